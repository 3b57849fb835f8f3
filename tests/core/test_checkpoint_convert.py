# SPDX-License-Identifier: Apache-2.0
"""Conversion between dialects: the same bytes, the same facts, or a sentence that says what is missing."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from dspark_trt.checkpoint import DraftOverrides, read_draft, read_target
from dspark_trt.checkpoint.convert import convert_draft
from dspark_trt.cli import build_app
from dspark_trt.config import ConfidenceInput, SlotSemantics
from dspark_trt.errors import CheckpointError
from tests.checkpoints import edit_config, edit_tensors, write_draft, write_target

DIALECTS = ("deepspec", "speculators", "specforge", "model-optimizer")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target", tied=False)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(DIALECTS, 2)))
def test_round_trip(tmp_path: Path, target: Path, first: str, second: str) -> None:
    """There and back: files equal bit for bit, and every dialect's reader gives one description."""
    start = write_draft(
        tmp_path / "start", layout=first, head="rnn", dtype="mixed", target=target,
        config={"rope_scaling": YARN} if first != "speculators" else None,
    )  # fmt: skip
    edit_tensors(start, lambda weights: weights.update(_ends_of(target, weights)))
    served = read_target(target)
    draft = read_draft(start)
    there = convert_draft(draft, tmp_path / "there", to=second, target=served)
    back = convert_draft(there, tmp_path / "back", to=first, target=served)
    assert (there.format, back.format) == (second, first)
    assert back.config == replace(draft.config, num_target_layers=4)
    before, after = (load_file(x / "model.safetensors") for x in (start, tmp_path / "back"))
    skipped = {"t2d", "d2t", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert after.keys() == before.keys() - skipped
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name]), name
    assert not list(tmp_path.glob(".*"))


def _ends_of(target: Path, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Embedding and head in the target's own dtype, whatever the mix had made of them."""
    served = load_file(target / "model.safetensors")
    ends = {
        "embed_tokens.weight": served["model.embed_tokens.weight"],
        "lm_head.weight": served["lm_head.weight"],
    }
    return {name: tensor for name, tensor in ends.items() if name in weights}


def test_facts_that_no_dialect_names_are_kept(tmp_path: Path, target: Path) -> None:
    start = write_draft(
        tmp_path / "start", target=target,
        config={"rope_scaling": YARN, "num_anchors": 96, "eos_token_id": [5, 6], "rms_norm_eps": 1e-5},
    )  # fmt: skip
    there = convert_draft(read_draft(start), tmp_path / "there", to="speculators")
    back = convert_draft(there, tmp_path / "back", to="deepspec")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["num_anchors"] == 96
    assert config["eos_token_id"] == [5, 6]
    assert config["rope_scaling"] == YARN
    assert "transformer_layer_config" not in config
    assert "speculators_config" not in config
    assert back.config == read_draft(start).config  # num_target_layers came through as well


def test_windows_and_reduced_vocabularies_of_speculators(tmp_path: Path) -> None:
    start = write_draft(tmp_path / "start", layout="speculators", drafted=(3, 7, 200))
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}
    edit_config(start, windows, nested="transformer_layer_config")
    draft = read_draft(start)
    copy = convert_draft(draft, tmp_path / "copy", to="speculators")
    assert copy.config == draft.config
    assert copy.config.decoder.windows == (None, 64)
    before, after = (load_file(x / "model.safetensors") for x in (start, tmp_path / "copy"))
    for name in ("t2d", "d2t", "lm_head.weight"):
        assert torch.equal(before[name], after[name])
    with pytest.raises(
        CheckpointError,
        match=r"deepspec, which has no words for a target of unknown depth .*; a draft vocabulary "
        "of 3 tokens; windows counted from the anchor",
    ):
        convert_draft(draft, tmp_path / "other", to="deepspec")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("how", "to", "text"),
    [
        ({"layout": "speculators", "in_place": True}, "deepspec", "slots in place"),
        ({"layout": "model-optimizer", "in_place": True}, "specforge", "slots in place"),
        ({"confidence": "hidden"}, "model-optimizer", "confidence head without Markov features"),
        ({"head": "none", "confidence": "none"}, "model-optimizer", "markov_rank 0"),
        ({"layout": "zlab-dflash"}, "deepspec", "slots in place"),
        ({"config": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}},
         "speculators", "windows counted from each slot"),
        ({"layout": "specforge"}, "deepspec", "has no embed_tokens.weight and lm_head.weight, which deepspec"),
        ({}, "specforge", "has its own embed_tokens.weight and lm_head.weight, which specforge takes"),
        ({"layout": "speculators"}, "deepspec", "a target of unknown depth .give it with --target"),
        ({}, "zlab-dflash", "'zlab-dflash' cannot be written; choose one of deepspec, speculators"),
    ],
)  # fmt: skip
def test_what_a_dialect_cannot_say(
    tmp_path: Path, how: dict[str, Any], to: str, text: str
) -> None:
    draft = read_draft(write_draft(tmp_path / "draft", **how))
    with pytest.raises(CheckpointError, match=text):
        convert_draft(draft, tmp_path / "out", to=to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]


def test_own_embeddings_are_never_dropped(tmp_path: Path, target: Path) -> None:
    draft = read_draft(write_draft(tmp_path / "draft"))  # random ones, not the target's
    with pytest.raises(
        CheckpointError, match=r"embed_tokens\.weight of .* is not .*would replace"
    ):
        convert_draft(draft, tmp_path / "out", to="specforge", target=read_target(target))


def test_a_target_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    draft = read_draft(write_draft(tmp_path / "draft", layout="specforge"))
    other = read_target(write_target(tmp_path / "target", vocab=128))
    with pytest.raises(CheckpointError, match="do not belong together: vocab_size"):
        convert_draft(draft, tmp_path / "out", to="deepspec", target=other)


def test_overrides_are_written_down(tmp_path: Path) -> None:
    """A file that is wrong about its slots becomes one that is right."""
    path = write_draft(tmp_path / "draft", layout="speculators", in_place=True)
    served = read_target(write_target(tmp_path / "target"))
    overrides = DraftOverrides(slot_semantics=SlotSemantics.ANCHOR_FIRST)
    written = convert_draft(
        read_draft(path, overrides=overrides), tmp_path / "out", to="deepspec", target=served
    )
    assert written.config.slot_semantics is SlotSemantics.ANCHOR_FIRST
    assert written.config.gamma == 5


def test_zlab_becomes_a_speculators_dflash(tmp_path: Path, target: Path) -> None:
    draft = read_draft(write_draft(tmp_path / "draft", layout="zlab-dflash"))
    written = convert_draft(
        draft, tmp_path / "out", to="speculators", target=read_target(target)
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_model_type"] == "dflash"
    assert config["sample_from_anchor"] is False
    assert written.config == draft.config
    assert written.config.confidence is ConfidenceInput.NONE
    assert not written.warnings


def test_command(tmp_path: Path, target: Path) -> None:
    start = write_draft(tmp_path / "start", layout="specforge")
    runner, app = CliRunner(), build_app()
    out = str(tmp_path / "out")
    arguments = ["convert", str(start), "-o", out, "--to", "deepspec", "--target", str(target)]
    result = runner.invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["from"], report["to"], report["warnings"]) == ("specforge", "deepspec", [])
    again = runner.invoke(app, arguments)
    assert isinstance(again.exception, CheckpointError)
    assert "pass --overwrite" in str(again.exception)
    assert runner.invoke(app, [*arguments, "--overwrite"]).exit_code == 0
    assert read_draft(out).format == "deepspec"
