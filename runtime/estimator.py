# SPDX-License-Identifier: Apache-2.0
"""A confidence for drafters without a confidence head (DFlash, Eagle3), from their own probabilities.

The drafter's probability of the token it drew, and the largest one it gave, become a logit per
position: logit_k = w_k · [logit q(x_k), logit max q, 1]. It stands where a head's logit stands, so
calibration, online correction, schedulers and traces need not know the difference. Weights are
fitted on traces (``calibration_fit``) and kept in the calibration; unfitted, the drafted token's own
logit is used.

Legend: R requests, N rounds, K = γ drafted tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.errors import TableError

_EDGE = (
    1e-4  # probabilities are kept this far from 0 and 1: a sure drafter is not a sure target
)
UNFITTED = np.array([1.0, 0.0, 0.0])

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Estimator:
    """Weights of the features at each drafted position."""

    weights: Floats  # [K, 3]

    def __post_init__(self) -> None:
        weights = np.array(self.weights, dtype=np.float64)
        if weights.ndim != 2 or weights.shape[1] != 3 or not np.all(np.isfinite(weights)):
            raise TableError(f"estimator weights must be finite [K, 3], got {weights.tolist()}")
        object.__setattr__(self, "weights", weights)

    @classmethod
    def unfitted(cls, gamma: int) -> Self:
        """The drafted token's own logit at every position."""
        return cls(np.tile(UNFITTED, (gamma, 1)))

    def logits(self, drafted_prob: ArrayLike, top_prob: ArrayLike) -> Floats:
        """Confidence logits [R, K] from q(x_k) and max q, each [R, K]."""
        features = probability_features(drafted_prob, top_prob)
        if features.shape[1] != len(self.weights):
            raise TableError(
                f"the estimator is for {len(self.weights)} drafted tokens, got {features.shape[1]}"
            )
        return np.asarray(np.einsum("rkf,kf->rk", features, self.weights))


def draft_probabilities(
    logits: NDArray[np.float32], tokens: NDArray[np.int64], temperature: NDArray[np.float32]
) -> tuple[Floats, Floats]:
    """q(x_k) and max q, each `[R, K]`, from draft logits `[R, K, V]`; greedy requests count at temperature 1."""
    heat = np.where(temperature > 0, temperature, 1)[:, None, None]
    scaled = logits / heat
    top = scaled.max(axis=-1)
    total = np.exp(scaled - top[..., None]).sum(axis=-1)
    chosen = np.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0]
    return np.exp(chosen - top).astype(np.float64) / total, 1.0 / total.astype(np.float64)


def probability_features(
    drafted_prob: ArrayLike, top_prob: ArrayLike
) -> Floats:  # [R, K] twice -> [R, K, 3]
    drafted, largest = _logit(drafted_prob), _logit(top_prob)
    if drafted.ndim != 2 or drafted.shape != largest.shape:
        raise TableError(
            f"drafter probabilities must be [R, K] twice, got {drafted.shape} and {largest.shape}"
        )
    return np.stack([drafted, largest, np.ones_like(drafted)], axis=-1)


def _logit(probability: ArrayLike) -> Floats:
    inside = np.clip(np.asarray(probability, dtype=np.float64), _EDGE, 1 - _EDGE)
    return np.asarray(np.log(inside) - np.log1p(-inside))
