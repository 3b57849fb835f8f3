# SPDX-License-Identifier: Apache-2.0
"""Random rounds for the verification graphs, with what their NumPy specification answers."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark_trt.bundle import Bundle
from dspark_trt.plugins.distribution import Processors, process_logits
from dspark_trt.plugins.specification import token_logprobs, verify_rejection

Arrays = dict[str, NDArray[Any]]

_BATCH = 4


class VerifyCase(NamedTuple):
    graph: str
    inputs: Arrays
    expected: Arrays


def verify_cases(bundle: Bundle, random: np.random.Generator) -> Iterator[VerifyCase]:
    """One round of four requests for each verification graph of the bundle."""
    gamma, vocab = bundle.draft.gamma, bundle.draft.decoder.vocab_size
    drafted, sampling = _round(gamma, vocab, random), _sampling(gamma, vocab, random)
    sampling["draft_logits"] += _rows_of_requests(drafted, gamma)
    yield VerifyCase(
        "verify", drafted | sampling, verify_rejection(**drafted, **sampling)._asdict()
    )
    greedy = verify_rejection(**drafted, **_greedy(sampling))._asdict()
    yield VerifyCase("verify_greedy", drafted, greedy)
    yield _processed(drafted, sampling, bundle.top_logprobs, random)


def _round(gamma: int, vocab: int, random: np.random.Generator) -> Arrays:
    """Verification lengths from none to all; drafts that are often what the target prefers."""
    lengths = np.array([0, 1, gamma, gamma // 2])
    offsets = np.concatenate([[0], np.cumsum(1 + lengths)])
    target_logits = 2 * random.standard_normal((int(offsets[-1]), vocab), np.float32)
    drafted: Arrays = {"target_logits": target_logits, "offsets": offsets.astype(np.int64)}
    noisy = _rows_of_requests(drafted, gamma)
    noisy += 0.3 * random.standard_normal(noisy.shape, np.float32)
    return drafted | {"draft_tokens": noisy.argmax(-1)}


def _rows_of_requests(drafted: Arrays, gamma: int) -> NDArray[np.float32]:  # [B, K, V]
    rows = drafted["target_logits"]
    shape = (gamma, rows.shape[1])
    return np.stack([np.resize(rows[a:b], shape) for a, b in pairwise(drafted["offsets"])])


def _sampling(gamma: int, vocab: int, random: np.random.Generator) -> Arrays:
    return {
        "draft_logits": 0.3 * random.standard_normal((_BATCH, gamma, vocab), np.float32),
        "draft_temperature": np.array([0, 0.5, 1, 1], np.float32),
        "temperature": np.array([0, 0.5, 1, 1], np.float32),
        "top_k": np.array([0, 0, 20, 0], np.int64),
        "top_p": np.array([1, 1, 1, 0.9], np.float32),
        "min_p": np.zeros(_BATCH, np.float32),
        "uniforms": random.random((_BATCH, gamma + 1), np.float32),
    }


def _greedy(sampling: Arrays) -> Arrays:
    """Rejection at temperature 0, where nothing but the arg max matters."""
    zeros = np.zeros(_BATCH, np.float32)
    return sampling | {"draft_temperature": zeros, "temperature": zeros}


def _processed(
    drafted: Arrays, sampling: Arrays, alternatives: int, random: np.random.Generator
) -> VerifyCase:
    rows, vocab = drafted["target_logits"].shape
    processors = Processors(
        logit_bias=random.standard_normal((_BATCH, vocab), np.float32),
        repetition_penalty=np.array([1, 1.3, 1, 0.8], np.float32),
        presence_penalty=np.array([0, 0, 0.5, 0.2], np.float32),
        frequency_penalty=np.array([0, 0.1, 0, 0.3], np.float32),
        prompt_mask=random.random((_BATCH, vocab)) < 0.2,
        output_counts=random.integers(0, 3, (_BATCH, vocab), np.int32),
        allowed=random.random((rows, vocab)) < 0.9,
    )
    logits, offsets = drafted["target_logits"], drafted["offsets"]
    processed = process_logits(logits, offsets, drafted["draft_tokens"], processors)
    verified = verify_rejection(**(drafted | sampling | {"target_logits": processed}))
    logprobs = token_logprobs(logits, offsets, verified.tokens, alternatives)
    expected = verified._asdict() | logprobs._asdict()
    return VerifyCase("verify_processed", drafted | sampling | processors._asdict(), expected)
