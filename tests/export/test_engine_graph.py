# SPDX-License-Identifier: Apache-2.0
"""What happens to a graph before a library's parser sees it."""

import onnx
import pytest
from onnx import TensorProto, helper, parser

from dspark_trt.errors import BuildError
from dspark_trt.export.engines.engine_graph import (
    for_plugin,
    for_tensorrt,
    for_tensorrt_rtx,
    structure_sha256,
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


def verifier(mode: str) -> onnx.ModelProto:
    return verify_model(mode=mode, gamma=GAMMA, vocab_size=VOCAB)


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


@pytest.mark.parametrize("mode", ["rejection", "greedy"])
def test_function_bodies_stay_for_tensorrt_rtx(mode: str) -> None:
    model = verifier(mode)
    assert for_tensorrt_rtx(model, capacity=128) == model


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
