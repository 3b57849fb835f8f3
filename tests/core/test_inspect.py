# SPDX-License-Identifier: Apache-2.0
"""``dspark-trt inspect`` through the real command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dspark_trt import __version__
from dspark_trt.checkpoint import read_draft
from dspark_trt.cli import build_app
from dspark_trt.errors import CheckpointError
from tests.checkpoints import (
    LAYOUTS,
    Dims,
    draft_weights,
    edit_config,
    write_draft,
    write_target,
)
from tests.command_line import dspark


def inspect(*arguments: str | Path) -> str:
    result = CliRunner().invoke(
        build_app(), ["inspect", *map(str, arguments)], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def inspect_json(*arguments: str | Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(inspect(*arguments, "--json"))
    return report


@pytest.mark.parametrize("layout", LAYOUTS)
def test_json_has_every_decision_by_name(tmp_path: Path, layout: str) -> None:
    path = write_draft(tmp_path / "draft", layout=layout)
    report, checkpoint = inspect_json(path), read_draft(path)
    assert report["kind"] == "drafter"
    assert report["decisions"].keys() == {item.name for item in checkpoint.decisions}
    assert report["decisions"].keys() >= {
        "format", "head_type", "markov_rank", "confidence", "gamma", "block_slots", "slot_semantics",
        "target_layer_ids", "num_target_layers", "mask_token_id", "borrowed", "dtype", "rope",
    }  # fmt: skip
    assert report["decisions"]["format"]["value"] == checkpoint.format
    assert report["decisions"]["gamma"]["value"] == 4
    assert report["decisions"]["target_layer_ids"]["value"] == [0, 2]
    assert all(item["reason"] for item in report["decisions"].values())


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    weights = draft_weights(Dims())
    facts = inspect_json(write_draft(tmp_path / "draft", dtype="bfloat16"))["facts"]
    assert facts["parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert facts["weight_bytes"] == 2 * facts["parameters"]


def test_table_shows_what_json_says(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", layout="speculators")
    edit_config(path, drop=["sample_from_anchor"])
    text = inspect(path)
    for shown in ("speculators", "vanilla", "hidden+markov", "in_place", "0, 2", "float32"):
        assert shown in text
    assert "warning: sample_from_anchor is absent" in text


def test_flags_override_the_files(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", layout="speculators")
    flags = ("--no-sample-from-anchor", "--mask-token-id", "7", "--gamma", "2")
    decisions = inspect_json(path, *flags)["decisions"]
    values = {name: item["value"] for name, item in decisions.items()}
    assert values["slot_semantics"] == "in_place"
    assert (values["mask_token_id"], values["gamma"], values["block_slots"]) == (7, 2, 3)


def test_targets_are_told_from_drafters(tmp_path: Path) -> None:
    path = write_target(tmp_path / "target", family="llama")
    report = inspect_json(path)
    assert (report["kind"], report["decisions"]["family"]["value"]) == ("target", "llama")
    assert report["facts"]["tokenizer_files"] == ["generation_config.json"]
    assert "llama" in inspect(path)
    with pytest.raises(CheckpointError, match="--target goes with a drafter"):
        inspect(path, "--target", path)


def test_pairs_are_checked(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "draft", max_positions=256)
    report = inspect_json(draft, "--target", write_target(tmp_path / "target"))
    assert report["facts"]["fits_target"] is True
    assert any("max_position_embeddings" in text for text in report["warnings"])
    with pytest.raises(CheckpointError, match="do not belong together"):
        inspect(draft, "--target", write_target(tmp_path / "other", vocab=322))


def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", config={"target_layer_ids": [0, 3]})
    code = "from dspark_trt.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(path), "--json"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "target_layer_ids [0, 3] taps the last of 4 layers" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_printed_stands_as_it_is() -> None:
    """By default rich prints a thumb for ":-1:", as in a scheduler `fixed:-1:`."""
    ran = dspark("inspect", "no:-1:folder")
    assert ran.code == 2
    assert "no:-1:folder: no such folder" in ran.stderr


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--set", "markov_rank=16", "--set", "markov_rank=8"), "markov_rank is given 2 times"),
        (("--set", "target_layer_ids=[0,1]", "--target-layer-ids", "0,2"),
         "--target-layer-ids and --set target_layer_ids state the same"),
        (("--set", "target.rope_theta=5",), "--set target.rope_theta: no target is read"),
    ],
)  # fmt: skip
def test_flags_that_would_be_dropped_in_silence(
    tmp_path: Path, flags: tuple[str, ...], text: str
) -> None:
    ran = dspark("inspect", write_draft(tmp_path / "draft"), *flags)
    assert (ran.code, text in ran.stderr) == (2, True), ran.stderr


@pytest.mark.parametrize(
    "flags", [("--gamma", "2"), ("--set", "rope_theta=5"), ("--mask-token-id", "2")]
)
def test_flags_of_drafters_are_refused_for_targets(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    target = write_target(tmp_path / "target")
    ran = dspark("inspect", target, *flags)
    assert ran.code == 2
    assert "is a target; what states settings of a drafter" in ran.stderr
    assert dspark("inspect", target, "--set", "target.rope_theta=5").code == 0


def test_the_version_is_told() -> None:
    assert dspark("--version") == (0, f"dspark-trt {__version__}\n", "")


def test_options_of_checkpoints_are_refused_for_what_is_none(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_text("{}")
    for path in (tmp_path, tmp_path / "draft.engine"):
        for options in (("--revision", "v2"), ("--target", "x")):
            with pytest.raises(
                CheckpointError, match="is no checkpoint: --target, and what states"
            ):
                inspect(path, *options)


def test_a_file_of_a_folder_is_refused_with_what_is_taken(tmp_path: Path) -> None:
    graph = tmp_path / "draft.onnx"
    graph.write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"draft\.onnx is a file; inspect takes the folder of a bundle"
    ):
        inspect(graph)
