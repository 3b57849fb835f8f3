# SPDX-License-Identifier: Apache-2.0
"""A model whose weights claim to lie elsewhere is refused before anything is written."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dspark_trt.errors import ExportError
from dspark_trt.plugins.attach import attach_to_file


@pytest.mark.parametrize("location", ["../victim.bin", "/victim.bin", "a/../../victim.bin"])
def test_weights_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    weight = numpy_helper.from_array(np.ones((4, 8), np.float32), "w")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    entry = weight.external_data.add()
    entry.key, entry.value = "location", location
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["logits"])],
        "model",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["T", 8])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    source = tmp_path / "in" / "model.onnx"
    source.parent.mkdir()
    source.write_bytes(model.SerializeToString())
    victim = tmp_path / "victim.bin"
    victim.write_bytes(b"precious")
    with pytest.raises(ExportError, match="outside its own folder"):
        attach_to_file(source, tmp_path / "out" / "model.onnx", mode="rejection", gamma=2)
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "out" / "model.onnx").exists()
    assert onnx.load(source, load_external_data=False).graph.name == "model"
