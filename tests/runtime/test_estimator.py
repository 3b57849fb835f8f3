# SPDX-License-Identifier: Apache-2.0
"""Confidence from the drafter's own probabilities, on a drafter and a target made here."""

from pathlib import Path

import numpy as np
import pytest

from dspark_trt.errors import TableError
from dspark_trt.runtime.calibration import Calibration
from dspark_trt.runtime.calibration_fit import (
    fit_calibration,
    fit_estimator,
    with_estimated_logits,
)
from dspark_trt.runtime.calibration_metrics import area_under_roc, calibration_error
from dspark_trt.runtime.estimator import Estimator
from dspark_trt.runtime.traces import Traces, traces_from_arrays


def _rejection_sampled(rounds: int, gamma: int, seed: int) -> Traces:
    """Drafts from noisy copies of random target distributions, accepted with min(1, p/q)."""
    rng = np.random.default_rng(seed)
    shape = (rounds, gamma, 20)
    target = rng.normal(size=shape) * rng.gamma(2.0, 1.5, (rounds, gamma, 1))
    draft = target + rng.normal(size=shape) * (0.5 + 0.2 * np.arange(gamma)[:, None])
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (target, draft))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    token = (q.cumsum(-1) < rng.random((rounds, gamma, 1))).sum(-1).clip(max=19)[..., None]
    drafted = np.take_along_axis(q, token, -1)[..., 0]
    kept = rng.random((rounds, gamma)) < np.take_along_axis(p, token, -1)[..., 0] / drafted
    return traces_from_arrays(
        conf_logits=np.zeros((rounds, gamma)),
        accept_prefix_mask=np.logical_and.accumulate(kept, axis=1),
        request_id=np.arange(rounds) // 50,
        drafted_prob=drafted,
        top_prob=q.max(-1),
    )


@pytest.fixture(scope="module")
def traces() -> Traces:
    return _rejection_sampled(6000, 4, seed=0)


def test_fitted_estimator_ranks_and_is_calibrated_on_held_out_requests(traces: Traces) -> None:
    estimator = fit_estimator(traces)
    held_out = traces.where(traces.split == 1)
    assert held_out.drafted_prob is not None
    assert held_out.top_prob is not None
    logits = estimator.logits(held_out.drafted_prob, held_out.top_prob)
    first = held_out.accept_prefix_mask[:, 0]
    assert area_under_roc(logits[:, 0], first) > 0.58
    assert calibration_error(1 / (1 + np.exp(-logits[:, 0])), first) < 0.03


def test_its_logits_take_the_place_of_a_head(traces: Traces) -> None:
    estimated = with_estimated_logits(traces, Estimator.unfitted(4))
    figures = fit_calibration(estimated).figures
    assert np.mean(figures["after"]["ece"]) < 0.03
    assert np.mean(figures["before"]["ece"]) > np.mean(figures["after"]["ece"])


def test_unfitted_uses_the_drafted_tokens_probability() -> None:
    logits = Estimator.unfitted(2).logits([[0.8, 1.0]], [[0.9, 1.0]])
    assert logits[0, 0] == pytest.approx(np.log(4.0))
    assert np.isfinite(logits).all()


def test_it_is_saved_with_the_calibration(tmp_path: Path, traces: Traces) -> None:
    estimator = fit_estimator(traces)
    Calibration.identity(4).with_estimator(estimator).save(tmp_path / "calibration.json")
    loaded = Calibration.load(tmp_path / "calibration.json").estimator
    assert loaded is not None
    assert np.array_equal(loaded.weights, estimator.weights)


def test_refusals() -> None:
    plain = traces_from_arrays(
        conf_logits=np.zeros((2, 1)), accept_prefix_mask=np.zeros((2, 1)), request_id=[0, 1]
    )
    with pytest.raises(TableError, match="needs drafted_prob and top_prob"):
        fit_estimator(plain)
    with pytest.raises(TableError, match="for 2 drafted tokens, got 3"):
        Estimator.unfitted(2).logits(np.full((1, 3), 0.5), np.full((1, 3), 0.5))
    with pytest.raises(TableError, match=r"must be \[R, K\] twice"):
        Estimator.unfitted(2).logits(np.full((1, 2), 0.5), np.full((1, 3), 0.5))
    with pytest.raises(TableError, match=r"finite \[K, 3\]"):
        Estimator(np.full((2, 3), np.nan))
