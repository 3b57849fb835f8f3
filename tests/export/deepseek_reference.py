# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek-V4 drafter in float64 NumPy, written again from the published equations."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tests.checkpoints_deepseek import StageDims
from tests.export.draft_reference import Doubles, rms, sigmoid


class Reference:
    """One request, no cache, over the tensor names of the files."""

    def __init__(self, weights: dict[str, Doubles], sizes: StageDims, limit: float) -> None:
        self.w, self.sizes, self.limit = weights, sizes, limit

    def draft(self, taps: Doubles, anchor: int) -> tuple[list[int], Doubles, Doubles]:
        """Greedy tokens, logits `[γ, V]`, confidence logits `[γ]`; the anchor sits behind the taps."""
        w, last = self.w, f"mtp.{self.sizes.stages - 1}."
        tokens, logits, scores, previous = [], [], [], anchor
        for h in self.hidden(taps, anchor):
            e = w[last + "markov_head.markov_w1.weight"][previous]
            step = w["head.weight"] @ rms(h, w[last + "norm.weight"])
            step = step + w[last + "markov_head.markov_w2.weight"] @ e
            scores.append(w[last + "confidence_head.proj.weight"][0] @ np.concatenate([h, e]))
            previous = int(step.argmax())
            tokens.append(previous)
            logits.append(step)
        return tokens, np.stack(logits), np.array(scores)

    def hidden(
        self, taps: Doubles, anchor: int
    ) -> Doubles:  # [N, m*H] -> [γ, H], before the norm
        w, sizes = self.w, self.sizes
        context = rms(taps @ w["mtp.0.main_proj.weight"].T, w["mtp.0.main_norm.weight"])
        block = w["embed.weight"][[anchor] + [sizes.mask] * (sizes.gamma - 1)]
        streams = np.stack([block] * sizes.streams, 1)  # [γ, S, H]
        for stage in range(sizes.stages):
            p = f"mtp.{stage}."

            def attend(x: Doubles, p: str = p) -> Doubles:
                return self.attention(p + "attn.", context, rms(x, w[p + "attn_norm.weight"]))

            def feed(x: Doubles, p: str = p) -> Doubles:
                return self.experts(p + "ffn.", rms(x, w[p + "ffn_norm.weight"]))

            streams = self.connected(p + "hc_attn_", streams, attend)
            streams = self.connected(p + "hc_ffn_", streams, feed)
        fn, base, scale = (w[f"{p}hc_head_{part}"] for part in ("fn", "base", "scale"))
        gates = sigmoid(unit(streams.reshape(len(block), -1)) @ fn.T * scale + base) + 1e-6
        return np.asarray(np.einsum("ks,ksh->kh", gates, streams))

    def connected(
        self, p: str, streams: Doubles, block: Callable[[Doubles], Doubles]
    ) -> Doubles:
        count, w = self.sizes.streams, self.w
        mixes = unit(streams.reshape(len(streams), -1)) @ w[p + "fn"].T
        scale, base = w[p + "scale"], w[p + "base"]
        entering, given, combined = [], [], []
        for row, x in zip(mixes, streams, strict=True):
            gate = sigmoid(row[:count] * scale[0] + base[:count]) + 1e-6
            entering.append(gate @ x)
            given.append(
                2 * sigmoid(row[count : 2 * count] * scale[1] + base[count : 2 * count])
            )
            mix = (row[2 * count :] * scale[2] + base[2 * count :]).reshape(count, count)
            mix = np.exp(mix) / np.exp(mix).sum(1, keepdims=True) + 1e-6
            mix /= mix.sum(0) + 1e-6
            for _ in range(self.sizes.sinkhorn - 1):
                mix /= mix.sum(1)[:, None] + 1e-6
                mix /= mix.sum(0) + 1e-6
            combined.append(np.stack([mix[:, to] @ x for to in range(count)]))
        output = block(np.stack(entering))
        return np.stack(combined) + np.stack(given)[:, :, None] * output[:, None]

    def attention(self, p: str, context: Doubles, block: Doubles) -> Doubles:
        w, sizes = self.w, self.sizes
        start = len(context)
        seen = np.arange(max(0, start - sizes.window), start)
        own = np.arange(start, start + len(block))
        rows = np.concatenate([context[seen], block])
        keys = rms(rows @ w[p + "wkv.weight"].T, w[p + "kv_norm.weight"])[:, None]
        keys = self.turned(keys, np.concatenate([seen, own]))[:, 0]
        low = rms(block @ w[p + "wq_a.weight"].T, w[p + "q_norm.weight"])
        queries = (low @ w[p + "wq_b.weight"].T).reshape(len(block), sizes.heads, -1)
        queries = self.turned(unit(queries), own)
        scores = np.exp(np.einsum("qhd,kd->qhk", queries, keys) / np.sqrt(sizes.head_dim))
        shares = scores / (scores.sum(-1, keepdims=True) + np.exp(w[p + "attn_sink"])[:, None])
        mixed = self.turned(np.einsum("qhk,kd->qhd", shares, keys), -own)
        grouped = mixed.reshape(len(block), sizes.groups, -1)
        weight = w[p + "wo_a.weight"].reshape(sizes.groups, sizes.output_rank, -1)
        ranks = np.einsum("qgi,gri->qgr", grouped, weight).reshape(len(block), -1)
        return np.asarray(ranks @ w[p + "wo_b.weight"].T)

    def turned(self, x: Doubles, positions: NDArray[np.int64]) -> Doubles:  # [N, heads, D]
        """Neighbours as complex numbers, in the last elements of a head."""
        size = self.sizes.rotary
        speeds = 10000.0 ** (-np.arange(0, size, 2) / size)
        pairs = x[..., -size::2] + 1j * x[..., -size + 1 :: 2]
        pairs = pairs * np.exp(1j * positions[:, None, None] * speeds)
        tail = np.stack([pairs.real, pairs.imag], -1).reshape(*x.shape[:-1], size)
        return np.concatenate([x[..., :-size], tail], -1)

    def experts(self, p: str, block: Doubles) -> Doubles:
        w = self.w
        outputs = []
        for x in block:
            scores = np.sqrt(np.log1p(np.exp(w[p + "gate.weight"] @ x)))
            taken = np.argsort(-(scores + w[p + "gate.bias"]))[: self.sizes.per_token]
            shares = 1.5 * scores[taken] / scores[taken].sum()
            output = self.expert(p + "shared_experts.", x)
            for share, index in zip(shares, taken, strict=True):
                output = output + share * self.expert(f"{p}experts.{index}.", x)
            outputs.append(output)
        return np.stack(outputs)

    def expert(self, p: str, x: Doubles) -> Doubles:
        gate = np.minimum(self.w[p + "w1.weight"] @ x, self.limit)
        up = np.clip(self.w[p + "w3.weight"] @ x, -self.limit, self.limit)
        return np.asarray(self.w[p + "w2.weight"] @ (gate * sigmoid(gate) * up))


def unit(x: Doubles) -> Doubles:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6))
