# SPDX-License-Identifier: Apache-2.0
"""Layers for multi-token prediction: what is read of them, and each refusal by its text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_trt.checkpoint import (
    EMBEDDING,
    LM_HEAD,
    DraftCheckpoint,
    DraftOverrides,
    check_pair,
    read_checkpoint,
    read_draft,
    read_target,
)
from dspark_trt.checkpoint.convert import convert_draft
from dspark_trt.config import FINAL_NORM, ConfidenceInput
from dspark_trt.errors import CheckpointError
from tests.checkpoints import Weights, edit_config, edit_tensors, write_target
from tests.checkpoints_mtp import write_mtp


@pytest.mark.parametrize("quantised", [False, True])
def test_what_is_read(tmp_path: Path, quantised: bool) -> None:
    """A target's folder with such a layer is read as the drafter in it."""
    draft = read_checkpoint(write_mtp(tmp_path / "draft", quantised=quantised))
    assert isinstance(draft, DraftCheckpoint)
    config, decoder = draft.config, draft.config.decoder
    assert (draft.format, draft.borrowed, draft.warnings) == ("mtp", frozenset(), ())
    assert (config.gamma, config.target_layer_ids, config.num_target_layers) == (
        1,
        (FINAL_NORM,),
        4,
    )
    assert (config.tap_size, config.context_size) == (64, 65)
    assert config.confidence is ConfidenceInput.NONE
    assert decoder.cache_sizes == ((1, 40),)  # a latent and a turned key for all heads
    assert config.chain is not None
    assert config.chain.mtp is not None
    assert config.chain.mtp.attention_scale == pytest.approx(24**-0.5 * 1.3688879**2)
    made = {item.name: item.value for item in draft.decisions}
    assert (made["layer"], made["unused_tensors"]) == (4, 1)
    assert made["dtype"] == ("float32+FP8" if quantised else "float32")
    assert check_pair(draft, read_target(write_target(tmp_path / "target"))) == ()


def test_embedding_and_head(tmp_path: Path) -> None:
    """The layer's own copies, else the target's beside it, else the target's elsewhere."""
    path = write_mtp(tmp_path / "draft", owns_vocabulary=False)
    assert read_draft(path).borrowed == {EMBEDDING, LM_HEAD}
    table = torch.zeros(320, 64)
    edit_tensors(path, lambda weights: weights.update({"model.embed_tokens.weight": table}))
    assert read_draft(path).borrowed == {LM_HEAD}
    edit_tensors(path, lambda weights: weights.update({"lm_head.weight": table}))
    draft = read_draft(path)
    assert draft.borrowed == frozenset()
    assert draft.tensors[LM_HEAD].key == "lm_head.weight"
    own = "model.layers.4.shared_head.head.weight"
    edit_tensors(path, lambda weights: weights.update({own: table}))
    assert read_draft(path).tensors[LM_HEAD].key == own


def test_experts_only_where_the_target_has_them(tmp_path: Path) -> None:
    dense = write_mtp(tmp_path / "dense", experts=None)
    assert read_draft(dense).config.decoder.experts is None
    edit_config(dense, {"n_routed_experts": 8, "first_k_dense_replace": 5})
    assert read_draft(dense).config.decoder.experts is None
    edit_config(dense, {"first_k_dense_replace": 4})
    with pytest.raises(
        CheckpointError, match=r"missing: model\.layers\.4\.mlp\.experts\.0\.down"
    ):
        read_draft(dense)


def test_a_target_of_another_depth(tmp_path: Path) -> None:
    draft = read_draft(write_mtp(tmp_path / "draft"))
    target = read_target(write_target(tmp_path / "target", layers=5))
    with pytest.raises(
        CheckpointError, match=r"num_target_layers of the drafter is 4, but .* 5"
    ):
        check_pair(draft, target)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": 3}, r"expected at model\.layers\.3, but eh_proj is in layers .4."),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', which is not supported"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy', which is not supported"),
        ({"rope_interleave": False}, "rope_interleave is False, which is not supported"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"qk_rope_head_dim": 7}, "rotary size must be even and positive, got 7"),
        ({"topk_group": 5}, "5 of 4 groups is impossible"),
        ({"num_experts_per_tok": 9}, "9 of 8 experts a token is impossible"),
        ({"n_group": 3}, "8 experts cannot be split into 3 groups"),
        ({"n_group": 8}, "groups of one expert are not supported"),
        ({"v_head_dim": 8}, r"o_proj\.weight is \(64, 80\), expected \(64, 32\)"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    path = write_mtp(tmp_path / "draft")
    edit_config(path, changes)
    with pytest.raises(CheckpointError, match=text):
        read_draft(path)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda w: w.pop("model.layers.4.enorm.weight"), r"missing: model\.layers\.4\.enorm"),
        (lambda w: w.update({"model.layers.4.x": torch.ones(1)}), r"unexpected: model\.layers\.4\.x"),
        (
            lambda w: w.update({"model.layers.4.embed_tokens.weight": torch.ones(2, 2)}),
            r"embed_tokens\.weight is \(2, 2\), expected \(320, 64\)",
        ),
    ],
)  # fmt: skip
def test_tensors_that_are_refused(
    tmp_path: Path, edit: Callable[[Weights], object], text: str
) -> None:
    path = write_mtp(tmp_path / "draft")
    edit_tensors(path, edit)
    with pytest.raises(CheckpointError, match=text):
        read_draft(path)


def test_it_drafts_one_token(tmp_path: Path) -> None:
    path = write_mtp(tmp_path / "draft")
    assert read_draft(path, overrides=DraftOverrides(gamma=1)).config.gamma == 1
    with pytest.raises(
        CheckpointError, match="gamma 3 was asked for, but an MTP layer drafts 1"
    ):
        read_draft(path, overrides=DraftOverrides(gamma=3))


def test_it_is_not_converted(tmp_path: Path) -> None:
    draft = read_draft(write_mtp(tmp_path / "draft"))
    with pytest.raises(CheckpointError, match="speculators, which has no words for MTP layers"):
        convert_draft(draft, tmp_path / "out", to="speculators")
