# SPDX-License-Identifier: Apache-2.0
"""What happens to a graph before a library's parser sees it."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, parser

from dspark_trt.errors import BuildError
from dspark_trt.export.engines.engine_graph import (
    for_plugin,
    for_tensorrt,
    for_tensorrt_rtx,
    structure_sha256,
    unnest_conditionals,
)
from dspark_trt.plugins.contract import DOMAIN
from dspark_trt.plugins.verify_model import verify_model

GAMMA, VOCAB = 3, 40
SIZES = {"gamma": GAMMA, "vocab_size": VOCAB}

ATTENTION = """
<ir_version: 11, opset_import: ["" : 24]>
step (float16[batch,2,4,64] q, float16[batch,1,capacity,64] past, int64[batch] length)
  => (float16[batch,2,4,64] mixed, float16[batch,1,capacity,64] present)
{
  present = Identity(past)
  mixed = Attention<is_causal=1, softmax_precision=1>(q, past, past, , , , length)
}
"""

# Three levels, and an outer conditional with two results.
NESTED = """
<ir_version: 11, opset_import: ["" : 24]>
nest (bool a, bool b, bool c, float[n] x) => (float[n] y, float[n] z)
{
  y, z = If (a) <
    then_branch = outer () => (float[n] p, float[n] q) {
      p = If (b) <
        then_branch = middle () => (float[n] r) {
          r = If (c) <
            then_branch = inner () => (float[n] s) { s = Add(x, x) },
            else_branch = other () => (float[n] t) { t = Neg(x) }
          >
        },
        else_branch = last () => (float[n] u) { u = Abs(x) }
      >
      q = Exp(x)
    },
    else_branch = none () => (float[n] v, float[n] w) { v = Identity(x)
      w = Sqrt(x) }
  >
}
"""


def verifier(mode: str) -> onnx.ModelProto:
    return verify_model(mode=mode, gamma=GAMMA, vocab_size=VOCAB)


def depth_of_conditionals(nodes: Any) -> int:
    return max(
        (
            (node.op_type == "If")
            + max((depth_of_conditionals(a.g.node) for a in node.attribute), default=0)
            for node in nodes
        ),
        default=0,
    )


def run(model: onnx.ModelProto, inputs: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    results: list[NDArray[Any]] = session.run(None, inputs)
    return results


def test_caches_get_a_fixed_capacity_and_attention_loses_what_the_parser_refuses() -> None:
    model = parser.parse_model(ATTENTION)
    prepared = for_tensorrt_rtx(model, capacity=128)
    shapes = {
        value.name: [d.dim_value or d.dim_param for d in value.type.tensor_type.shape.dim]
        for value in (*prepared.graph.input, *prepared.graph.output)
    }
    assert shapes["past"] == shapes["present"] == ["batch", 1, 128, 64]
    assert shapes["q"] == ["batch", 2, 4, 64]
    (attention,) = (node for node in prepared.graph.node if node.op_type == "Attention")
    assert [a.name for a in attention.attribute] == ["is_causal"]
    assert model == parser.parse_model(ATTENTION)  # the model itself is left alone


@pytest.mark.parametrize("flags", range(8))
def test_unnesting_keeps_what_is_computed(flags: int) -> None:
    model = parser.parse_model(NESTED)
    flat = unnest_conditionals(model)
    assert depth_of_conditionals(model.graph.node) == 3
    assert depth_of_conditionals(flat.graph.node) == 1
    onnx.checker.check_model(flat, full_check=True)
    inputs: dict[str, NDArray[Any]] = {
        name: np.array(bool(flags >> bit & 1)) for bit, name in enumerate("abc")
    }
    inputs["x"] = np.array([0.5, 1.0, 4.0], np.float32)
    for one, other in zip(run(model, inputs), run(flat, inputs), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_an_outer_condition_skips_stays_conditional() -> None:
    flat = unnest_conditionals(parser.parse_model(NESTED))
    (inner,) = (node for node in flat.graph.node if node.op_type == "If")
    operators = {output: node for node in flat.graph.node for output in node.output}
    guards, pending = set(), [inner.input[0]]
    while pending:
        name = pending.pop()
        if name in operators:
            assert operators[name].op_type == "And"
            pending += operators[name].input
        else:
            guards.add(name)
    assert guards == {"a", "b", "c"}


def test_graphs_without_nested_conditionals_are_returned_as_they_are() -> None:
    model = verifier("greedy")
    assert unnest_conditionals(model) is model


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("top_k", [0, 3])
def test_verification_survives_unnesting(temperature: float, top_k: int) -> None:
    """With every path through its conditionals: greedy or not, filtered or not."""
    model = verifier("rejection")
    flat = for_tensorrt_rtx(model, capacity=64)
    assert depth_of_conditionals(flat.graph.node) == 1
    assert not flat.functions
    random = np.random.default_rng(top_k)
    batch = 3
    inputs: dict[str, NDArray[Any]] = {
        "target_logits": random.standard_normal((8, VOCAB)).astype(np.float32),
        "offsets": np.array([0, 4, 5, 8]),
        "draft_tokens": random.integers(0, VOCAB, (batch, GAMMA)),
        "draft_logits": random.standard_normal((batch, GAMMA, VOCAB)).astype(np.float32),
        "draft_temperature": np.full(batch, temperature, np.float32),
        "temperature": np.full(batch, temperature, np.float32),
        "top_k": np.full(batch, top_k),
        "top_p": np.ones(batch, np.float32),
        "min_p": np.zeros(batch, np.float32),
        "uniforms": random.random((batch, GAMMA + 1)).astype(np.float32),
    }
    for one, other in zip(run(model, inputs), run(flat, inputs), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("place", ["graph", "function", "branch"])
def test_a_node_that_only_a_plugin_implements_never_reaches_tensorrt_rtx(place: str) -> None:
    node = helper.make_node("Mystery", ["x"], ["y"], name="culprit", domain=DOMAIN)
    model = verifier("greedy")
    if place == "graph":
        model.graph.node.append(node)
    elif place == "function":
        model.functions[0].node.append(node)
    else:
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        branch = helper.make_graph([node], "branch", [], [output])
        model.graph.node.append(
            helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=branch)
        )
    with pytest.raises(BuildError, match=r"culprit .* dspark::Mystery without a function body"):
        for_tensorrt_rtx(model, capacity=64)


def test_a_plugin_graph_never_reaches_tensorrt_rtx() -> None:
    plugins = for_plugin(verifier("rejection"), **SIZES)
    with pytest.raises(BuildError, match=r"only a plugin could run; TensorRT-RTX has none"):
        for_tensorrt_rtx(plugins, capacity=64)


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
def test_tensorrt_gets_plugin_nodes_and_no_function_body(mode: str) -> None:
    model = verifier(mode)
    prepared = for_tensorrt(model, capacity=64, **SIZES)
    assert not prepared.functions
    assert {node.domain for node in prepared.graph.node} == {DOMAIN}
    attributes = [{a.name for a in node.attribute} for node in prepared.graph.node]
    assert all({"plugin_namespace", "aot"} <= names for names in attributes)
    assert prepared.graph.input == model.graph.input
    assert [o.name for o in prepared.graph.output] == [o.name for o in model.graph.output]


def test_graphs_without_verification_keep_their_bodies_for_tensorrt() -> None:
    model = verifier("greedy")
    assert for_plugin(model, **SIZES) is model


def with_weight(values: list[float], offset: int) -> onnx.ModelProto:
    model = parser.parse_model(ATTENTION)
    weight = helper.make_tensor("w", TensorProto.FLOAT, [len(values)], values)
    stored = TensorProto(name="e", dims=[4], data_type=TensorProto.FLOAT)
    stored.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", str(offset))):
        stored.external_data.add(key=key, value=value)
    model.graph.initializer.extend([weight, stored])
    return model


def test_structure_is_what_drafters_of_one_architecture_share() -> None:
    reference = structure_sha256(with_weight([1.0, 2.0], 0))
    assert structure_sha256(with_weight([3.0, 4.0], 4096)) == reference
    assert structure_sha256(with_weight([1.0, 2.0, 3.0], 0)) != reference
    other = with_weight([1.0, 2.0], 0)
    other.graph.node[1].op_type = "Softmax"
    assert structure_sha256(other) != reference
