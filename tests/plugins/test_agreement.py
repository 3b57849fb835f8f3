# SPDX-License-Identifier: Apache-2.0
"""The ONNX functions return, token for token, what the specification says."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from dspark_trt.plugins.contract import VerifyMode
from dspark_trt.plugins.specification import REFUSED, Verified, sample_draft
from tests.plugins.cases import (
    Batch,
    batches,
    ragged_batch,
    run_onnx,
    run_specification,
    same,
)
from tests.plugins.rounds import draft_sampler

SETTINGS = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
MODES = (VerifyMode.REJECTION, VerifyMode.COUPLED)


@pytest.mark.parametrize("mode", MODES)
@SETTINGS
@given(batch=batches())
def test_onnx_function_agrees_with_specification(mode: VerifyMode, batch: Batch) -> None:
    expected = run_specification(mode, batch)
    assert same(run_onnx(mode, batch), expected), expected


@SETTINGS
@given(batch=batches())
def test_greedy_graph_equals_a_greedy_batch(batch: Batch) -> None:
    batch["temperature"][:] = 0
    greedy = run_onnx(VerifyMode.GREEDY, batch)
    for mode in MODES:
        assert same(greedy, run_specification(mode, batch))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("damage", [np.nan, np.inf])
@pytest.mark.parametrize("greedy", [0.0, 1.0])
def test_a_damaged_row_refuses_its_request_only(
    mode: VerifyMode, damage: float, greedy: float
) -> None:
    rng = np.random.default_rng(3)
    batch = ragged_batch(rng, requests=5, gamma=3, vocab_size=700, greedy=greedy)
    healthy = run_onnx(mode, batch)
    first_row = batch["offsets"][2]
    batch["target_logits"][first_row, 600] = damage
    damaged = run_onnx(mode, batch)
    assert damaged.accepted[2] == REFUSED
    assert (damaged.tokens[2] == REFUSED).all()
    others = [0, 1, 3, 4]
    assert same(
        Verified(*(part[others] for part in damaged)),
        Verified(*(part[others] for part in healthy)),
    )


@pytest.mark.parametrize("mode", MODES)
def test_rows_behind_the_first_rejection_are_not_looked_at(mode: VerifyMode) -> None:
    batch = ragged_batch(
        np.random.default_rng(0), requests=1, gamma=3, vocab_size=50, greedy=1.0
    )
    batch["offsets"][:] = [0, 4]
    batch["target_logits"] = np.random.default_rng(1).normal(size=(4, 50)).astype(np.float32)
    batch["draft_tokens"][0, 0] = (batch["target_logits"][0].argmax() + 1) % 50  # rejected
    batch["target_logits"][1:] = np.nan
    result = run_onnx(mode, batch)
    assert result.accepted.tolist() == [0]
    assert result.tokens[0, 0] == batch["target_logits"][0].argmax()


def test_places_behind_the_drafted_ones_may_hold_anything() -> None:
    batch = ragged_batch(np.random.default_rng(5), requests=4, gamma=4, vocab_size=90)
    expected = run_specification(VerifyMode.REJECTION, batch)
    for r, drafted in enumerate(np.diff(batch["offsets"]) - 1):
        batch["draft_tokens"][r, drafted:] = [-7, 10**12, -1, 91][drafted:]
        batch["draft_logits"][r, drafted:] = np.nan
    batch["target_logits"] = np.pad(
        batch["target_logits"], ((0, 3), (0, 0)), constant_values=np.nan
    )
    assert same(run_onnx(VerifyMode.REJECTION, batch), expected)


@pytest.mark.parametrize("vocab_size", [2, 320, 512, 2048, 5003])
def test_drafts_are_the_specification_s_token_for_token(vocab_size: int) -> None:
    """Edges of the uniforms, greedy rows, flat and sharp ones, and tokens that cannot be drawn."""
    rng = np.random.default_rng(vocab_size)
    rows = 600
    scale = rng.choice([0.0, 1.0, 8.0], (rows, 1)).astype(np.float32)
    logits = rng.standard_normal((rows, vocab_size), np.float32) * scale
    logits[rng.random(logits.shape) < rng.choice([0.0, 0.5, 0.99], (rows, 1))] = -1e30
    logits[:, rng.integers(vocab_size)] = 0  # one is always there
    temperature = rng.choice(np.array([0, 0.7, 1, 2], np.float32), rows)
    uniforms = rng.random(rows, np.float32)
    uniforms[:40], uniforms[40:80] = 0, 1 - 2.0**-24
    feed = {"logits": logits, "temperature": temperature, "uniforms": uniforms}
    (tokens,) = draft_sampler(vocab_size).run(None, feed)
    expected = sample_draft(logits, temperature, uniforms)
    drawn = logits[np.arange(rows), tokens]
    assert (drawn > -1e30).all()
    # A uniform within rounding of a boundary may fall on either side.
    assert (tokens != expected).sum() <= 1
