# SPDX-License-Identifier: Apache-2.0
"""From confidence logits to calibrated conditional acceptance probabilities.

c_k = σ(slope_k · logit_k + offset_k). The paper's sequential temperature scaling (section 3.2.1) is
slope_k = 1 / T_k and offset_k = 0; the general form also mends a head that says 0.55 where 0.42
holds, which no temperature can. Slopes are positive, so the order within a position never changes.

Legend: R requests, K = γ drafted tokens.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.errors import TableError
from dspark_trt.files import write_json
from dspark_trt.runtime.estimator import Estimator

FORMAT = "dspark-calibration-1"

Floats = NDArray[np.float64]

_FIT_AGAIN = "Fit it again: dspark-trt calibrate BUNDLE"


@dataclass(frozen=True, eq=False, init=False)
class Calibration:
    """Slope and offset per drafted position, how they were found, and how well they do."""

    slope: Floats  # [K] positive
    offset: Floats  # [K]
    method: str  # "identity", "sts", "affine" or "auto"
    request_variance: (
        float  # prior variance of a request's own logit offset; 0: no online correction
    )
    temperatures: Floats  # [K] what others read: the temperature fit, also beside an affine one
    estimator: Estimator | None  # makes the logits of a drafter without a confidence head
    acceptance: Floats | None  # [K] conditional acceptance over the rounds it was fitted on
    figures: Mapping[str, Any] = field(repr=False)  # before/after on held-out requests

    def __init__(
        self,
        slope: ArrayLike,
        offset: ArrayLike | None = None,
        *,
        method: str,
        temperatures: ArrayLike | None = None,
        request_variance: float = 0.0,
        estimator: Estimator | None = None,
        acceptance: ArrayLike | None = None,
        figures: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises TableError unless slopes and temperatures are positive, acceptances probabilities, all
        finite, all length K.
        """
        slopes = _positive(slope, "slope")
        offsets = np.zeros(slopes.size) if offset is None else _finite(offset, "offset")
        others = (
            1.0 / slopes if temperatures is None else _positive(temperatures, "temperatures")
        )
        if not slopes.shape == offsets.shape == others.shape:
            raise TableError(
                f"slope, offset and temperatures must have one length, got {slopes.size}, "
                f"{offsets.size} and {others.size}"
            )
        if not request_variance >= 0:
            raise TableError(f"request_variance must be at least 0, got {request_variance}")
        accepted = None if acceptance is None else _finite(acceptance, "acceptance")
        if accepted is not None and (
            accepted.shape != slopes.shape or np.any((accepted < 0) | (accepted > 1))
        ):
            raise TableError(
                f"acceptance must be {slopes.size} probabilities, got {accepted.tolist()}"
            )
        for name, value in {
            "slope": slopes,
            "offset": offsets,
            "method": method,
            "request_variance": float(request_variance),
            "estimator": estimator,
            "temperatures": others,
            "acceptance": accepted,
            "figures": dict(figures or {}),
        }.items():
            object.__setattr__(self, name, value)

    @classmethod
    def identity(cls, gamma: int) -> Self:
        """The head's own probabilities."""
        return cls(np.ones(gamma), method="identity")

    @classmethod
    def from_temperatures(cls, temperatures: ArrayLike) -> Self:  # [K]
        """Sequential temperature scaling with T_k > 0."""
        positive = _positive(temperatures, "temperatures")
        return cls(1.0 / positive, method="sts", temperatures=positive)

    @property
    def gamma(self) -> int:
        return int(self.slope.size)

    def logits(self, raw: ArrayLike) -> Floats:  # [R, K] -> [R, K]
        """Calibrated logits; TableError unless there are K columns."""
        values = np.asarray(raw, dtype=np.float64)
        if values.ndim != 2 or values.shape[1] != self.gamma:
            raise TableError(
                f"calibration is for {self.gamma} drafted tokens, got logits of shape {values.shape}"
            )
        return values * self.slope + self.offset

    def confidence(self, raw: ArrayLike) -> Floats:  # [R, K] -> [R, K]
        """Calibrated conditional acceptance probabilities c_k; NaN stays NaN."""
        return sigmoid(self.logits(raw))

    def to_json(self) -> dict[str, Any]:
        """SGLang reads ``temperatures`` of this object, TensorRT-LLM ``sts_temperatures``."""
        return {
            "format": FORMAT,
            "method": self.method,
            "slope": self.slope.tolist(),
            "offset": self.offset.tolist(),
            "request_variance": self.request_variance,
            "temperatures": self.temperatures.tolist(),
            "sts_temperatures": self.temperatures.tolist(),
            "estimator": None if self.estimator is None else self.estimator.weights.tolist(),
            "acceptance": None if self.acceptance is None else self.acceptance.tolist(),
            "figures": dict(self.figures),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Our own object, or one that holds only ``temperatures`` or ``sts_temperatures``."""
        spelled = [data[key] for key in ("temperatures", "sts_temperatures") if key in data]
        if len(spelled) == 2 and spelled[0] != spelled[1]:
            raise TableError(
                f"temperatures {spelled[0]} and sts_temperatures {spelled[1]} contradict each other"
            )
        if "slope" in data:
            return cls(
                data["slope"],
                data.get("offset"),
                method=str(data.get("method", "affine")),
                temperatures=spelled[0] if spelled else None,
                request_variance=data.get("request_variance", 0.0),
                estimator=Estimator(weights) if (weights := data.get("estimator")) else None,
                acceptance=data.get("acceptance"),
                figures=data.get("figures"),
            )
        if not spelled:
            raise TableError(
                "calibration holds none of slope, temperatures, sts_temperatures. "
                "Fit one: dspark-trt calibrate BUNDLE"
            )
        return cls.from_temperatures(spelled[0])

    def with_figures(self, figures: Mapping[str, Any]) -> Self:
        return type(self).from_json({**self.to_json(), "figures": figures})

    def with_estimator(self, estimator: Estimator) -> Self:
        return type(self).from_json({**self.to_json(), "estimator": estimator.weights.tolist()})

    def require_gamma(self, gamma: int) -> Self:
        """Raise TableError unless this is for ``gamma`` drafted tokens; return it otherwise."""
        if self.gamma != gamma:
            raise TableError(
                f"the calibration is for {self.gamma} drafted tokens, the drafter has {gamma}. "
                "Fit again: dspark-trt calibrate BUNDLE"
            )
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read any of the three spellings."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise TableError(
                f"cannot read calibration {path}: {error}. {_FIT_AGAIN}"
            ) from error
        if not isinstance(data, dict):
            raise TableError(
                f"{path} must hold a JSON object, got {type(data).__name__}. {_FIT_AGAIN}"
            )
        try:
            return cls.from_json(data)
        except (TableError, TypeError, ValueError, OverflowError) as error:
            raise TableError(
                f"calibration {path} is malformed: {error}. {_FIT_AGAIN}"
            ) from error

    def save(self, path: Path) -> None:
        """Write ``to_json``; nothing half-written stays behind."""
        write_json(Path(path), self.to_json())


def sigmoid(logits: Floats) -> Floats:
    """σ by tanh, which saturates where exp would overflow."""
    return np.asarray(0.5 + 0.5 * np.tanh(0.5 * logits), dtype=np.float64)


def _finite(values: ArrayLike, name: str) -> Floats:
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TableError(f"{name} must be a list of numbers: {error}") from error
    if array.ndim != 1 or not array.size or not np.all(np.isfinite(array)):
        raise TableError(f"{name} must be a list of finite numbers, got {array.tolist()}")
    array.setflags(write=False)
    return array


def _positive(values: ArrayLike, name: str) -> Floats:
    array = _finite(values, name)
    if np.any(array <= 0):
        raise TableError(f"{name} must be positive, got {array.tolist()}")
    return array
