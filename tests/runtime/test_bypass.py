# SPDX-License-Identifier: Apache-2.0
"""Drafting that does not pay stops, costs little, and starts again when it pays."""

import numpy as np
import pytest

from dspark_trt.errors import RequestError
from dspark_trt.runtime.break_even import (
    Spent,
    break_even_acceptance,
    expected_gain,
    fixed_length_speed,
    plain_rounds_spent,
    recommended_length,
)
from dspark_trt.runtime.bypass import Bypass, BypassState
from dspark_trt.runtime.cost_table import CostTable

# A step over 8 tokens costs 1.6 steps of one, drafting 0.65: like the toy drafters on a CPU.
_TABLE = CostTable(
    [1, 8], [1.0, 1 / 1.6], padded=False, requests=[1, 64], draft_seconds=[0.65, 8.0]
)


def _run(
    conditional: np.ndarray,  # [T, K] acceptance of each round's drafts
    requests: int,
    *,
    verified: int = 7,
    seed: int = 0,
    table: CostTable = _TABLE,
) -> tuple[float, np.ndarray]:
    """(plain rounds of time a request, [T, R] who drafted) over T rounds."""
    rng = np.random.default_rng(seed)
    policy, slots = Bypass(), np.arange(requests)
    state = policy.joined(policy.start(requests), slots)
    spent = 0.0
    history = np.zeros((len(conditional), requests), bool)
    for t, chances in enumerate(conditional[:, :verified]):
        history[t] = drafted = policy.drafting(state, slots)
        kept = np.logical_and.accumulate(rng.random((requests, verified)) < chances, axis=1)
        cost = plain_rounds_spent(table, verified * drafted, drafted)
        state = policy.updated(
            state,
            slots,
            drafted=drafted,
            spent=cost,
            accepted=drafted * kept.sum(axis=1),
        )
        spent += 1 + cost.together.mean()
    return spent, history


@pytest.mark.parametrize(
    ("requests", "verified", "rounds"), [(1, 7, 128), (1, 7, 512), (8, 3, 96), (32, 1, 96)]
)
def test_garbage_costs_at_most_five_percent(requests: int, verified: int, rounds: int) -> None:
    spent, history = _run(np.zeros((rounds, 7)), requests, verified=verified)
    assert spent <= 1.05 * rounds
    assert history.any()


@pytest.mark.parametrize("requests", [1, 8])
def test_probes_grow_apart(requests: int) -> None:
    _, history = _run(np.zeros((2500, 7)), requests=requests)
    gaps = np.diff(np.flatnonzero(history.any(axis=1)))
    waits = gaps[gaps > 1]
    assert waits[0] < 256
    assert (waits[1:] >= waits[:-1]).all()
    assert waits[-1] == Bypass().longest_wait + 1


@pytest.mark.parametrize(
    ("requests", "table"),
    [(1, _TABLE), (8, CostTable([8, 64], [1.0, 0.7], requests=[8], draft_seconds=[0.2]))],
)
def test_a_good_drafter_is_hardly_ever_stopped(requests: int, table: CostTable) -> None:
    good = np.tile([0.8, 0.75, 0.75, 0.75, 0.75, 0.75, 0.75], (400, 1))
    shares = [_run(good, requests, table=table, seed=seed)[1].mean() for seed in range(20)]
    assert np.mean(shares) > 0.9
    assert np.median(shares) > 0.95


def test_one_request_drafts_only_where_drafts_return_more_than_the_table_says_they_cost() -> (
    None
):
    """Neighbours on a machine make drafting dearer than it was when it was measured."""
    conditional = np.tile([0.7, 0.6, 0.5, 0.5, 0.5, 0.5, 0.5], (600, 1))  # 1.5 accepted
    shares = []
    for drafting_cost in (0.5, 0.8):  # 1.1 and 1.4 plain rounds with verification
        table = CostTable(
            [1, 8], [1.0, 1 / 1.6], padded=False, requests=[1], draft_seconds=[drafting_cost]
        )
        runs = [_run(conditional, 1, table=table, seed=seed)[1].mean() for seed in range(10)]
        shares.append(np.mean(runs))
    assert shares[0] > 0.6
    assert shares[1] < 0.4


