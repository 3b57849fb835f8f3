# SPDX-License-Identifier: Apache-2.0
"""What TensorRT and TensorRT-RTX ask of a graph beyond the ONNX file: pure functions from model to model.

Weights stay where they are: initializers keep pointing into the bundle's weight file.
"""

import hashlib
from collections.abc import Iterable, Iterator

import onnx
import onnx.inliner
from onnx import helper

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
    return unnest_conditionals(prepared)


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


def unnest_conditionals(model: onnx.ModelProto) -> onnx.ModelProto:
    """Move every `If` that sits inside another one's branch out of it; TensorRT-RTX compiles no nested ones.

    The outer `If` becomes a selection between both results. Inner ones stay conditional, on their own
    condition and the outer one's, so that what they skip is still skipped.
    """
    in_functions = any(_conditionals(function.node) for function in model.functions)
    if not in_functions and not any(_is_nested(node) for node in model.graph.node):
        return model
    flat = onnx.inliner.inline_local_functions(model)  # shows what is nested through calls
    while (index := _first_nested(flat.graph)) is not None:
        _hoist(flat.graph, index)
    return flat


def _first_nested(graph: onnx.GraphProto) -> int | None:
    return next((i for i, node in enumerate(graph.node) if _is_nested(node)), None)


def _hoist(graph: onnx.GraphProto, index: int) -> None:
    outer = graph.node[index]
    condition, prefix = outer.input[0], outer.name or outer.output[0]
    otherwise = f"{prefix}/otherwise"
    replaced = [helper.make_node("Not", [condition], [otherwise], name=otherwise)]
    results = []
    for name, guard in (("then_branch", condition), ("else_branch", otherwise)):
        branch = next(a.g for a in outer.attribute if a.name == name)
        graph.initializer.extend(branch.initializer)
        results.append([output.name for output in branch.output])
        for place, node in enumerate(branch.node):
            if node.op_type == "If":
                both = f"{prefix}/{name}/{place}"
                inputs = [guard, node.input[0]]
                replaced.append(helper.make_node("And", inputs, [both], name=both))
                node.input[0] = both
            replaced.append(node)
    for output, then_result, else_result in zip(outer.output, *results, strict=True):
        inputs = [condition, then_result, else_result]
        replaced.append(helper.make_node("Where", inputs, [output], name=f"{prefix}/{output}"))
    nodes = [*graph.node[:index], *replaced, *graph.node[index + 1 :]]
    del graph.node[:]
    graph.node.extend(nodes)


def _is_nested(node: onnx.NodeProto) -> bool:
    return any(_conditionals(branch.node) for branch in _branches(node))


def _conditionals(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    return [node for node in _with_branches(nodes) if node.op_type == "If"]


def _with_branches(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for branch in _branches(node):
            yield from _with_branches(branch.node)


def _branches(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
