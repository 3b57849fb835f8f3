# SPDX-License-Identifier: Apache-2.0
"""From raw target logits to the distribution a request asked for, in NumPy.

The order is that of Hugging Face `generate` (`GenerationMixin._get_logits_processor`): logit bias,
repetition penalty, (presence and frequency penalties, which Hugging Face does not have), allowed tokens,
temperature, top-k, top-p, min-p. Top-k and top-p keep or drop equal logits together.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

# Below this temperature a request is greedy, as in DeepSpec's sampler.
GREEDY_BELOW = 1e-5


def is_greedy(temperature: np.float32) -> bool:
    return bool(temperature < GREEDY_BELOW)


def is_usable(logits: Floats) -> bool:
    """Whether a row can be sampled from: no NaN, no +inf, at least one finite logit."""
    return bool(np.isfinite(logits.max()))  # max propagates NaN


def softmax(scaled: Floats) -> Floats:
    weights: Floats = np.exp(scaled - scaled.max())
    p: Floats = weights / weights.sum(dtype=np.float32)
    return p


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
    logits: Floats,
    temperature: np.float32,
    top_k: np.int64,
    top_p: np.float32,
    min_p: np.float32,
) -> Floats | None:
    """The distribution [V] one token is drawn from; None if the row cannot be sampled from.

    ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch a filter off.
    """
    if not is_usable(logits):
        return None
    if is_greedy(temperature):
        return point_mass(int(logits.argmax()), len(logits))
    return softmax(filter_logits(logits / temperature, top_k, top_p, min_p))


def filter_logits(
    scaled: Floats, top_k: np.int64, top_p: np.float32, min_p: np.float32
) -> Floats:
    """Scaled logits [V] with -inf where top-k, top-p or min-p drop a token.

    Kept are: logits not below the k-th largest; of these, tokens such that all strictly likelier ones
    together hold less than ``top_p``; tokens at least ``min_p`` times as likely as the likeliest.
    """
    descending = np.sort(scaled)[::-1]
    threshold = (
        descending[min(int(top_k), len(scaled)) - 1] if top_k > 0 else np.float32(-np.inf)
    )
    weights = np.exp(descending - descending[0])
    if top_p < 1:
        kept = np.where(descending >= threshold, weights, np.float32(0))
        mass = np.cumsum(kept, dtype=np.float32)
        before = np.concatenate([np.zeros(1, np.float32), mass[:-1]])
        inside = max(1, int(np.count_nonzero(before < top_p * mass[-1])))
        threshold = max(threshold, descending[inside - 1])
    if min_p > 0:
        threshold = max(threshold, descending[0] + np.log(min_p))
    return np.where(scaled >= threshold, scaled, np.float32(-np.inf))


class Processors(NamedTuple):
    """What changes the logits before the temperature does. Each part has a neutral value.

    ``output_counts`` counts the output tokens committed so far, the anchor included. Drafts of the same
    block are counted by `process_logits`: row k knows the drafted tokens before it.
    """

    logit_bias: Floats  # [B, V], added first
    repetition_penalty: Floats  # [B], 1: off; divides positive and multiplies negative logits
    presence_penalty: Floats  # [B], 0: off; subtracted if the token was output at all
    frequency_penalty: Floats  # [B], 0: off; subtracted once an occurrence in the output
    prompt_mask: NDArray[np.bool_]  # [B, V]: the token occurs in the prompt
    output_counts: NDArray[np.int32]  # [B, V]
    allowed: NDArray[np.bool_]  # [T, V]: what a grammar permits at this row


def process_logits(
    target_logits: Floats, offsets: Ints, draft_tokens: Ints, processors: Processors
) -> Floats:
    """The target's logits [T, V] after bias, penalties and the allowed-token mask.

    Repetition counts prompt and output, as in Hugging Face (CTRL, arXiv 1909.05858); presence and frequency
    count the output alone, as in the OpenAI API. Both see a draft as output at the rows behind it, which
    only matter if it is accepted.
    """
    processed = np.empty_like(target_logits)
    for r, (start, end) in enumerate(pairwise(offsets)):
        counts = processors.output_counts[r].astype(np.float32)
        for k, row in enumerate(range(start, end)):
            if k > 0:
                counts[draft_tokens[r, k - 1]] += 1
            logits = target_logits[row] + processors.logit_bias[r]
            penalty = processors.repetition_penalty[r]
            punished = np.where(logits < 0, logits * penalty, logits / penalty)
            seen = processors.prompt_mask[r] | (counts > 0)
            logits = np.where(seen, punished, logits)
            logits -= processors.presence_penalty[r] * (counts > 0)
            logits -= processors.frequency_penalty[r] * counts
            processed[row] = np.where(processors.allowed[row], logits, np.float32(-np.inf))
    return processed
