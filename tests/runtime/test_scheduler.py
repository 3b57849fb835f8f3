# SPDX-License-Identifier: Apache-2.0
"""Schedulers against brute force, the paper's pseudo-code and its appendix A."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from dspark_trt.errors import CapacityError, RequestError
from dspark_trt.runtime.cost_table import CostTable
from dspark_trt.runtime.scheduler import (
    Algorithm1,
    Asynchronous,
    Budget,
    ConfidenceHistory,
    Fixed,
    Global,
    Threshold,
)
from dspark_trt.runtime.survival import (
    best_lengths,
    candidates,
    ranking,
    survival_from_confidence,
)
from tests.runtime.anticipation import asks_nothing_later

# Survival given an accepted first token: sure if x_1 = A, hopeless if x_1 = B (appendix A).
_APPENDIX_A = CostTable([1, 2, 3], [1.0, 0.5, 0.5])
_AFTER_A, _AFTER_B = [[0.8, 1.0]], [[0.8, 0.0]]


def _random_case(rng: np.random.Generator) -> tuple[np.ndarray, CostTable]:
    """Confidences [R ≤ 4, K ≤ 4] and a random staircase that covers every batch."""
    requests, drafted = rng.integers(1, 5, size=2)
    confidence = rng.choice([0.0, 0.3, 0.9, 1.0], (requests, drafted))
    confidence = np.where(
        rng.random(confidence.shape) < 0.7, rng.random(confidence.shape), confidence
    )
    tokens = np.arange(1, requests * (drafted + 1) + 1)
    steps = np.where(rng.random(tokens.size) < 0.4, rng.random(tokens.size), 0.0)
    return confidence, CostTable(tokens, 1.0 / (1.0 + np.cumsum(steps)))


def _throughput(confidence: np.ndarray, table: CostTable, lengths: tuple[int, ...]) -> float:
    survival = survival_from_confidence(confidence)
    tokens = sum(1 + survival[r, :k].sum() for r, k in enumerate(lengths))
    batch = len(lengths) + sum(lengths)
    return float(tokens / table.seconds(batch, batch)[0])


def _every_plan(confidence: np.ndarray) -> "itertools.product[tuple[int, ...]]":
    requests, drafted = confidence.shape
    return itertools.product(range(drafted + 1), repeat=requests)


@pytest.mark.parametrize("seed", range(40))
def test_global_finds_the_best_of_all_plans(seed: int) -> None:
    confidence, table = _random_case(np.random.default_rng(seed))
    chosen = Global(table, min_gain=0.0, verification="coupled").plan(confidence)
    best = max(_throughput(confidence, table, plan) for plan in _every_plan(confidence))
    assert _throughput(confidence, table, tuple(chosen)) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_asynchronous_spends_its_budget_on_the_best_drafts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    confidence, table = _random_case(rng)
    budget = int(rng.integers(0, confidence.size + 1))
    chosen = Asynchronous(table).plan(confidence, budget=Budget(budget))
    survival = survival_from_confidence(confidence)
    best = max(
        sum(survival[r, :k].sum() for r, k in enumerate(plan))
        for plan in _every_plan(confidence)
        if sum(plan) == budget
    )
    assert chosen.sum() == budget
    assert sum(survival[r, :k].sum() for r, k in enumerate(chosen)) == pytest.approx(best)


def _pseudo_code(confidence: np.ndarray, table: CostTable) -> list[int]:
    """Algorithm 1, one candidate at a time."""
    survival = survival_from_confidence(confidence)
    requests, drafted = survival.shape
    order = sorted(
        ((r, k) for r in range(requests) for k in range(drafted)),
        key=lambda candidate: (-survival[candidate], candidate),
    )
    lengths = [0] * requests
    tokens, batch = float(requests), requests
    throughput = tokens / table.seconds(batch, batch)[0]
    for r, k in order:
        tokens, batch = tokens + survival[r, k], batch + 1
        candidate = tokens / table.seconds(batch, batch)[0]
        if candidate < throughput:
            break
        throughput, lengths[r] = candidate, k + 1
    return lengths


@pytest.mark.parametrize("seed", range(60))
def test_algorithm1_follows_the_pseudo_code(seed: int) -> None:
    confidence, table = _random_case(np.random.default_rng(seed))
    chosen = Algorithm1(table, min_gain=0.0).plan(confidence)
    assert chosen.tolist() == _pseudo_code(confidence, table)


def _probability_of_a(scheduler: Algorithm1 | Global) -> float:
    """First output token A under rejection verification: draft even, target 0.7 / 0.3."""
    draft, target = np.array([0.5, 0.5]), np.array([0.7, 0.3])
    accept = np.minimum(1.0, target / draft)
    residual = np.maximum(target - draft, 0) / np.maximum(target - draft, 0).sum()
    total = 0.0
    for token, confidence in enumerate((_AFTER_A, _AFTER_B)):
        if scheduler.plan(confidence)[0]:
            kept = accept[token] * (token == 0)
            total += draft[token] * (kept + (1 - accept[token]) * residual[0])
        else:
            total += draft[token] * target[0]  # nothing verified: the target's own draw
    return total


def test_appendix_a_verifies_nothing_in_both_cases() -> None:
    for confidence in (_AFTER_A, _AFTER_B):
        assert Algorithm1(_APPENDIX_A).plan(confidence).tolist() == [0]
    assert _probability_of_a(Algorithm1(_APPENDIX_A)) == pytest.approx(0.70)


def test_appendix_a_shows_why_global_search_is_refused_with_rejection() -> None:
    search = Global(_APPENDIX_A, verification="coupled")
    assert [search.plan(c)[0] for c in (_AFTER_A, _AFTER_B)] == [2, 0]
    assert _probability_of_a(search) == pytest.approx(0.85)
    with pytest.raises(RequestError, match=r"'rejection' verification \(paper, appendix A\)"):
        Global(_APPENDIX_A, verification="rejection")


def test_algorithm1_never_asks_what_a_draft_itself_decides() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        confidence, table = _random_case(rng)
        asks_nothing_later(Algorithm1(table), confidence, rng)


def test_two_requests_swapped_swap_their_lengths_under_the_same_budget() -> None:
    table = CostTable(np.arange(1, 9), 1.0 / np.linspace(1.0, 2.5, 8))
    stale = np.array([[0.9, 0.8, 0.1], [0.6, 0.3, 0.2]])
    now = np.array([[0.95, 0.9, 0.9], [0.2, 0.2, 0.2]])
    scheduler = Asynchronous(table)
    first, second = scheduler.plan(now, stale=stale), scheduler.plan(now[::-1], stale=stale)
    assert first.sum() == second.sum() == scheduler.budget(stale).drafts
    assert first.tolist() == second[::-1].tolist() == [3, 0]


def test_flat_cost_verifies_everything_and_says_why() -> None:
    flat = CostTable([1, 8], [100.0, 100.0])
    confidence = [[0.5, 0.01, 0.0, 0.3, 0.9, 0.9, 0.9]]
    assert Algorithm1(flat).plan(confidence).tolist() == [7]
    plan = Global(flat, verification="coupled").decide(confidence)
    assert (plan.lengths.tolist(), "flat" in plan.reason) == ([7], True)


@pytest.mark.parametrize(
    "scheduler",
    [Algorithm1(None), Global(None, verification="coupled"), Asynchronous(None)],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_without_a_table_nothing_is_trimmed(
    scheduler: Algorithm1 | Global | Asynchronous,
) -> None:
    plan = scheduler.decide([[0.1, 0.1]], limits=[1])
    assert (plan.lengths.tolist(), plan.reason) == (
        [1],
        "no cost table: every draft is verified",
    )


def test_padding_paid_for_is_filled() -> None:
    table = CostTable([2, 6, 16], [1.0, 0.8, 0.2])  # 2..6 tokens cost what 6 cost
    confidence = np.full((2, 7), 0.5)
    confidence[:, 2:] = 0.01
    for scheduler in (Algorithm1(table), Global(table, verification="coupled")):
        assert len(confidence) + scheduler.plan(confidence).sum() == 6
    assert len(confidence) + Asynchronous(table).budget(confidence).drafts == 6


def test_early_stop_is_not_caught_at_the_edge_of_a_padded_size() -> None:
    sizes = np.arange(4, 129, 4)
    table = CostTable(sizes, 1.0 / (1.0 + 0.01 * sizes))
    confidence = np.tile([0.95, 0.9, 0.8, 0.3], (4, 1))
    lengths = Algorithm1(table, min_gain=0.0).plan(confidence)
    search = Global(table, min_gain=0.0, verification="coupled").plan(confidence)
    assert lengths.tolist() == search.tolist() == [4, 4, 4, 4]


def test_a_gain_below_the_minimum_does_not_trim() -> None:
    table = CostTable([1, 2], [1.0, 1.0 / 1.205], padded=False)
    confidence = [[0.2]]  # verifying loses 0.4 %
    search = Global(table, verification="coupled")
    assert search.plan(confidence).tolist() == [1]
    assert Algorithm1(table).plan(confidence).tolist() == [1]
    assert Asynchronous(table).budget(confidence).drafts == 1
    assert Global(table, verification="coupled", min_gain=0.0).plan(confidence).tolist() == [0]
    assert Algorithm1(table, min_gain=0.0).plan(confidence).tolist() == [0]
    assert Asynchronous(table, min_gain=0.0).budget(confidence).drafts == 0


@given(
    arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=6)),
    st.integers(0, 40),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_any_input_gives_lengths_within_every_bound(
    confidence: np.ndarray, spare: int, data: st.DataObject
) -> None:
    requests, drafted = confidence.shape
    limits = data.draw(arrays(np.int64, requests, elements=st.integers(-1, drafted + 2)))
    table = CostTable([1, 4, 9, 30], [9.0, 7.0, 4.0, 1.0])
    most = requests + spare
    for scheduler in (
        Fixed(3, most),
        Threshold(0.5, most),
        Algorithm1(table, max_tokens_per_step=most),
        Global(table, max_tokens_per_step=most, verification="coupled"),
        Asynchronous(table, max_tokens_per_step=most),
    ):
        lengths = scheduler.plan(confidence, limits=limits)
        assert lengths.shape == (requests,)
        assert np.all((lengths >= 0) & (lengths <= np.clip(limits, 0, drafted)))
        assert requests + lengths.sum() <= most
        assert np.array_equal(lengths, scheduler.plan(confidence, limits=limits))


def test_ties_keep_prefixes_closed() -> None:
    plan = Asynchronous(None).plan(np.ones((3, 4)), budget=Budget(6))
    assert plan.tolist() == [4, 2, 0]


def test_nan_counts_as_zero() -> None:
    table = CostTable([1, 2, 3, 4], [1.0, 0.9, 0.6, 0.5])
    confidence = [[0.9, np.nan, 1.0]]
    assert Algorithm1(table).plan(confidence).tolist() == [1]
    assert Threshold(0.1).plan(confidence).tolist() == [1]


def test_threshold_is_the_conditional_confidence() -> None:
    confidence = [[0.9, 0.9, 0.4, 1.0], [0.5, 0.5, 0.5, 0.5], [0.1, 1.0, 1.0, 1.0]]
    assert Threshold(0.5).plan(confidence).tolist() == [2, 4, 0]
    assert Threshold(0.0).plan(confidence).tolist() == [4, 4, 4]


def test_fixed_length_is_cut_by_limits_and_budget() -> None:
    confidence = [[0.9, 0.9, 0.9], [0.5, 0.5, 0.5]]
    assert Fixed(2).plan(confidence).tolist() == [2, 2]
    assert Fixed(9).plan(confidence, limits=[1, 5]).tolist() == [1, 3]
    assert Fixed(3, max_tokens_per_step=6).plan(confidence).tolist() == [3, 1]


def test_refusals_name_the_value() -> None:
    with pytest.raises(RequestError, match=r"\[requests, drafted\], got shape \(3,\)"):
        Fixed(1).plan(np.ones(3))
    with pytest.raises(RequestError, match=r"limits must be \[1\], got shape \(2,\)"):
        Fixed(1).plan([[0.5]], limits=[1, 1])
    with pytest.raises(
        CapacityError, match="3 requests need a token each, max_tokens_per_step is 2"
    ):
        Fixed(1, max_tokens_per_step=2).plan(np.ones((3, 2)))
    with pytest.raises(RequestError, match="at least 0, got -1"):
        Fixed(-1)
    with pytest.raises(RequestError, match=r"fraction in \[0, 1\), got 1"):
        Algorithm1(None, min_gain=1)


def test_history_is_two_rounds_old_and_follows_request_ids() -> None:
    history = ConfidenceHistory()
    assert history.stale([1]) is None
    history = history.push([7, 3], [[0.7, 0.7], [0.3, 0.3]])
    assert history.stale([7]) is None
    history = history.push([3, 7], [[0.1, 0.1], [0.2, 0.2]])
    stale = history.stale([3, 9, 7])
    assert stale is not None
    assert stale == pytest.approx(np.array([[0.3, 0.3], [0.5, 0.5], [0.7, 0.7]]))
    third = history.push([9], [[0.9, 0.9]]).stale([7])
    assert third is not None
    assert third == pytest.approx(np.array([[0.2, 0.2]]))


def test_rounds_without_history_stop_early() -> None:
    table = CostTable([1, 2, 3], [1.0, 0.6, 0.4])
    confidence = [[0.9, 0.1]]
    plan = Asynchronous(table).decide(confidence)
    assert plan.lengths.tolist() == Algorithm1(table).plan(confidence).tolist() == [1]
    assert plan.reason == "throughput stops improving"


@given(
    confidence=arrays(
        np.float64, array_shapes(min_dims=2, max_dims=2, max_side=6),
        elements=st.sampled_from([0.0, 0.25, 0.5, 1.0]),  # ties everywhere
    ),
    data=st.data(),
)  # fmt: skip
def test_lengths_by_ranking_and_by_the_last_admitted_value_agree(
    confidence: np.ndarray, data: st.DataObject
) -> None:
    requests, drafted = confidence.shape
    limits = data.draw(arrays(np.int64, requests, elements=st.integers(0, drafted)))
    offered = candidates(confidence, limits=limits)
    admitted = data.draw(st.integers(0, offered.available))
    found = best_lengths(offered, admitted)
    assert found.tolist() == best_lengths(offered, admitted, ranking(offered)).tolist()
    assert found.sum() == admitted
    assert (found <= limits).all()
