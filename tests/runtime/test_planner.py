# SPDX-License-Identifier: Apache-2.0
"""What a planner remembers: the same for one request as for a row of many, and what it is judged by alone."""

import numpy as np
import pytest

from dspark_trt.runtime.backends.interface import DraftOutput
from dspark_trt.runtime.bypass import Bypass
from dspark_trt.runtime.calibration import Calibration
from dspark_trt.runtime.cost_table import CostTable
from dspark_trt.runtime.planner import DraftedRequests, PlannedRound, Planner
from dspark_trt.runtime.scheduler import Algorithm1, Fixed

GAMMA = 7
# A step over 8 tokens costs 1.6 steps of one, drafting 0.4.
_TABLE = CostTable(
    [1, 8], [1.0, 1 / 1.6], padded=False, requests=[1, 64], draft_seconds=[0.4, 8.0]
)


def _planner(slots: int, *, bypass: Bypass | None = None) -> Planner:
    planner = Planner(
        Algorithm1(_TABLE),
        calibration=Calibration.identity(GAMMA),
        slots=slots,
        table=_TABLE,
        bypass=bypass,
    )
    for slot in range(slots):
        planner.joined(slot, greedy=slot % 2 == 0)
    return planner


def _planned(planner: Planner, slots: np.ndarray, scores: np.ndarray) -> PlannedRound:
    """A round in which all of ``slots`` draft, by confidence logits [R, K]."""
    planner.drafting(slots)
    requests = DraftedRequests(
        rows=np.arange(slots.size),
        ids=slots,
        slots=slots,
        drafted=np.ones(slots.size, np.bool_),
        limits=np.full(slots.size, GAMMA),
        temperature=np.zeros(slots.size, np.float32),
        context_tokens=np.full(slots.size, 100),
    )
    tokens = np.zeros(scores.shape, np.int64)
    logits = np.zeros((*scores.shape, 0), np.float32)
    return planner.plan(requests, DraftOutput(tokens, logits, scores.astype(np.float32)))


def _learned(planner: Planner, planned: PlannedRound, accepted: list[int]) -> None:
    everyone = np.ones(len(accepted), np.bool_)
    context = np.full(len(accepted), 100)
    planner.learn(planned, everyone, planned.lengths, np.array(accepted), context)


def test_confidences_of_one_request_are_those_of_its_row_among_many() -> None:
    random = np.random.default_rng(0)
    many, scores = _planner(4), random.normal(1.0, 2.0, (4, GAMMA))
    scores[1, 3], scores[2, 0] = np.nan, np.inf
    for _ in range(70):  # corrections of their own
        planned = _planned(many, np.arange(4), np.nan_to_num(scores, posinf=30.0))
        _learned(many, planned, [min(2, length) for length in planned.lengths.tolist()])
    many.drafting(np.array([0]))  # others run now: what they showed is learned
    together = _planned(many, np.arange(4), scores).confidence
    assert together is not None
    for slot in range(4):
        alone = _planned(many, np.array([slot]), scores[slot : slot + 1]).confidence
        assert alone is not None
        np.testing.assert_allclose(alone[0], together[slot], rtol=1e-12)


@pytest.mark.parametrize(("logit", "goes_on"), [(3.5, True), (-1.0, False)])
def test_alone_a_round_is_also_judged_by_what_it_promised(logit: float, goes_on: bool) -> None:
    planner, slots = _planner(1, bypass=Bypass()), np.zeros(1, np.int64)
    for _ in range(3):  # of bad luck, or of a drafter that knew it
        _learned(planner, _planned(planner, slots, np.full((1, GAMMA), logit)), [0])
    assert planner.drafting(slots)[0] == goes_on


def test_confidences_that_are_no_numbers_promise_nothing() -> None:
    planner, slots = _planner(1, bypass=Bypass()), np.zeros(1, np.int64)
    _learned(planner, _planned(planner, slots, np.full((1, GAMMA), np.nan)), [0])
    for _ in range(40):
        planner.drafting(slots)
        _learned(planner, _planned(planner, slots, np.full((1, GAMMA), 4.0)), [GAMMA])
    assert planner.bypassed == {"requests": 0, "all": 0, "rounds_to_next_probe": 0}


def test_a_round_without_numbers_leaves_what_others_showed() -> None:
    planner, slots = _planner(1), np.zeros(1, np.int64)
    planner.scheduler = Fixed(GAMMA)
    for logit in (2.0, np.nan, 2.0):
        _learned(planner, _planned(planner, slots, np.full((1, GAMMA), logit)), [3])
    assert planner.drift.outcomes[0] == pytest.approx(2, rel=0.01)
    assert planner.drift.gap()[0] == pytest.approx(1 / (1 + np.exp(-2.0)) - 1)


def test_a_scheduler_that_verifies_nothing_drafts_nothing_whatever_the_bypass_thinks() -> None:
    planner, slots = _planner(3, bypass=Bypass()), np.arange(3)
    assert planner.drafting(slots).all()
    planner.scheduler = Fixed(0)
    assert not any(planner.drafting(slots).any() for _ in range(60))


def test_rounds_of_one_scheduler_are_learned_before_the_next_takes_over() -> None:
    """They hold confidences of different kinds."""
    planner, slots = _planner(2), np.arange(2)
    scores = np.full((2, GAMMA), 2.0)
    _learned(planner, _planned(planner, slots, scores), [1, 1])
    planner.scheduler = Fixed(GAMMA)
    _learned(planner, _planned(planner, slots, scores), [1, 1])
    planner.scheduler = Algorithm1(_TABLE)
    assert planner.drift.outcomes[0] == pytest.approx(4, rel=0.01)
