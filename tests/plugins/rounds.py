# SPDX-License-Identifier: Apache-2.0
"""Vectorised speculative rounds on `chains`: drafts and verification run through the ONNX functions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, parser

from dspark_trt.plugins.contract import DOMAIN, OPSET, VerifyMode
from dspark_trt.plugins.distribution import Processors, process_logits, target_distribution
from dspark_trt.plugins.draft_functions import sample_draft_function
from dspark_trt.plugins.specification import Verified
from dspark_trt.plugins.verify_model import function_protos, verify_model
from tests.plugins.cases import session_of
from tests.plugins.chains import Chain

GAMMA = 3


@dataclass(frozen=True)
class Sampling:
    """What every request of a test asks for."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    draft_temperature: float = 1.0
    processors: dict[str, Any] = field(default_factory=dict)  # of one request

    def inputs(self, requests: int) -> dict[str, NDArray[Any]]:
        def full(value: float, dtype: str = "float32") -> NDArray[Any]:
            return np.full(requests, value, dtype)

        return {
            "temperature": full(self.temperature),
            "top_k": full(self.top_k, "int64"),
            "top_p": full(self.top_p),
            "min_p": full(self.min_p),
        }


def target_law(chain: Chain, sampling: Sampling) -> NDArray[np.float64]:
    """The distribution [S, V] the target alone would sample from in each state."""
    logits = chain.target
    if sampling.processors:
        logits = np.stack([_processed(chain, s, sampling) for s in range(len(logits))])
    rows = [
        target_distribution(
            row,
            np.float32(sampling.temperature),
            np.int64(sampling.top_k),
            np.float32(sampling.top_p),
            np.float32(sampling.min_p),
        )
        for row in logits
    ]
    return np.stack([row for row in rows if row is not None]).astype(np.float64)


def _processed(chain: Chain, state: int, sampling: Sampling) -> NDArray[np.float32]:
    """One state's logits: its prefix was drafted in this block, so it comes as the drafts before the row."""
    prefix = chain.prefix[state]
    rows = np.tile(chain.target[state], (len(prefix) + 1, 1))
    one = {name: np.asarray(value)[None] for name, value in sampling.processors.items()}
    one["allowed"] = np.tile(one["allowed"], (len(rows), 1))
    drafts = np.array([[*prefix, 0]])
    processed = process_logits(rows, np.array([0, len(rows)]), drafts, Processors(**one))
    return np.asarray(processed[-1])


def draft_law(chain: Chain, sampling: Sampling) -> NDArray[np.float64]:
    scaled = chain.draft.astype(np.float64) / sampling.draft_temperature
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


@cache
def sampler(name: str) -> ort.InferenceSession:
    """`SampleCoupled` or `FilterDraft` as a graph of its own."""
    from dspark_trt.plugins.coupled_functions import SampleCoupled
    from dspark_trt.plugins.filter_functions import FilterDraft

    real, whole = TensorProto.FLOAT, TensorProto.INT64
    function, vectors = {
        "SampleCoupled": (SampleCoupled, {"seeds": whole, "positions": whole}),
        "FilterDraft": (FilterDraft, {"top_k": whole, "top_p": real, "min_p": real}),
    }[name]
    rows = helper.make_tensor_value_info("logits", real, ("batch", "vocab"))
    inputs = [rows] + [
        helper.make_tensor_value_info(n, t, ("batch",))
        for n, t in {"temperature": real, **vectors}.items()
    ]
    output = helper.make_tensor_value_info("result", whole, ("batch",))
    if name == "FilterDraft":
        output = helper.make_tensor_value_info("result", real, ("batch", "vocab"))
    graph = helper.make_graph(
        [helper.make_node(name, [i.name for i in inputs], ["result"], domain=DOMAIN)],
        name,
        inputs,
        [output],
    )
    model = helper.make_model(
        graph,
        functions=function_protos(function),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
        ir_version=11,
    )
    return session_of(model)


