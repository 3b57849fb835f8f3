# SPDX-License-Identifier: Apache-2.0
"""The same drafter in every dialect; conventions of slots, layers and names."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_trt.checkpoint import EMBEDDING, LM_HEAD, DraftOverrides, read_draft
from dspark_trt.checkpoint.convert import convert_draft
from dspark_trt.config import GemmaConfig, SlotSemantics
from dspark_trt.errors import CheckpointError
from tests.checkpoints import (
    LAYOUTS,
    edit_config,
    edit_tensors,
    write_draft,
    write_gemma_draft,
    write_target,
)

DSPARK_LAYOUTS = [layout for layout in LAYOUTS if layout != "zlab-dflash"]
IN_PLACE, ANCHOR_FIRST = SlotSemantics.IN_PLACE, SlotSemantics.ANCHOR_FIRST


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("layout", DSPARK_LAYOUTS)
def test_one_drafter_reads_alike_from_every_dialect(
    tmp_path: Path, layout: str, head: str
) -> None:
    reference = read_draft(write_draft(tmp_path / "reference", head=head))
    checkpoint = read_draft(write_draft(tmp_path / "draft", layout=layout, head=head))
    assert checkpoint.format == ("specforge" if layout == "sglang" else layout)
    depth = {"num_target_layers": 0} if layout == "speculators" else {}
    assert checkpoint.config.to_json() == reference.config.to_json() | depth
    assert checkpoint.tensors.keys() | checkpoint.borrowed == reference.tensors.keys()
    for name, ref in checkpoint.tensors.items():
        assert ref.name == name
        assert torch.equal(ref.load(), reference.tensors[name].load())
    owned = {"deepspec", "speculators"}
    assert checkpoint.borrowed == (frozenset() if layout in owned else {EMBEDDING, LM_HEAD})


@pytest.mark.parametrize(
    "architecture", ["DSparkDraftModel", "DFlashDraftModel", "Qwen3ForCausalLM", None]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_architecture_string_decides_nothing(
    tmp_path: Path, layout: str, architecture: str | None
) -> None:
    path = write_draft(tmp_path / "draft", layout=layout)
    before = read_draft(path)
    edit_config(path, {"architectures": [architecture]})
    assert (read_draft(path).format, read_draft(path).config) == (before.format, before.config)


def test_zlab_is_in_place_and_borrows(tmp_path: Path) -> None:
    checkpoint = read_draft(write_draft(tmp_path / "draft", layout="zlab-dflash"))
    assert (checkpoint.format, checkpoint.config.slot_semantics) == ("zlab-dflash", IN_PLACE)
    assert (checkpoint.config.block_slots, checkpoint.config.gamma) == (5, 4)
    assert checkpoint.borrowed == {EMBEDDING, LM_HEAD}


def test_zlab_block_size_may_be_nested(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", layout="zlab-dflash")
    edit_config(path, drop=["block_size"])
    edit_config(path, {"block_size": 5}, nested="dflash_config")
    assert read_draft(path).config.gamma == 4
    edit_config(path, {"block_size": 6})
    with pytest.raises(
        CheckpointError, match=r"block_size is 6 but dflash_config\.block_size is 5"
    ):
        read_draft(path)


@pytest.mark.parametrize(
    ("depth", "layers", "ids"),
    [(36, 5, (1, 9, 17, 25, 33)), (40, 5, (1, 10, 19, 28, 37)), (6, 1, (3,))],
)
def test_zlab_default_layers(
    tmp_path: Path, depth: int, layers: int, ids: tuple[int, ...]
) -> None:
    path = write_draft(
        tmp_path / "draft",
        layout="zlab-dflash",
        layers=layers,
        target_layers=depth,
        target_layer_ids=ids,
    )
    edit_config(path, nested="dflash_config", drop=["target_layer_ids"])
    assert read_draft(path).config.target_layer_ids == ids


def test_speculators_ids_come_one_higher(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", layout="speculators")
    edit_config(path, {"aux_hidden_state_layer_ids": [0, 3]})
    assert read_draft(path).config.target_layer_ids == (-1, 2)
    edit_config(path, {"aux_hidden_state_layer_ids": [-1, 3]})
    with pytest.raises(
        CheckpointError, match=r"aux_hidden_state_layer_ids \[-1, 3\] must lie in"
    ):
        read_draft(path)


@pytest.mark.parametrize(("layout", "warnings"), [("specforge", 0), ("model-optimizer", 1)])
def test_embedding_taps_are_doubtful_in_one_format(
    tmp_path: Path, layout: str, warnings: int
) -> None:
    path = write_draft(tmp_path / "draft", layout=layout, target_layer_ids=(-1, 2))
    checkpoint = read_draft(path)
    assert checkpoint.config.target_layer_ids == (-1, 2)
    assert ["-1 is read as" in text for text in checkpoint.warnings] == [True] * warnings


@pytest.mark.parametrize(
    ("layout", "key", "nested"),
    [
        ("speculators", "sample_from_anchor", None),
        ("model-optimizer", "shift_label", "dflash_config"),
    ],
)
def test_slot_semantics_follow_the_key(
    tmp_path: Path, layout: str, key: str, nested: str | None
) -> None:
    path = write_draft(tmp_path / "draft", layout=layout)
    assert read_draft(path).config.slot_semantics is ANCHOR_FIRST
    edit_config(path, nested=nested, changes={key: False})
    in_place = read_draft(path).config
    assert (in_place.slot_semantics, in_place.block_slots, in_place.gamma) == (IN_PLACE, 4, 3)


def test_speculators_without_the_key_are_in_place_with_a_warning(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", layout="speculators")
    edit_config(path, drop=["sample_from_anchor"])
    checkpoint = read_draft(path)
    assert checkpoint.config.slot_semantics is IN_PLACE
    assert any("--sample-from-anchor" in text for text in checkpoint.warnings)
    assert any("speculative_tokens is 4, but" in text for text in checkpoint.warnings)
    overrides = DraftOverrides(slot_semantics=ANCHOR_FIRST)
    assert read_draft(path, overrides=overrides).config.gamma == 4


def test_model_optimizer_without_the_key_is_anchor_first_with_a_warning(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", layout="model-optimizer")
    edit_config(path, nested="dflash_config", drop=["shift_label"])
    checkpoint = read_draft(path)
    assert checkpoint.config.slot_semantics is ANCHOR_FIRST
    assert any("--no-sample-from-anchor" in text for text in checkpoint.warnings)


def test_slot_semantics_can_be_overridden_in_any_format(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", layout="specforge")
    checkpoint = read_draft(path, overrides=DraftOverrides(slot_semantics=IN_PLACE))
    assert (checkpoint.config.slot_semantics, checkpoint.config.gamma) == (IN_PLACE, 3)
    reason = next(item.reason for item in checkpoint.decisions if item.name == "slot_semantics")
    assert "asked for" in reason
    assert "anchor_first" in reason
    assert len(checkpoint.warnings) == 1


@pytest.mark.parametrize("name", ["enable_confidence_head", "use_confidence_head"])
def test_both_names_of_the_confidence_switch_are_read(tmp_path: Path, name: str) -> None:
    path = write_draft(tmp_path / "draft", layout="model-optimizer")
    edit_config(path, nested="dflash_config", drop=["use_confidence_head"])
    edit_config(path, nested="dflash_config", changes={name: True})
    checkpoint = read_draft(path)
    assert (checkpoint.config.confidence.value, checkpoint.warnings) == ("hidden+markov", ())
    edit_config(path, nested="dflash_config", changes={name: False})
    with pytest.raises(
        CheckpointError, match=rf"{name} is false, but the files hold confidence_proj"
    ):
        read_draft(path)


def test_spellings_that_disagree_are_refused(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", layout="specforge", config={"dspark_markov_rank": 8})
    with pytest.raises(
        CheckpointError, match=r"dspark_markov_rank is 8 but dflash_config\.markov_rank is 16"
    ):
        read_draft(path)


def test_dspark_config_and_noise_token_are_understood(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", layout="sglang")
    edit_config(
        path,
        {"dspark_noise_token_id": 319},
        drop=["dspark_mask_token_id", "dspark_markov_rank"],
    )
    edit_config(path, {"dspark_config": {"markov_rank": 16}})
    config = read_draft(path).config
    assert (config.mask_token_id, config.markov_rank) == (319, 16)


def test_specforge_promoted_to_deepspec_keys_still_borrows(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft")
    edit_tensors(path, lambda weights: [weights.pop(EMBEDDING), weights.pop(LM_HEAD)])
    checkpoint = read_draft(path)
    assert checkpoint.format == "deepspec"
    assert checkpoint.borrowed == {EMBEDDING, LM_HEAD}


def test_two_names_for_one_tensor_are_refused(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", layout="model-optimizer")
    edit_tensors(
        path, lambda w: w.update({"markov_head.markov_w1.weight": w["markov_w1.weight"]})
    )
    with pytest.raises(CheckpointError, match=r"are both markov_head\.markov_w1\.weight"):
        read_draft(path)


DRAFTED = (1, 4, 9, 300)


def test_reduced_vocabulary(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", layout="speculators", drafted=DRAFTED)
    checkpoint = read_draft(path)
    assert checkpoint.config.draft_vocab_size == len(DRAFTED)
    assert checkpoint.config.decoder.vocab_size == 320
    assert checkpoint.tensors["lm_head.weight"].shape == (len(DRAFTED), 64)
    assert checkpoint.tensors["markov_head.markov_w1.weight"].shape == (320, 16)
    assert any(d.name == "vocabulary" and d.value == len(DRAFTED) for d in checkpoint.decisions)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"d2t": torch.tensor([1, 4, 9, 318])}, "d2t must hold offsets.*it looks like absolute ids"),
        ({"d2t": torch.tensor([1, 3, 7, 317])}, "increasing tokens below 320, but it gives 1 to 320"),
        ({"d2t": torch.tensor([1, 3, 1, 297])}, "increasing tokens"),
        ({"d2t": torch.tensor([-1, 3, 7, 297])}, "it gives -1 to 300"),
        ({"d2t": torch.zeros(100, dtype=torch.int64)}, r"d2t is int64 \(100,\), expected int64 \(4,\)"),
        ({"d2t": torch.zeros(4)}, "d2t is float32"),
        ({"t2d": torch.ones(320, dtype=torch.bool)}, "t2d keeps 320 tokens and d2t names 4; they differ at token 0"),
        ({"t2d": torch.ones(4, dtype=torch.bool)}, r"t2d is bool \(4,\), expected bool \(320,\)"),
        ({"d2t": None}, "draft_vocab_size is 4 of 320, but the files hold no d2t"),
    ],
)  # fmt: skip
def test_vocabulary_maps_that_contradict(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], text: str
) -> None:
    path = write_draft(tmp_path / "draft", layout="speculators", drafted=DRAFTED)

    def edit(weights: dict[str, torch.Tensor]) -> None:
        for name, table in changes.items():
            if table is None:
                del weights[name]
            else:
                weights[name] = table

    edit_tensors(path, edit)
    with pytest.raises(CheckpointError, match=text):
        read_draft(path)


def test_size_of_the_draft_vocabulary_against_the_head(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", layout="speculators", drafted=DRAFTED)
    edit_config(path, {"draft_vocab_size": 321})
    with pytest.raises(
        CheckpointError, match="draft_vocab_size is 321, expected 1 to vocab_size 320"
    ):
        read_draft(path)
    edit_config(path, {"draft_vocab_size": 3})
    with pytest.raises(CheckpointError, match=r"d2t is int64 \(4,\), expected int64 \(3,\)"):
        read_draft(path)


@pytest.mark.parametrize(
    ("tensor", "layout"),
    [
        ("mtp.fc.weight", "mtp"),
        ("selector_proj.weight", "DFlash2"),
    ],
)
def test_other_layouts_are_refused_by_name(tmp_path: Path, tensor: str, layout: str) -> None:
    path = write_draft(tmp_path / "draft")
    edit_tensors(path, lambda weights: weights.update({tensor: torch.ones(1)}))
    with pytest.raises(CheckpointError, match=f"{layout} layout not supported yet.*{tensor}"):
        read_draft(path)


def test_a_target_is_no_drafter(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"not a DSpark or DFlash drafter.*looks like a target"
    ):
        read_draft(write_target(tmp_path / "target"))


def test_depth_is_required_where_the_format_records_it(tmp_path: Path) -> None:
    for layout in ("deepspec", "specforge", "zlab-dflash"):
        path = write_draft(tmp_path / layout, layout=layout)
        edit_config(path, drop=["num_target_layers"])
        with pytest.raises(CheckpointError, match="num_target_layers is missing"):
            read_draft(path)


YARN: dict[str, Any] = {"factor": 16.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_yarn_is_read_in_every_dialect(tmp_path: Path, layout: str) -> None:
    path = write_draft(tmp_path / "draft", layout=layout)
    nested = "transformer_layer_config" if layout == "speculators" else None
    edit_config(
        path,
        nested=nested,
        changes={"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN}},
    )
    rope = read_draft(path).config.decoder.rope
    assert (rope.yarn_factor, rope.original_positions, rope.theta) == (16.0, 4096, 1e4)


def test_gemma4_uses_the_sizes_of_full_attention(tmp_path: Path) -> None:
    checkpoint = read_draft(write_gemma_draft(tmp_path / "draft"))
    decoder = checkpoint.config.decoder
    assert (checkpoint.format, decoder.head_dim, decoder.num_kv_heads) == ("deepspec", 32, 2)
    assert decoder.gemma == GemmaConfig(key_is_value=True, logit_softcap=2.0)
    assert (decoder.rope.theta, decoder.rope.rotary_fraction) == (1e6, 0.25)
    assert "layers.1.self_attn.v_proj.weight" not in checkpoint.tensors
    separate = read_draft(write_gemma_draft(tmp_path / "separate", key_is_value=False))
    assert "layers.1.self_attn.v_proj.weight" in separate.tensors
    copy = convert_draft(checkpoint, tmp_path / "copy", to="deepspec")
    assert copy.config == checkpoint.config
    with pytest.raises(
        CheckpointError, match="speculators, which has no words for Gemma4 layers"
    ):
        convert_draft(checkpoint, tmp_path / "other", to="speculators")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"enable_moe_block": True}, "enable_moe_block is True, which is not supported yet"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input is 256"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"attention_k_eq_v": None}, "attention_k_eq_v is missing"),
        ({"attention_k_eq_v": False}, r"missing: layers\.0\.self_attn\.v_proj\.weight"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0, expected a positive number"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types holds 'sliding_attention'; Gemma4"),
        ({"num_kv_shared_layers": 1, "use_double_wide_mlp": True}, "wide MLPs are not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
         "rope_parameters.full_attention.rope_type is 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6}}},
         "partial_rotary_factor is None, expected a number"),
    ],
)  # fmt: skip
def test_gemma4_settings_that_are_refused(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    path = write_gemma_draft(tmp_path / "draft", config=changes)
    with pytest.raises(CheckpointError, match=text):
        read_draft(path)


def test_a_lost_layer_scalar_is_missed(tmp_path: Path) -> None:
    """It is a buffer in the reference, and is easily lost on the way (vllm-project/vllm#41703)."""
    path = write_gemma_draft(tmp_path / "draft")
    edit_tensors(path, lambda weights: weights.pop("layers.1.layer_scalar"))
    with pytest.raises(CheckpointError, match=r"missing: layers\.1\.layer_scalar"):
        read_draft(path)
