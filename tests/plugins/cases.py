# SPDX-License-Identifier: Apache-2.0
"""Random ragged batches for the verification tests, and the ONNX sessions they run through."""

from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from hypothesis import strategies as st
from numpy.typing import NDArray

from dspark_trt.plugins import specification
from dspark_trt.plugins.contract import VerifyMode, verify_bindings
from dspark_trt.plugins.verify_model import verify_model

Batch = dict[str, NDArray[Any]]

# Around the block of 512 and the chunk of 8192 tokens, the 1024 candidates, and a real vocabulary.
VOCABULARIES = (1, 2, 5, 63, 511, 512, 513, 1025, 4097, 9001, 152_000)


@cache
def session(mode: VerifyMode, gamma: int, vocab_size: int) -> ort.InferenceSession:
    return session_of(verify_model(mode=mode, gamma=gamma, vocab_size=vocab_size))


def session_of(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # a second thread spins: half as much processor time again
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run_onnx(mode: VerifyMode, batch: Batch) -> specification.Verified:
    gamma, vocab_size = batch["draft_tokens"].shape[1], batch["target_logits"].shape[1]
    accepted, tokens = session(mode, gamma, vocab_size).run(None, inputs_of(mode, batch))
    return specification.Verified(accepted, tokens)


def run_specification(mode: VerifyMode, batch: Batch) -> specification.Verified:
    inputs = inputs_of(mode, batch)
    if mode is VerifyMode.COUPLED:
        return specification.verify_coupled(**inputs)
    return specification.verify_rejection(**inputs)


def inputs_of(mode: VerifyMode, batch: Batch) -> Batch:
    return {
        name: batch[name] for name in verify_bindings(mode, gamma=1, vocab_size=1).input_names
    }


def same(one: specification.Verified, other: specification.Verified) -> bool:
    return np.array_equal(one.accepted, other.accepted) and np.array_equal(
        one.tokens, other.tokens
    )


def ragged_batch(
    rng: np.random.Generator,
    *,
    requests: int,
    gamma: int,
    vocab_size: int,
    style: str = "normal",
    greedy: float = 0.25,
    filtered: float = 0.5,
) -> Batch:
    """A batch for both modes whose drafts are sometimes right.

    ``style`` shapes the logits; ``greedy`` and ``filtered`` are the shares of requests that use temperature
    0 and each of top-k, top-p and min-p.
    """
    lengths = rng.integers(0, gamma + 1, requests)
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
    target = _logits(rng, (int(offsets[-1]), vocab_size), style)
    rows = np.minimum(offsets[:-1, None] + np.arange(gamma), len(target) - 1)
    draft = target[rows] + (0 if style == "p == q" else 0.7 * _logits(rng, (requests, gamma, vocab_size), "normal"))  # fmt: skip
    temperature = np.where(rng.random(requests) < greedy, 0, rng.uniform(0.4, 1.5, requests))
    draft_temperature = np.where(
        rng.random(requests) < greedy, 0, rng.uniform(0.4, 1.5, requests)
    )
    if style == "p == q":
        draft_temperature = temperature

    def some(value: NDArray[Any], off: float) -> NDArray[Any]:
        return np.where(rng.random(requests) < filtered, value, off)

    batch: Batch = {
        "target_logits": target,
        "offsets": offsets,
        "draft_logits": draft.astype(np.float32),
        "draft_temperature": draft_temperature.astype(np.float32),
        "temperature": temperature.astype(np.float32),
        "top_k": some(rng.integers(1, vocab_size + 2, requests), 0).astype(np.int64),
        "top_p": some(rng.uniform(0, 1, requests), 1).astype(np.float32),
        "min_p": some(rng.uniform(0, 0.5, requests), 0).astype(np.float32),
        "uniforms": rng.random((requests, gamma + 1), dtype=np.float32),
        "seeds": rng.integers(-(2**63), 2**63 - 1, requests),
        "positions": rng.integers(0, 2**31, requests),
    }
    batch["draft_tokens"] = np.stack(
        [
            specification.sample_draft(
                batch["draft_logits"][:, k],
                batch["draft_temperature"],
                rng.random(requests, np.float32),
            )
            for k in range(gamma)
        ],
        axis=1,
    )
    return batch


def _logits(
    rng: np.random.Generator, shape: tuple[int, ...], style: str
) -> NDArray[np.float32]:
    if style == "equal":
        return np.zeros(shape, np.float32)
    if style == "ties":
        return rng.integers(-2, 3, shape).astype(np.float32)
    logits = rng.normal(0, 2, shape).astype(np.float32)
    if style == "one token":
        logits[..., rng.integers(shape[-1])] += 1000
    if style == "masked":
        logits[rng.random(shape) < 0.7] = -np.inf
        logits[..., 0] = np.maximum(logits[..., 0], -3)
    return logits


@st.composite
def batches(
    draw: st.DrawFn, vocabularies: tuple[int, ...] = VOCABULARIES, max_requests: int = 4
) -> Batch:
    """Ragged batches of every style, some of them with damaged rows."""
    vocab_size = draw(st.sampled_from(vocabularies))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch = ragged_batch(
        rng,
        requests=draw(st.integers(1, 1 if vocab_size > 100_000 else max_requests)),
        gamma=draw(st.sampled_from((1, 3))),
        vocab_size=vocab_size,
        style=draw(
            st.sampled_from(("normal", "ties", "equal", "one token", "masked", "p == q"))
        ),
        greedy=draw(st.sampled_from((0.0, 0.3, 1.0))),
        filtered=draw(st.sampled_from((0.0, 0.5))),
    )
    damage = draw(st.sampled_from((None, None, np.nan, np.inf, -np.inf)))
    if damage is not None:
        name = draw(st.sampled_from(("target_logits", "draft_logits")))
        rows = batch[name].reshape(-1, vocab_size)
        row = rows[draw(st.integers(0, len(rows) - 1))]
        if damage == -np.inf:
            row[:] = damage  # nothing is allowed
        else:
            row[draw(st.integers(0, vocab_size - 1))] = damage
    return batch
