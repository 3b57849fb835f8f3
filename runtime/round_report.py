# SPDX-License-Identifier: Apache-2.0
"""What a round did and what its stages took: all that metrics, traces and benchmarks learn about it."""

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.backends.interface import CountsWaits, DraftOutput
from dspark_trt.runtime.planner import PlannedRound
from dspark_trt.runtime.sequence import Sequence

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]

STAGES = ("draft", "schedule", "target", "verify", "commit")


_NO_WAITS = dict.fromkeys(STAGES, 0)


class Stages:
    """Seconds of a round by stage, and how often the host waited for the device."""

    def __init__(self, counter: CountsWaits | None) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.waits = _NO_WAITS if counter is None else _NO_WAITS.copy()
        self._counter = counter
        self._waited = 0 if counter is None else counter.waits
        self._since = time.perf_counter()

    def end(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] += now - self._since
        self._since = now
        if self._counter is not None:
            waited = self._counter.waits
            self.waits[stage] += waited - self._waited
            self._waited = waited

    def on_device(self, draft: float, step: float) -> None:
        """Behind a launched round: what the device took, of the time that the host spent waiting for it."""
        spent = self.seconds["target"] + self.seconds["commit"]
        self.seconds |= {
            "draft": draft,
            "target": step,
            "commit": max(spent - draft - step, 0.0),
        }


class RoundReport(NamedTuple):
    """What a round did, for metrics and traces. B requests, in row order."""

    sequences: tuple[Sequence, ...]
    decoding: Bools  # [B]: not prefilling
    drafted: Bools  # [B]
    lengths: Ints  # [B] ℓ_r
    accepted: Ints  # [B] accepted drafts; 0 where a request is prefilling
    committed: Ints  # [B] tokens
    target_rows: int
    draft: DraftOutput | None  # of the first rows; valid until the next round
    temperature: Floats  # [B]
    planned: PlannedRound | None
    undrafted_reason: str  # why requests that may draft did not
    seconds: dict[str, float]  # by stage
    waits: dict[str, int]  # by stage; 0 where steps are over when they return
