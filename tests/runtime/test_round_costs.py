# SPDX-License-Identifier: Apache-2.0
"""The measured grid: what it says on its cells and between them, and the best plan where blocks are padded."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from dspark_trt.errors import TableError
from dspark_trt.runtime.break_even import plain_rounds_spent, recommended_length
from dspark_trt.runtime.cost_table_formats import load_cost_table, sglang_flat
from dspark_trt.runtime.round_costs import RoundCosts
from dspark_trt.runtime.scheduler import Algorithm1, Asynchronous, Global
from dspark_trt.runtime.scheduling import beyond_measured
from dspark_trt.runtime.survival import survival_from_confidence
from tests.runtime.anticipation import asks_nothing_later

_STEPS = [[[1.0, 2.0, 3.0], [4.0, 8.0, 10.0]]]
_COSTS = RoundCosts(
    [1, 4], [0, 1, 3], _STEPS, [[0.5, 2.0]], context_tokens=[128], row_seconds=[[0.1, 0.2]]
)


def _seconds(costs: RoundCosts, lengths: tuple[int, ...]) -> float:
    tokens = len(lengths) + sum(lengths)
    return float(costs.seconds(tokens, tokens, requests=len(lengths), longest=max(lengths))[0])


def test_cells_cost_what_was_measured() -> None:
    for row, requests in enumerate((1, 4)):
        for column, length in enumerate((0, 1, 3)):
            assert _seconds(_COSTS, (length,) * requests) == pytest.approx(
                _STEPS[0][row][column]
            )
    assert _COSTS.seconds(4, 16, requests=4, drafting=4)[12] == pytest.approx(12.0)


def test_more_requests_than_were_measured_are_told() -> None:
    note = beyond_measured(_COSTS, 8, Path("bundle"))
    assert note is not None
    assert "up to 4 requests, this engine runs up to 8" in note
    assert note.endswith("dspark-trt profile bundle --max-requests 8")
    assert beyond_measured(_COSTS, 4, Path("bundle")) is None
    assert beyond_measured(None, 4, Path("bundle")) is None


def test_between_cells_costs_are_linear() -> None:
    assert _COSTS.seconds(1, 4, requests=1).tolist() == [1.0, 2.0, 2.5, 3.0]
    assert _COSTS.seconds(2, 2, requests=2)[0] == pytest.approx(2.0)
    assert _COSTS.draft_cost(2) == pytest.approx(1.0)
    assert _COSTS.draft_cost(0) == 0.0
    # Beyond the last cells: as steeply as between the last two.
    assert _COSTS.seconds(8, 8, requests=8)[0] == pytest.approx(8.0)
    assert _COSTS.seconds(3, 6, requests=1) == pytest.approx([2.5, 3.0, 3.5, 4.0])


def test_a_short_block_saves_its_rows_only() -> None:
    assert _seconds(_COSTS, (1, 1, 1, 0)) == pytest.approx(8.0 - 0.2)
    assert _seconds(_COSTS, (3, 0, 0, 0)) == pytest.approx(10.0 - 9 * 0.2)
    # never cheaper than even lengths
    assert _COSTS.seconds(14, 14, requests=4, longest=3)[0] >= _COSTS.seconds(
        14, 14, requests=4
    )
    spent = plain_rounds_spent(_COSTS, [3, 0, 0, 0], [True] * 4).together
    assert spent.sum() == pytest.approx(4 * (2.0 + 10.0 - 1.8 - 4.0) / 4.0)
    assert spent[1] == pytest.approx(0.5)


def test_a_measured_cost_that_falls_with_length_is_noise() -> None:
    noisy = RoundCosts([1], [0, 1, 2], [[[1.0, 1.5, 1.4]]], [[0.1]], context_tokens=[64])
    assert noisy.seconds(1, 3, requests=1).tolist() == [1.0, 1.5, 1.5]


def test_between_contexts_costs_are_linear() -> None:
    costs = RoundCosts(
        [1], [0, 1], [[[1.0, 1.1]], [[2.0, 2.2]]], [[0.1], [0.3]], context_tokens=[64, 128]
    )
    assert costs.seconds(1, 1, requests=1, context_tokens=10)[0] == 1.0
    assert costs.seconds(1, 1, requests=1, context_tokens=96)[0] == pytest.approx(1.5)
    assert costs.seconds(1, 1, requests=1, context_tokens=256)[0] == pytest.approx(4.0)
    assert costs.seconds(1, 1, requests=1)[0] == 2.0
    assert costs.draft_cost(1, 96) == pytest.approx(0.2)
    assert costs.sees_context


@pytest.mark.parametrize("seed", range(30))
def test_the_search_finds_the_best_plan_where_the_longest_block_costs_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests, gamma = int(rng.integers(2, 5)), int(rng.integers(1, 5))
    confidence = rng.random((requests, gamma))
    steps = 1.0 + rng.random() * np.cumsum(np.r_[0.0, rng.random(gamma)])
    costs = RoundCosts(
        [requests], np.arange(gamma + 1), [[steps]], [[0.2]], context_tokens=[64],
        row_seconds=[[0.02 * rng.random()]],
    )  # fmt: skip
    survival = survival_from_confidence(confidence)

    def throughput(lengths: tuple[int, ...]) -> float:
        tokens = sum(1 + survival[r, :k].sum() for r, k in enumerate(lengths))
        return float(tokens / (_seconds(costs, lengths) + costs.draft_cost(requests)))

    plans = itertools.product(range(gamma + 1), repeat=requests)
    best = max(throughput(plan) for plan in plans)
    chosen = Global(costs, min_gain=0.0, verification="coupled").plan(confidence)
    assert throughput(tuple(chosen)) == pytest.approx(best, rel=1e-12)


def _random_grid(rng: np.random.Generator, requests: int, drafted: int) -> RoundCosts:
    steps = 1.0 + np.cumsum(rng.uniform(0.0, 0.6, drafted + 1))
    rows = [[rng.uniform(0.0, 0.5) / requests]]
    return RoundCosts(
        [requests],
        range(drafted + 1),
        [[steps]],
        [[0.2]],
        context_tokens=[64],
        row_seconds=rows,
    )


def _early_stop(confidence: np.ndarray, costs: RoundCosts) -> list[int]:
    """One candidate at a time: first by even lengths, then while blocks grow no longer and rows pay."""
    survival = survival_from_confidence(confidence)
    requests = len(survival)
    order = sorted(np.ndindex(survival.shape), key=lambda c: (-survival[c], c))
    lengths = [0] * requests

    def throughput(tokens: float, longest: int | None) -> float:
        size = requests + sum(lengths)
        return tokens / float(
            costs.seconds(size, size, requests=requests, drafting=requests, longest=longest)[0]
        )

    tokens, longest = float(requests), None
    best = throughput(tokens, None)
    for r, k in order:
        lengths[r] += 1
        tokens += float(survival[r, k])
        now = throughput(tokens, longest)
        if longest is None and now < best:
            longest = max(length - (row == r) for row, length in enumerate(lengths))
            lengths[r] -= 1
            best = throughput(tokens - float(survival[r, k]), longest)
            lengths[r] += 1
            now = throughput(tokens, longest)
        if longest is not None and (k >= longest or now < best):
            lengths[r] -= 1
            return lengths
        best = now if longest is not None else max(best, now)
    return lengths


@pytest.mark.parametrize("seed", range(60))
def test_early_stop_goes_on_in_blocks_that_are_paid_for(seed: int) -> None:
    rng = np.random.default_rng(seed)
    confidence = rng.random((3, 4)) ** rng.uniform(0.1, 1.0)
    costs = _random_grid(rng, *confidence.shape)
    chosen = Algorithm1(costs, min_gain=0.0).plan(confidence)
    assert chosen.tolist() == _early_stop(confidence, costs)


def test_rows_beside_a_long_block_cost_less_than_even_lengths_say() -> None:
    even = RoundCosts(
        [2], [0, 1, 2], [[[1.0, 1.5, 2.0]]], [[0.1]], context_tokens=[64], row_seconds=[[0.25]]
    )
    padded = RoundCosts(
        [2], [0, 1, 2], [[[1.0, 1.5, 2.0]]], [[0.1]], context_tokens=[64], row_seconds=[[0.01]]
    )
    confidence = [[0.99, 0.99], [0.2, 0.2]]
    assert Algorithm1(even).plan(confidence).tolist() == [2, 0]
    assert Algorithm1(padded).plan(confidence).tolist() == [2, 2]


def test_early_stop_never_asks_what_a_draft_itself_decides() -> None:
    rng = np.random.default_rng(5)
    for _ in range(500):
        confidence = rng.random((3, 4)) ** rng.uniform(0.1, 1.0)
        asks_nothing_later(Algorithm1(_random_grid(rng, *confidence.shape)), confidence, rng)


def test_the_budget_caps_blocks_with_confidences_of_earlier_rounds() -> None:
    costs = RoundCosts(
        [4], [0, 1, 2, 3], [[[1.0, 1.1, 3.0, 9.0]]], [[0.1]], context_tokens=[64],
        row_seconds=[[0.0]],
    )  # fmt: skip
    stale = np.full((4, 3), 0.9)
    budget = Asynchronous(costs).budget(stale)
    assert (budget.drafts, budget.longest) == (4, 1)
    now = np.ones((4, 3))
    now[0] = 0.1
    assert Asynchronous(costs).plan(now, stale=stale).tolist() == [1, 1, 1, 1]


def test_recommended_length_depends_on_the_load() -> None:
    costs = RoundCosts(
        [1, 8], [0, 1, 2], [[[1.0, 1.05, 1.1], [4.0, 8.0, 12.0]]], [[0.2, 3.0]],
        context_tokens=[64],
    )  # fmt: skip
    assert recommended_length(costs, [0.7, 0.7], requests=1) == 2
    assert recommended_length(costs, [0.7, 0.7], requests=8) == 0


def test_saved_costs_come_back_equal_and_edits_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "sps.json"
    _COSTS.save(path)
    again = load_cost_table(path)
    assert isinstance(again, RoundCosts)
    assert again.to_json() == _COSTS.to_json()
    data = json.loads(path.read_text())
    data["step_seconds"][0][0][1] = 1.5
    path.write_text(json.dumps(data))
    with pytest.raises(TableError, match="edited after it was measured"):
        load_cost_table(path)


def test_formats_that_know_tokens_only_get_the_curve_of_one_load() -> None:
    flat = sglang_flat(_COSTS.cost_table(4))
    assert flat["sample_batch_tokens"] == [4, 8, 16]
    assert flat["sample_steps_per_sec"] == pytest.approx([1 / 4, 1 / 8, 1 / 10])


@pytest.mark.parametrize(
    ("steps", "lengths", "message"),
    [
        ([[[1.0, np.nan]]], [0, 1], "holds nan"),
        ([[[1.0, 0.0]]], [0, 1], "must be positive, got 0"),
        ([[[1.0]]], [0, 1], r"step_seconds must be \[1, 1, 2\], got \[1, 1, 1\]"),
        ([[[1.0, 2.0]]], [1, 2], r"lengths must start at 0, got \[1, 2\]"),
        ([[[1.0, 2.0, 3.0]]], [0, 2, 1], "strictly increasing"),
    ],
)
def test_malformed_grids_are_refused(
    steps: list[list[list[float]]], lengths: list[int], message: str
) -> None:
    with pytest.raises(TableError, match=message):
        RoundCosts([1], lengths, steps, [[0.1]], context_tokens=[64])


@pytest.mark.parametrize(
    ("lengths", "steps", "reason"),
    [
        ([0], [[[1.0]]], "one point only"),
        ([0, 7], [[[1.0, 1.002]]], "flat: verifying 7 drafts costs 0.20 % more than none"),
    ],
)
def test_degenerate_grids_are_refused_with_the_reason(
    lengths: list[int], steps: list[list[list[float]]], reason: str
) -> None:
    costs = RoundCosts([1], lengths, steps, [[0.1]], context_tokens=[64])
    with pytest.raises(TableError, match=reason):
        costs.require_informative()