def test_drafting_comes_back_when_it_pays() -> None:
    conditional = np.zeros((600, 7))
    conditional[100:] = 0.95
    stopped, resumed = [], []
    for seed in range(10):
        _, history = _run(conditional, requests=1, seed=seed)
        stopped.append(history[30:100].mean())
        resumed.append(history[300:].mean())
    assert max(stopped) < 0.1
    assert np.median(resumed) == 1.0


def _played(
    policy: Bypass,
    state: BypassState,
    slots: list[int],
    accepted: list[int],
    spent: float = 1.0,
) -> tuple[BypassState, np.ndarray]:
    """One round in which those that drafted got ``accepted`` drafts."""
    drafted = policy.drafting(state, slots)
    got = drafted * np.array(accepted)
    cost = np.multiply(spent, drafted, dtype=np.float64)
    state = policy.updated(state, slots, drafted=drafted, spent=Spent(cost, cost), accepted=got)
    return state, drafted


def test_where_drafting_does_not_pay_others_a_new_request_does_not_start() -> None:
    policy = Bypass()
    state = policy.start(2)
    for _ in range(3):  # one bad request is not yet a bad drafter
        state = policy.joined(state, [0])
        assert policy.drafting(state, [0])[0]
        for _ in range(8):
            state, _ = _played(policy, state, [0], [0])
    assert not policy.drafting(policy.joined(state, [1]), [1])[0]
    for _ in range(200):
        state, _ = _played(policy, state, [0], [5])
    assert policy.drafting(policy.joined(state, [1]), [1])[0]


def test_requests_it_does_not_pay_for_do_not_stop_those_behind_them() -> None:
    """Requests one by one, of 60 plain rounds each; a draft step and its verification cost one."""
    policy, speed = Bypass(), np.zeros((10, 30))
    for seed, speeds in enumerate(speed):
        rng, state = np.random.default_rng(seed), policy.start(1)
        for request in range(speeds.size):
            state, tokens, spent = policy.joined(state, [0]), 0, 0.0
            kept = 1.8 if request >= 10 else 0.4
            while tokens < 60:
                drafted = policy.drafting(state, [0])[0]
                accepted = int(rng.poisson(kept))
                state, _ = _played(policy, state, [0], [accepted])
                tokens += 1 + accepted * int(drafted)
                spent += 1.0 + drafted
            speeds[request] = tokens / spent
    before, soon, later = np.split(speed, [10, 13], axis=1)
    assert before.mean(axis=1).min() > 0.96
    assert soon.mean() > 1.1
    assert later.mean() > 1.3  # of 1.4


def test_short_requests_of_a_useless_drafter_do_not_try_it_each_anew() -> None:
    policy = Bypass()
    state, drafted = policy.start(1), np.zeros((50, 10), bool)
    for request in drafted:
        state = policy.joined(state, [0])
        for t in range(request.size):
            state, request[t : t + 1] = _played(policy, state, [0], [0], spent=1.5)
    assert 1.5 * drafted[5:].mean() < 0.05


def test_one_hard_round_of_many_does_not_stop_all() -> None:
    policy, slots = Bypass(expected=((0.1, 2.0),)), np.arange(32)
    state = policy.joined(policy.start(32), slots)
    state, _ = _played(policy, state, slots.tolist(), [2] * 32, spent=3.0)
    assert policy.drafting(state, slots).all()
    for _ in range(6):
        state, _ = _played(policy, state, slots.tolist(), [2] * 32, spent=3.0)
    assert not policy.drafting(state, slots).any()


def test_one_request_among_many_is_stopped_alone() -> None:
    policy, slots = Bypass(), [0, 1, 2, 3]
    state = policy.joined(policy.start(4), slots)
    drafted = np.ones((300, 4), bool)
    for t in range(300):
        state, drafted[t] = _played(policy, state, slots, [3, 3, 3, 0])
    assert drafted[:, :3].all()
    assert drafted[100:, 3].mean() < 0.1


def test_what_a_round_costs_is_shared_by_who_caused_it() -> None:
    spent = plain_rounds_spent(_TABLE, [6, 0, 0], [True, True, False]).together
    step = _TABLE.seconds(3, 9)
    draft = _TABLE.draft_cost(2) / 2
    assert spent[2] == 0
    assert spent[1] == pytest.approx(3 * draft / step[0])
    assert spent[0] == pytest.approx(3 * (draft + step[-1] - step[0]) / step[0])


