# SPDX-License-Identifier: Apache-2.0
"""What happened in each round of a request that asks for it, for people who want to see it."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from dspark_trt.runtime.engine import Engine, RoundObserver
from dspark_trt.runtime.request import Request
from dspark_trt.runtime.round_report import RoundReport


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round of one request; every event with tokens has one."""

    drafted: bool
    verified: int  # ℓ
    accepted: int  # of them
    survival: (
        tuple[float, ...] | None
    )  # [K] predicted; None: not drafted, or no confidence head
    reason: str  # why ℓ
    requests: int  # in the round
    target_rows: int
    draft_seconds: float
    round_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest(Request):
    """`rounds` is filled by the engine's thread and emptied by the reader, in the order of the events."""

    rounds: deque[RoundTrace] = field(default_factory=deque)


def round_tracer(engine: Engine) -> RoundObserver:
    """An observer that fills the rounds of traced requests and costs others nothing."""

    def observe(report: RoundReport) -> None:
        for row, sequence in enumerate(report.sequences):
            if isinstance(sequence.request, TracedRequest) and report.committed[row]:
                sequence.request.rounds.append(_trace(engine, report, row))

    return observe


def _trace(engine: Engine, report: RoundReport, row: int) -> RoundTrace:
    drafted = bool(report.drafted[row])
    planned = report.planned
    return RoundTrace(
        drafted=drafted,
        verified=int(report.lengths[row]),
        accepted=int(report.accepted[row]) if drafted else 0,
        survival=_survival(engine, report, row) if drafted else None,
        reason=planned.reason if drafted and planned is not None else report.undrafted_reason,
        requests=len(report.sequences),
        target_rows=report.target_rows,
        draft_seconds=report.seconds["draft"],
        round_seconds=sum(report.seconds.values()),
    )


def _survival(engine: Engine, report: RoundReport, row: int) -> tuple[float, ...] | None:
    """Calibrated: what the scheduler used, or would have used if it had asked."""
    planned, index = report.planned, int(report.drafted[:row].sum())
    if planned is not None and planned.confidence is not None:
        confidence = planned.confidence[index]
    elif report.draft is not None and report.draft.confidence_logits is not None:
        logits = report.draft.confidence_logits[row : row + 1]
        confidence = engine.planner.calibration.confidence(logits)[0]
    else:
        return None
    survival = confidence.cumprod()
    return tuple(survival.tolist()) if np.isfinite(survival).all() else None
