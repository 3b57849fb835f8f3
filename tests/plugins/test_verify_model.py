# SPDX-License-Identifier: Apache-2.0
"""The verification graphs: contract, operators, log-probabilities, and the parser of TensorRT-RTX."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

from dspark_trt.plugins.contract import VerifyMode, verify_bindings
from dspark_trt.plugins.specification import REFUSED
from dspark_trt.plugins.verify_model import verify_model
from tests.plugins.cases import inputs_of, ragged_batch, session_of

VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"mode": VerifyMode.GREEDY},
    "rejection": {"mode": VerifyMode.REJECTION},
    "processed": {"mode": VerifyMode.REJECTION, "processors": True, "top_logprobs": 5},
    "coupled": {"mode": VerifyMode.COUPLED, "top_logprobs": 0},
}
GAMMA, VOCAB = 3, 40


def nodes_of(nodes: Any) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from nodes_of(attribute.g.node)


@pytest.mark.parametrize("name", VARIANTS)
def test_graph_is_the_contract_from_plain_operators(name: str) -> None:
    model = verify_model(gamma=GAMMA, vocab_size=VOCAB, **VARIANTS[name])
    onnx.checker.check_model(model, full_check=True)
    bindings = verify_bindings(gamma=GAMMA, vocab_size=VOCAB, **VARIANTS[name])
    assert [value.name for value in model.graph.input] == list(bindings.input_names)
    session = session_of(model)
    types = {"float32": "tensor(float)", "int64": "tensor(int64)", "int32": "tensor(int32)", "bool": "tensor(bool)"}  # fmt: skip
    for binding, value in zip(
        (*bindings.inputs, *bindings.outputs),
        (*session.get_inputs(), *session.get_outputs()),
        strict=True,
    ):
        assert (value.name, value.type) == (binding.name, types[binding.dtype])
        assert value.shape == list(binding.shape)
    used = {
        (node.domain, node.op_type)
        for function in model.functions
        for node in nodes_of(function.node)
    }
    standard = {op for domain, op in used if domain == ""}
    forbidden = {"Loop", "Scan", "NonZero", "Compress", "Unique", "Multinomial", "Bernoulli"}
    assert not {op for op in standard if op in forbidden or op.startswith("Random")}
    own = {op for domain, op in used if domain == "dspark"}
    assert own <= {function.name for function in model.functions}


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    batch = ragged_batch(np.random.default_rng(2), requests=6, gamma=GAMMA, vocab_size=VOCAB)
    batch["target_logits"][batch["offsets"][4]] = np.nan  # a refused request has none
    model = verify_model(mode="rejection", gamma=GAMMA, vocab_size=VOCAB, top_logprobs=4)
    accepted, tokens, logprobs, top_tokens, top_logprobs = session_of(model).run(
        None, inputs_of(VerifyMode.REJECTION, batch)
    )
    assert accepted[4] == REFUSED
    for r, count in enumerate(accepted):
        for k in range(GAMMA + 1):
            if k > count:
                assert logprobs[r, k] == 0
                assert (top_tokens[r, k] == REFUSED).all()
                assert (top_logprobs[r, k] == 0).all()
                continue
            row = batch["target_logits"][batch["offsets"][r] + k].astype(np.float64)
            expected = row - np.log(np.exp(row - row.max()).sum()) - row.max()
            assert logprobs[r, k] == pytest.approx(expected[tokens[r, k]], abs=1e-5)
            assert top_tokens[r, k].tolist() == np.argsort(-expected)[:4].tolist()
            np.testing.assert_allclose(
                top_logprobs[r, k], np.sort(expected)[::-1][:4], atol=1e-5
            )


@pytest.mark.trt
@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx"
)
@pytest.mark.parametrize("name", ["greedy", "rejection", "processed"])
def test_tensorrt_rtx_inlines_the_functions_and_builds_an_engine(name: str) -> None:
    import tensorrt_rtx as trt

    model = verify_model(gamma=7, vocab_size=151_936, **VARIANTS[name])
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    assert parser.parse(model.SerializeToString()), parser.get_error(0).desc()
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    extents = {"batch": (1, 4, 8), "offsets": (2, 5, 9), "rows": (1, 20, 64)}
    for binding in verify_bindings(gamma=7, vocab_size=151_936, **VARIANTS[name]).inputs:
        shapes = zip(
            *((d,) * 3 if isinstance(d, int) else extents[d] for d in binding.shape),
            strict=True,
        )
        profile.set_shape(binding.name, *shapes)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None
    assert engine.nbytes > 100_000
