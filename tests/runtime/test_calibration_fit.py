# SPDX-License-Identifier: Apache-2.0
"""Fits on traces of two real heads: a good one and an overconfident one (tests/data/traces)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspark_trt.errors import TableError
from dspark_trt.runtime.calibration import Calibration
from dspark_trt.runtime.calibration_fit import (
    Method,
    fit_calibration,
    fit_logistic,
    held_out_figures,
    replay_online,
)
from dspark_trt.runtime.calibration_metrics import by_position, conditional_acceptance
from dspark_trt.runtime.traces import Traces, load_traces

_DATA = Path(__file__).parents[1] / "data" / "traces"
# Held-out ECE in % of the overconfident head under a plain slope-and-offset fit, 20 bins.
_AFFINE_REFERENCE = np.array([8.0, 6.9, 3.1, 1.3, 0.9, 0.6, 0.4])


@pytest.fixture(scope="module")
def good_head() -> Traces:
    return load_traces(_DATA / "tiny-qwen3_T1.npz")


@pytest.fixture(scope="module")
def overconfident_head() -> Traces:
    return load_traces(_DATA / "smollm2_T1.npz")


def _percent(values: list[float]) -> np.ndarray:
    return 100 * np.asarray(values)


@pytest.mark.parametrize("method", list(Method))
def test_a_good_head_stays_good(good_head: Traces, method: Method) -> None:
    calibration = fit_calibration(good_head, method=method)
    for bins in (10, 20):
        figures = held_out_figures(
            calibration, good_head.where(good_head.split == 1), bins=bins
        )
        before, after = (_percent(figures[key]["ece"]) for key in ("before", "after"))
        assert after.mean() <= 2.0
        if method is not Method.AFFINE:
            assert np.all(after <= before + 0.3)


@pytest.mark.parametrize("order", [1, -1])
def test_stretched_logits_are_recovered(good_head: Traces, order: int) -> None:
    stretch = np.linspace(0.8, 2.0, 7)[::order]
    stretched = replace(good_head, conf_logits=good_head.conf_logits * stretch)
    for method in (Method.STS, Method.AUTO):
        figures = fit_calibration(stretched, method=method).figures
        assert np.any(_percent(figures["before"]["ece"]) > 3.0)
        assert np.all(_percent(figures["after"]["ece"]) <= 2.0)


def test_stretching_only_stretches_the_temperatures(good_head: Traces) -> None:
    plain = fit_calibration(good_head, method=Method.STS).temperatures
    doubled = fit_calibration(
        replace(good_head, conf_logits=2 * good_head.conf_logits), method=Method.STS
    ).temperatures
    assert doubled[:3] / plain[:3] == pytest.approx(2.0, rel=0.1)  # later ones: too few rounds


@pytest.mark.parametrize("method", list(Method))
def test_ranking_within_a_position_is_unchanged(good_head: Traces, method: Method) -> None:
    figures = fit_calibration(good_head, method=method).figures
    assert figures["after"]["auc"] == pytest.approx(figures["before"]["auc"], abs=1e-12)


def test_auto_mends_an_overconfident_head(overconfident_head: Traces) -> None:
    calibration = fit_calibration(overconfident_head)
    held_out = overconfident_head.where(overconfident_head.split == 1)
    after = _percent(held_out_figures(calibration, held_out, bins=20)["after"]["ece"])
    assert np.all(after <= _AFFINE_REFERENCE + 0.3)


def test_temperatures_cannot_mend_it(overconfident_head: Traces) -> None:
    figures = fit_calibration(overconfident_head, method=Method.STS).figures
    assert _percent(figures["after"]["ece"])[0] > 9.0


def test_earlier_rounds_mend_more_on_prompts_unlike_the_calibration_set(
    overconfident_head: Traces,
) -> None:
    held_out = overconfident_head.where(overconfident_head.split == 1)
    for bins in (10, 15, 20):
        figures = held_out_figures(fit_calibration(overconfident_head), held_out, bins=bins)
        after, online = (_percent(figures[key]["ece"]) for key in ("after", "online"))
        assert online.mean() < after.mean() - 0.3
    code = overconfident_head.domain == overconfident_head.domain_names.index("code")
    calibration = fit_calibration(overconfident_head.where(code))
    math = held_out.where(held_out.domain == held_out.domain_names.index("math"))
    figures = held_out_figures(calibration, math)
    assert np.mean(figures["online"]["ece"]) < np.mean(figures["after"]["ece"]) - 0.002


def test_the_online_replay_never_looks_at_its_own_round(good_head: Traces) -> None:
    some = good_head.where(good_head.request_id < 4)
    calibration = Calibration(np.ones(7), method="affine", request_variance=0.1)
    before = replay_online(calibration, some)
    mask = some.accept_prefix_mask.copy()
    last = np.flatnonzero(some.request_id == 2)[-1]
    mask[last] = ~mask[last, 0]
    after = replay_online(calibration, replace(some, accept_prefix_mask=mask))
    assert np.array_equal(before, after)
    first = np.flatnonzero(some.request_id == 2)[0]
    assert before[first] == pytest.approx(calibration.confidence(some.conf_logits)[first])


def test_too_little_data_is_refused(good_head: Traces) -> None:
    with pytest.raises(
        TableError, match=r"calibration half has \d+ fully verified rounds of 3"
    ):
        fit_calibration(good_head.where(good_head.request_id < 6))
    trimmed = replace(good_head, lengths=np.maximum(good_head.accepted, 3))
    with pytest.raises(TableError, match="expected at least 200 of 4"):
        fit_calibration(trimmed.where(good_head.request_id < 40))


def test_a_score_that_ranks_backwards_keeps_its_order_and_gets_the_level_right() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2000, 1))
    accepted = rng.random((2000, 1)) < 1 / (1 + np.exp(2 * logits + 1))
    traces = Traces(
        conf_logits=logits, accept_prefix_mask=accepted, request_id=np.arange(2000) % 20,
        lengths=np.ones(2000, np.int64), split=np.arange(2000) % 2, domain=np.zeros(2000, np.int64),
        domain_names=("all",),
    )  # fmt: skip
    calibration = fit_calibration(traces, method=Method.AFFINE)
    assert calibration.slope[0] > 0
    mean = calibration.confidence(logits).mean()
    assert mean == pytest.approx(accepted[traces.split == 0].mean(), abs=0.01)


def test_logistic_fit_finds_known_weights() -> None:
    rng = np.random.default_rng(1)
    features = np.stack([rng.normal(size=20000), np.ones(20000)], axis=1)
    outcome = rng.random(20000) < 1 / (1 + np.exp(-features @ np.array([1.5, -0.5])))
    assert fit_logistic(features, outcome, np.zeros(2)) == pytest.approx([1.5, -0.5], abs=0.06)


def test_conditional_acceptance_counts_rounds_that_got_there() -> None:
    mask = np.array([[1, 1], [1, 0], [0, 0], [1, 0]], dtype=bool)
    assert conditional_acceptance(mask).tolist() == [0.75, pytest.approx(1 / 3)]


def test_figures_of_a_perfect_oracle_are_zero() -> None:
    mask = np.random.default_rng(2).random((50, 1)) < 0.5
    figures = by_position(mask.astype(float), mask)
    assert (figures["ece"], figures["brier"], figures["auc"]) == ([0.0], [0.0], [1.0])
