# SPDX-License-Identifier: Apache-2.0
"""How good a confidence is: calibration error, ranking, and what a threshold would do.

Legend: N rounds, K = γ drafted tokens. "Prefix" is survival a_k against "the first k drafts were all
accepted", over all rounds; "conditional" is c_k against "accepted", over rounds that reached k.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.survival import survival_from_confidence

BINS = 10  # of equal width; more bins measure mostly the noise of a few thousand rounds

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Reliability(NamedTuple):
    """A reliability diagram: what was said and what happened, by bin."""

    predicted: Floats  # [bins] mean prediction, NaN where the bin is empty
    observed: Floats  # [bins] share of successes
    rounds: Floats  # [bins]


def reliability(predicted: Floats, outcome: Bools, bins: int = BINS) -> Reliability:  # [N], [N]
    """Bins of equal width over [0, 1]."""
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    count = np.bincount(index, minlength=bins).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return Reliability(
            np.bincount(index, predicted, bins) / count,
            np.bincount(index, outcome.astype(np.float64), bins) / count,
            count,
        )


def calibration_error(predicted: Floats, outcome: Bools, bins: int = BINS) -> float:  # [N], [N]
    """Expected calibration error: mean |predicted − observed| over the bins, weighted by count."""
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(index, predicted - outcome, bins)
    return float(np.abs(gaps).sum() / predicted.size)


def area_under_roc(score: Floats, outcome: Bools) -> float:  # [N], [N]
    """Probability that a success outranks a failure, ties counting half; NaN with one class only."""
    successes = int(outcome.sum())
    if successes in (0, outcome.size):
        return float("nan")
    _, inverse, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[inverse]
    above = rank[outcome].sum() - successes * (successes + 1) / 2
    return float(above / (successes * (outcome.size - successes)))


def reached(mask: Bools) -> Bools:  # [N, K] -> [N, K]
    """Whether the drafts before k were all accepted."""
    return np.concatenate([np.ones((len(mask), 1), bool), mask[:, :-1]], axis=1)


def conditional_acceptance(mask: Bools) -> Floats:  # [N, K] -> [K]
    """P(x_k accepted | prefix accepted), the paper's figure 2; NaN where nothing reached k."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(mask.sum(axis=0) / reached(mask).sum(axis=0))


def by_position(confidence: Floats, mask: Bools, bins: int = BINS) -> dict[str, list[float]]:
    """ECE and Brier score of survival and AUC of the conditional score, a value a position."""
    survival = survival_from_confidence(confidence)
    arrived = reached(mask)
    positions = range(mask.shape[1])
    return {
        "ece": [calibration_error(survival[:, k], mask[:, k], bins) for k in positions],
        "brier": [float(np.mean((survival[:, k] - mask[:, k]) ** 2)) for k in positions],
        "auc": [
            area_under_roc(confidence[arrived[:, k], k], mask[arrived[:, k], k])
            for k in positions
        ],
    }


def threshold_sweep(
    confidence: Floats,  # [N, K]
    mask: Bools,  # [N, K]
    thresholds: Floats,  # [T]
) -> dict[str, list[Any]]:
    """What the static rule c_k ≥ threshold would verify and keep, the paper's figure 5."""
    accepted = mask.sum(axis=1)
    verified, kept = [], []
    for threshold in thresholds:
        lengths = np.logical_and.accumulate(confidence >= threshold, axis=1).sum(axis=1)
        verified.append(float(lengths.mean()))
        kept.append(float(np.minimum(lengths, accepted).mean()))
    return {
        "threshold": [float(value) for value in thresholds],
        "verified_per_round": verified,
        "accepted_per_round": kept,
        "acceptance_rate": [k / v if v else None for k, v in zip(kept, verified, strict=True)],
    }
