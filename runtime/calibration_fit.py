# SPDX-License-Identifier: Apache-2.0
"""Fit a calibration on traces, position by position from the left.

Three candidates a position: the head as it is; the paper's temperature, a 1-D grid search for the
least calibration error of the cumulative product with earlier positions fixed (section 3.2.1); and a
slope with an offset, a logistic fit on rounds that reached the position. ``sts`` and ``affine`` take
one kind throughout, ``auto`` takes at each position the one with the least held-out error.

Legend: N rounds, K = γ drafted tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import TableError
from dspark_trt.runtime.calibration import Calibration, sigmoid
from dspark_trt.runtime.calibration_metrics import (
    BINS,
    by_position,
    calibration_error,
    conditional_acceptance,
    reached,
)
from dspark_trt.runtime.estimator import UNFITTED, Estimator, probability_features
from dspark_trt.runtime.online_calibration import (
    RequestOffsets,
    corrected_confidence,
    outcomes,
)
from dspark_trt.runtime.traces import Traces

MIN_ROUNDS, MIN_REQUESTS = (
    200,
    4,
)  # in each half; below this the error bars exceed what is mended
_TEMPERATURES = np.exp(np.linspace(np.log(0.1), np.log(10.0), 461))  # 1 % apart
_TIE = 1e-3  # calibration errors this close are equal; the middle of such temperatures is taken
_RIDGE = 0.1  # pulls a slope to 1 and an offset to 0 where few rounds reach a position
_MIN_SLOPE = 0.05  # keeps the order within a position
# Requests differ by about ±0.3 in logit. A likelihood fit on the calibration half picks less, for it
# cannot see prompts unlike its own, which are what the correction is for (docs/calibration.md).
REQUEST_VARIANCE = 0.1

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Method(StrEnum):
    STS = "sts"
    AFFINE = "affine"
    AUTO = "auto"


class _Line(NamedTuple):
    """c = σ(slope · logit + offset) at one position."""

    slope: float
    offset: float

    def __call__(self, logits: Floats) -> Floats:
        return sigmoid(self.slope * logits + self.offset)


class _Half(NamedTuple):
    """One half of the traces at one position, and the survival that the fit so far gives it."""

    logits: Floats  # [N]
    outcome: Bools  # [N] prefix accepted up to and with this position
    reached: Bools  # [N] prefix accepted before it
    survival: Floats  # [N] before it

    def error(self, line: _Line, bins: int) -> float:
        return calibration_error(self.survival * line(self.logits), self.outcome, bins)


def fit_calibration(
    traces: Traces, *, method: Method = Method.AUTO, bins: int = BINS
) -> Calibration:
    """Fit on the calibration half; figures, and the choices of ``auto``, are of the held-out half.

    Only fully verified rounds count. Raises TableError if either half has too little of them.
    """
    halves = _halves(traces)
    candidates: dict[Method, tuple[Callable[[_Half, int], _Line], ...]] = {
        Method.STS: (_temperature,),
        Method.AFFINE: (_slope_and_offset,),
        Method.AUTO: (lambda half, bins: _Line(1.0, 0.0), _temperature, _slope_and_offset),
    }
    lines = _left_to_right(halves, candidates[method], bins)
    temperatures = _left_to_right(halves, (_temperature,), bins)
    fitted = Calibration(
        [line.slope for line in lines],
        [line.offset for line in lines],
        method=method.value,
        temperatures=[1.0 / line.slope for line in temperatures],
        request_variance=REQUEST_VARIANCE,
        acceptance=np.nan_to_num(conditional_acceptance(halves[0].accept_prefix_mask)),
    )
    return fitted.with_figures(held_out_figures(fitted, halves[1], bins=bins))


def held_out_figures(
    calibration: Calibration, held_out: Traces, *, bins: int = BINS
) -> dict[str, Any]:
    """ECE, Brier and AUC per position before, after, and after with the online correction."""
    mask = held_out.accept_prefix_mask
    plain = Calibration.identity(calibration.gamma).confidence(held_out.conf_logits)
    return {
        "bins": bins,
        "rounds": len(held_out),
        "requests": int(np.unique(held_out.request_id).size),
        "before": by_position(plain, mask, bins),
        "after": by_position(calibration.confidence(held_out.conf_logits), mask, bins),
        "online": by_position(replay_online(calibration, held_out), mask, bins),
    }


def replay_online(calibration: Calibration, traces: Traces) -> Floats:
    """What the engine would have said with the per-request correction, [N, K].

    Every request meets its rounds in order and learns from earlier ones only.
    """
    _, slot = np.unique(traces.request_id, return_inverse=True)
    offsets = RequestOffsets.empty(int(slot.max()) + 1)
    turn = _turns(slot)
    accepted = traces.accepted
    confidence = np.empty_like(traces.conf_logits)
    for round_index in range(int(turn.max()) + 1):
        rows = np.flatnonzero(turn == round_index)
        said = corrected_confidence(calibration, traces.conf_logits[rows], offsets, slot[rows])
        confidence[rows] = said
        shown = outcomes(said, traces.lengths[rows], accepted[rows])
        offsets = offsets.updated(slot[rows], shown, calibration.request_variance)
    return confidence


def fit_logistic(
    features: Floats,  # [N, D]; a column of ones for an offset
    outcome: Bools,  # [N]
    prior: Floats,  # [D] where the ridge pulls to
    ridge: float = _RIDGE,
) -> Floats:  # [D]
    """Weights of a ridge-regularised logistic regression, by Newton's method with halving steps."""

    def loss(candidate: Floats) -> float:
        logits = features @ candidate
        likelihood = np.logaddexp(0.0, logits).sum() - logits[outcome].sum()
        return float(likelihood + 0.5 * ridge * np.sum((candidate - prior) ** 2))

    weights, current = prior.copy(), loss(prior)
    for _ in range(100):
        predicted = sigmoid(features @ weights)
        gradient = features.T @ (predicted - outcome) + ridge * (weights - prior)
        curvature = (features.T * (predicted * (1 - predicted))) @ features
        step = np.linalg.solve(curvature + ridge * np.eye(prior.size), gradient)
        while loss(weights - step) > current and np.abs(step).max() > 1e-10:
            step = step / 2
        weights, previous, current = weights - step, current, loss(weights - step)
        if previous - current < 1e-9 * max(1.0, abs(current)):
            break
    return np.asarray(weights, dtype=np.float64)


