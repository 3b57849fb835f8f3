# SPDX-License-Identifier: Apache-2.0
"""Rewrite a graph so that TensorRT takes its verification from plugins instead of function bodies."""

import onnx
from onnx import helper

from dspark_trt.errors import BuildError
from dspark_trt.plugins.contract import DOMAIN, VerifyMode, verify_bindings
from dspark_trt.plugins.kernel_plan import verify_plan

MODES = {"VerifyRejection": VerifyMode.REJECTION, "VerifyCoupled": VerifyMode.COUPLED}
HALF_LOGITS = ("target_logits", "draft_logits")


def use_plugins(model: onnx.ModelProto, *, gamma: int, vocab_size: int) -> onnx.ModelProto:
    """A copy of ``model`` in which each verification node is a chain of plugin nodes.

    Function bodies that nothing needs any more are dropped, and so is a cast of half-precision logits in
    front of a verification: the kernels read them as they are. Raises `BuildError` if the graph has no
    node that a plugin implements.
    """
    rewritten = onnx.ModelProto()
    rewritten.CopyFrom(model)
    graph = rewritten.graph
    casts = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Cast"}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.domain == DOMAIN and node.op_type in MODES:
            nodes += _chain(node, casts, gamma, vocab_size)
        else:
            nodes.append(node)
    if len(nodes) == len(graph.node):
        raise BuildError(
            f"the graph has no {' or '.join(MODES)} node: there is nothing to build a plugin for"
        )
    nodes = _without_dead_casts(nodes, {output.name for output in graph.output})
    del graph.node[:]
    graph.node.extend(nodes)
    functions = {function.name: function for function in rewritten.functions}
    needed = _called(nodes, functions)
    del rewritten.functions[:]
    rewritten.functions.extend(functions[name] for name in functions if name in needed)
    return rewritten


def _chain(
    node: onnx.NodeProto, casts: dict[str, str], gamma: int, vocab_size: int
) -> list[onnx.NodeProto]:
    """Plugin nodes of one verification: TensorRT's parser finds a plugin by op type and namespace."""
    mode = MODES[node.op_type]
    names = verify_bindings(mode, gamma=gamma, vocab_size=vocab_size).input_names
    tensors = dict(zip(names, node.input, strict=True))
    for name in HALF_LOGITS:
        if name in tensors:
            tensors[name] = casts.get(tensors[name], tensors[name])
    tensors |= dict(zip(("accepted", "tokens"), node.output, strict=True))
    plan = verify_plan(mode, gamma=gamma, vocab_size=vocab_size)
    prefix = node.name or node.output[0]
    for name in plan.buffers:
        tensors.setdefault(name, f"{prefix}/{name}")
    return [
        helper.make_node(
            step.name,
            [tensors[name] for name in step.inputs],
            [tensors[name] for name in step.outputs],
            name=f"{prefix}/{step.name}",
            domain=DOMAIN,
            plugin_namespace=DOMAIN,
            aot=1,
            gamma=gamma,
            vocab_size=vocab_size,
        )
        for step in plan.steps
    ]


def _without_dead_casts(nodes: list[onnx.NodeProto], outputs: set[str]) -> list[onnx.NodeProto]:
    read = {name for node in nodes for name in node.input} | outputs
    return [node for node in nodes if node.op_type != "Cast" or node.output[0] in read]


def _called(nodes: list[onnx.NodeProto], functions: dict[str, onnx.FunctionProto]) -> set[str]:
    """Names of the functions that nodes call, directly, in branches or through one another."""
    found: set[str] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        pending += (inner for a in node.attribute for inner in a.g.node)
        if node.domain == DOMAIN and node.op_type in functions and node.op_type not in found:
            found.add(node.op_type)
            pending += functions[node.op_type].node
    return found
