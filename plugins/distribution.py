# SPDX-License-Identifier: Apache-2.0
"""From raw target logits to the distribution a request asked for, in NumPy.

The order is that of Hugging Face `generate` (`GenerationMixin._get_logits_processor`): logit bias,
repetition penalty, (presence and frequency penalties, which Hugging Face does not have), allowed tokens,
temperature, top-k, top-p, min-p. Top-k and top-p keep or drop equal logits together.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

# Below this temperature a request is greedy, as in DeepSpec's sampler.
GREEDY_BELOW = 1e-5


def is_greedy(temperature: float) -> bool:
    return temperature < GREEDY_BELOW


def is_usable(logits: Floats) -> bool:
    """Whether a row can be sampled from: no NaN, no +inf, at least one finite logit."""
    return bool(np.isfinite(logits.max()))  # max propagates NaN


def softmax(scaled: Floats) -> Floats:
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum(dtype=np.float32)


def point_mass(token: int, vocab_size: int) -> Floats:
    p = np.zeros(vocab_size, np.float32)
    p[token] = 1
    return p


def probabilities(logits: Floats, temperature: np.float32) -> Floats:
    """softmax(logits / temperature) of one row [V]; a point mass on the first maximum at temperature 0."""
    if is_greedy(temperature):
        return point_mass(int(logits.argmax()), len(logits))
    return softmax(logits / temperature)


def target_distribution(
    logits: Floats, temperature: np.float32, top_k: np.int64, top_p: np.float32, min_p: np.float32
) -> Floats | None:
    """The distribution [V] one token is drawn from; None if the row cannot be sampled from.

    ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch a filter off.
    """
    if not is_usable(logits):
        return None
    if is_greedy(temperature):
        return point_mass(int(logits.argmax()), len(logits))
    return softmax(filter_logits(logits / temperature, top_k, top_p, min_p))


def filter_logits(scaled: Floats, top_k: np.int64, top_p: np.float32, min_p: np.float32) -> Floats:
    """Scaled logits [V] with −inf where top-k, top-p or min-p drop a token.

    Kept are: logits not below the k-th largest; of these, tokens such that all strictly likelier ones
    together hold less than ``top_p``; tokens at least ``min_p`` times as likely as the likeliest.
    """
    descending = np.sort(scaled)[::-1]
    threshold = descending[min(top_k, len(scaled)) - 1] if top_k > 0 else np.float32(-np.inf)
    weights = np.exp(descending - descending[0])
    if top_p < 1:
        kept = np.where(descending >= threshold, weights, np.float32(0))
        mass = np.cumsum(kept, dtype=np.float32)
        before = np.concatenate([np.zeros(1, np.float32), mass[:-1]])
        inside = max(1, int(np.count_nonzero(before < top_p * mass[-1])))
        threshold = max(threshold, descending[inside - 1])
    keep = (scaled >= threshold) & (np.exp(scaled - descending[0]) >= min_p)
    return np.where(keep, scaled, np.float32(-np.inf))
