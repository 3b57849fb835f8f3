# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 drafters: what is read of mtp.*, and each refusal by its text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_trt.checkpoint import (
    EMBEDDING,
    LM_HEAD,
    DraftCheckpoint,
    check_pair,
    read_checkpoint,
    read_draft,
    read_target,
)
from dspark_trt.checkpoint.convert import convert_draft
from dspark_trt.config import ConfidenceInput, DraftConfig, WindowRule
from dspark_trt.errors import CheckpointError
from tests.checkpoints import Weights, edit_config, edit_tensors, write_target
from tests.checkpoints_deepseek import write_deepseek_draft, write_released_sizes


def decisions(draft: DraftCheckpoint) -> dict[str, Any]:
    return {item.name: item.value for item in draft.decisions}


@pytest.mark.parametrize("quantised", [False, True])
def test_what_is_read(tmp_path: Path, quantised: bool) -> None:
    path = write_deepseek_draft(tmp_path / "draft", quantised=quantised)
    draft = read_checkpoint(path)
    assert isinstance(draft, DraftCheckpoint)
    config, decoder = draft.config, draft.config.decoder
    assert (draft.format, draft.borrowed, draft.warnings) == ("deepseek-v4", frozenset(), ())
    assert (config.gamma, config.block_slots, config.mask_token_id) == (4, 4, 319)
    assert (config.target_layer_ids, config.num_target_layers) == ((1, 3), 4)
    assert (config.confidence, config.confidence_bias) == (ConfidenceInput.HIDDEN_MARKOV, False)
    assert (config.window_rule, decoder.windows) == (WindowRule.ANCHOR, (6, 6))
    assert decoder.cache_sizes == ((1, 48), (1, 48))  # one a stage: keys are the values
    assert decoder.rope.yarn_factor == 1  # rope_scaling is of other layers
    made = decisions(draft)
    assert (made["stages"], made["unused_tensors"]) == (2, 1)
    assert made["dtype"] == ("float32+FP4+FP8" if quantised else "float32")
    assert made.get("quantization") == ("FP4+FP8" if quantised else None)
    assert check_pair(draft, read_target(write_target(tmp_path / "target"))) == ()


def test_embedding_and_head_may_be_elsewhere(tmp_path: Path) -> None:
    path = write_deepseek_draft(tmp_path / "draft", with_target=False)
    assert read_draft(path).borrowed == {EMBEDDING, LM_HEAD}
    edit_tensors(path, lambda weights: weights.update({"head.weight": torch.zeros(320, 64)}))
    with pytest.raises(CheckpointError, match=r"missing: embed\.weight"):
        read_draft(path)


def test_released_sizes(tmp_path: Path) -> None:
    """As many keys as DeepSeek-V4-Flash-DSpark has, and its widths."""
    assert write_released_sizes(tmp_path / "draft") == 4705
    draft = read_draft(tmp_path / "draft")
    assert DraftConfig.from_json(draft.config.to_json()) == draft.config
    assert (draft.config.gamma, draft.config.target_layer_ids) == (5, (40, 41, 42))
    assert draft.tensors["confidence_head.proj.weight"].shape == (1, 4352)
    assert draft.tensors["layers.2.mlp.experts.255.down_proj.weight"].shape == (4096, 2048)
    assert decisions(draft)["dtype"] == "FP4+bfloat16+FP8+float32"


def _drop(name: str) -> Callable[[Weights], object]:
    return lambda weights: weights.pop(name)


def _put(name: str, tensor: torch.Tensor) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: tensor})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dspark_block_size": None}, "block_size is missing"),
        ({"dspark_noise_token_id": 320}, "mask_token_id 320 .dspark_noise_token_id. is outside"),
        ({"dspark_target_layer_ids": [1, 4]}, r"must lie in -1\.\.3 for a target of 4 layers"),
        ({"dspark_target_layer_ids": [3, 1]}, "is not strictly increasing"),
        ({"dspark_markov_rank": None}, "markov_rank is missing"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', which is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False, which is not supported"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, which is not supported"),
        ({"compress_ratios": [0, 0, 0, 0, 4, 0]}, "compress_ratios of the stages is .4, 0."),
        ({"o_groups": 3}, "num_heads 4 must be a multiple of 3 groups"),
        ({"qk_rope_head_dim": 64}, "rotary size 64 exceeds head_dim 48"),
        ({"qk_rope_head_dim": 7}, "rotary size must be even and positive, got 7"),
        ({"hc_mult": 0}, "hc_mult is 0, expected at least 1"),
        ({"swiglu_limit": -1.0}, "swiglu_limit must be positive, got -1"),
        ({"num_experts_per_tok": 6}, "6 of 5 experts a token is impossible"),
        ({"n_routed_experts": 10**6}, "n_routed_experts is 1000000, beyond 100000"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"dspark_n_routed_experts": 4}, "V4.1 mtp layout not supported yet .*dspark_n_routed"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    path = write_deepseek_draft(tmp_path / "draft")
    edit_config(path, changes)
    with pytest.raises(CheckpointError, match=text):
        read_draft(path)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (_drop("mtp.0.main_norm.weight"), r"missing: mtp\.0\.main_norm\.weight"),
        (_drop("mtp.1.ffn.experts.4.w2.weight"), r"missing: mtp\.1\.ffn\.experts\.4\.w2"),
        (_drop("mtp.0.main_proj.weight"), "no DSpark drafter .mtp.0.main_proj.weight is missing"),
        (_put("mtp.0.norm.weight", torch.ones(64)), r"unexpected: mtp\.0\.norm\.weight"),
        (_put("mtp.3.attn_norm.weight", torch.ones(64)), r"stages .0, 1, 3. of mtp"),
        (_put("mtp.1.markov_head.embed.weight", torch.ones(1)), "V4.1 .*markov_head.embed.weight"),
        (_drop("mtp.0.attn.wkv.scale"), r"wkv.weight is FP8, but mtp\.0\.attn\.wkv\.scale .* is missing"),
        (
            _put("mtp.0.attn.wkv.scale", torch.ones(2, 1)),
            r"wkv\.scale is float32 \(2, 1\), expected float8_e8m0fnu \(1, 1\): one scale a 128 x 128",
        ),
        (
            _put("mtp.0.ffn.experts.0.w1.scale", torch.ones(32, 1)),
            r"w1\.scale is float32 \(32, 1\), expected .*\(32, 2\): one scale a 1 x 32 block of FP4",
        ),
        (
            _put("mtp.0.attn.wkv.weight", torch.ones(48, 64).to(torch.float8_e5m2)),
            r"wkv\.weight is float8_e5m2 \(48, 64\), which is not supported; supported are float8_e4m3fn",
        ),
        (_put("mtp.0.hc_attn_fn.scale", torch.ones(1)), r"unexpected: mtp\.0\.hc_attn_fn\.scale"),
    ],
)  # fmt: skip
def test_tensors_that_are_refused(
    tmp_path: Path, edit: Callable[[Weights], object], text: str
) -> None:
    path = write_deepseek_draft(tmp_path / "draft", quantised=True)
    edit_tensors(path, edit)
    with pytest.raises(CheckpointError, match=text):
        read_draft(path)


def test_it_is_not_converted(tmp_path: Path) -> None:
    draft = read_draft(write_deepseek_draft(tmp_path / "draft"))
    with pytest.raises(CheckpointError, match="deepspec, which has no words for DeepSeek-V4"):
        convert_draft(draft, tmp_path / "out", to="deepspec")
