# SPDX-License-Identifier: Apache-2.0
"""From a draft step to verification lengths: what the engine's scheduler remembers between rounds.

Schedulers are pure; this is where their past lives: the bypass accounts, each request's own correction
from its earlier rounds, and the confidences of two rounds ago. Slots name requests for as long as they
run, ids for ever.

A round may take a millisecond, and learning from it a third of one. So several are learned from together: the longer the
same requests have been watched, the less one more says. Only the bypass counts one by one while it is unknown
whether drafting pays.

Legend: R decoding requests of a round, D of them drafted, n rounds, K = γ drafted tokens, V vocabulary.
"""

from dataclasses import replace
from functools import lru_cache
from math import tanh
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.backends.interface import DraftOutput
from dspark_trt.runtime.break_even import expected_gain, plain_rounds_spent
from dspark_trt.runtime.bypass import Bypass
from dspark_trt.runtime.calibration import Calibration
from dspark_trt.runtime.cost_model import CostModel, read_only
from dspark_trt.runtime.estimator import Estimator, draft_probabilities
from dspark_trt.runtime.online_calibration import (
    CommonOffsets,
    Drift,
    Outcomes,
    RequestOffsets,
    outcomes,
)
from dspark_trt.runtime.scheduler import (
    FIXED,
    Asynchronous,
    Budget,
    ConfidenceHistory,
    Fixed,
    Plan,
    Scheduler,
)
from dspark_trt.runtime.survival import survival_from_confidence

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

BYPASSED = "drafting does not pay: bypassed"
_LEAST_TOGETHER, _MOST_TOGETHER = 8, 64  # rounds
# What confidences say of a round varies less than what it accepts: alone, a request is judged by this share of it.
_FORESEEN = 0.3


class DraftedRequests(NamedTuple):
    """The decoding requests of a round whose draft step is done."""

    rows: Ints  # [R] of the draft output
    ids: Ints  # [R]
    slots: Ints  # [R]
    drafted: Bools  # [R]
    limits: Ints  # [R] most drafts to verify; 0 where not drafted
    temperature: NDArray[np.float32]  # [R]
    context_tokens: Ints  # [R] rows that attention pays for; [1] if all pay for as many


class PlannedRound(NamedTuple):
    lengths: Ints  # [R] ℓ_r
    reason: str
    confidence: Floats | None  # [D, K] calibrated; None: nobody asked for it
    logits: NDArray[np.floating] | None  # [D, K] raw, where nobody asked for more


class _Round(NamedTuple):
    """A round to learn from."""

    planned: PlannedRound
    drafted: Bools  # [R]
    lengths: Ints  # [R]
    accepted: Ints  # [R]
    context_tokens: Ints  # [R] or [1]


@lru_cache(maxsize=512, typed=True)
def all_alike(requests: int, value: int) -> NDArray[Any]:
    """One value for each of so many requests, bool or int64: the same read-only array every time."""
    return read_only(np.full(requests, value))


