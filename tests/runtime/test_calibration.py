# SPDX-License-Identifier: Apache-2.0
"""Calibration files: application, the spellings others use, refusals."""

import json
from pathlib import Path

import numpy as np
import pytest

from dspark_trt.errors import TableError
from dspark_trt.runtime.calibration import Calibration
from dspark_trt.runtime.online_calibration import (
    Drift,
    RequestOffsets,
    corrected_confidence,
    outcomes,
)


def _write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


def test_confidence_is_the_sigmoid_of_an_affine_logit() -> None:
    calibration = Calibration([2.0, 0.5], [0.1, -0.2], method="affine")
    logits = np.array([[1.0, -3.0], [0.0, 1000.0]])
    expected = [[1 / (1 + np.exp(-2.1)), 1 / (1 + np.exp(1.7))], [1 / (1 + np.exp(-0.1)), 1.0]]
    assert calibration.confidence(logits) == pytest.approx(np.array(expected))


@pytest.mark.parametrize("key", ["temperatures", "sts_temperatures"])
def test_foreign_spellings_are_read(tmp_path: Path, key: str) -> None:
    calibration = Calibration.load(_write(tmp_path / "sts.json", {key: [0.5, 2.0]}))
    assert calibration.slope.tolist() == [2.0, 0.5]
    assert calibration.offset.tolist() == [0.0, 0.0]


def test_saved_calibration_carries_both_foreign_spellings(tmp_path: Path) -> None:
    calibration = Calibration(
        [2.0, 0.5], [0.1, -0.2], method="auto", temperatures=[0.6, 1.5], request_variance=0.1,
        figures={"ece": [0.01]},
    )  # fmt: skip
    calibration.save(tmp_path / "calibration.json")
    data = json.loads((tmp_path / "calibration.json").read_text())
    assert data["temperatures"] == data["sts_temperatures"] == [0.6, 1.5]
    again = Calibration.load(tmp_path / "calibration.json")
    assert again.to_json() == calibration.to_json()
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "none of slope, temperatures, sts_temperatures"),
        ([], "must hold a JSON object, got list"),
        ({"temperatures": []}, "finite numbers"),
        ({"temperatures": [1.0, 0.0]}, r"positive, got \[1.0, 0.0\]"),
        ({"temperatures": [1.0, float("nan")]}, "finite numbers"),
        ({"temperatures": ["hot"]}, "list of numbers"),
        ({"temperatures": [1.0], "sts_temperatures": [2.0]}, "contradict"),
        ({"slope": [1.0, 1.0], "offset": [0.0]}, "one length, got 2, 1 and 2"),
        ({"slope": [1.0], "request_variance": -1.0}, "at least 0, got -1.0"),
        ({"slope": [1.0], "request_variance": "1"}, "calibration .* is malformed: '>=' not"),
        ({"slope": [1.0], "estimator": "x"}, "is malformed: could not convert"),
        ({"slope": [1.0], "figures": 3}, "is malformed: 'int' object is not iterable"),
        ({"temperatures": [10**400]}, "malformed: int too large.*dspark-trt calibrate BUNDLE"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, data: object, message: str) -> None:
    with pytest.raises(TableError, match=message):
        Calibration.load(_write(tmp_path / "calibration.json", data))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TableError, match=r"cannot read calibration .*nothing\.json.*Fit it again"
    ):
        Calibration.load(tmp_path / "nothing.json")


def test_another_block_size_is_refused() -> None:
    assert Calibration.identity(7).require_gamma(7).gamma == 7
    with pytest.raises(TableError, match="for 5 drafted tokens, the drafter has 7"):
        Calibration.identity(5).require_gamma(7)


def test_logits_of_another_block_size_are_refused() -> None:
    with pytest.raises(TableError, match=r"for 2 drafted tokens, got logits of shape \(1, 3\)"):
        Calibration.identity(2).confidence(np.zeros((1, 3)))


def test_offsets_learn_a_request_that_accepts_more_than_predicted() -> None:
    calibration, slots = Calibration.identity(3), np.array([2, 0])
    offsets = RequestOffsets.empty(4)
    raw = np.zeros((2, 3))  # says one half
    for _ in range(60):
        confidence = corrected_confidence(calibration, raw, offsets, slots)
        shown = outcomes(confidence, [3, 3], [3, 0])
        offsets = offsets.updated(slots, shown, variance=1.0)
    learnt = corrected_confidence(calibration, raw, offsets, slots)
    assert np.all(learnt[0] > 0.9)
    assert np.all(learnt[1] < 0.1)
    assert offsets.offset[[1, 3]].tolist() == [0.0, 0.0]
    assert offsets.released([2]).offset[2] == 0.0
    assert offsets.released([2]).offset[0] == offsets.offset[0]


def test_offsets_use_verified_outcomes_only() -> None:
    offsets = RequestOffsets.empty(1)
    half = np.full((1, 3), 0.5)
    one = offsets.updated([0], outcomes(half, [1], [1]), variance=1.0)  # one outcome, accepted
    assert one.evidence[0] == pytest.approx(0.25)
    assert one.offset[0] == pytest.approx(0.5 / 1.25)
    none = offsets.updated([0], outcomes(half, [0], [0]), variance=1.0)
    assert none.offset[0] == none.evidence[0] == 0.0
    assert offsets.updated([0], outcomes(half, [3], [3]), variance=0.0) is offsets


def test_drift_compares_predictions_with_what_was_seen() -> None:
    rng = np.random.default_rng(0)
    drift = Drift.empty(2)
    assert not drift.has_drifted()
    for _ in range(500):
        first = rng.random(4) < 0.5
        accepted = first.astype(int) * (1 + (rng.random(4) < 0.9))
        drift = drift.updated(outcomes(np.full((4, 2), 0.9), np.full(4, 2), accepted))
    assert drift.gap() == pytest.approx([0.4, 0.0], abs=0.06)
    assert drift.has_drifted()
