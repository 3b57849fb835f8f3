# SPDX-License-Identifier: Apache-2.0
"""`inspect`, `export` and `check` as a person or a script runs them: documents, sentences, exit codes."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from dspark_trt.bundle import Bundle, load_bundle
from dspark_trt.cli import _COMMANDS, build_app
from tests.checkpoints import write_draft, write_target
from tests.command_line import Ran, dspark
from tests.conftest import DRAFTERS, TINY_TARGET


def document(ran: Ran) -> Any:
    """The one JSON document on stdout."""
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_draft(
        folder / "draft", head="vanilla", confidence="none", layers=1, gamma=2, max_positions=100,
        target_layers=2, target_layer_ids=(0,),
    )  # fmt: skip
    write_target(folder / "target", layers=2)
    return folder


@pytest.fixture(scope="module")
def exported(folder: Path) -> Ran:
    return dspark(
        "export", "--draft", folder / "draft", "--target", folder / "target",
        "-o", folder / "deep" / "bundle", "--gamma", "1", "--json",
    )  # fmt: skip


def test_export_prints_one_document(exported: Ran, folder: Path) -> None:
    assert exported.code == 0, exported.stderr
    told = document(exported)
    bundle = load_bundle(folder / "deep" / "bundle")
    assert told["bundle"] == str(folder / "deep" / "bundle")
    assert tuple(told["graphs"]) == bundle.graph_names
    assert told["gamma"] == bundle.draft.gamma == 1
    assert told["dtype"] == "float32"
    assert told["bytes"] == sum(record.size_bytes for record in bundle.files.values())
    assert told["seconds"] > 0
    shorter, positions = told["warnings"]
    assert "gamma is 1 instead of the trained 2" in shorter
    assert "max_position_embeddings of the drafter is 100, of the target 512" in positions
    for warning in told["warnings"]:
        assert f"warning: {warning}" in exported.stderr
    assert "Traceback" not in exported.stderr


def test_check_passes_with_code_0(exported: Ran, folder: Path) -> None:
    checkpoints = ("--draft", folder / "draft", "--target", folder / "target")
    ran = dspark("check", folder / "deep" / "bundle", "--json", *checkpoints)
    assert ran.code == 0, ran.stderr
    told = document(ran)
    assert told["passed"] is True
    assert {graph["name"] for graph in told["graphs"]} == set(document(exported)["graphs"])


def test_check_of_a_changed_file_is_bad_input(
    exported: Ran, folder: Path, tmp_path: Path
) -> None:
    assert exported.code == 0
    bundle = copy_of(load_bundle(folder / "deep" / "bundle"), tmp_path)
    with (bundle / "weights.bin").open("r+b") as stream:
        stream.write(b"\xff")
    refused(dspark("check", bundle), "weights.bin was changed: sha256")


def copy_of(bundle: Bundle, folder: Path) -> Path:

    return Path(shutil.copytree(bundle.path, folder / "bundle"))


def refused(ran: Ran, sentence: str) -> None:
    assert ran.code == 2, ran
    assert ran.stdout == ""
    assert "Traceback" not in ran.stderr
    (line,) = ran.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert sentence in line


REFUSALS: dict[str, tuple[list[str | Path], str]] = {
    "no checkpoint": (
        ["export", "--draft", "nowhere", "-o", "OUT"],
        "nowhere: no such folder, and not a hub id of the form owner/name",
    ),
    "a target as drafter": (
        ["export", "--draft", TINY_TARGET, "-o", "OUT"],
        "is not a DSpark or DFlash drafter: config.json has none of target_layer_ids",
    ),
    "a drafter as target": (
        ["export", "--draft", DRAFTERS["dflash"], "--target", DRAFTERS["dflash"], "-o", "OUT"],
        "holds a drafter (it has the tensor fc.weight), not a target",
    ),
    "a pair that does not fit": (
        ["export", "--draft", "DRAFT", "--target", TINY_TARGET, "-o", "OUT"],
        "do not belong together: target_hidden_size of the drafter is 64, but hidden_size of the "
        "target is 128 (override: --set target_hidden_size=VALUE); vocab_size",
    ),
    "gamma beyond the block": (
        ["export", "--draft", DRAFTERS["dspark-rnn"], "--gamma", "8", "-o", "OUT"],
        "gamma 8 was asked for, but block_size is 7: this checkpoint proposes 1 to 7 tokens",
    ),
    "an unknown precision": (
        ["export", "--draft", "DRAFT", "--dtype", "fp8", "-o", "OUT"],
        "dtype 'fp8' is not one of float32, float16, bfloat16",
    ),
    "an output that exists": (
        ["export", "--draft", "DRAFT", "-o", "DRAFT"],
        "exists already. Choose another folder, or pass --overwrite.",
    ),
    "overwriting what is no bundle": (
        ["export", "--draft", "DRAFT", "-o", "DRAFT", "--overwrite"],
        "is no bundle, so --overwrite does not remove it",
    ),
    "checking what is no bundle": (
        ["check", "DRAFT"],
        "is no bundle: it has no bundle.json. Make one with: dspark-trt export",
    ),
    "inspecting nothing": (
        ["inspect", "nowhere", "--json"],
        "nowhere: no such folder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_one_sentence_and_code_2(case: str, folder: Path, tmp_path: Path) -> None:
    places: dict[str | Path, Path] = {
        "DRAFT": folder / "draft",
        "OUT": tmp_path / "a" / "bundle",
    }
    arguments, sentence = REFUSALS[case]
    before = sorted(path.name for path in folder.iterdir())
    refused(dspark(*(places.get(argument, argument) for argument in arguments)), sentence)
    assert not (tmp_path / "a").exists()
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_missing_option_is_code_2() -> None:
    ran = dspark("export", "--draft", DRAFTERS["dflash"])
    assert ran.code == 2
    assert "--output" in ran.stderr


@pytest.mark.parametrize("name", _COMMANDS)
def test_help_of_every_command(name: str) -> None:
    """At 80 columns: every option by its whole name, and a description behind it."""
    result = CliRunner().invoke(build_app(), [name, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    text = result.stdout
    summary = text.split("Usage:")[1].strip().splitlines()[2].strip()
    assert summary.endswith(".")
    root: Any = get_command(build_app())
    for option in root.commands[name].params:
        if option.param_type_name == "option":
            for spelling in option.opts:
                assert re.search(
                    rf"^ .*{spelling}\b.*?(  |\n {{10,}})\S", text, re.MULTILINE
                ), spelling


def test_the_list_of_commands_says_what_each_does() -> None:
    result = CliRunner().invoke(build_app(), ["--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert "..." not in result.stdout.split("Commands:")[1]
    for name in _COMMANDS:
        assert re.search(rf"^ +{name} +\S.*\.$", result.stdout, re.MULTILINE), name


def test_no_arguments_show_help() -> None:
    ran = dspark()
    assert "Commands" in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
