# SPDX-License-Identifier: Apache-2.0
"""What TensorRT and TensorRT-RTX ask of a graph beyond the ONNX file: pure functions from model to model.

Weights stay where they are: initializers keep pointing into the bundle's weight file.
"""

import hashlib
from collections.abc import Iterable, Iterator

import onnx

from dspark_trt.errors import BuildError
from dspark_trt.plugins.contract import DOMAIN

_STANDARD = ("", "ai.onnx")


def for_tensorrt_rtx(model: onnx.ModelProto, *, capacity: int) -> onnx.ModelProto:
    """The model TensorRT-RTX is given: function bodies stay, caches have `capacity` rows.

    Raises:
        BuildError: a node has no body. TensorRT-RTX has no plugins, and meeting one ends the process.
    """
    prepared = _prepared(model, capacity)
    _check_bodies(prepared)
    return prepared


def for_tensorrt(
    model: onnx.ModelProto, *, capacity: int, gamma: int, vocab_size: int
) -> onnx.ModelProto:
    """The model TensorRT is given: verification by plugin nodes, caches have `capacity` rows."""
    return for_plugin(_prepared(model, capacity), gamma=gamma, vocab_size=vocab_size)


def for_plugin(model: onnx.ModelProto, *, gamma: int, vocab_size: int) -> onnx.ModelProto:
    """Verification nodes become plugin nodes without a body; a model without any is returned as it is.

    The small functions that no plugin implements (a draft's sampling, greedy verification) keep their
    bodies.
    """
    from dspark_trt.plugins.plugin_graph import MODES, use_plugins  # needs triton

    if not any(node.domain == DOMAIN and node.op_type in MODES for node in model.graph.node):
        return model
    return use_plugins(model, gamma=gamma, vocab_size=vocab_size)


def structure_sha256(model: onnx.ModelProto) -> str:
    """Hash of a graph without its weights: equal for two drafters of one architecture.

    Where weights are stored depends on which of them happen to be equal, so that is left out as well.
    """
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for tensor in bare.graph.initializer:
        del tensor.external_data[:]
        for field in ("raw_data", "float_data", "int32_data", "data_location"):
            tensor.ClearField(field)
    bare.producer_version = ""
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()


def _prepared(model: onnx.ModelProto, capacity: int) -> onnx.ModelProto:
    prepared = onnx.ModelProto()
    prepared.CopyFrom(model)
    _pin(prepared.graph, "capacity", capacity)
    _drop_softmax_precision(prepared.graph.node)
    return prepared


def _pin(graph: onnx.GraphProto, symbol: str, extent: int) -> None:
    """Caches must be static in their sequence dimension."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == symbol:
                dim.dim_value = extent


def _drop_softmax_precision(nodes: Iterable[onnx.NodeProto]) -> None:
    """The parser refuses the attribute; fused attention accumulates its softmax in float32 anyway."""
    for node in nodes:
        if node.op_type == "Attention":
            kept = [a for a in node.attribute if a.name != "softmax_precision"]
            del node.attribute[:]
            node.attribute.extend(kept)


def _check_bodies(model: onnx.ModelProto) -> None:
    known = {(function.domain, function.name) for function in model.functions}
    nodes = [*model.graph.node, *(n for function in model.functions for n in function.node)]
    for node in _with_branches(nodes):
        if node.domain not in _STANDARD and (node.domain, node.op_type) not in known:
            raise BuildError(
                f"node {node.name or node.op_type} of graph {model.graph.name} is "
                f"{node.domain}::{node.op_type} without a function body, which only a plugin could run; "
                "TensorRT-RTX has none. Export the bundle again."
            )


def _with_branches(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _with_branches(attribute.g.node)
