# SPDX-License-Identifier: Apache-2.0
"""Rounds that are launched at once, where the backend has them: which rounds can be, and whose state the device
holds meanwhile.

The device keeps anchors, lengths and waiting taps of the first rows; the host follows all of it from the
committed tokens but the taps, and fetches those only when rows change hands or a round has to wait in between.
"""

import logging
from collections import Counter
from collections.abc import Sequence as Listed

import numpy as np

from dspark_trt.errors import BackendError
from dspark_trt.runtime.backends.interface import (
    Committed,
    DecodingRows,
    DeviceRounds,
    DraftOutput,
    RoundInputs,
    RoundOnTheWay,
)
from dspark_trt.runtime.planner import DraftedRequests, Planner
from dspark_trt.runtime.rows import RowTable
from dspark_trt.runtime.scheduler import Asynchronous, Budget
from dspark_trt.runtime.sequence import Sequence

_log = logging.getLogger(__name__)

PROMPT = "a prompt is read"
PROCESSED = "penalties, biases, masks or log-probabilities are worked out on the host"
UNDRAFTED = "not every request drafts"
TOO_EARLY = "confidences two rounds old are not there yet"
NO_HEAD = "the drafter has no confidence head"


class LaunchedRounds:
    """Runs the rounds of one engine that can be launched without the host reading anything in between."""

    def __init__(
        self, device: DeviceRounds, planner: Planner, table: RowTable, *, has_confidence: bool
    ) -> None:
        self.rounds = 0
        self.waiting: Counter[str] = Counter()  # other rounds, by why they had to wait
        self._device, self._planner, self._table = device, planner, table
        self._has_confidence = has_confidence
        self._held = 0  # first rows that the device keeps
        device.calibrate(planner.calibration.slope)

    def budget(
        self,
        sequences: Listed[Sequence],
        requests: DraftedRequests,
    ) -> Budget | None:
        """What a round of the first rows verifies, if it can be launched; else the reason is counted."""
        budget = None
        if any(sequence.is_prefilling for sequence in sequences):
            reason = PROMPT
        elif not requests.drafted.all():
            reason = UNDRAFTED
        elif any(sequence.request.uses_processors for sequence in sequences):
            reason = PROCESSED
        else:
            budget, reason = self._known_budget(requests)
        if budget is None:
            if reason not in self.waiting:
                _log.info("rounds wait for the device in between: %s", reason)
            self.waiting[reason] += 1
        return budget

    def _known_budget(self, requests: DraftedRequests) -> tuple[Budget | None, str]:
        scheduler = self._planner.scheduler
        if isinstance(scheduler, Asynchronous) and not self._has_confidence:
            return None, NO_HEAD
        budget = self._planner.budget(requests)
        if isinstance(scheduler, Asynchronous):
            return budget, TOO_EARLY
        return budget, f"scheduler {type(scheduler).__name__} asks this round's confidences"

    def launch(self, requests: DraftedRequests, budget: Budget) -> RoundOnTheWay:
        """Launch a round of the first rows and return at once.

        Raises:
            BackendError: it could not be launched. Nothing was committed and the round can be run again.
        """
        count, planner, table = len(requests.rows), self._planner, self._table
        if self._held < count:
            self._take(count)
        limits = requests.limits
        if budget.longest is not None:
            limits = np.minimum(limits, budget.longest)
        inputs = RoundInputs(
            budget=min(budget.drafts, int(limits.sum())),
            limits=limits,
            shifts=planner.calibration.offset + planner.corrections(requests.slots),
            draft_uniforms=table.draft_uniforms[:count],
            verify_uniforms=table.verify_uniforms[:count],
        )
        try:
            return self._device.launch(inputs)
        except BackendError:
            self.bring_home()
            raise

    def read(self, way: RoundOnTheWay, count: int) -> Committed:
        """Wait for what a round committed; waiting taps went to the drafter's cache.

        Raises:
            BackendError: it did not come. The host's rows count as they were before the round, which can be run
                again: their waiting taps are gone, which costs accepted drafts but no token.
        """
        try:
            committed = way.read()
        except BaseException:
            self._held = 0  # the device went on without us
            raise
        self.rounds += 1
        self._table.taps_are_cached(count)
        return committed

    def drafted(self, count: int) -> DraftOutput:
        """Drafts of the last round."""
        return self._device.drafted(count)

    def _take(self, count: int) -> None:
        self.bring_home()
        table = self._table
        self._device.take(
            DecodingRows(*(getattr(table, name)[:count] for name in DecodingRows._fields))
        )
        self._held = count

    def bring_home(self) -> None:
        """The host keeps all rows again: before they move, and before a round that needs their taps."""
        if self._held:
            self._table.new_taps[: self._held] = self._device.new_taps(self._held)
            self._held = 0