def fit_estimator(traces: Traces) -> Estimator:
    """Fit the calibration half; TableError if the traces carry no drafter probabilities."""
    half = traces.fully_verified()
    half = half.where(half.split == 0)
    if half.drafted_prob is None or half.top_prob is None:
        raise TableError(
            "a drafter without a confidence head needs drafted_prob and top_prob in the traces. "
            "Collect them anew"
        )
    features = probability_features(half.drafted_prob, half.top_prob)
    mask, arrived = half.accept_prefix_mask, reached(half.accept_prefix_mask)
    return Estimator(
        np.stack(
            [
                fit_logistic(features[arrived[:, k], k], mask[arrived[:, k], k], UNFITTED)
                for k in range(half.gamma)
            ]
        )
    )


def with_estimated_logits(traces: Traces, estimator: Estimator) -> Traces:
    """The same rounds with the estimator's logits in place of a head's."""
    assert traces.drafted_prob is not None
    assert traces.top_prob is not None
    logits = estimator.logits(traces.drafted_prob, traces.top_prob)
    return replace(traces, conf_logits=logits)


def _halves(traces: Traces) -> tuple[Traces, Traces]:
    usable = traces.fully_verified()
    halves = usable.where(usable.split == 0), usable.where(usable.split == 1)
    for name, half in zip(("calibration", "held-out"), halves, strict=True):
        requests = np.unique(half.request_id).size
        if len(half) < MIN_ROUNDS or requests < MIN_REQUESTS:
            raise TableError(
                f"the {name} half has {len(half)} fully verified rounds of {requests} requests, "
                f"expected at least {MIN_ROUNDS} of {MIN_REQUESTS}. Collect more traces"
            )
    return halves


def _left_to_right(
    halves: tuple[Traces, Traces],
    candidates: tuple[Callable[[_Half, int], _Line], ...],
    bins: int,
) -> list[_Line]:
    """At each position, the candidate fitted on the first half with least error on the second."""
    survival = [np.ones(len(half)) for half in halves]
    arrived = [reached(half.accept_prefix_mask) for half in halves]
    lines = []
    for k in range(halves[0].gamma):
        fitting, held_out = (
            _Half(half.conf_logits[:, k], half.accept_prefix_mask[:, k], before[:, k], so_far)
            for half, before, so_far in zip(halves, arrived, survival, strict=True)
        )
        fits = [candidate(fitting, bins) for candidate in candidates]
        best = min(fits, key=lambda line: held_out.error(line, bins))
        lines.append(best)
        survival = [half.survival * best(half.logits) for half in (fitting, held_out)]
    return lines


def _temperature(half: _Half, bins: int) -> _Line:
    errors = np.array([half.error(_Line(1.0 / t, 0.0), bins) for t in _TEMPERATURES])
    good = _TEMPERATURES[errors <= errors.min() + _TIE]
    return _Line(float(np.exp(-np.log(good).mean())), 0.0)


def _slope_and_offset(half: _Half, bins: int) -> _Line:
    del bins  # a likelihood fit
    logits, outcome = half.logits[half.reached], half.outcome[half.reached]
    ones = np.ones_like(logits)
    slope, offset = fit_logistic(
        np.stack([logits, ones], axis=1), outcome, np.array([1.0, 0.0])
    )
    if slope < _MIN_SLOPE:  # the score does not rank here: keep its order, fit the level
        share = (outcome.sum() + 0.5) / (outcome.size + 1.0)
        level = np.log(share / (1 - share)) - _MIN_SLOPE * logits.mean()
        return _Line(_MIN_SLOPE, float(level))
    return _Line(float(slope), float(offset))


def _turns(slot: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N] how many earlier rows hold the same slot."""
    order = np.argsort(slot, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(slot[order]) != 0])
    sizes = np.diff(np.r_[starts, slot.size])
    turn = np.empty_like(slot)
    turn[order] = np.arange(slot.size) - np.repeat(starts, sizes)
    return turn
