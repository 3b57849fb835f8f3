# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 drafters against float64 NumPy, written again from the published equations."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark_trt.checkpoint import DraftOverrides, read_draft
from dspark_trt.config import DraftConfig
from dspark_trt.models.drafter import Drafter
from dspark_trt.models.loading import load_drafter
from tests.checkpoints import Weights
from tests.checkpoints_deepseek import (
    StageDims,
    deepseek_weights,
    quantise,
    write_deepseek_draft,
)
from tests.export.draft_reference import ANCHORS, CONTEXT, NEW, all_taps, prepared, rms, sigmoid

Doubles = NDArray[np.float64]
SIZES = StageDims()


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

    def hidden(self, taps: Doubles, anchor: int) -> Doubles:  # [N, m*H] -> [γ, H], before the norm
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


def doubles(weights: Weights) -> dict[str, Doubles]:
    return {name: tensor.double().numpy() for name, tensor in weights.items()}


def step(module: Drafter, inputs: list[Tensor]) -> list[NDArray[Any]]:
    with torch.inference_mode():
        return [output.numpy() for output in module(*inputs)[:3]]


def assert_equals(
    outputs: list[NDArray[Any]], reference: Reference, taps: list[NDArray[np.float32]]
) -> None:
    tokens, logits, scores = outputs
    for request, rows in enumerate(taps):
        expected = reference.draft(rows.astype(np.float64), ANCHORS[request])
        assert tokens[request].tolist() == expected[0]
        np.testing.assert_allclose(logits[request], expected[1], atol=1e-4)
        np.testing.assert_allclose(scores[request], expected[2], atol=1e-4)


@pytest.mark.parametrize(
    "dims", [{}, {"streams": 4, "sinkhorn": 20, "stages": 3, "window": 128, "per_token": 5}]
)
def test_draft_step_equals_float64(tmp_path: Path, dims: dict[str, int]) -> None:
    sizes = replace(SIZES, **dims)
    draft = read_draft(write_deepseek_draft(tmp_path / "draft", **dims))
    assert DraftConfig.from_json(draft.config.to_json()) == draft.config
    module, taps = load_drafter(draft), all_taps()
    reference = Reference(doubles(deepseek_weights(sizes)), sizes, limit=0.75)
    outputs = step(module, prepared(module, taps))
    assert_equals(outputs, reference, taps)
    again = step(module, prepared(module, taps, garbage=1e4))
    for first, second in zip(outputs, again, strict=True):  # nothing beyond valid rows is seen
        np.testing.assert_array_equal(first, second)


def test_the_window_counts_from_the_anchor(tmp_path: Path) -> None:
    """Rows before the window change nothing; its first row does."""
    module = load_drafter(read_draft(write_deepseek_draft(tmp_path / "draft")))
    taps = all_taps()
    request, rows = 2, CONTEXT[2] + NEW[2]
    before = step(module, prepared(module, taps))
    taps[request][: rows - SIZES.window] += 1
    same = step(module, prepared(module, taps))
    np.testing.assert_array_equal(before[1], same[1])
    taps[request][rows - SIZES.window] += 1
    other = step(module, prepared(module, taps))
    assert np.abs(other[1][request] - same[1][request]).max() > 1e-3
    np.testing.assert_array_equal(other[1][:request], same[1][:request])


def test_no_clipping_where_there_is_no_limit(tmp_path: Path) -> None:
    path = write_deepseek_draft(tmp_path / "draft", config={"swiglu_limit": None})
    module, taps = load_drafter(read_draft(path)), all_taps()
    reference = Reference(doubles(deepseek_weights(SIZES)), SIZES, limit=np.inf)
    assert_equals(step(module, prepared(module, taps)), reference, taps)


def test_fewer_drafts_than_trained(tmp_path: Path) -> None:
    path = write_deepseek_draft(tmp_path / "draft")
    module = load_drafter(read_draft(path, overrides=DraftOverrides(gamma=2)))
    taps = [rows[-3:] for rows in all_taps()]
    caches = [torch.zeros(3, 1, 64, SIZES.head_dim) for _ in range(SIZES.stages)]
    new = torch.from_numpy(np.stack(taps))
    three, zero = torch.full((3,), 3), torch.zeros(3, dtype=torch.int64)
    outputs = step(
        module,
        [torch.tensor(ANCHORS), new, three, zero, torch.zeros(3), torch.zeros(3, 2), *caches],
    )
    short = replace(SIZES, gamma=2)
    assert_equals(
        outputs, Reference(doubles(deepseek_weights(SIZES)), short, limit=0.75), taps
    )


def e4m3(raw: NDArray[np.uint8]) -> Doubles:
    """Four bits of exponent (bias 7), three of mantissa."""
    exponent, mantissa = (raw >> 3 & 15).astype(int), (raw & 7) / 8
    plain = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    return np.where(raw & 128, -plain, plain)


def e2m1(raw: NDArray[np.uint8]) -> Doubles:
    """Two bits of exponent (bias 1), one of mantissa; two elements a byte, the low half first."""
    bits = np.stack([raw & 15, raw >> 4], -1).reshape(len(raw), -1)
    exponent, mantissa = (bits >> 1 & 3).astype(int), (bits & 1) / 2
    plain = np.where(exponent == 0, mantissa, (1 + mantissa) * 2.0 ** (exponent - 1))
    return np.where(bits & 8, -plain, plain)


def dequantised(weights: Weights) -> dict[str, Doubles]:
    """Element by element: value times two to the power of its block's exponent less 127."""
    result = {}
    for name, tensor in weights.items():
        scale = weights.get(name.removesuffix("weight") + "scale")
        if name.endswith(".scale"):
            continue
        if scale is None or not name.endswith(".weight"):
            result[name] = tensor.double().numpy()
            continue
        raw = tensor.view(torch.uint8).numpy()
        is_fp4 = ".experts." in name
        values = e2m1(raw) if is_fp4 else e4m3(raw)
        powers = 2.0 ** (scale.view(torch.uint8).numpy().astype(int) - 127)
        row, column = np.indices(values.shape)
        block = (1, 32) if is_fp4 else (128, 128)
        result[name] = values * powers[row // block[0], column // block[1]]
    return result


def test_quantised_weights_are_read_exactly(tmp_path: Path) -> None:
    weights = quantise(deepseek_weights(SIZES))
    assert weights["mtp.0.attn.wq_b.weight"].dtype == torch.float8_e4m3fn
    assert weights["mtp.0.attn.wq_b.scale"].shape == (2, 1)  # 192 rows
    expected = dequantised(weights)
    draft = read_draft(write_deepseek_draft(tmp_path / "draft", quantised=True))
    for stage, part, name in (
        (0, "attn.wq_b", "self_attn.wq_b"),
        (1, "ffn.shared_experts.w2", "mlp.shared_experts.down_proj"),
        (1, "ffn.experts.3.w3", "mlp.experts.3.up_proj"),
    ):
        ours = draft.tensors[f"layers.{stage}.{name}.weight"].load()
        np.testing.assert_array_equal(ours.numpy(), expected[f"mtp.{stage}.{part}.weight"])
    module, taps = load_drafter(draft), all_taps()
    assert_equals(
        step(module, prepared(module, taps)), Reference(expected, SIZES, limit=0.75), taps
    )
