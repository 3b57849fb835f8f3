# SPDX-License-Identifier: Apache-2.0
"""`attach-verify` on language models that other tools exported."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dspark_trt.errors import ExportError
from dspark_trt.plugins.attach import attach_to_file, attach_verify
from dspark_trt.plugins.contract import VerifyMode
from dspark_trt.plugins.specification import Verified, verify_coupled, verify_rejection
from tests.plugins.cases import (
    Batch,
    inputs_of,
    ragged_batch,
    run_specification,
    same,
    session_of,
)

VOCAB, HIDDEN, GAMMA = 61, 16, 3


class Model(torch.nn.Module):
    """A small recurrent language model; torch's exporter turns it into a graph of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, HIDDEN)
        self.rnn = torch.nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = torch.nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.rnn(self.embed(input_ids))[0])
        return 4 * logits


@pytest.fixture(scope="module")
def padded_model() -> onnx.ModelProto:
    """[B, L] -> logits [B, L, V], by torch.onnx at its default opset."""
    torch.manual_seed(0)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    program = torch.onnx.export(
        Model().eval(),
        (torch.zeros(2, 5, dtype=torch.int64),),
        dynamo=True,
        verbose=False,
        input_names=["input_ids"],
        output_names=["logits"],
        dynamic_shapes=({0: batch, 1: length},),
    )
    assert program is not None
    return program.model_proto


def rows_model(
    *, dtype: int = TensorProto.FLOAT, opset: int = 18, vocab: Any = VOCAB
) -> onnx.ModelProto:
    """[T] -> scores [T, V]: a table of logits, built by hand."""
    table = np.random.default_rng(2).normal(0, 2, (VOCAB, VOCAB))
    weights = numpy_helper.from_array(
        table.astype(helper.tensor_dtype_to_np_dtype(dtype)), "table"
    )
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["scores"])],
        "bigram",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["tokens"])],
        [helper.make_tensor_value_info("scores", dtype, ["tokens", vocab])],
        [weights],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9
    )


def table_of(model: onnx.ModelProto) -> NDArray[np.float32]:
    return numpy_helper.to_array(model.graph.initializer[0]).astype(np.float32)


def batch_for(logits: NDArray[np.float32], lengths: NDArray[np.int64]) -> Batch:
    """A batch of any requests, its target logits replaced by a model's."""
    rng = np.random.default_rng(9)
    batch = ragged_batch(rng, requests=len(lengths), gamma=GAMMA, vocab_size=VOCAB)
    batch["offsets"] = np.concatenate([[0], np.cumsum(lengths + 1)])
    batch["target_logits"] = logits
    return batch


def run(model: onnx.ModelProto, feed: Batch) -> Verified:
    onnx.checker.check_model(model, full_check=True)
    return Verified(*session_of(model).run(["accepted", "tokens"], feed))


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_rows_of_logits(dtype: int) -> None:
    model = rows_model(dtype=dtype)
    lengths = np.array([2, 0, 3])
    ids = np.random.default_rng(0).integers(0, VOCAB, 8)
    batch = batch_for(table_of(model)[ids], lengths)
    inputs = inputs_of(VerifyMode.REJECTION, batch)
    expected = verify_rejection(**inputs)
    del inputs["target_logits"]
    attached = attach_verify(model, mode="rejection", gamma=GAMMA)
    assert [output.name for output in attached.graph.output] == ["accepted", "tokens"]
    assert same(run(attached, {"ids": ids, **inputs}), expected)


@pytest.mark.parametrize("mode", [VerifyMode.REJECTION, VerifyMode.COUPLED])
def test_padded_logits_of_another_exporter(
    padded_model: onnx.ModelProto, mode: VerifyMode
) -> None:
    """Anchors stand at different places of the padded rows; what lies around them does not matter."""
    lengths, anchors = np.array([3, 0, 1, 2]), np.array([2, 4, 0, 3])
    rng = np.random.default_rng(5)
    ids = rng.integers(0, VOCAB, (4, 6))
    (logits,) = session_of(padded_model).run(None, {"input_ids": ids})
    rows = [logits[r, anchors[r] : anchors[r] + lengths[r] + 1] for r in range(4)]
    batch = batch_for(np.concatenate(rows), lengths)
    for r in range(4):
        batch["draft_tokens"][r, : lengths[r]] = ids[
            r, anchors[r] + 1 : anchors[r] + lengths[r] + 1
        ]
    inputs = inputs_of(mode, batch)
    expected = run_specification(mode, batch)
    for name in ("target_logits", "offsets"):
        del inputs[name]
    attached = attach_verify(padded_model, mode=mode, gamma=GAMMA, keep_logits=True)
    feed = {"input_ids": ids, "draft_lengths": lengths, "anchor_places": anchors, **inputs}
    assert same(run(attached, feed), expected)
    (kept,) = session_of(attached).run(["logits"], feed)
    np.testing.assert_array_equal(kept, logits)


