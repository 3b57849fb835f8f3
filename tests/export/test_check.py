# SPDX-License-Identifier: Apache-2.0
"""Parity of every graph, and that the check finds what is wrong with a bundle."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner, Result

from dspark_trt.bundle import Bundle, load_bundle, record_files, write_manifest
from dspark_trt.cli import build_app
from dspark_trt.errors import BackendError, BundleError, CheckpointError
from dspark_trt.export.parity import OutputParity, check_parity
from dspark_trt.export.stored_weights import changed_weights
from dspark_trt.runtime.session import DraftSession
from tests.checkpoints import write_draft
from tests.conftest import DRAFTERS, TINY_TARGET, ExportBundle
from tests.export.conftest import RECIPES, ToyBundle

RUNNABLE = [name for name, recipe in RECIPES.items() if recipe.dtype != "bfloat16"]


def failures(results: list[OutputParity]) -> list[OutputParity]:
    return [result for result in results if not result.passed]


@pytest.mark.parametrize("name", RUNNABLE)
def test_toys_equal_the_modules_of_their_checkpoints(toy_bundle: ToyBundle, name: str) -> None:
    toy = toy_bundle(name)
    for seed in range(2):
        results = list(check_parity(toy.bundle, draft=toy.draft, target=toy.target, seed=seed))
        assert not failures(results)
        assert {result.name for result in results} == set(toy.bundle.graph_names)
        assert all(
            r.max_abs_error is not None and r.max_abs_error <= r.tolerance for r in results
        )


def test_the_example_equals_its_own_weights(tiny_bundle: Bundle) -> None:
    results = list(check_parity(tiny_bundle))
    assert not failures(results)
    assert {result.tolerance for result in results} >= {0.0, 2e-4}
    assert not changed_weights(tiny_bundle)


def test_the_reference_comes_from_the_right_checkpoint(
    toy_bundle: ToyBundle, tmp_path: Path
) -> None:
    toy = toy_bundle("gated-in-place-llama-yarn")
    recipe = RECIPES["gated-in-place-llama-yarn"]
    other = write_draft(tmp_path / "draft", **(recipe.draft | {"seed": 9}))
    result = check(toy.bundle.path, "--draft", str(other))
    assert isinstance(result.exception, CheckpointError)
    assert "is not what the bundle was exported from: draft, sha256" in str(result.exception)


def check(bundle: Path, *options: str) -> Result:
    return CliRunner().invoke(build_app(), ["check", str(bundle), *options])


@pytest.fixture
def copy(toy_bundle: ToyBundle, tmp_path: Path) -> Path:
    """A bundle to damage."""
    folder = tmp_path / "bundle"
    shutil.copytree(toy_bundle("gated-in-place-llama-yarn").bundle.path, folder)
    return folder


def accept_files(folder: Path) -> None:
    """Make the manifest fit whatever the files have become."""
    bundle = load_json_bundle(folder)
    (folder / "bundle.json").unlink()
    write_manifest(replace(bundle, files=record_files(folder)))
    load_bundle(folder)


def load_json_bundle(folder: Path) -> Bundle:
    """The manifest as it stands, over files that no longer fit it."""
    whole = folder.with_name("whole")
    file = folder / "bundle.json"
    data = json.loads(file.read_text())
    files, data["files"] = data["files"], {}
    whole.mkdir()
    (whole / "bundle.json").write_text(json.dumps(data))
    assert files
    return replace(load_bundle(whole), path=folder)


def test_json_is_as_documented(copy: Path) -> None:
    result = check(copy, "--json", "--seed", "5")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["passed"] is True
    assert document["changed_weights"] == []
    assert {graph["name"] for graph in document["graphs"]} == set(load_bundle(copy).graph_names)
    for graph in document["graphs"]:
        assert set(graph) == {"name", "output", "max_abs_error", "tolerance", "passed"}
        assert graph["passed"] is True
        assert 0 <= graph["max_abs_error"] <= graph["tolerance"]


def test_the_table_shows_the_worst_cache_of_a_graph(copy: Path) -> None:
    result = check(copy)
    assert result.exit_code == 0
    for text in (
        "context",
        "draft",
        "target",
        "caches",
        "confidence_logits",
        "tolerance",
        "ok",
    ):
        assert text in result.stdout
    assert "present_key_0" not in result.stdout
    assert "FAILED" not in result.stdout


@pytest.mark.parametrize("where", [0.02, 0.5, 0.98])
def test_flipped_bits_fail_even_under_a_manifest_that_accepts_them(
    copy: Path, where: float
) -> None:
    file = copy / "weights.bin"
    data = bytearray(file.read_bytes())
    place = int(len(data) * where) // 4096 * 4096 + 3  # the exponent of a tensor's first weight
    data[place] ^= 0x04
    file.write_bytes(data)
    with pytest.raises(BundleError, match=r"weights.bin was changed"):
        load_bundle(copy)
    accept_files(copy)
    assert changed_weights(load_bundle(copy))
    result = check(copy)
    assert result.exit_code == 1
    assert "changed since the export" in result.stdout


def test_changed_weights_fail_against_the_checkpoint(copy: Path, toy_bundle: ToyBundle) -> None:
    """Without any hash: the outputs differ from the checkpoint's own modules."""
    file = copy / "weights.bin"
    weights = np.fromfile(file, np.float32)
    weights[: len(weights) // 2] *= 1.01
    weights.tofile(file)
    accept_files(copy)
    toy = toy_bundle("gated-in-place-llama-yarn")
    results = list(check_parity(load_bundle(copy), draft=toy.draft, target=toy.target))
    assert failures(results)


def scale_attention(model: onnx.ModelProto) -> None:
    attention = next(node for node in model.graph.node if node.op_type == "Attention")
    attention.attribute.append(onnx.helper.make_attribute("scale", 0.1))


def look_ahead(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Attention" and attribute.name == "is_causal":
                attribute.i = 0


def make_infinite(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        if tensor.name == "norm.weight":
            values = onnx.numpy_helper.to_array(tensor).copy()
            values[0] = np.inf
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


@pytest.mark.parametrize(
    ("graph", "change"),
    [("draft", scale_attention), ("target", look_ahead), ("target", make_infinite)],
)
def test_a_graph_that_computes_something_else_fails(
    copy: Path, graph: str, change: Callable[[onnx.ModelProto], None]
) -> None:
    path = copy / f"{graph}.onnx"
    model = onnx.load(path, load_external_data=False)
    before = model.SerializeToString()
    change(model)
    assert model.SerializeToString() != before
    path.write_bytes(model.SerializeToString())
    accept_files(copy)
    result = check(copy, "--json")
    assert result.exit_code == 1, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    failed = {entry["name"] for entry in document["graphs"] if not entry["passed"]}
    assert failed == {graph}
    assert "FAILED" in check(copy).stdout


def test_a_graph_that_is_no_onnx_is_refused(copy: Path) -> None:
    path = copy / "draft.onnx"
    model = onnx.load(path, load_external_data=False)
    model.graph.node[0].op_type = "NoSuchOperator"
    path.write_bytes(model.SerializeToString())
    accept_files(copy)
    result = check(copy)
    assert isinstance(result.exception, BundleError)
    assert "draft.onnx is no valid ONNX model" in str(result.exception)


def test_a_file_of_other_bytes_is_refused(copy: Path) -> None:
    (copy / "draft.onnx").write_bytes(b"\x00not a protobuf\xff" * 10)
    accept_files(copy)
    result = check(copy)
    assert isinstance(result.exception, BundleError)
    assert "draft.onnx is no valid ONNX model" in str(result.exception)


def test_bfloat16_is_refused_where_nothing_can_run_it(toy_bundle: ToyBundle) -> None:
    bundle = toy_bundle("no-head-bfloat16").bundle
    assert not changed_weights(bundle)
    with pytest.raises(
        BackendError,
        match=r"CPU provider has no bfloat16 kernels, so parity cannot be measured here. "
        r"Check a float32 or float16 export of the same checkpoint",
    ):
        list(check_parity(bundle))
    with pytest.raises(
        BackendError,
        match=r"has no bfloat16 kernels. Export the bundle again with --dtype float32 or float16",
    ):
        DraftSession.load(bundle)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dspark-rnn", "dflash"])
def test_the_other_trained_drafters_equal_their_checkpoints(
    fixture_bundle: ExportBundle, name: str
) -> None:
    from dspark_trt.checkpoint import read_draft, read_target

    draft, target = read_draft(DRAFTERS[name]), read_target(TINY_TARGET)
    assert not failures(list(check_parity(fixture_bundle(name), draft=draft, target=target)))
