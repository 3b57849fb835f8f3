# SPDX-License-Identifier: Apache-2.0
"""Gumbel noise that is a function of (seed, absolute position, token) and of nothing else.

Philox4x32-10 (Salmon et al., SC 2011), the generator that Triton's `tl.philox` and cuRAND use: key = the
seed's two halves, counter = (token // 4, position, 0, 0), output word token % 4.
"""

import numpy as np
from numpy.typing import NDArray

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORDS = 4
LOW_WORD = 0xFFFFFFFF

# Below this x, -log(1 - x) is computed by its series: float32 would lose the digits of x.
SERIES_BELOW = 2.0**-7
LARGEST = 1 - 2.0**-24

Words = NDArray[np.uint32]


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> Words:
    """Ten rounds on arrays of counters: four uint32 [N] -> uint32 [N, 4]."""
    c0, c1, c2, c3 = (word.astype(np.uint64) for word in counter)
    k0, k1 = key
    low, shift = np.uint64(LOW_WORD), np.uint64(32)
    for _ in range(ROUNDS):
        first, second = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1 = (second >> shift) ^ c1 ^ np.uint64(k0), second & low
        c2, c3 = (first >> shift) ^ c3 ^ np.uint64(k1), first & low
        k0, k1 = (k0 + WEYL[0]) & LOW_WORD, (k1 + WEYL[1]) & LOW_WORD
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def random_words(vocab_size: int, seed: int, position: int) -> Words:
    """One uint32 a token [V]."""
    calls = np.arange(-(-vocab_size // WORDS), dtype=np.uint32)
    zero = np.zeros_like(calls)
    counter = (calls, np.full_like(calls, position), zero, zero)
    return philox(counter, (seed & LOW_WORD, seed >> 32 & LOW_WORD)).reshape(-1)[:vocab_size]


def exponential(words: Words) -> NDArray[np.float32]:
    """-log(1 - x) for x = (word + ½) / 2^32: exact near 0, where the largest Gumbel values come from.

    x stays below 1, so that noise is finite, between -2.9 and 22.9.
    """
    x = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    x = np.minimum(x, np.float32(LARGEST))
    series = x * (1 + x * (np.float32(1 / 2) + x * np.float32(1 / 3)))
    noise: NDArray[np.float32] = np.where(x < SERIES_BELOW, series, -np.log(1 - x))
    return noise


def gumbel_scores(scaled: NDArray[np.float32], seed: int, position: int) -> NDArray[np.float32]:
    """Scaled logits [V] plus standard Gumbel noise; the first maximum is a sample of their softmax."""
    words = random_words(len(scaled), seed, position)
    return scaled - np.log(exponential(words))