def test_an_older_graph_is_converted() -> None:
    model = rows_model(opset=13)
    ids = np.array([4, 8])
    batch = batch_for(table_of(model)[ids], np.array([1]))
    inputs = inputs_of(VerifyMode.COUPLED, batch)
    expected = verify_coupled(**inputs)
    del inputs["target_logits"]
    attached = attach_verify(model, mode="coupled", gamma=GAMMA)
    assert {f.opset_import[0].version for f in attached.functions if f.name == "Pick"} <= {18}
    assert same(run(attached, {"ids": ids, **inputs}), expected)


def test_a_symbolic_vocabulary_has_to_be_given() -> None:
    model = rows_model(vocab="vocabulary")
    with pytest.raises(
        ExportError, match=r"last extent of output scores is symbolic.*--vocab-size"
    ):
        attach_verify(model, mode="greedy", gamma=GAMMA)
    attached = attach_verify(model, mode="greedy", gamma=GAMMA, vocab_size=VOCAB)
    feed = {"ids": np.array([7]), "offsets": np.array([0, 1]), "draft_tokens": np.zeros((1, GAMMA), np.int64)}  # fmt: skip
    assert run(attached, feed).tokens[0, 0] == table_of(model)[7].argmax()


def test_refusals() -> None:
    model = rows_model()
    with pytest.raises(ExportError, match=r"no output hidden among scores; .*--logits"):
        attach_verify(model, mode="greedy", gamma=GAMMA, logits="hidden")
    with pytest.raises(ExportError, match="output scores has 61 columns, not the 50 asked for"):
        attach_verify(model, mode="greedy", gamma=GAMMA, vocab_size=50)
    attached = attach_verify(model, mode="greedy", gamma=GAMMA, keep_logits=True)
    with pytest.raises(ExportError, match="already has tensors called accepted, draft_tokens"):
        attach_verify(attached, mode="greedy", gamma=GAMMA, logits="scores")
    model.graph.output[0].type.tensor_type.shape.dim.add().dim_value = 2
    model.graph.output[0].type.tensor_type.shape.dim.add().dim_value = 2
    with pytest.raises(ExportError, match="output scores has rank 4"):
        attach_verify(model, mode="greedy", gamma=GAMMA)


def test_weights_in_external_files_come_along(tmp_path: Path) -> None:
    source = tmp_path / "given" / "model.onnx"
    source.parent.mkdir()
    onnx.save(
        rows_model(),
        source,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    destination = tmp_path / "made" / "model.onnx"
    attach_to_file(source, destination, mode="greedy", gamma=GAMMA)
    session = ort.InferenceSession(destination, providers=["CPUExecutionProvider"])
    assert {value.name for value in session.get_outputs()} == {"accepted", "tokens"}
    assert sorted(path.name for path in destination.parent.iterdir()) == ["model.onnx", "weights.bin"]  # fmt: skip
    (source.parent / "weights.bin").unlink()
    with pytest.raises(ExportError, match=r"weights\.bin, which holds weights of the model, is missing"):  # fmt: skip
        attach_to_file(source, tmp_path / "again" / "model.onnx", mode="greedy", gamma=GAMMA)


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command alone, as a process: its file is independent of the others."""
    code = (
        "import sys, typer; from dspark_trt.cli.attach_verify import command;"
        "from dspark_trt.errors import DSparkError\n"
        "try: typer.run(command)\n"
        "except DSparkError as error: sys.exit(f'error: {error}')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True
    )


def test_command_writes_the_model_and_describes_it(tmp_path: Path) -> None:
    model = tmp_path / "lm.onnx"
    onnx.save(rows_model(), model)
    done = run_command(str(model), "--gamma", "3", "--mode", "greedy", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["model"] == str(tmp_path / "lm-verify.onnx")
    assert report["inputs"] == ["ids", "offsets", "draft_tokens"]
    assert report["outputs"] == ["accepted", "tokens"]
    assert ort.InferenceSession(report["model"], providers=["CPUExecutionProvider"])


def test_command_refuses_in_one_sentence(tmp_path: Path) -> None:
    text = tmp_path / "lm.onnx"
    text.write_text("not a model")
    for arguments, message in {
        (str(text),): "cannot be read as an ONNX model",
        (
            str(text),
            "--mode",
            "tree",
        ): "mode tree is unknown; choose one of rejection, coupled, greedy",
    }.items():
        done = run_command(*arguments)
        assert done.returncode != 0
        assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["lm.onnx"]
