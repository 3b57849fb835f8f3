# SPDX-License-Identifier: Apache-2.0
"""Chi-square tests: what verification commits is distributed exactly as the target's own samples."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from _pytest.mark import ParameterSet
from numpy.typing import NDArray

from dspark_trt.plugins.distribution import filter_logits
from tests.plugins.chains import (
    Chain,
    block_law,
    chi_square_p_value,
    markov_chain,
    outcome,
    prefix_chain,
    sequence_law,
)
from tests.plugins.rounds import (
    GAMMA,
    Bias,
    Round,
    Sampling,
    draft_law,
    sampler,
    target_law,
)

ROUNDS = 200_000
COUPLED_ROUNDS = 40_000  # several steps each; that so many are enough, a control below shows
BATCH = 20_000
LENGTH = GAMMA + 1

PREFIX = prefix_chain(np.random.default_rng(11), vocab_size=5, depth=GAMMA)
MARKOV = markov_chain(np.random.default_rng(12), vocab_size=64, groups=8)
CHAINS = {5: PREFIX, 64: MARKOV}

FILTERS = {
    "plain": Sampling(),
    "temperature": Sampling(temperature=0.7, draft_temperature=1.4),
    "top-k": Sampling(top_k=3),
    "top-p": Sampling(top_p=0.8),
    "min-p": Sampling(min_p=0.2),
    "all": Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, draft_temperature=1.2),
}
NEUTRAL: dict[str, Any] = {
    "logit_bias": np.zeros(5, np.float32),
    "repetition_penalty": np.float32(1),
    "presence_penalty": np.float32(0),
    "frequency_penalty": np.float32(0),
    "prompt_mask": np.zeros(5, bool),
    "output_counts": np.zeros(5, np.int32),
    "allowed": np.ones(5, bool),
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": np.array([1.5, 0, -2, 0, 0.5], np.float32)},
    "repetition": {
        "repetition_penalty": np.float32(1.8),
        "prompt_mask": np.array([True, False, False, False, True]),
    },
    "presence": {
        "presence_penalty": np.float32(1.2),
        "output_counts": np.array([0, 2, 0, 0, 0], np.int32),
    },
    "frequency": {
        "frequency_penalty": np.float32(0.8),
        "output_counts": np.array([0, 2, 0, 1, 0], np.int32),
    },
    "allowed": {"allowed": np.array([True, True, False, True, False])},
}


def rejection_p_value(
    chain: Chain, sampling: Sampling, *, seed: int = 0, bias: Bias | None = None
) -> float:
    """Of the joint outcome (drafts accepted, all committed tokens) of one round."""
    laws = block_law(chain, target_law(chain, sampling), draft_law(chain, sampling), GAMMA)
    counts = [np.zeros_like(law) for law in laws]
    rng = np.random.default_rng(seed)
    for _ in range(ROUNDS // BATCH):
        states = np.zeros(BATCH, np.int64)
        result = Round(chain, sampling, states, rng, bias).rejection()
        for n, count in enumerate(counts):
            committed = result.tokens[result.accepted == n, : n + 1]
            count += np.bincount(outcome(chain, committed), minlength=len(count))
    return chi_square_p_value(np.concatenate(counts), np.concatenate(laws))


def coupled_p_value(
    chain: Chain, sampling: Sampling, *, seed: int = 0, under: Sampling | None = None
) -> float:
    """Of the first γ + 1 tokens of requests that run round after round, under the target's law."""
    law = sequence_law(chain, target_law(chain, under or sampling), LENGTH)
    counts = np.zeros_like(law)
    rng = np.random.default_rng(seed)
    for _ in range(COUPLED_ROUNDS // BATCH):
        counts += np.bincount(
            outcome(chain, coupled_sequences(chain, sampling, rng)), minlength=len(law)
        )
    return chi_square_p_value(counts, law)


def coupled_sequences(
    chain: Chain, sampling: Sampling, rng: np.random.Generator
) -> NDArray[np.int64]:
    seeds = rng.integers(-(2**63), 2**63 - 1, BATCH)
    states, lengths = np.zeros(BATCH, np.int64), np.zeros(BATCH, np.int64)
    sequences = np.zeros((BATCH, 2 * LENGTH + 1), np.int64)
    open_ = np.arange(BATCH)
    while len(open_):
        result = Round(chain, sampling, states[open_], rng).coupled(
            seeds[open_], lengths[open_]
        )
        for k in range(GAMMA + 1):
            committed = open_[result.accepted >= k]
            tokens = result.tokens[result.accepted >= k, k]
            sequences[committed, lengths[committed]] = tokens
            lengths[committed] += 1
            states[committed] = chain.step[states[committed], tokens]
        open_ = open_[lengths[open_] < LENGTH]
    return sequences[:, :LENGTH]


def mostly_slow(names: Iterable[str], quick: tuple[str, ...]) -> list[ParameterSet]:
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", mostly_slow(FILTERS, ("plain", "top-k", "top-p", "min-p")))
def test_rejection_commits_exact_blocks(name: str) -> None:
    assert rejection_p_value(PREFIX, FILTERS[name]) > 1e-3


@pytest.mark.parametrize("name", mostly_slow(FILTERS, ("all",)))
def test_rejection_commits_exact_blocks_of_64_tokens(name: str) -> None:
    assert rejection_p_value(MARKOV, FILTERS[name]) > 1e-3


@pytest.mark.parametrize(
    "name", mostly_slow(PROCESSORS, ("repetition", "frequency", "allowed"))
)
def test_rejection_with_processors_commits_exact_blocks(name: str) -> None:
    sampling = Sampling(processors=NEUTRAL | PROCESSORS[name])
    assert rejection_p_value(PREFIX, sampling) > 1e-3


@pytest.mark.parametrize("name", mostly_slow(FILTERS, ("all",)))
def test_coupled_rounds_give_exact_sequences(name: str) -> None:
    assert coupled_p_value(PREFIX, FILTERS[name]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", FILTERS)
def test_coupled_rounds_give_exact_sequences_of_64_tokens(name: str) -> None:
    assert coupled_p_value(MARKOV, FILTERS[name]) > 1e-3


@pytest.mark.parametrize("name", mostly_slow(PROCESSORS, ()))
def test_coupled_with_processors_gives_exact_sequences(name: str) -> None:
    sampling = Sampling(processors=NEUTRAL | PROCESSORS[name])
    assert coupled_p_value(PREFIX, sampling) > 1e-3


def test_filters_mirrored_into_the_drafter_keep_blocks_exact_and_accept_more() -> None:
    """The graph function filters the drafter as the specification does; the target's law is unchanged."""
    sampling = FILTERS["top-k"]
    good = replace(PREFIX, draft=(0.7 * PREFIX.target + 0.3 * PREFIX.draft).astype(np.float32))
    feed = {"logits": good.draft, **sampling.inputs(len(good.draft))}
    (mirrored,) = sampler("FilterDraft").run(None, feed)
    off = (np.float32(sampling.top_p), np.float32(sampling.min_p))
    expected = [filter_logits(row, np.int64(sampling.top_k), *off) for row in good.draft]
    np.testing.assert_array_equal(mirrored, np.stack(expected))
    chain = replace(good, draft=mirrored)
    assert rejection_p_value(chain, sampling) > 1e-3
    p = target_law(chain, sampling)
    plain, filtered = (
        np.minimum(p, draft_law(c, sampling)).sum(axis=1).mean() for c in (good, chain)
    )
    assert filtered > plain + 0.05


@pytest.mark.parametrize("vocab_size", [5, 64])
def test_the_same_test_rejects_a_biased_verifier(vocab_size: int) -> None:
    """A verifier that keeps a draft where u < 1.1 p/q."""
    biased = rejection_p_value(
        CHAINS[vocab_size], Sampling(), bias=lambda u: u / np.float32(1.1)
    )
    assert biased < 1e-6


@pytest.mark.parametrize("vocab_size", [5, 64])
def test_the_test_of_sequences_rejects_another_temperature(vocab_size: int) -> None:
    warmer = Sampling(temperature=1.1)
    assert coupled_p_value(CHAINS[vocab_size], warmer, under=Sampling()) < 1e-6


def test_the_law_of_a_block_is_lossless() -> None:
    """The law itself: its first token is p, whatever q is."""
    p, q = target_law(PREFIX, Sampling()), draft_law(PREFIX, Sampling())
    laws = block_law(PREFIX, p, q, GAMMA)
    first = sum(law.reshape(5, -1).sum(axis=1) for law in laws)
    np.testing.assert_allclose(first, p[0], rtol=1e-6)
