# SPDX-License-Identifier: Apache-2.0
"""The draw and the noise that every implementation has to repeat."""

import numpy as np
import pytest
import torch

from dspark_trt.plugins.philox import exponential, gumbel_scores, philox, random_words
from dspark_trt.plugins.specification import (
    BLOCK,
    SPREAD,
    UNIFORM_STEPS,
    draw,
    pick,
    sample_draft,
    spread,
)

LARGEST_UNIFORM = 1 - 1 / UNIFORM_STEPS


@pytest.mark.parametrize(
    ("uniform", "expected"), [(0.0, 1), (0.2499, 1), (0.25, 3), (0.9, 3), (LARGEST_UNIFORM, 3)]
)
def test_pick_never_returns_a_weight_of_zero(uniform: float, expected: int) -> None:
    weights = np.array([0, 1, 0, 3, 0], np.float32)
    assert pick(weights, uniform) == expected


def test_draw_is_proportional_to_the_weights() -> None:
    """All 2^24 uniforms would give p to 2^-24 each; a regular grid of 2^15 of them to 2^-14."""
    rng = np.random.default_rng(0)
    weights = rng.gamma(0.3, size=3 * BLOCK + 17).astype(np.float32)
    steps = 1 << 15
    drawn = [draw(weights, i / steps) for i in range(steps)]
    share = np.bincount(drawn, minlength=len(weights)) / steps
    by_block = np.add.reduceat(weights, range(0, len(weights), BLOCK)) / weights.sum()
    np.testing.assert_allclose(
        np.add.reduceat(share, range(0, len(weights), BLOCK)), by_block, atol=2 / steps
    )
    assert np.abs(share - weights / weights.sum()).max() < 16 / steps


def test_spread_permutes_the_uniforms_and_spaces_neighbours_evenly() -> None:
    assert SPREAD % 2 == 1  # invertible modulo 2^24
    numbers = sorted(float(spread((1_000_000 + i) / UNIFORM_STEPS)) for i in range(1000))
    gaps = np.diff([*numbers, numbers[0] + 1])
    assert gaps.max() < 3.0 / 1000
    assert gaps.min() > 0.3 / 1000


def test_sample_draft_at_temperature_zero_is_the_first_maximum() -> None:
    logits = np.array([[1, 5, 5, 0], [2, 2, 1, 0]], np.float32)
    zero = np.zeros(2, np.float32)
    assert sample_draft(logits, zero, zero + 0.99).tolist() == [1, 0]


def test_philox_known_answers() -> None:
    """Vectors published with Random123 (kat_vectors, philox4x32 10)."""
    zero, ones = np.zeros(1, np.uint32), np.full(1, 0xFFFFFFFF, np.uint32)
    a, b, c, d = np.array([[0x243F6A88], [0x85A308D3], [0x13198A2E], [0x03707344]], np.uint32)
    assert philox((zero,) * 4, (0, 0))[0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # fmt: skip
    assert philox((ones,) * 4, (0xFFFFFFFF,) * 2)[0].tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]  # fmt: skip
    assert philox((a, b, c, d), (0xA4093822, 0x299F31D0))[0].tolist() == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]  # fmt: skip


def test_noise_depends_on_seed_position_and_token_only() -> None:
    words = random_words(1000, seed=-5, position=77)
    assert np.array_equal(words[:13], random_words(13, seed=-5, position=77))
    assert not np.array_equal(words, random_words(1000, seed=-5, position=78))
    assert not np.array_equal(words, random_words(1000, seed=-5 + 2**32, position=77))


def test_exponential_is_exact_where_the_largest_noise_comes_from() -> None:
    words = np.array([0, 1, 255, 2**20, 2**25 - 1, 2**25, 2**31, 2**32 - 1], np.uint32)
    exact = -torch.log1p(-(torch.from_numpy(words.astype(np.float64)) + 0.5) / 2**32).numpy()
    np.testing.assert_allclose(exponential(words[:-1]), exact[:-1], rtol=4e-7)
    assert np.isfinite(exponential(words[-1:]))


def test_gumbel_maximum_samples_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.2, 0.05], np.float32))
    drawn = [int(gumbel_scores(logits, 9, position).argmax()) for position in range(10_000)]
    share = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(share, np.exp(logits), atol=0.016)
