# SPDX-License-Identifier: Apache-2.0
"""A trace that is read again is the trace, and nothing that changes a graph goes unseen."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from dspark_trt.checkpoint import read_draft, read_target
from dspark_trt.config import TargetConfig
from dspark_trt.export.graphs import Graph, draft_graphs, target_graph
from dspark_trt.export.onnx_from_module import onnx_from_module
from dspark_trt.models.loading import draft_skeleton, target_skeleton
from tests.conftest import DRAFTERS, TINY_TARGET
from tests.traced_once import TracedOnce, identity, read, written

DRAFT = read_draft(DRAFTERS["dspark-vanilla"]).config
TARGET = read_target(TINY_TARGET).config


def target(
    config: TargetConfig = TARGET,
    layers: tuple[int, ...] = DRAFT.target_layer_ids,
    dtype: str = "float32",
) -> Graph:
    return target_graph(target_skeleton(config, layers), DRAFT, dtype)


def confidence_head() -> Graph:
    graphs = draft_graphs(draft_skeleton(DRAFT), "float32")
    graph = next(graph for graph in graphs if graph.name == "confidence_head")
    graph.module.to_empty(device="cpu")
    return graph


def test_a_trace_that_is_read_is_the_trace(tmp_path: Path) -> None:
    trace = TracedOnce(tmp_path / "traced")
    first, again = trace(confidence_head()), trace(confidence_head())
    assert len(list(trace.folder.iterdir())) == 1
    fresh = onnx_from_module(confidence_head())
    assert written(first) == written(again) == written(fresh)
    assert written(read(written(fresh))) == written(fresh)
    weights = [value.const_value for value in again.graph.initializers.values()]
    assert sum(isinstance(weight, ir.LazyTensor) for weight in weights) > 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: target(layers=(1, 2, 4)),
        lambda: target(dtype="float16"),
        lambda: target(replace(TARGET, decoder=replace(TARGET.decoder, rms_norm_eps=1e-3))),
        lambda: target(replace(TARGET, decoder=replace(TARGET.decoder, num_layers=7))),
    ],
)
def test_other_graphs_are_traced(other: Callable[[], Graph]) -> None:
    assert identity(target()) == identity(target())
    assert identity(other()) != identity(target())


def test_constants_are_seen_and_functions_are_not_guessed() -> None:
    graphs = [target(), target(), target()]
    for value, graph in enumerate(graphs[:2]):
        graph.module.register_buffer("constant", torch.full((2000,), float(value)))
    assert len({identity(graph) for graph in graphs}) == 3
    graphs[2].module.hook = lambda: None  # type: ignore[assignment]
    assert identity(graphs[2]) is None