def test_a_draft_step_costs_by_how_many_draft() -> None:
    spent = plain_rounds_spent(
        _TABLE, [[0, 0, 0], [0, 0, 0]], [[False, False, True], [True] * 3]
    )
    plain = _TABLE.seconds(3, 3)[0]
    costs = [_TABLE.draft_cost(1), _TABLE.draft_cost(3)]
    assert spent.together.sum(axis=1) * plain / 3 == pytest.approx(costs)


def test_who_stops_alone_saves_the_last_row_only() -> None:
    spent = plain_rounds_spent(_TABLE, [0] * 4, [True] * 4)
    plain = _TABLE.seconds(4, 4)[0]
    saved = _TABLE.draft_cost(4) - _TABLE.draft_cost(3)
    assert spent.alone == pytest.approx(4 * saved / plain)
    assert spent.alone[0] < spent.together[0]
    one = plain_rounds_spent(_TABLE, [7], [True])
    assert one.alone == pytest.approx(one.together)


@pytest.mark.parametrize("verified", range(8))
@pytest.mark.parametrize("drafts", [False, True])
def test_one_request_pays_for_its_round(verified: int, drafts: bool) -> None:
    lengths, drafted = [[verified * drafts]], [[drafts]]
    spent = plain_rounds_spent(_TABLE, lengths, drafted)
    plain, step = _TABLE.seconds(1, 1)[0], _TABLE.seconds(1, 8)[verified * drafts]
    assert spent.together == pytest.approx(
        (step + drafts * _TABLE.draft_cost(1)) / plain - 1, abs=1e-12
    )
    assert (spent.alone == spent.together).all()


def test_what_calibration_expects_outweighs_the_first_rounds() -> None:
    def drafted_rounds(expected: tuple[tuple[float, float], ...]) -> int:
        policy = Bypass(expected=expected)
        state, count = policy.start(1), 0
        for _ in range(12):
            state = policy.joined(state, [0])  # whose own account stays empty
            state, drafted = _played(policy, state, [0], [0], spent=1.5)
            count += int(drafted[0])
        return count

    assert (
        drafted_rounds(((1.0, 4.0),)) > drafted_rounds(()) > drafted_rounds(((-1.5, 0.1),)) == 1
    )


def test_expected_gain_is_the_mean_over_all_outcomes() -> None:
    conditional = [0.9, 0.5, 0.2]
    table = CostTable([1, 4], [1.0, 0.8], padded=False, requests=[1], draft_seconds=[0.3])
    length = int(fixed_length_speed(table, conditional, requests=1)[1:].argmax()) + 1
    reached = np.concatenate([[1.0], np.cumprod(conditional)[:length], [0.0]])
    chance = reached[:-1] - reached[1:]  # of exactly 0..length accepted drafts
    accepted = np.arange(length + 1)
    mean, variance = expected_gain(table, conditional, requests=1)
    spent = (table.draft_cost(1) + table.seconds(1, 1 + length)[-1]) / table.seconds(1, 1)[
        0
    ] - 1
    assert mean == pytest.approx(chance @ accepted - spent)
    assert variance == pytest.approx(chance @ accepted**2 - (chance @ accepted) ** 2)


def test_recommended_length_can_be_zero() -> None:
    costly = CostTable([1, 2, 3, 4], [1.0, 0.4, 0.3, 0.25])
    assert recommended_length(costly, [0.9, 0.9, 0.9], requests=1) == 0
    assert break_even_acceptance(costly, 3, requests=1) == pytest.approx(1.0)
    cheap = CostTable([1, 4], [1.0, 0.9])
    assert recommended_length(cheap, [0.9, 0.9, 0.9], requests=1) == 3
    with pytest.raises(RequestError, match="at least one drafted token, got 0"):
        break_even_acceptance(cheap, 0, requests=1)


def test_at_break_even_a_fixed_length_is_as_fast_as_plain_decoding() -> None:
    acceptance = break_even_acceptance(_TABLE, 7, requests=1)
    speed = fixed_length_speed(_TABLE, np.full(7, acceptance), requests=1)
    assert 0.3 < acceptance < 0.7
    assert speed[1:].max() == pytest.approx(speed[0], rel=1e-6)
