# SPDX-License-Identifier: Apache-2.0
"""TensorRT-RTX's parser takes every graph of a bundle, with the names, types and shapes of the contract."""

from pathlib import Path
from typing import Any

import onnx
import pytest

from dspark_trt.bindings import Binding
from dspark_trt.bundle import Bundle
from dspark_trt.export.engines.engine_graph import for_tensorrt_rtx
from dspark_trt.export.engines.profiles import graph_bindings
from tests.export.conftest import ToyBundle

pytestmark = pytest.mark.trt

CAPACITY = 96
DRAFT_GRAPHS = (
    "context", "draft", "draft_greedy", "backbone", "sequential_head", "confidence_head",
)  # fmt: skip
VERIFIERS = ("verify", "verify_greedy", "verify_processed")


def parse(model: onnx.ModelProto, path: Path) -> tuple[Any, list[str]]:
    """The network (kept alive with its owners) and what the parser complained about."""
    import tensorrt_rtx as trt

    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    parser.parse(model.SerializeToString(), str(path))
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    owners = (builder, parser, logger)
    return (network, owners), [f"{e.node_operator()}: {e.desc()}" for e in errors]


def tensors(count: int, get: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(get(i).name, get(i).dtype.name.lower(), tuple(get(i).shape)) for i in range(count)]


def expected(bindings: tuple[Binding, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
    names = {"float32": "float", "float16": "half", "bfloat16": "bf16"}
    sizes = {"capacity": CAPACITY}
    return [
        (
            binding.name,
            names.get(binding.dtype, binding.dtype),
            tuple(sizes.get(d, -1) if isinstance(d, str) else d for d in binding.shape),
        )
        for binding in bindings
    ]


def check(bundle: Bundle, graph: str) -> None:
    path = bundle.graph_path(graph)
    model = onnx.load(path, load_external_data=False)
    (network, _owners), errors = parse(for_tensorrt_rtx(model, capacity=CAPACITY), path)
    assert errors == []
    contract = graph_bindings(bundle, graph)
    assert tensors(network.num_inputs, network.get_input) == expected(contract.inputs)
    assert tensors(network.num_outputs, network.get_output) == expected(contract.outputs)


@pytest.mark.parametrize("graph", [*DRAFT_GRAPHS, "target", *VERIFIERS])
def test_float16_graphs(toy_bundle: ToyBundle, graph: str) -> None:
    check(toy_bundle("rnn-borrowing-float16").bundle, graph)


@pytest.mark.parametrize(
    "graph", ["context", "draft", "draft_greedy", "backbone", "confidence_head"]
)
def test_bfloat16_graphs(toy_bundle: ToyBundle, graph: str) -> None:
    check(toy_bundle("no-head-bfloat16").bundle, graph)


def test_every_graph_of_a_bundle_was_checked(toy_bundle: ToyBundle) -> None:
    graphs = {*DRAFT_GRAPHS, "target", *VERIFIERS}
    assert set(toy_bundle("rnn-borrowing-float16").bundle.graph_names) == graphs


def test_the_parser_needs_what_the_engine_graph_changes(toy_bundle: ToyBundle) -> None:
    """Were the exported file taken as it is, the changes could go."""
    path = toy_bundle("rnn-borrowing-float16").bundle.graph_path("draft")
    model = onnx.load(path, load_external_data=False)
    _, errors = parse(model, path)
    assert "must have a static sequence length" in errors[0]
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "capacity":
                dim.dim_value = CAPACITY
    _, errors = parse(model, path)
    assert "softmax precision is not supported" in errors[0]
