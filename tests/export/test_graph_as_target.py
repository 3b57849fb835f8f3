# SPDX-License-Identifier: Apache-2.0
"""A target given as an ONNX graph is refused: which outputs it has, which taps it lacks, what mends it."""

from pathlib import Path

import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner

from dspark_trt.checkpoint import DraftCheckpoint, read_draft, read_target
from dspark_trt.errors import ExportError
from dspark_trt.export.graph_as_target import refuse_graph_as_target
from tests.checkpoints import write_draft, write_target


@pytest.fixture
def draft(tmp_path: Path) -> DraftCheckpoint:
    return read_draft(write_draft(tmp_path / "draft"))  # taps layers 0 and 2


def write_graph(path: Path, outputs: list[str]) -> Path:
    """A language model as other tools export it."""
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", 8]) for name in outputs
    ]
    nodes = [helper.make_node("Identity", ["x"], [name]) for name in outputs]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", 8])
    path.parent.mkdir(parents=True, exist_ok=True)
    graph = helper.make_graph(nodes, "model", [x], values)
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return path


CACHES = [f"present.{layer}.{kind}" for layer in range(4) for kind in ("key", "value")]


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (["logits"], r"outputs logits: no output holds .* target layers \[0, 2\]"),
        (["logits", *CACHES], r"outputs logits, present\.0\.key, .* and 1 more: no output holds"),
        (["logits", "hidden_states.1", "hidden_states.2"], r"target layers \[2\]\. Give --target"),
        (["logits", "hidden_states.0", "hidden_states.2"], r"target layers \[0, 2\]\. Give --target"),
        (["hidden_states.1", "hidden_states.3"], "it has what the drafter taps, but neither ragged"),
    ],
)  # fmt: skip
def test_outputs_and_missing_taps_are_named(
    tmp_path: Path, draft: DraftCheckpoint, outputs: list[str], text: str
) -> None:
    graph = write_graph(tmp_path / "target" / "model.onnx", outputs)
    for source in (graph, graph.parent, str(graph.parent)):
        with pytest.raises(ExportError, match=text) as caught:
            refuse_graph_as_target(source, draft)
        assert "--target CHECKPOINT -o BUNDLE" in str(caught.value)


def test_a_folder_of_graphs_names_the_model_s(tmp_path: Path, draft: DraftCheckpoint) -> None:
    write_graph(tmp_path / "target" / "decoder.onnx", ["other"])
    write_graph(tmp_path / "target" / "model.onnx", ["logits"])
    with pytest.raises(ExportError, match=r"target/model\.onnx is an ONNX graph"):
        refuse_graph_as_target(tmp_path / "target", draft)
    nested = write_graph(tmp_path / "hub" / "onnx" / "x", []).parent  # as the hub keeps them
    write_graph(nested / "model.onnx", ["logits"])
    with pytest.raises(ExportError, match=r"hub/onnx/model\.onnx is an ONNX graph"):
        refuse_graph_as_target(tmp_path / "hub", draft)


def test_checkpoints_pass(tmp_path: Path, draft: DraftCheckpoint) -> None:
    target = write_target(tmp_path / "target")
    write_graph(target / "model.onnx", ["logits"])  # some repositories hold both
    for source in (target, "owner/name", tmp_path / "nothing", tmp_path / "gone.onnx"):
        refuse_graph_as_target(source, draft)
    assert read_target(target).config.decoder.num_layers == 4


def test_a_damaged_graph(tmp_path: Path, draft: DraftCheckpoint) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\x08garbage")
    with pytest.raises(ExportError, match="cannot be read as an ONNX model"):
        refuse_graph_as_target(tmp_path / "model.onnx", draft)


def test_the_command_line_says_so(tmp_path: Path, draft: DraftCheckpoint) -> None:
    from dspark_trt.cli import build_app

    graph = write_graph(tmp_path / "target" / "model.onnx", ["logits", *CACHES])
    command = ["export", "--draft", str(draft.path), "-o", str(tmp_path / "bundle")]
    result = CliRunner().invoke(build_app(), [*command, "--target", str(graph)])
    assert isinstance(result.exception, ExportError)
    assert not (tmp_path / "bundle").exists()
