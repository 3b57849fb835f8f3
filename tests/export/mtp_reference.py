# SPDX-License-Identifier: Apache-2.0
"""A layer for multi-token prediction in float64 NumPy, with keys and values of every head written out."""

import numpy as np
from numpy.typing import NDArray

from tests.checkpoints_mtp import MtpDims
from tests.export.draft_reference import Doubles, rms, sigmoid


class MtpReference:
    """One request, no cache, over the layer's own tensor names."""

    def __init__(self, weights: dict[str, Doubles], sizes: MtpDims) -> None:
        self.w, self.sizes = weights, sizes

    def logits(self, hidden: Doubles, next_ids: list[int]) -> Doubles:  # [N, H] -> [V]
        """Of the token behind the last of `next_ids`; hidden states are those of the final norm."""
        w = self.w
        embedded = rms(w["embed_tokens.weight"][next_ids], w["enorm.weight"])
        pairs = np.concatenate([embedded, rms(hidden, w["hnorm.weight"])], 1)
        x = pairs @ w["eh_proj.weight"].T
        x = (x + self.attention(rms(x, w["input_layernorm.weight"])))[-1]
        x = x + self.mlp(rms(x, w["post_attention_layernorm.weight"]))
        return w["shared_head.head.weight"] @ rms(x, w["shared_head.norm.weight"])

    def attention(self, x: Doubles) -> Doubles:
        sizes, positions = self.sizes, np.arange(len(x))
        split = (len(x), sizes.heads, -1)
        queries = self.queries(x).reshape(*split)
        low = self.linear("kv_a_proj_with_mqa", x)
        latent = rms(low[:, : sizes.latent], self.w["self_attn.kv_a_layernorm.weight"])
        inner = self.linear("kv_b_proj", latent).reshape(*split)
        shared = np.repeat(low[:, None, sizes.latent :], sizes.heads, 1)
        keys = np.concatenate([inner[..., : sizes.plain], shared], -1)
        queries, keys = self.turned(queries, positions), self.turned(keys, positions)
        # YaRN's scale, squared, for factor 40 and mscale_all_dim 1.
        stretch = (0.1 * np.log(40) + 1) ** 2 / np.sqrt(sizes.plain + sizes.rotary)
        scores = np.einsum("qhd,khd->hqk", queries, keys) * stretch
        scores = np.where(positions <= positions[:, None], scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, inner[..., sizes.plain :])
        return self.linear("o_proj", mixed.reshape(len(x), -1))

    def queries(self, x: Doubles) -> Doubles:
        if self.sizes.query_rank is None:
            return self.linear("q_proj", x)
        low = rms(self.linear("q_a_proj", x), self.w["self_attn.q_a_layernorm.weight"])
        return self.linear("q_b_proj", low)

    def turned(self, x: Doubles, positions: NDArray[np.int64]) -> Doubles:  # [N, heads, D]
        """Neighbours as complex numbers; YaRN of factor 40 over 64 positions."""
        size = self.sizes.rotary
        fast = 10000.0 ** (-np.arange(0, size, 2) / size)
        low, high = (
            size * np.log(64 / (turns * 2 * np.pi)) / (2 * np.log(10000)) for turns in (32, 1)
        )
        low, high = max(np.floor(low), 0), min(np.ceil(high), size - 1)
        ramp = np.clip((np.arange(size // 2) - low) / max(high - low, 0.001), 0, 1)
        speeds = fast / 40 * ramp + fast * (1 - ramp)
        pairs = x[..., -size::2] + 1j * x[..., -size + 1 :: 2]
        pairs = pairs * np.exp(1j * positions[:, None, None] * speeds)
        tail = np.stack([pairs.real, pairs.imag], -1).reshape(*x.shape[:-1], size)
        return np.concatenate([x[..., :-size], tail], -1)

    def mlp(self, x: Doubles) -> Doubles:
        sizes = self.sizes
        if sizes.experts is None:
            return self.expert("mlp.", x)
        scores = sigmoid(self.w["mlp.gate.weight"] @ x)
        moved = scores + self.w["mlp.gate.e_score_correction_bias"]
        groups = np.split(np.arange(sizes.experts), sizes.groups)
        worth = [np.sort(moved[group])[-2:].sum() for group in groups]
        best = np.argsort(worth)[-sizes.groups_taken :]
        candidates = np.concatenate([groups[index] for index in best])
        taken = candidates[np.argsort(-moved[candidates])[: sizes.per_token]]
        output = self.expert("mlp.shared_experts.", x)
        for index in taken:
            share = 2.5 * scores[index] / scores[taken].sum()
            output = output + share * self.expert(f"mlp.experts.{index}.", x)
        return output

    def expert(self, stem: str, x: Doubles) -> Doubles:
        gate, up = (self.w[f"{stem}{name}_proj.weight"] @ x for name in ("gate", "up"))
        return np.asarray(self.w[stem + "down_proj.weight"] @ (gate * sigmoid(gate) * up))

    def linear(self, name: str, x: Doubles) -> Doubles:
        return np.asarray(x @ self.w[f"self_attn.{name}.weight"].T)
