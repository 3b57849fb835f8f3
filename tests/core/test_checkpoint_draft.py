# SPDX-License-Identifier: Apache-2.0
"""Drafters: strict accounting, and config.json against the tensors."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_trt.checkpoint import DraftCheckpoint, DraftOverrides, draft_shapes, read_draft
from dspark_trt.config import ConfidenceInput, HeadType, SlotSemantics
from dspark_trt.errors import CheckpointError
from tests.checkpoints import Dims, draft_weights, edit_config, edit_tensors, write_draft

HEADS = [
    *product(["vanilla", "gated", "rnn"], ["none", "hidden", "hidden+markov"]),
    *product(["none"], ["none", "hidden"]),
]


def decision(checkpoint: DraftCheckpoint, name: str) -> Any:
    return next(item.value for item in checkpoint.decisions if item.name == name)


@pytest.mark.parametrize(("head", "confidence"), HEADS)
def test_heads_are_described(tmp_path: Path, head: str, confidence: str) -> None:
    config = read_draft(
        write_draft(tmp_path / "draft", head=head, confidence=confidence)
    ).config
    assert config.head_type == HeadType(head)
    assert config.confidence == ConfidenceInput(confidence)
    assert config.markov_rank == (0 if head == "none" else 16)
    assert (config.gamma, config.block_slots) == (4, 4)
    assert (config.slot_semantics, config.mask_token_id) == (SlotSemantics.ANCHOR_FIRST, 319)
    assert (config.target_layer_ids, config.num_target_layers) == ((0, 2), 4)
    assert (config.decoder.qk_norm, config.decoder.head_dim) == (True, 32)
    weights = draft_weights(Dims(), head=head, confidence=confidence)
    assert draft_shapes(config) == {name: tuple(w.shape) for name, w in weights.items()}


@pytest.mark.parametrize("name", sorted(draft_weights(Dims(), head="gated")))
def test_a_renamed_tensor_is_missing_and_unexpected(tmp_path: Path, name: str) -> None:
    path = write_draft(tmp_path / "draft", head="gated")
    edit_tensors(path, lambda weights: weights.update({name + "x": weights.pop(name)}))
    with pytest.raises(CheckpointError, match=rf"missing: {name}.*unexpected: {name}x"):
        read_draft(path)


def test_one_error_lists_every_fault(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft")

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        del weights["fc.weight"], weights["layers.1.self_attn.k_norm.weight"]
        weights["extra.a"] = torch.zeros(1)
        weights["extra.b"] = torch.zeros(1, dtype=torch.int64)
        weights["norm.weight"] = torch.zeros(63)
        weights["hidden_norm.weight"] = torch.zeros(64, dtype=torch.float8_e4m3fn)

    edit_tensors(path, spoil)
    with pytest.raises(CheckpointError) as caught:
        read_draft(path)
    text = str(caught.value)
    assert "missing: fc.weight, layers.1.self_attn.k_norm.weight" in text
    assert "unexpected: extra.a, extra.b" in text
    assert "norm.weight is (63,), expected (64,)" in text
    assert "extra.b is int64, hidden_norm.weight is float8_e4m3fn" in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"markov_rank": 8}, r"markov_w1\.weight is \(320, 16\), expected \(320, 8\)"),
        ({"markov_rank": 0}, "markov_rank is 0, but the files hold markov_head"),
        ({"markov_rank": -1}, "markov_rank is -1, expected 0 or more"),
        ({"markov_rank": "16"}, "markov_rank is '16', expected an integer"),
        ({"markov_head_type": "rnn"}, r"missing: markov_head\.joint_proj\.bias"),
        ({"markov_head_type": "tree"}, "'tree', expected vanilla, gated or rnn"),
        ({"enable_confidence_head": False}, "is false, but the files hold confidence_head"),
        ({"confidence_head_with_markov": False}, r"is \(1, 80\), expected \(1, 64\)"),
        ({"hidden_size": 32}, r"fc\.weight is \(64, 128\), expected \(32, 64\)"),
        ({"target_layer_ids": [0, 1, 2]}, r"fc\.weight is \(64, 128\), expected \(64, 192\)"),
        ({"num_hidden_layers": 3}, r"missing: layers\.2\.input_layernorm\.weight"),
        ({"num_hidden_layers": 1}, r"unexpected: layers\.1\.input_layernorm\.weight"),
        ({"num_attention_heads": 3}, "must be a multiple of num_kv_heads"),
        ({"block_size": 0}, "block_size is 0, which proposes no token"),
        ({"block_size": None}, "block_size is missing"),
        ({"block_size": True}, "block_size is True, expected an integer"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported yet"),
        ({"attention_bias": True}, r"missing: layers\.0\.self_attn\.k_proj\.bias"),
    ],
)
def test_config_against_tensors(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    path = write_draft(tmp_path / "draft", config=changes)
    with pytest.raises(CheckpointError, match=text):
        read_draft(path)


def test_head_type_against_the_tensors_of_another_head(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", head="rnn", config={"markov_head_type": "vanilla"})
    with pytest.raises(
        CheckpointError, match=r"'vanilla', but the tensors are of a 'rnn' head"
    ):
        read_draft(path)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_head_keys_left_out_are_read_off_the_tensors(tmp_path: Path, head: str) -> None:
    path = write_draft(tmp_path / "draft", head=head)
    edit_config(path, drop=["markov_head_type", "markov_rank"])
    checkpoint = read_draft(path)
    assert (checkpoint.config.head_type, checkpoint.config.markov_rank) == (HeadType(head), 16)
    assert any("markov_rank" in warning for warning in checkpoint.warnings)


def test_confidence_enabled_without_tensors_is_refused(tmp_path: Path) -> None:
    path = write_draft(
        tmp_path / "draft", confidence="none", config={"enable_confidence_head": True}
    )
    with pytest.raises(CheckpointError, match="is true, but the files hold no confidence head"):
        read_draft(path)


@pytest.mark.parametrize("confidence", ["hidden", "hidden+markov"])
def test_confidence_without_keys_is_used_with_a_warning(
    tmp_path: Path, confidence: str
) -> None:
    path = write_draft(tmp_path / "draft", confidence=confidence)
    edit_config(path, drop=["enable_confidence_head", "confidence_head_with_markov"])
    checkpoint = read_draft(path)
    assert checkpoint.config.confidence == ConfidenceInput(confidence)
    assert any("does not mention a confidence head" in text for text in checkpoint.warnings)


def test_confidence_on_markov_without_a_head_is_refused(tmp_path: Path) -> None:
    changes = {"confidence_head_with_markov": True}
    path = write_draft(tmp_path / "draft", head="none", confidence="hidden", config=changes)
    with pytest.raises(CheckpointError, match="needs markov_rank > 0"):
        read_draft(path)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([2, 0], "not strictly increasing"),
        ([0, 0], "not strictly increasing"),
        ([0, 3], "taps the last of 4 layers"),
        ([0, 4], r"must lie in -1\.\.2 for a target of 4 layers"),
        ([-2, 0], r"must lie in -1\.\.2"),
        ([], "is empty"),
        ([0, "2"], "expected a list of integers"),
    ],
)
def test_layer_ids(tmp_path: Path, ids: list[Any], text: str) -> None:
    path = write_draft(tmp_path / "draft", config={"target_layer_ids": ids})
    with pytest.raises(CheckpointError, match=rf"target_layer_ids .*{text}"):
        read_draft(path)


def test_embedding_output_may_be_tapped(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", target_layer_ids=(-1, 2))
    assert read_draft(path).config.target_layer_ids == (-1, 2)


def test_mask_token(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", config={"mask_token_id": 320})
    with pytest.raises(
        CheckpointError, match=r"mask_token_id 320 .*outside the embedding of 320"
    ):
        read_draft(path)
    edit_config(path, drop=["mask_token_id"])
    with pytest.raises(
        CheckpointError, match=r"mask_token_id is missing \(override: --mask-token-id ID\)"
    ):
        read_draft(path)
    checkpoint = read_draft(path, overrides=DraftOverrides(mask_token_id=7))
    assert (checkpoint.config.mask_token_id, checkpoint.warnings) == (7, ())
    with pytest.raises(CheckpointError, match="mask_token_id 999"):
        read_draft(path, overrides=DraftOverrides(mask_token_id=999))


def test_mask_token_that_contradicts_the_file_warns(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft")
    checkpoint = read_draft(path, overrides=DraftOverrides(mask_token_id=7))
    assert checkpoint.config.mask_token_id == 7
    assert any("7" in text and "319" in text for text in checkpoint.warnings)


@pytest.mark.parametrize("layout", ["deepspec", "zlab-dflash"])
def test_gamma_is_bounded_by_the_checkpoint(tmp_path: Path, layout: str) -> None:
    path = write_draft(tmp_path / "draft", layout=layout)
    for gamma in (0, 5, 16):
        with pytest.raises(
            CheckpointError, match=rf"gamma {gamma} was asked for.*1 to 4 tokens"
        ):
            read_draft(path, overrides=DraftOverrides(gamma=gamma))
    fewer = read_draft(path, overrides=DraftOverrides(gamma=2))
    assert (fewer.config.gamma, decision(fewer, "gamma")) == (2, 2)
    assert any("not a prefix" in text for text in fewer.warnings)
    assert read_draft(path, overrides=DraftOverrides(gamma=4)).warnings == ()


def test_inherited_quantization_is_decided_by_the_tensors(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8"}
    path = write_draft(tmp_path / "draft", config={"quantization_config": quantization})
    checkpoint = read_draft(path)
    assert decision(checkpoint, "quantization") is None
    assert any("quantization_config" in text for text in checkpoint.warnings)
    edit_tensors(
        path, lambda w: w.update({"fc.weight": w["fc.weight"].to(torch.float8_e4m3fn)})
    )
    with pytest.raises(CheckpointError, match=r"fc\.weight is float8_e4m3fn"):
        read_draft(path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is missing"),
        ({"dflash_config": {"use_swa": True}}, "use_swa is true asks for a sliding window"),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 128}, "sliding_window": 64},
         "swa_window_size is 128, but sliding_window is 64: remove the wrong one"),
        ({"dflash_config": {"use_swa": False}, "sliding_window": 64,
          "layer_types": ["full_attention", "sliding_attention"]},
         "use_swa is false, but layer_types holds 'sliding_attention'"),
        ({"dflash_config": {"causal": True}}, "causal is True"),
    ],
)  # fmt: skip
def test_sliding_windows_that_contradict(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    path = write_draft(tmp_path / "draft", config=changes)
    with pytest.raises(CheckpointError, match=text):
        read_draft(path)


def test_window_that_is_switched_off_is_full_attention(tmp_path: Path) -> None:
    off = {"sliding_window": 4096, "use_sliding_window": False, "layer_types": None}
    assert read_draft(write_draft(tmp_path / "draft", config=off)).warnings == ()


def test_dtypes_may_mix(tmp_path: Path) -> None:
    checkpoint = read_draft(write_draft(tmp_path / "draft", dtype="mixed"))
    assert set(decision(checkpoint, "dtype").split("+")) == {"float32", "float16", "bfloat16"}


def test_stored_rotary_frequencies_are_not_weights(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft")
    edit_tensors(path, lambda weights: weights.update({"rotary_emb.inv_freq": torch.ones(16)}))
    checkpoint = read_draft(path)
    assert decision(checkpoint, "unused_tensors") == ["rotary_emb.inv_freq"]
    assert "rotary_emb.inv_freq" not in checkpoint.tensors