@cache
def draft_sampler(vocab_size: int) -> ort.InferenceSession:
    """`SampleDraft` of a block of one slot: logits [B, V], temperature [B], uniforms [B] -> tokens [B]."""
    model = parser.parse_model(f"""
        <ir_version: 11, opset_import: ["" : {OPSET}, "{DOMAIN}" : 1]>
        sample (float[B, {vocab_size}] logits, float[B] temperature, float[B] uniforms) => (int64[B] tokens)
        <int64[1] axis = {{1}}>
        {{
          rows = Unsqueeze(logits, axis)
          block = Unsqueeze(uniforms, axis)
          drawn = {DOMAIN}.SampleDraft<slot = [0]>(rows, temperature, block)
          tokens = Squeeze(drawn, axis)
        }}
    """)
    model.functions.extend(function_protos(sample_draft_function(vocab_size)))
    return session_of(model)


@cache
def verifier(mode: VerifyMode, vocab_size: int, processors: bool) -> ort.InferenceSession:
    return session_of(
        verify_model(mode=mode, gamma=GAMMA, vocab_size=vocab_size, processors=processors)
    )


Bias = Callable[[NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True)
class Round:
    """Inputs of one round of R requests that all start in the same or in their own states [R]."""

    chain: Chain
    sampling: Sampling
    states: NDArray[np.int64]
    rng: np.random.Generator
    bias: Bias | None = None

    def rejection(self) -> Verified:
        requests = len(self.states)
        path, drafts, draft_rows = self._draft(
            lambda k: {"uniforms": self.rng.random(requests, np.float32)},
            draft_sampler(self.chain.draft.shape[1]),
        )
        uniforms = self.rng.random((requests, GAMMA + 1), np.float32)
        if self.bias is not None:
            uniforms[:, :-1] = self.bias(uniforms[:, :-1])
        inputs = {
            "draft_logits": draft_rows,
            "draft_temperature": np.full(requests, self.sampling.draft_temperature, np.float32),
            "uniforms": uniforms,
        }
        return self._verify(VerifyMode.REJECTION, path, drafts, inputs)

    def coupled(self, seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> Verified:
        path, drafts, _ = self._draft(
            lambda k: {"seeds": seeds, "positions": positions + k}, sampler("SampleCoupled")
        )
        return self._verify(
            VerifyMode.COUPLED, path, drafts, {"seeds": seeds, "positions": positions}
        )

    def _draft(
        self, noise: Callable[[int], dict[str, NDArray[Any]]], drawing: ort.InferenceSession
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """States [R, γ+1], drafts [R, γ] and the logits they came from [R, γ, V]."""
        temperature = np.full(len(self.states), self.sampling.draft_temperature, np.float32)
        states, drafts, rows = [self.states], [], []
        for k in range(GAMMA):
            logits = self.chain.draft[states[-1]]
            feed = {"logits": logits, "temperature": temperature, **noise(k)}
            (tokens,) = drawing.run(None, feed)
            drafts.append(tokens)
            rows.append(logits)
            states.append(self.chain.step[states[-1], tokens])
        return np.stack(states, 1), np.stack(drafts, 1), np.stack(rows, 1)

    def _verify(
        self,
        mode: VerifyMode,
        path: NDArray[np.int64],
        drafts: NDArray[np.int64],
        inputs: dict[str, NDArray[Any]],
    ) -> Verified:
        requests, vocab_size = len(drafts), self.chain.target.shape[1]
        processors = {
            name: np.tile(value, (requests, *np.ndim(value) * (1,)))
            for name, value in self.sampling.processors.items()
        }
        if processors:
            processors["output_counts"] += self.chain.counts[self.states]
            processors["allowed"] = np.repeat(processors["allowed"], GAMMA + 1, axis=0)
        feed = {
            "target_logits": self.chain.target[path.reshape(-1)],
            "offsets": np.arange(requests + 1) * (GAMMA + 1),
            "draft_tokens": drafts,
            **self.sampling.inputs(requests),
            **inputs,
            **processors,
        }
        return Verified(*verifier(mode, vocab_size, bool(processors)).run(None, feed))
