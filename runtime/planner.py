# SPDX-License-Identifier: Apache-2.0
"""From confidence logits to verification lengths: what the engine's scheduler remembers between rounds.

Schedulers are pure; this is where their past lives: the bypass accounts, each request's own correction
from its earlier rounds, and the confidences of two rounds ago. Slots name requests for as long as they run.

Legend: R requests of a round, K = γ drafted tokens.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.break_even import plain_rounds_spent
from dspark_trt.runtime.bypass import Bypass
from dspark_trt.runtime.calibration import Calibration
from dspark_trt.runtime.cost_table import CostTable
from dspark_trt.runtime.online_calibration import (
    Drift,
    RequestOffsets,
    corrected_confidence,
    updated,
)
from dspark_trt.runtime.scheduler import Asynchronous, ConfidenceHistory, Fixed, Scheduler

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


_UNREAD_ROUNDS = (
    64  # drift is read by people and scrapers: rounds need not pay for it one by one
)


class PlannedRound(NamedTuple):
    lengths: Ints  # [R] ℓ_r
    confidence: (
        Floats | None
    )  # [R, K] calibrated; None: nobody asked for it, or there is no head
    reason: str


class Planner:
    """One scheduler over the slots of one engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        calibration: Calibration,
        slots: int,
        table: CostTable | None = None,
        bypass: Bypass | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.calibration = calibration
        self.table = table
        self._drift = Drift.empty(calibration.gamma)
        self._unread: list[tuple[Floats, Ints, Ints]] = []  # rounds not yet in the drift
        self._bypass = (
            bypass if table is not None else None
        )  # what drafting costs must be known
        self._accounts = Bypass().start(slots)
        self._offsets = RequestOffsets.empty(slots)
        self._history = ConfidenceHistory()

    @property
    def gamma(self) -> int:
        return self.calibration.gamma

    @property
    def drift(self) -> Drift:
        """Predicted against observed acceptance of recent rounds."""
        for confidence, lengths, accepted in self._unread:
            self._drift = self._drift.updated(confidence, lengths, accepted)
        self._unread.clear()
        return self._drift

    def joined(self, slot: int) -> None:
        """A new request has `slot`: nothing is known about it."""
        if self._bypass is not None:
            self._accounts = self._bypass.joined(self._accounts, [slot])
        self._offsets = self._offsets.released([slot])

    def drafting(self, slots: Ints) -> Bools:  # [R] -> [R]
        """Whose drafting may pay this round."""
        if self._bypass is None:
            return np.ones(len(slots), np.bool_)
        return self._bypass.drafting(self._accounts, slots)

    def plan(
        self,
        slots: Ints,
        confidence_logits: NDArray[np.floating] | None,
        limits: Ints,
        context: float,
    ) -> PlannedRound:
        """Lengths of the requests in `slots`, at most `limits`, with a mean context of so many tokens."""
        if confidence_logits is None:
            return PlannedRound(
                self.scheduler.plan(np.ones((len(slots), self.gamma)), limits=limits),
                None,
                "the drafter has no confidence head",
            )
        confidence = corrected_confidence(
            self.calibration, confidence_logits, self._offsets, slots
        )
        if isinstance(self.scheduler, Asynchronous):
            stale = self._history.stale(slots)
            plan = self.scheduler.decide(
                confidence, stale=stale, limits=limits, context_tokens=context
            )
            self._history = self._history.push(slots, confidence)
            return PlannedRound(plan.lengths, confidence, plan.reason)
        lengths = self.scheduler.plan(confidence, limits=limits, context_tokens=context)
        reason = "fixed" if isinstance(self.scheduler, Fixed) else "planned"
        return PlannedRound(lengths, confidence, reason)

    def learn(
        self,
        slots: Ints,
        drafted: Bools,
        planned: PlannedRound | None,
        lengths: Ints,
        accepted: Ints,
        context: float,
    ) -> None:
        """What the round showed; used from the next round on, never in this one."""
        if self._bypass is not None and self.table is not None:
            spent = plain_rounds_spent(self.table, lengths, drafted, context_tokens=context)
            self._accounts = self._bypass.updated(
                self._accounts, slots, drafted=drafted, spent=spent, accepted=accepted
            )
        if planned is None or planned.confidence is None or not drafted.any():
            return
        rows = np.flatnonzero(drafted)
        self._unread.append((planned.confidence, lengths[rows], accepted[rows]))
        if len(self._unread) == _UNREAD_ROUNDS:
            _ = self.drift
        self._offsets = updated(
            self._offsets,
            slots[rows],
            planned.confidence,
            lengths[rows],
            accepted[rows],
            self.calibration.request_variance,
        )