def patience(watched: int) -> int:
    """How many rounds of the same requests are learned from together, after so many of them."""
    return min(max(_LEAST_TOGETHER, watched // 2), _MOST_TOGETHER)


class Planner:
    """One scheduler over the slots of one engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        calibration: Calibration,
        slots: int,
        table: CostModel | None = None,
        bypass: Bypass | None = None,
    ) -> None:
        self._unlearned: list[_Round] = []  # of one scheduler
        self._unaccounted = 0  # the last so many of them
        self.scheduler = scheduler
        self.calibration = calibration
        self.table = table
        self._estimator = calibration.estimator or Estimator.unfitted(calibration.gamma)
        self._bypass = None
        if bypass is not None and table is not None:  # what drafting costs must be known
            self._bypass = replace(bypass, expected=_expected(table, calibration, slots))
        self._accounts = Bypass().start(slots)
        self._offsets = RequestOffsets.empty(slots)
        self._common = CommonOffsets.empty(calibration.gamma)
        self._greedy = np.zeros(slots, np.bool_)
        self._scale = 0.5 * calibration.slope
        self._shift = self._new_shift()
        self._history = ConfidenceHistory()
        self._drift = Drift.empty(calibration.gamma)
        self._slots = np.zeros(0, np.int64)  # whose rounds wait to be learned from
        self._watched = 0  # rounds since these came together
        self._rest = self._rested = 0  # rounds without drafts: still to come, not yet accounted
        self._is_known = True  # whether drafting pays at this load
        self._stopped = np.zeros(0, np.bool_)  # [R] whose drafting does not
        self._some_stopped = False

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Scheduler) -> None:
        self._learn()
        self._scheduler = scheduler
        fixed = scheduler if isinstance(scheduler, Fixed) else None
        self._drafts = fixed is None or fixed.k > 0
        # Nothing is asked of confidences then; their cost is saved.
        self._fixed = None if fixed and fixed.max_tokens_per_step is not None else fixed
        self._asynchronous = scheduler if isinstance(scheduler, Asynchronous) else None

    @property
    def undrafted_reason(self) -> str:
        """Why a request that may draft does not."""
        return BYPASSED if self._drafts else FIXED

    @property
    def gamma(self) -> int:
        return self.calibration.gamma

    @property
    def drift(self) -> Drift:
        """Predicted against observed acceptance of recent rounds, those not yet learned from included."""
        rounds = self._unlearned
        found = self._shown(rounds)
        return self._drift if found is None else self._drift.updated(found[1], len(rounds))

    @property
    def bypassed(self) -> dict[str, int] | None:
        """Who has stopped drafting, for status; None: nobody ever does."""
        if self._bypass is None:
            return None
        rest = self._bypass.rest(self._accounts, self._slots)
        return {
            "requests": int(self._bypass.stopped(self._accounts, self._slots).sum()),
            "all": int(rest > 0),
            "rounds_to_next_probe": max(rest - self._rested, 0),
        }

    def joined(self, slot: int, *, greedy: bool) -> None:
        """A new request has ``slot``: nothing is known about it."""
        self._learn()
        self._watched = 0
        if self._bypass is not None:
            self._accounts = self._bypass.joined(self._accounts, [slot])
        self._offsets = self._offsets.released([slot])
        self._greedy[slot] = greedy
        self._shift = self._new_shift()

    def drafting(self, slots: Ints) -> Bools:  # [R] -> [R]
        """Whose drafting may pay this round."""
        if slots is not self._slots and slots.tobytes() != self._slots.tobytes():
            self._learn()
            self._account_for_rest()
            self._slots, self._rest, self._watched = slots, 0, 0
            self._look_up_accounts()
        is_sure = self._is_known and not self._some_stopped
        if not self._drafts or self._bypass is None or is_sure:
            return all_alike(len(slots), self._drafts)
        if self._rest == 0:
            self._account_for_rest()
            drafts = self._bypass.drafting(self._accounts, slots)
            if drafts.any():
                return drafts
            self._rest = max(self._bypass.rest(self._accounts, slots), 1)
        self._rest, self._rested = self._rest - 1, self._rested + 1
        return all_alike(len(slots), False)

    def plan(self, requests: DraftedRequests, draft: DraftOutput) -> PlannedRound:
        """Lengths of the requests, at most their limits."""
        rows, ids, slots = requests.rows, requests.ids, requests.slots
        if not all(requests.drafted.tolist()):
            rows, ids, slots = (each[requests.drafted] for each in (rows, ids, slots))
        scores = draft.confidence_logits
        if self._fixed is not None:
            lengths = requests.limits
            if self._fixed.k < self.gamma:
                lengths = np.minimum(lengths, self._fixed.k)
            raw = None if scores is None else scores.take(rows, axis=0)
            return PlannedRound(lengths, FIXED, None, raw)
        logits = (
            self._estimated(draft, rows, requests)
            if scores is None
            else scores.take(rows, axis=0)
        )
        confidence = self._confidence(logits, slots)
        plan = self._decide(requests, ids, confidence)
        return PlannedRound(plan.lengths, plan.reason, confidence, None)

    def budget(self, requests: DraftedRequests) -> Budget | None:
        """What a round in which all requests draft may verify, if its own confidences do not decide that."""
        if self._fixed is not None:
            lengths = np.minimum(requests.limits, self._fixed.k)
            return Budget(int(lengths.sum()), longest=self._fixed.k)
        if self._asynchronous is None:
            return None
        stale = self._history.stale(requests.ids)
        if stale is None:
            return None
        context = self._context(requests.context_tokens)
        return self._asynchronous.budget(stale, limits=requests.limits, context_tokens=context)

    def corrections(self, slots: Ints) -> Floats:  # [R] -> [R, K]
        """What is added to the calibrated confidence logits of each request."""
        common = self._common.offset[self._greedy[slots].astype(np.int64)]
        return self._offsets.offset[slots][:, None] + common

    def planned(
        self,
        requests: DraftedRequests,
        lengths: Ints,  # [R]
        scores: NDArray[np.floating] | None,  # [R, K] raw confidence logits
    ) -> PlannedRound:
        """The round that shared its budget out by itself; later rounds know its confidences."""
        if self._asynchronous is None or scores is None:
            return PlannedRound(lengths, FIXED, None, scores)
        confidence = self._confidence(scores, requests.slots)
        self._history = self._history.push(requests.ids, confidence)
        plan = self._asynchronous.shared_out(lengths, requests.limits)
        return PlannedRound(plan.lengths, plan.reason, confidence, None)

    def _confidence(self, logits: NDArray[np.floating], slots: Ints) -> Floats:  # [D, K]
        """Calibrated and corrected, σ(x) = (1 + tanh(x / 2)) / 2, with few passes over few numbers."""
        if len(slots) == 1:  # a loop over a handful of numbers costs less than arrays do
            shift = self._shift[slots.item()].tolist()
            own = zip(logits[0].tolist(), self._scale.tolist(), shift, strict=True)
            return np.array([[0.5 + 0.5 * tanh(x * scale + added) for x, scale, added in own]])
        values = logits * self._scale
        values += self._shift[slots]
        np.tanh(values, out=values)
        values *= 0.5
        values += 0.5
        return values

    def _estimated(
        self, draft: DraftOutput, rows: Ints, requests: DraftedRequests
    ) -> Floats:  # [D, K]
        """Confidence logits from the drafter's own probabilities."""
        logits, tokens = draft.logits[rows], draft.tokens[rows]
        temperature = requests.temperature[requests.drafted]
        return self._estimator.logits(*draft_probabilities(logits, tokens, temperature))

    def _decide(self, requests: DraftedRequests, ids: Ints, confidence: Floats) -> Plan:
        limits, context = requests.limits, self._context(requests.context_tokens)
        everyone = self._for_all(confidence, requests.drafted)
        if self._asynchronous is None:
            return self.scheduler.decide(everyone, limits=limits, context_tokens=context)
        stale = self._history.stale(ids)
        self._history = self._history.push(ids, confidence)
        if stale is not None:
            stale = self._for_all(stale, requests.drafted)
        return self._asynchronous.decide(
            everyone, stale=stale, limits=limits, context_tokens=context
        )

    def _context(self, tokens: Ints) -> float:  # [R] or [1]
        """The context length that costs are asked for."""
        if tokens.size == 1:
            return float(tokens[0])
        pays_longest = self.table is not None and self.table.pays_longest
        return float(tokens.max() if pays_longest else tokens.mean())

    def _for_all(self, values: Floats, drafted: Bools) -> Floats:  # [D, K] -> [R, K]
        """Rows of those that did not draft are zero: their rows of the step count, they do not."""
        if len(values) == drafted.size:
            return values
        spread = np.zeros((drafted.size, self.gamma))
        spread[drafted] = values
        return spread

    def learn(
        self,
        planned: PlannedRound,
        drafted: Bools,  # [R]
        lengths: Ints,  # [R]
        accepted: Ints,  # [R]
        context_tokens: Ints,  # [R] or [1]
    ) -> None:
        """What the round of the slots last given to ``drafting`` showed; later rounds use it."""
        self._unlearned.append(_Round(planned, drafted, lengths, accepted, context_tokens))
        self._watched += 1
        self._unaccounted += 1
        # Without a bypass only drift learns from fixed lengths, and it is read by people.
        is_patient = self._fixed is not None and self._bypass is None
        together = _MOST_TOGETHER if is_patient else patience(self._watched)
        if len(self._unlearned) >= together:
            self._learn()
        elif not self._is_known or self._is_probe(drafted):
            self._account()

    def _is_probe(self, drafted: Bools) -> bool:
        return self._some_stopped and bool((drafted & self._stopped).any())

    def _learn(self) -> None:
        """From the rounds that wait: accounts, drift and corrections."""
        if not self._unlearned:
            return
        self._account()
        rounds, self._unlearned = self._unlearned, []
        found = self._shown(rounds)
        if found is None:
            return
        drafted, shown = found
        self._drift = self._drift.updated(shown, len(rounds))
        if self._fixed is None:
            self._correct(drafted, shown)

    def _account(self) -> None:
        """What the rounds since the last time gained: all that the next ``drafting`` asks for."""
        rounds = self._unlearned[len(self._unlearned) - self._unaccounted :]
        self._unaccounted = 0
        if self._bypass is None or self.table is None or not rounds:
            return
        drafted, lengths, accepted = _stacked(rounds)
        context = self._context(rounds[-1].context_tokens)
        spent = plain_rounds_spent(self.table, lengths, drafted, context_tokens=context)
        kept = accepted.astype(np.float64)
        confidence = self._confidences(rounds) if self._slots.size == 1 else None
        if confidence is not None:
            foreseen = _expected_accepted(confidence, lengths[drafted])
            kept[drafted] += _FORESEEN * (foreseen - kept[drafted])
        self._accounts = self._bypass.updated(
            self._accounts, self._slots, drafted=drafted, spent=spent, accepted=kept
        )
        self._look_up_accounts()

    def _look_up_accounts(self) -> None:
        if self._bypass is not None:
            self._is_known = self._bypass.knows(self._accounts, self._slots.size)
            self._stopped = self._bypass.stopped(self._accounts, self._slots)
            self._some_stopped = bool(self._stopped.any())

    def _shown(self, rounds: list[_Round]) -> tuple[Bools, Outcomes] | None:
        """Who drafted [n, R], and what these showed, round by round; None if their drafter has no scores."""
        confidence = self._confidences(rounds)
        if confidence is None:
            return None
        drafted, lengths, accepted = _stacked(rounds)
        return drafted, outcomes(confidence, lengths[drafted], accepted[drafted])

    def _confidences(self, rounds: list[_Round]) -> Floats | None:  # [M, K]
        """Of requests that drafted, round by round; None if their drafter has no scores."""
        known = [r.planned.confidence for r in rounds if r.planned.confidence is not None]
        if known:
            return np.concatenate(known)
        raw = [r.planned.logits for r in rounds if r.planned.logits is not None]
        return self.calibration.confidence(np.concatenate(raw)) if raw else None

    def _correct(self, drafted: Bools, shown: Outcomes) -> None:
        """Offsets of requests and positions."""
        slots = self._slots[drafted.nonzero()[1]]
        variance = self.calibration.request_variance
        self._offsets = self._offsets.updated(slots, shown, variance)
        self._common = self._common.updated(self._greedy[slots], shown, len(drafted))
        self._shift = self._new_shift()

    def _new_shift(self) -> Floats:  # [S, K]
        """Half of what is added to the scaled logits of each slot's request."""
        return 0.5 * (self.calibration.offset + self.corrections(np.arange(self._greedy.size)))

    def _account_for_rest(self) -> None:
        if self._bypass is not None and self._rested:
            self._accounts = self._bypass.rested(self._accounts, self._slots, self._rested)
            self._rested = 0


def _stacked(rounds: list[_Round]) -> tuple[Bools, Ints, Ints]:  # [n, R] each
    """Who drafted, verification lengths and accepted drafts."""
    shape = (len(rounds), -1)
    return (
        np.concatenate([each.drafted for each in rounds]).reshape(shape),
        np.concatenate([each.lengths for each in rounds]).reshape(shape),
        np.concatenate([each.accepted for each in rounds]).reshape(shape),
    )


def _expected_accepted(confidence: Floats, lengths: Ints) -> Floats:  # [M, K], [M] -> [M]
    """Drafts that confidences say a round keeps: Σ a_k over those verified."""
    survival = survival_from_confidence(confidence)
    within = np.arange(confidence.shape[1]) < lengths[:, None]
    return np.asarray(np.add.reduce(survival * within, axis=1))


def _expected(
    table: CostModel, calibration: Calibration, slots: int
) -> tuple[tuple[float, float], ...]:
    """What calibration says drafting gains at 1, 2, 4, .. requests."""
    if calibration.acceptance is None:
        return ()
    loads = [1 << level for level in range(slots.bit_length())]
    return tuple(expected_gain(table, calibration.acceptance, requests=n) for n in loads)
