# SPDX-License-Identifier: Apache-2.0
"""TensorRT plugins: their registration and ahead-of-time results, and the graph that uses them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from dspark_trt.errors import BuildError
from dspark_trt.plugins.contract import VerifyMode
from dspark_trt.plugins.kernel_plan import verify_plan
from dspark_trt.plugins.plugin_graph import use_plugins
from dspark_trt.plugins.verify_model import verify_model

ROOT = Path(__file__).parents[2]


@pytest.mark.trt
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_bindings") is None
    or importlib.util.find_spec("tensorrt_rtx_libs") is None,
    reason="needs tensorrt-rtx-cu13 and, with --no-deps, tensorrt-cu13-bindings",
)
def test_registration_through_the_real_bindings() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/plugins/plugin_registration.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("mode", [VerifyMode.REJECTION, VerifyMode.COUPLED])
def test_a_verification_node_becomes_a_chain_of_plugins(mode: VerifyMode) -> None:
    model = verify_model(mode=mode, gamma=3, vocab_size=100)
    rewritten = use_plugins(model, gamma=3, vocab_size=100)
    assert not rewritten.functions
    assert [node.op_type for node in rewritten.graph.node] == [
        step.name for step in verify_plan(mode, gamma=3, vocab_size=100).steps
    ]
    known = {value.name for value in rewritten.graph.input}
    for node in rewritten.graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert attributes == {
            "plugin_namespace": b"dspark", "aot": 1, "gamma": 3, "vocab_size": 100,
        }  # fmt: skip
        assert set(node.input) <= known
        known |= set(node.output)
    assert {value.name for value in rewritten.graph.output} <= known
    assert rewritten.graph.output == model.graph.output


def test_other_functions_stay_and_a_cast_of_logits_goes() -> None:
    model = verify_model(mode="rejection", gamma=3, vocab_size=100, top_logprobs=2)
    half = model.graph.input[0]
    assert half.name == "target_logits"
    half.name = "half_logits"
    half.type.tensor_type.elem_type = TensorProto.FLOAT16
    cast = helper.make_node("Cast", ["half_logits"], ["target_logits"], to=TensorProto.FLOAT)
    model.graph.node.insert(0, cast)
    rewritten = use_plugins(model, gamma=3, vocab_size=100)
    assert {f.name for f in rewritten.functions} == {
        "TokenLogprobs",
        "TopLogprobs",
        "RowsOfRequests",
    }
    plugins = {node.op_type: node for node in rewritten.graph.node}
    assert plugins["TargetRows"].input[0] == "half_logits"
    assert "Cast" in plugins  # the log-probabilities still read float32
    del model.graph.node[2:]
    del model.graph.output[2:]
    without = use_plugins(model, gamma=3, vocab_size=100)
    assert "Cast" not in {node.op_type for node in without.graph.node}


def test_a_graph_without_verification_is_refused() -> None:
    model = verify_model(mode="greedy", gamma=3, vocab_size=100)
    with pytest.raises(BuildError, match="no VerifyRejection or VerifyCoupled node"):
        use_plugins(model, gamma=3, vocab_size=100)
