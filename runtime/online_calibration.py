# SPDX-License-Identifier: Apache-2.0
"""What live rounds teach: a logit offset per request, one per position for all, and drift.

Offsets b ~ N(0, variance) are random effects on top of the fitted calibration; after each round, or
after several together, they take one Newton step on the outcomes seen. They are applied to *later*
rounds, so whether a token is verified never depends on the round that proposes it (paper, section 3.2.2).

Legend: R requests of a round, M = requests × rounds, K = γ drafted tokens, S slots.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.runtime.calibration import Calibration, sigmoid

Floats = NDArray[np.float64]


# A head is trained and calibrated for sampling; greedy decoding accepts other drafts, by about a logit.
COMMON_VARIANCE = 0.25


class Outcomes(NamedTuple):
    """What rounds showed about what was said of them; 0 where nothing was seen. M = requests × rounds."""

    predicted: Floats  # [M, K] the confidence
    surprise: Floats  # [M, K] accepted (0 or 1) minus predicted
    information: Floats  # [M, K] variance c(1 − c) of the prediction
    seen: NDArray[np.bool_]  # [M, K] accepted positions and the first rejected one, if verified


def outcomes(confidence: Floats, verified: ArrayLike, accepted: ArrayLike) -> Outcomes:
    """From confidences [M, K] as they were used, ℓ [M] and accepted drafts [M] ≤ ℓ. NaN said nothing."""
    kept = np.asarray(accepted)
    position = np.arange(confidence.shape[1])
    seen = (position < np.minimum(verified, kept + 1)[:, None]) & ~np.isnan(confidence)
    predicted = np.where(seen, confidence, 0.0)
    surprise: Floats = np.where(seen, (position < kept[:, None]) - predicted, 0.0)
    return Outcomes(predicted, surprise, predicted * (1.0 - predicted), seen)


class RequestOffsets(NamedTuple):
    """What earlier rounds of each slot's request say; updates return a new value."""

    offset: Floats  # [S] added to every calibrated logit of the slot's request
    evidence: Floats  # [S] Σ c(1 − c) over the outcomes seen

    @classmethod
    def empty(cls, slots: int) -> "RequestOffsets":
        return cls(np.zeros(slots), np.zeros(slots))

    def released(self, slots: ArrayLike) -> "RequestOffsets":
        """Forget the requests that held ``slots``."""
        offset, evidence = self.offset.copy(), self.evidence.copy()
        offset[np.asarray(slots)] = evidence[np.asarray(slots)] = 0.0
        return RequestOffsets(offset, evidence)

    def updated(
        self,
        slots: ArrayLike,  # [M]; a slot stands once for each of its rounds
        shown: Outcomes,  # of what corrected_confidence said
        variance: float,
    ) -> "RequestOffsets":
        """The offsets after a round, or after several at once; variance 0 returns them unchanged."""
        if variance == 0:
            return self
        rows, size = np.asarray(slots), self.offset.size
        information = np.add.reduce(shown.information, axis=1)
        surprise = np.add.reduce(shown.surprise, axis=1)
        evidence = self.evidence + np.bincount(rows, information, size)
        step = np.bincount(rows, surprise, size) / (1.0 / variance + evidence)
        return RequestOffsets(self.offset + step, evidence)


class CommonOffsets(NamedTuple):
    """What earlier rounds of all requests say about each position, sampled and greedy requests apart."""

    offset: Floats  # [2, K] added to calibrated logits
    evidence: Floats  # [2, K] decayed Σ c(1 − c)
    memory: float = 0.999  # weight a round keeps at the next

    @classmethod
    def empty(cls, gamma: int) -> "CommonOffsets":
        return cls(np.zeros((2, gamma)), np.zeros((2, gamma)))

    def updated(
        self,
        greedy: NDArray[np.bool_],  # [M]
        shown: Outcomes,
        rounds: int = 1,
    ) -> "CommonOffsets":
        """The offsets after ``rounds`` rounds."""
        kind = np.array([~greedy, greedy], np.float64)  # [2, M]
        evidence = self.memory**rounds * self.evidence + kind @ shown.information
        step = (kind @ shown.surprise) / (1.0 / COMMON_VARIANCE + evidence)
        return CommonOffsets(self.offset + step, evidence, self.memory)


def corrected_confidence(
    calibration: Calibration,
    raw: ArrayLike,  # [R, K] confidence logits
    offsets: RequestOffsets,
    slots: ArrayLike,  # [R]
) -> Floats:  # [R, K]
    """Calibrated conditional confidences with each request's offset from its earlier rounds."""
    return sigmoid(calibration.logits(raw) + offsets.offset[np.asarray(slots)][:, None])


class Drift(NamedTuple):
    """Predicted against observed conditional acceptance of recent rounds, by position."""

    predicted: Floats  # [K] decayed sums over the outcomes seen
    observed: Floats  # [K]
    outcomes: Floats  # [K]
    memory: float = 0.999  # weight an outcome keeps each round; 0.999: the last thousand or so

    @classmethod
    def empty(cls, gamma: int, memory: float = 0.999) -> "Drift":
        return cls(np.zeros(gamma), np.zeros(gamma), np.zeros(gamma), memory)

    def updated(self, shown: Outcomes, rounds: int = 1) -> "Drift":
        """The sums after ``rounds`` rounds."""
        kept = self.memory**rounds
        predicted = np.add.reduce(shown.predicted, axis=0)
        return Drift(
            kept * self.predicted + predicted,
            kept * self.observed + predicted + np.add.reduce(shown.surprise, axis=0),
            kept * self.outcomes + np.add.reduce(shown.seen, axis=0),
            self.memory,
        )

    def gap(self) -> Floats:
        """Mean prediction minus mean outcome, [K]; NaN where nothing was seen."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((self.predicted - self.observed) / self.outcomes)

    def has_drifted(self, tolerance: float = 0.05) -> bool:
        """Whether a position is off by ``tolerance`` and by four standard errors."""
        with np.errstate(invalid="ignore", divide="ignore"):
            error = 0.5 / np.sqrt(self.outcomes)
        return bool(np.any(np.abs(self.gap()) > np.maximum(tolerance, 4 * error)))
