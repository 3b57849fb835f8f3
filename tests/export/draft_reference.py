# SPDX-License-Identifier: Apache-2.0
"""A drafter in float64 NumPy, from the published equations alone, and the inputs it is compared on."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark_trt.models.drafter import Drafter
from tests.checkpoints import Dims, draft_weights
from tests.export.toys import empty_caches

Doubles = NDArray[np.float64]
Visible = Callable[[int, int], NDArray[np.bool_]]
"""Context rows and slots -> bool `[slots, rows + slots]`: what each slot sees."""

SIZES = Dims(layers=2, gamma=4, rank=8)
CONTEXT = (0, 3, 11)  # committed rows of each request before this step
NEW = (5, 0, 2)  # of them, rows that arrive with the step


def sigmoid(x: Doubles) -> Doubles:
    return np.asarray(1 / (1 + np.exp(-x)))


def rms(x: Doubles, weight: Doubles) -> Doubles:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight)


def turn(x: Doubles, positions: NDArray[np.int64]) -> Doubles:
    """Rotary embedding of `[N, heads, D]`, pairs (i, i + D/2), theta 1e4."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
    )


class Reference:
    """One request, no cache: FORMATS' equations over DeepSpec's tensor names."""

    def __init__(
        self,
        weights: dict[str, Doubles],
        sizes: Dims,
        slots: int,
        visible: dict[int, Visible] | None = None,
    ) -> None:
        self.w, self.sizes, self.slots = weights, sizes, slots
        self.visible = visible or {}  # layer -> mask, where it does not see everything

    def linear(self, name: str, x: Doubles) -> Doubles:
        bias = self.w.get(f"{name}.bias", np.zeros(1))
        return np.asarray(x @ self.w[f"{name}.weight"].T + bias)

    def hidden(self, taps: Doubles, anchor: int) -> Doubles:  # [N, m*H] -> [slots, H]
        """Final hidden states of all block slots; taps are rows 0..N-1, the anchor sits at N."""
        w, embed = self.w, self.w["embed_tokens.weight"]
        context = rms(taps @ w["fc.weight"].T, w["hidden_norm.weight"])
        x = embed[[anchor] + [self.sizes.mask] * (self.slots - 1)]
        positions = np.arange(len(taps) + self.slots)
        for layer in range(self.sizes.layers):
            p = f"layers.{layer}."
            block = rms(x, w[p + "input_layernorm.weight"])
            sees = self.visible.get(
                layer, lambda rows, slots: np.ones((slots, rows + slots), np.bool_)
            )
            mask = sees(len(context), len(block))
            x = x + self.attention(p + "self_attn.", context, block, positions, mask)
            y = rms(x, w[p + "post_attention_layernorm.weight"])
            gate, up = self.linear(p + "mlp.gate_proj", y), self.linear(p + "mlp.up_proj", y)
            x = x + self.linear(p + "mlp.down_proj", gate * sigmoid(gate) * up)
        return rms(x, w["norm.weight"])

    def attention(
        self,
        p: str,
        context: Doubles,
        block: Doubles,
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
    ) -> Doubles:
        split = (-1, self.sizes.head_dim)
        rows = np.concatenate([context, block])
        q = rms(
            self.linear(p + "q_proj", block).reshape(len(block), *split),
            self.w[p + "q_norm.weight"],
        )
        k = rms(
            self.linear(p + "k_proj", rows).reshape(len(rows), *split),
            self.w[p + "k_norm.weight"],
        )
        v = self.linear(p + "v_proj", rows).reshape(len(rows), *split)
        q, k = turn(q, positions[len(context) :]), turn(k, positions)
        group = self.sizes.heads // self.sizes.kv_heads
        k, v = k.repeat(group, 1), v.repeat(group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(self.sizes.head_dim)
        scores = np.where(mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v)
        return self.linear(p + "o_proj", mixed.reshape(len(block), -1))

    def draft(
        self,
        hidden: Doubles,
        anchor: int,
        head: str,
        confidence: str,
        allowed: Sequence[int] | None = None,
    ) -> tuple[list[int], Doubles, Doubles | None]:
        """Greedy tokens (among `allowed`), logits `[γ, V]`, confidence logits `[γ]`."""
        w = self.w
        previous, state = anchor, np.zeros(self.sizes.rank)
        tokens, logits, scores = [], [], []
        for h in hidden:
            step = h @ w["lm_head.weight"].T
            e = w["markov_head.markov_w1.weight"][previous] if head != "none" else np.zeros(0)
            if confidence != "none":
                features = np.concatenate([h, e]) if confidence == "hidden+markov" else h
                scores.append(self.linear("confidence_head.proj", features)[0])
            if head == "vanilla":
                step = step + w["markov_head.markov_w2.weight"] @ e
            elif head == "gated":
                gate = sigmoid(self.linear("markov_head.gate_proj", np.concatenate([h, e])))
                step = step + w["markov_head.markov_w2.weight"] @ (gate * e)
            elif head == "rnn":
                z = self.linear("markov_head.joint_proj", np.concatenate([state, e, h]))
                keep, candidate, output = np.split(z, 3)
                state = sigmoid(keep) * state + (1 - sigmoid(keep)) * np.tanh(candidate)
                step = step + w["markov_head.markov_w2.weight"] @ np.tanh(output)
            previous = int(step.argmax())
            if allowed is not None:
                previous = allowed[int(step[list(allowed)].argmax())]
            tokens.append(previous)
            logits.append(step)
        return tokens, np.stack(logits), np.array(scores) if scores else None


def doubles(head: str, confidence: str, sizes: Dims = SIZES) -> dict[str, Doubles]:
    weights = draft_weights(sizes, head=head, confidence=confidence)
    return {name: tensor.double().numpy() for name, tensor in weights.items()}


def all_taps(seed: int = 5) -> list[NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    width = len(SIZES.target_layer_ids) * SIZES.target_hidden
    return [
        random.standard_normal((c + n, width), np.float32)
        for c, n in zip(CONTEXT, NEW, strict=True)
    ]


ANCHORS = (17, 200, 5)


def prepared(
    module: Drafter, taps: list[NDArray[np.float32]], garbage: float = 50.0
) -> list[Tensor]:
    """Inputs of one step after earlier rows were appended; everything that is not valid is garbage."""
    caches = empty_caches(module.config.decoder, len(taps))
    for cache in caches:
        cache.fill_(garbage)
    for request, rows in enumerate(taps):
        old = torch.from_numpy(rows[: CONTEXT[request]])[None]
        if old.shape[1]:
            own = [cache[request : request + 1] for cache in caches]
            module.backbone.append_context(old, torch.zeros(1, dtype=torch.int64), *own)
    gamma = module.config.gamma
    new_taps = torch.full((len(taps), gamma + 1, module.config.tap_size), garbage)
    for request, rows in enumerate(taps):
        new_taps[request, : NEW[request]] = torch.from_numpy(rows[CONTEXT[request] :])
    return [
        torch.tensor(ANCHORS), new_taps, torch.tensor(NEW), torch.tensor(CONTEXT),
        torch.zeros(len(taps)), torch.zeros(len(taps), gamma), *caches,
    ]  # fmt: skip
