# SPDX-License-Identifier: Apache-2.0
"""Each distinct graph of a test run is traced once, by whichever worker needs it first.

Half of an export's time is the target's graph, and most bundles of the tests have the same target; bundles
that differ in their weights alone have all graphs in common.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn

from dspark_trt.export.graphs import Graph
from dspark_trt.export.onnx_from_module import onnx_from_module
from dspark_trt.export.passes import unfilled
from dspark_trt.files import new_file

_OF_EVERY_MODULE = vars(nn.Module()).keys()
_UNWRITTEN = "unwritten"


class TracedOnce:
    """In the place of `onnx_from_module`: the first trace of a graph is kept in `folder`, read afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def __call__(self, graph: Graph) -> ir.Model:
        known = identity(graph)
        if known is None:
            return onnx_from_module(graph)
        path = self.folder / f"{known}.onnx"
        if path.exists():
            return read(path.read_bytes())
        model = onnx_from_module(graph)
        with new_file(path) as file:
            file.write_bytes(written(model))
        return model


def identity(graph: Graph) -> str | None:
    """A hash of all that tracing can see; None if something has no description but its address."""
    seen = "\n".join(_described(graph))
    return None if " at 0x" in seen else hashlib.sha256(seen.encode()).hexdigest()


def _described(graph: Graph) -> Iterator[str]:
    yield f"{graph.name} {graph.bindings}"
    for name, module in graph.module.named_modules():
        yield f"{name} {type(module).__module__}.{type(module).__qualname__}"
        for key, value in vars(module).items():
            if key not in _OF_EVERY_MODULE:
                yield f"{name}.{key} {_content(value) if isinstance(value, Tensor) else value!r}"
    for name, parameter in graph.module.named_parameters(remove_duplicate=False):
        yield f"{name} {tuple(parameter.shape)} {parameter.dtype}"  # their values come later
    for name, buffer in graph.module.named_buffers(remove_duplicate=False):
        yield f"{name} {_content(buffer)}"


def _content(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(data).hexdigest()}"


def written(model: ir.Model) -> bytes:
    """With a mark in the place of each weight that is yet to be written."""
    weights = [
        value
        for value in model.graph.initializers.values()
        if isinstance(value.const_value, ir.LazyTensor)
    ]
    for value in weights:
        assert value.name is not None
        assert value.dtype is not None
        assert value.shape is not None
        value.const_value = ir.ExternalTensor(
            _UNWRITTEN, None, None, value.dtype, shape=value.shape, name=value.name
        )
    data = ir.to_proto(model).SerializeToString()
    for value in weights:
        value.const_value = unfilled(value)
    return bytes(data)


def read(data: bytes) -> ir.Model:
    model = ir.from_proto(onnx.ModelProto.FromString(data))
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = unfilled(value)
    return model
