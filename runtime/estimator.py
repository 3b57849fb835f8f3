# SPDX-License-Identifier: Apache-2.0
"""A confidence for drafters without a confidence head (DFlash, Eagle3), from their own probabilities.

The drafter's probability of the token it drew, and the largest one it gave, become a logit per
position: logit_k = w_k · [logit q(x_k), logit max q, 1]. It stands where a head's logit stands, so
calibration, online correction, schedulers and traces need not know the difference. Weights are
fitted on traces; unfitted, the drafted token's own logit is used.

Legend: R requests, N rounds, K = γ drafted tokens.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.errors import TableError
from dspark_trt.files import write_json
from dspark_trt.runtime.calibration_fit import fit_logistic
from dspark_trt.runtime.calibration_metrics import reached
from dspark_trt.runtime.traces import Traces

FORMAT = "dspark-estimator-1"
_EDGE = (
    1e-4  # probabilities are kept this far from 0 and 1: a sure drafter is not a sure target
)
_UNFITTED = np.array([1.0, 0.0, 0.0])

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
        return cls(np.tile(_UNFITTED, (gamma, 1)))

    @classmethod
    def fitted(cls, traces: Traces) -> Self:
        """Fit on the calibration half; TableError if the traces carry no drafter probabilities."""
        if traces.drafted_prob is None or traces.top_prob is None:
            raise TableError(
                "an estimator needs drafted_prob and top_prob in the traces. Collect them anew: "
                "dspark-trt calibrate BUNDLE"
            )
        half = traces.fully_verified()
        half = half.where(half.split == 0)
        assert half.drafted_prob is not None
        assert half.top_prob is not None
        features = _features(half.drafted_prob, half.top_prob)
        arrived = reached(half.accept_prefix_mask)
        return cls(
            np.stack(
                [
                    fit_logistic(
                        features[arrived[:, k], k],
                        half.accept_prefix_mask[arrived[:, k], k],
                        _UNFITTED,
                    )
                    for k in range(half.gamma)
                ]
            )
        )

    def logits(self, drafted_prob: ArrayLike, top_prob: ArrayLike) -> Floats:
        """Confidence logits [R, K] from q(x_k) and max q, each [R, K]."""
        features = _features(drafted_prob, top_prob)
        if features.shape[1] != len(self.weights):
            raise TableError(
                f"the estimator is for {len(self.weights)} drafted tokens, got {features.shape[1]}"
            )
        return np.asarray(np.einsum("rkf,kf->rk", features, self.weights))

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "weights": self.weights.tolist()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        if data.get("format") != FORMAT or "weights" not in data:
            raise TableError(
                f"expected an estimator of format {FORMAT!r}, got keys {sorted(data)}"
            )
        return cls(data["weights"])

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise TableError(f"cannot read estimator {path}: {error}") from error

    def save(self, path: Path) -> None:
        write_json(Path(path), self.to_json())


def _features(
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
