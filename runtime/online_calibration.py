# SPDX-License-Identifier: Apache-2.0
"""What live rounds teach: a logit offset per request, one per position for all, and drift.

Offsets b ~ N(0, variance) are random effects on top of the fitted calibration; after each round, or
after several together, they take one Newton step on the outcomes seen. They are applied to *later*
rounds, so whether a token is verified never depends on the round that proposes it (paper, section 3.2.2).

Legend: R requests of a round, M outcomes (requests × rounds), K = γ drafted tokens, S slots.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.runtime.calibration import Calibration, sigmoid

Floats = NDArray[np.float64]


# A head is trained and calibrated for sampling; greedy decoding accepts other drafts, by about a logit.
COMMON_VARIANCE = 0.25


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
        confidence: Floats,  # [M, K]
        verified: ArrayLike,  # [M]
        accepted: ArrayLike,  # [M]
        rounds: int = 1,
    ) -> "CommonOffsets":
        """The offsets after ``rounds`` rounds."""
        surprise, information = _outcomes(confidence, verified, accepted)
        kind = np.stack([~greedy, greedy]).astype(np.float64)  # [2, M]
        evidence = self.memory**rounds * self.evidence + kind @ information
        step = (kind @ surprise) / (1.0 / COMMON_VARIANCE + evidence)
        return CommonOffsets(self.offset + step, evidence, self.memory)


def corrected_confidence(
    calibration: Calibration,
    raw: ArrayLike,  # [R, K] confidence logits
    offsets: RequestOffsets,
    slots: ArrayLike,  # [R]
) -> Floats:  # [R, K]
    """Calibrated conditional confidences with each request's offset from its earlier rounds."""
    return sigmoid(calibration.logits(raw) + offsets.offset[np.asarray(slots)][:, None])


def updated(
    offsets: RequestOffsets,
    slots: ArrayLike,  # [M]; a slot stands once for each of its rounds
    confidence: Floats,  # [M, K] what corrected_confidence said
    verified: ArrayLike,  # [M] ℓ_r
    accepted: ArrayLike,  # [M] accepted drafts ≤ ℓ_r
    variance: float,
) -> RequestOffsets:
    """The offsets after a round, or after several at once; variance 0 returns them unchanged."""
    if variance == 0:
        return offsets
    rows = np.asarray(slots)
    surprise, information = _outcomes(confidence, verified, accepted)
    size = offsets.offset.size
    evidence = offsets.evidence + np.bincount(rows, information.sum(axis=1), size)
    step = np.bincount(rows, surprise.sum(axis=1), size) / (1.0 / variance + evidence)
    return RequestOffsets(offsets.offset + step, evidence)


class Drift(NamedTuple):
    """Predicted against observed conditional acceptance of recent rounds, by position."""

    predicted: Floats  # [K] decayed sums over the outcomes seen
    observed: Floats  # [K]
    outcomes: Floats  # [K]
    memory: float = 0.999  # weight an outcome keeps each round; 0.999: the last thousand or so

    @classmethod
    def empty(cls, gamma: int, memory: float = 0.999) -> "Drift":
        return cls(np.zeros(gamma), np.zeros(gamma), np.zeros(gamma), memory)

    def updated(
        self, confidence: Floats, verified: ArrayLike, accepted: ArrayLike, rounds: int = 1
    ) -> "Drift":  # [M, K], [M], [M]
        """The sums after ``rounds`` rounds; arguments as in ``updated`` above."""
        seen = _seen(confidence.shape[1], verified, accepted)
        surprise, _ = _outcomes(confidence, verified, accepted)
        predicted = np.where(seen, confidence, 0.0).sum(axis=0)
        kept = self.memory**rounds
        return Drift(
            kept * self.predicted + predicted,
            kept * self.observed + predicted + surprise.sum(axis=0),
            kept * self.outcomes + seen.sum(axis=0),
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


def _seen(gamma: int, verified: ArrayLike, accepted: ArrayLike) -> NDArray[np.bool_]:
    """[R, K] outcomes that exist: accepted positions and the first rejected one, if verified."""
    last = np.minimum(np.asarray(verified), np.asarray(accepted) + 1)
    return np.asarray(np.arange(gamma) < last[:, None])


def _outcomes(
    confidence: Floats, verified: ArrayLike, accepted: ArrayLike
) -> tuple[Floats, Floats]:
    """Outcome minus prediction, and its variance, [R, K]; 0 where nothing was seen."""
    gamma = confidence.shape[1]
    seen = _seen(gamma, verified, accepted)
    kept = np.arange(gamma) < np.asarray(accepted)[:, None]
    surprise = np.where(seen, kept - confidence, 0.0)
    return surprise, np.where(seen, confidence * (1 - confidence), 0.0)
