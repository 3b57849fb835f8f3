# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 drafters against float64 NumPy and the layers of transformers; FP8 and FP4 read exactly."""

import re
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
from dspark_trt.models.deepseek import DeepseekBackbone
from dspark_trt.models.drafter import Drafter
from dspark_trt.models.loading import load_drafter
from tests.checkpoints import Weights
from tests.checkpoints_deepseek import (
    StageDims,
    deepseek_weights,
    quantise,
    write_deepseek_draft,
)
from tests.export.deepseek_reference import Reference
from tests.export.draft_reference import ANCHORS, CONTEXT, NEW, Doubles, all_taps, prepared

SIZES = StageDims()


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
def test_draft_step_equals_float64(tmp_path: Path, dims: dict[str, Any]) -> None:
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
    assert_equals(outputs, Reference(doubles(deepseek_weights(SIZES)), short, limit=0.75), taps)


def test_a_stage_equals_the_layer_of_transformers(tmp_path: Path) -> None:
    """With nothing in the window the block is all that a layer without a mask sees."""
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
        DeepseekV4DecoderLayer,
        DeepseekV4RotaryEmbedding,
    )

    config = DeepseekV4Config(
        hidden_size=SIZES.hidden, num_hidden_layers=1, num_attention_heads=SIZES.heads,
        head_dim=SIZES.head_dim, qk_rope_head_dim=SIZES.rotary, q_lora_rank=SIZES.query_rank,
        o_groups=SIZES.groups, o_lora_rank=SIZES.output_rank, n_routed_experts=SIZES.experts,
        num_experts_per_tok=SIZES.per_token, moe_intermediate_size=SIZES.inner, swiglu_limit=0.75,
        routed_scaling_factor=1.5, hc_mult=SIZES.streams, hc_sinkhorn_iters=SIZES.sinkhorn,
        layer_types=["sliding_attention"], mlp_layer_types=["moe"], attn_implementation="eager",
    )  # fmt: skip
    theirs = DeepseekV4DecoderLayer(config, 0).eval()
    theirs.load_state_dict(_named_as_in_transformers(deepseek_weights(SIZES)))
    module = load_drafter(read_draft(write_deepseek_draft(tmp_path / "draft")))
    streams = torch.randn((2, 4, SIZES.streams, SIZES.hidden), generator=torch.Generator())
    positions = torch.arange(4).expand(2, -1)
    window = torch.zeros(2, 1, SIZES.window, SIZES.head_dim)
    hidden = torch.ones(2, 1, 1, SIZES.window, dtype=torch.bool)
    assert isinstance(module.backbone, DeepseekBackbone)
    with torch.inference_mode():
        angles = DeepseekV4RotaryEmbedding(config)(streams, positions, layer_type="main")
        expected = theirs(
            streams, position_embeddings={"main": angles}, position_ids=positions,
            attention_mask=torch.zeros(2, 1, 4, 4),
        )  # fmt: skip
        rotation = module.backbone.rotary(positions)
        ours = module.backbone.layers[0](streams, window, hidden, rotation)
    np.testing.assert_allclose(ours.numpy(), expected.numpy(), atol=1e-5)


def _named_as_in_transformers(weights: Weights) -> Weights:
    own = {n.removeprefix("mtp.0."): w for n, w in weights.items() if n.startswith("mtp.0.")}
    named: Weights = {}
    for name, tensor in own.items():
        if name.startswith("main_") or ".experts." in name:
            continue
        for pattern, replacement in (
            (r"^hc_(attn|ffn)_", r"\1_hc."), (r"^attn_norm", "input_layernorm"),
            (r"^ffn_norm", "post_attention_layernorm"), (r"^attn\.", "self_attn."),
            (r"^ffn\.", "mlp."), (r"w(q|o)_([ab])\.", r"\1_\2_proj."), (r"wkv\.", "kv_proj."),
            (r"\.q_norm", ".q_a_norm"), (r"attn_sink", "sinks"),
            (r"gate\.bias", "gate.e_score_correction_bias"), (r"\.w1\.", ".gate_proj."),
            (r"\.w2\.", ".down_proj."), (r"\.w3\.", ".up_proj."),
        ):  # fmt: skip
            name = re.sub(pattern, replacement, name)
        named[name] = tensor
    experts = [f"ffn.experts.{index}." for index in range(SIZES.experts)]
    gates = [torch.cat((own[p + "w1.weight"], own[p + "w3.weight"])) for p in experts]
    named["mlp.experts.gate_up_proj"] = torch.stack(gates)
    named["mlp.experts.down_proj"] = torch.stack([own[p + "w2.weight"] for p in experts])
    return named


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
