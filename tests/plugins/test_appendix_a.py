# SPDX-License-Identifier: Apache-2.0
"""The paper's appendix A: looking at x_k before deciding whether to verify it loses losslessness."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from dspark_trt.plugins.contract import VerifyMode
from tests.plugins.cases import Batch, session
from tests.plugins.rounds import draft_sampler, sampler

ROUNDS = 100_000
TARGET = np.log(np.array([0.7, 0.3], np.float32))
DRAFT = np.log(np.array([0.5, 0.5], np.float32))

Schedule = Callable[[NDArray[np.int64], np.random.Generator], NDArray[np.bool_]]


def always(drafts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.bool_]:
    return np.ones(len(drafts), bool)


def at_random(drafts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.bool_]:
    """What a confidence of earlier tokens may decide: independent of the draft itself."""
    return rng.random(len(drafts)) < 0.4


def looks_ahead(drafts: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.bool_]:
    """The forbidden one: drop the draft that would likely be rejected."""
    return np.asarray(drafts == 0)


def share_of_first_token(mode: VerifyMode, schedule: Schedule) -> float:
    rng = np.random.default_rng(8)
    noise: Batch = {"seeds": np.arange(ROUNDS), "positions": np.zeros(ROUNDS, np.int64)}
    ones = np.ones(ROUNDS, np.float32)
    draft = np.tile(DRAFT, (ROUNDS, 1))
    if mode is VerifyMode.REJECTION:
        uniforms = {"uniforms": rng.random(ROUNDS, np.float32)}
        feed = {"logits": draft, "temperature": ones, **uniforms}
        (drafts,) = draft_sampler(draft.shape[1]).run(None, feed)
        own: Batch = {
            "draft_logits": draft[:, None],
            "draft_temperature": ones,
            "uniforms": rng.random((ROUNDS, 2), np.float32),
        }
    else:
        feed = {"logits": draft, "temperature": ones, **noise}
        (drafts,) = sampler("SampleCoupled").run(None, feed)
        own = noise
    lengths = schedule(drafts, rng).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
    _, tokens = session(mode, 1, 2).run(
        None,
        {
            "target_logits": np.tile(TARGET, (offsets[-1], 1)),
            "offsets": offsets,
            "draft_tokens": drafts[:, None],
            "temperature": ones,
            "top_k": np.zeros(ROUNDS, np.int64),
            "top_p": ones,
            "min_p": 0 * ones,
            **own,
        },
    )
    return float((tokens[:, 0] == 0).mean())


@pytest.mark.parametrize("mode", [VerifyMode.REJECTION, VerifyMode.COUPLED])
@pytest.mark.parametrize("schedule", [always, at_random])
def test_a_schedule_that_does_not_look_ahead_keeps_the_target(
    mode: VerifyMode, schedule: Schedule
) -> None:
    assert share_of_first_token(mode, schedule) == pytest.approx(0.7, abs=0.006)


def test_a_schedule_that_looks_ahead_is_caught() -> None:
    """0.70 / 0.30 becomes 0.85 / 0.15, as in the paper."""
    assert share_of_first_token(VerifyMode.REJECTION, looks_ahead) == pytest.approx(
        0.85, abs=0.006
    )


def test_coupled_sampling_survives_any_schedule() -> None:
    assert share_of_first_token(VerifyMode.COUPLED, looks_ahead) == pytest.approx(
        0.7, abs=0.006
    )
