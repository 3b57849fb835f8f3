# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters mean what they mean in Hugging Face `generate`."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspark_trt.plugins.distribution import Processors, process_logits, target_distribution

VOCAB = 200
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def ours(logits: NDArray[np.float32], **parameters: Any) -> NDArray[np.float32]:
    values = OFF | parameters
    p = target_distribution(
        logits,
        np.float32(values["temperature"]),
        np.int64(values["top_k"]),
        np.float32(values["top_p"]),
        np.float32(values["min_p"]),
    )
    assert p is not None
    return p


def theirs(
    logits: NDArray[np.float32], processors: list[Any], ids: list[int] | None = None
) -> NDArray[np.float32]:
    scores = torch.from_numpy(logits)[None].clone()
    scores = LogitsProcessorList(processors)(torch.tensor([ids or [0]]), scores)
    p: NDArray[np.float32] = scores.softmax(-1)[0].numpy()
    return p


@pytest.mark.parametrize("seed", range(10))
def test_filters_in_the_order_of_hugging_face(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, VOCAB).astype(np.float32)
    t, k = float(rng.uniform(0.3, 2)), int(rng.integers(1, VOCAB))
    p, m = float(rng.uniform(0.1, 0.99)), float(rng.uniform(0.001, 0.3))
    chain = [TemperatureLogitsWarper(t), TopKLogitsWarper(k), TopPLogitsWarper(p), MinPLogitsWarper(m)]  # fmt: skip
    names = ("temperature", "top_k", "top_p", "min_p")
    for end in range(1, 5):
        values = dict(zip(names[:end], (t, k, p, m), strict=False))
        expected = theirs(logits, chain[:end])
        np.testing.assert_allclose(ours(logits, **values), expected, rtol=2e-5, atol=1e-9)


def test_ties_at_the_threshold_are_kept_together() -> None:
    logits = np.array([2, 1, 1, 1, 0], np.float32)
    assert np.count_nonzero(ours(logits, top_k=2)) == 4
    assert np.count_nonzero(ours(logits, top_p=0.5)) == 4
    assert np.count_nonzero(ours(logits, top_p=0.3)) == 1


def test_limits_of_the_parameters() -> None:
    logits = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
    greedy = np.zeros(VOCAB, np.float32)
    greedy[logits.argmax()] = 1
    for values in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        np.testing.assert_array_equal(ours(logits, **values), greedy)
    for values in ({"top_k": VOCAB}, {"top_k": VOCAB + 9}):
        np.testing.assert_array_equal(ours(logits, **values), ours(logits))


@pytest.mark.parametrize("row", [[np.nan, 1, 2], [np.inf, 1, 2], [-np.inf] * 3])
def test_rows_that_cannot_be_sampled_from(row: list[float]) -> None:
    logits, zero = np.array(row, np.float32), np.float32(0)
    assert target_distribution(logits, zero + 1, np.int64(0), zero + 1, zero) is None


def processors(**values: Any) -> Processors:
    neutral: dict[str, Any] = {
        "logit_bias": np.zeros((1, VOCAB), np.float32),
        "repetition_penalty": np.ones(1, np.float32),
        "presence_penalty": np.zeros(1, np.float32),
        "frequency_penalty": np.zeros(1, np.float32),
        "prompt_mask": np.zeros((1, VOCAB), bool),
        "output_counts": np.zeros((1, VOCAB), np.int32),
        "allowed": np.ones((4, VOCAB), bool),
    }
    return Processors(**(neutral | values))


def test_repetition_penalty_and_bias_as_hugging_face_at_every_place_of_the_block() -> None:
    """Drafts of the block count as soon as they stand before the row."""
    rng = np.random.default_rng(1)
    rows = rng.normal(0, 2, (4, VOCAB)).astype(np.float32)
    prompt, output, drafts = [3, 7, 7], [9, 3], [11, 9, 11]
    bias = np.zeros((1, VOCAB), np.float32)
    bias[0, [3, 50]] = [-2, 4]
    mask = np.zeros((1, VOCAB), bool)
    mask[0, prompt] = True
    counts = np.bincount(output, minlength=VOCAB)[None].astype(np.int32)
    processed = process_logits(
        rows,
        np.array([0, 4]),
        np.array([drafts]),
        processors(
            logit_bias=bias,
            repetition_penalty=np.array([1.3], np.float32),
            prompt_mask=mask,
            output_counts=counts,
        ),
    )
    for k in range(4):
        chain = [
            SequenceBiasLogitsProcessor([[[3], -2.0], [[50], 4.0]]),
            RepetitionPenaltyLogitsProcessor(1.3),
        ]
        expected = theirs(rows[k], chain, [*prompt, *output, *drafts[:k]])
        np.testing.assert_allclose(ours(processed[k]), expected, rtol=2e-5)


def test_presence_and_frequency_count_the_output_and_earlier_drafts() -> None:
    rows = np.zeros((3, VOCAB), np.float32)
    counts = np.zeros((1, VOCAB), np.int32)
    counts[0, 5] = 2
    prompt = np.zeros((1, VOCAB), bool)
    prompt[0, 6] = True  # the prompt does not count
    processed = process_logits(
        rows,
        np.array([0, 3]),
        np.array([[5, 8, 0]]),
        processors(
            presence_penalty=np.array([0.5], np.float32),
            frequency_penalty=np.array([0.25], np.float32),
            output_counts=counts,
            prompt_mask=prompt,
        ),
    )
    assert processed[:, 5].tolist() == [-1.0, -1.25, -1.25]
    assert processed[:, 8].tolist() == [0.0, 0.0, -0.75]
    assert processed[:, 6].tolist() == [0.0, 0.0, 0.0]
