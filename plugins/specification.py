# SPDX-License-Identifier: Apache-2.0
"""Lossless verification in NumPy: the specification that every other implementation is tested against.

One round hands over, for each request r of a ragged batch, the target's logits of its anchor row and
of its ℓ_r ≤ γ drafted rows (``offsets[r] .. offsets[r+1]-1``), and the drafted tokens. What comes back,
the accepted drafts and one more token, is distributed exactly as the target's own samples.

``rejection``: Leviathan et al. 2023 (arXiv 2211.17192) and section 2.1 of the DSpark paper.
``coupled``: Daliri et al. (arXiv 2408.07978); see `dspark_trt.plugins.philox` for the noise.

A request is refused (accepted -1, all its tokens -1) when the row its last token would come from holds
NaN or +inf or allows no token, or when the draft row it is compared with does. Rows behind that one are
never looked at, as in decoding without drafts; other requests of the batch are not affected.

Legend: T target rows, B requests, K = γ, V vocabulary. Floats are float32.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark_trt.plugins.distribution import (
    filter_logits,
    is_greedy,
    is_usable,
    point_mass,
    probabilities,
    target_distribution,
)
from dspark_trt.plugins.philox import gumbel_scores

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

# Tokens a block of the two-level draw: near the square roots of vocabularies, a power of two. With 150,000 tokens
# it costs what 512 would, with few thousands a twentieth of a draft step less.
BLOCK = 256
# Uniforms are multiples of 2^-24. An odd number near 2^24 / golden ratio: n → n·SPREAD mod 2^24 visits the
# 24-bit numbers once each, and any run of consecutive n lands evenly spaced.
UNIFORM_STEPS = 1 << 24
SPREAD = 10368889
REFUSED = -1


class Verified(NamedTuple):
    """What one round commits: ``tokens[r, : accepted[r] + 1]``, -1 behind; accepted -1 is a refusal."""

    accepted: Ints  # [B]
    tokens: Ints  # [B, K+1]


def pick(weights: Floats, uniform: float) -> int:
    """Inverse CDF: the last token of positive weight whose preceding mass is at most ``uniform`` · total.

    Said so, no edge needs a rule of its own: 0 gives the first token of positive weight, 1 the last, and
    a token of weight zero is never drawn, however the sums were rounded.
    """
    mass = np.cumsum(weights, dtype=np.float32)
    before = np.concatenate([np.zeros(1, np.float32), mass[:-1]])
    hits = np.flatnonzero((weights > 0) & (before <= np.float32(uniform) * mass[-1]))
    return int(hits[-1]) if hits.size else 0


def spread(uniform: float) -> np.float32:
    """A second number in [0, 1) from the same 24 bits: evenly spaced where ``uniform`` is confined to a block."""
    return np.float32(int(uniform * UNIFORM_STEPS) * SPREAD % UNIFORM_STEPS) / np.float32(
        UNIFORM_STEPS
    )


def draw(weights: Floats, uniform: float) -> int:
    """One token in proportion to ``weights [V]``: first a block of `BLOCK` tokens, then a token inside it.

    Two short cumulative sums instead of one long: rounding moves a boundary by 1e-7 of a block's mass, not
    of the whole, so that implementations which add in another order still return the same token.
    """
    blocks = np.pad(weights, (0, -len(weights) % BLOCK)).reshape(-1, BLOCK)
    block = pick(blocks.sum(axis=1, dtype=np.float32), uniform)
    return block * BLOCK + pick(blocks[block], float(spread(uniform)))


def sample_draft(logits: Floats, temperature: Floats, uniforms: Floats) -> Ints:
    """One token a row from softmax(logits / temperature); temperature 0 gives the first maximum.

    Shapes: logits [B, V], temperature [B], uniforms [B] in [0, 1) -> int64 [B].
    """
    return np.array(
        [
            draw(probabilities(row, t), float(u)) if is_usable(row) else 0
            for row, t, u in zip(logits, temperature, uniforms, strict=True)
        ],
        np.int64,
    ).reshape(len(logits))


def verify_rejection(
    target_logits: Floats,  # [T, V]
    offsets: Ints,  # [B+1]
    draft_tokens: Ints,  # [B, K]
    draft_logits: Floats,  # [B, K, V]
    draft_temperature: Floats,  # [B]
    temperature: Floats,  # [B]
    top_k: Ints,  # [B]
    top_p: Floats,  # [B]
    min_p: Floats,  # [B]
    uniforms: Floats,  # [B, K+1]: K to accept with, one for the last token
) -> Verified:
    """Accept x_k if u·q(x_k) < p(x_k); the first rejected place draws from norm(max(p - q, 0)), else p a bonus.

    q is the softmax of the very ``draft_logits`` the token was drawn from, or a point mass on the token
    where ``draft_temperature`` is 0. Uniforms are below 1, so u·q < p accepts with probability min(1, p/q).
    """

    def request(r: int, start: int, end: int) -> list[int]:
        drafted, last_uniform = draft_tokens[r, : end - start - 1], float(uniforms[r, -1])
        for k, row in enumerate(target_logits[start:end]):
            accepted = [int(token) for token in drafted[:k]]
            p = target_distribution(row, temperature[r], top_k[r], top_p[r], min_p[r])
            if p is None:
                return []
            if k == len(drafted):
                return [*accepted, draw(p, last_uniform)]
            x = int(drafted[k])
            if is_greedy(temperature[r]) or is_greedy(draft_temperature[r]):
                q = point_mass(
                    x, len(p)
                )  # a greedy target does not ask how likely the draft was
            elif is_usable(draft_logits[r, k]):
                q = probabilities(draft_logits[r, k], draft_temperature[r])
            else:
                return []
            if not uniforms[r, k] * q[x] < p[x]:
                residual = np.maximum(p - q, np.float32(0))
                residual[x] = 0  # p(x) < q(x): rounding may say otherwise
                return [*accepted, draw(residual if residual.any() else p, last_uniform)]
        raise AssertionError("a request has at least its anchor's row")

    return _verified(request, offsets, draft_tokens)


def verify_coupled(
    target_logits: Floats,  # [T, V]
    offsets: Ints,  # [B+1]
    draft_tokens: Ints,  # [B, K]
    temperature: Floats,  # [B]
    top_k: Ints,  # [B]
    top_p: Floats,  # [B]
    min_p: Floats,  # [B]
    seeds: Ints,  # [B]
    positions: Ints,  # [B]: absolute position of the first drafted token
) -> Verified:
    """Keep drafts as long as they are the token the target itself draws with this seed at this position."""

    def request(r: int, start: int, end: int) -> list[int]:
        tokens: list[int] = []
        for k, row in enumerate(target_logits[start:end]):
            own = sample_coupled(
                row, temperature[r], top_k[r], top_p[r], min_p[r], seeds[r], positions[r] + k
            )
            if own == REFUSED:
                return []
            tokens.append(own)
            if start + k < end - 1 and own != draft_tokens[r, k]:
                break
        return tokens

    return _verified(request, offsets, draft_tokens)


def sample_coupled(
    logits: Floats,  # [V]
    temperature: np.float32,
    top_k: np.int64,
    top_p: np.float32,
    min_p: np.float32,
    seed: np.int64,
    position: np.int64,
) -> int:
    """The target's own sample at an absolute position: first maximum of logits / temperature + Gumbel noise.

    Returns `REFUSED` for a row from which nothing can be drawn. A drafter calls this with its own logits.
    """
    if not is_usable(logits):
        return REFUSED
    if is_greedy(temperature):
        return int(logits.argmax())
    kept = filter_logits(logits / temperature, top_k, top_p, min_p)
    return int(gumbel_scores(kept, int(seed), int(position)).argmax())


class TokenLogprobs(NamedTuple):
    """Under the target's raw logits; behind the committed tokens 0, and -1 for tokens."""

    logprobs: Floats  # [B, K+1]
    top_tokens: Ints  # [B, K+1, N]: the likeliest, likeliest first
    top_logprobs: Floats  # [B, K+1, N]


def token_logprobs(
    target_logits: Floats, offsets: Ints, tokens: Ints, alternatives: int
) -> TokenLogprobs:
    """Log-probabilities of committed `tokens [B, K+1]` and of the N likeliest tokens in their places."""
    own = np.zeros(tokens.shape, np.float32)
    top_tokens = np.full((*tokens.shape, alternatives), REFUSED, np.int64)
    top = np.zeros(top_tokens.shape, np.float32)
    for place in zip(*np.nonzero(tokens >= 0), strict=True):
        row = target_logits[offsets[place[0]] + place[1]]
        shifted = row - row.max()
        logprobs = shifted - np.log(np.exp(shifted).sum())
        own[place] = logprobs[tokens[place]]
        top_tokens[place] = np.argsort(-logprobs, kind="stable")[:alternatives]
        top[place] = logprobs[top_tokens[place]]
    return TokenLogprobs(own, top_tokens, top)


def _verified(
    request: Callable[[int, int, int], list[int]], offsets: Ints, draft_tokens: Ints
) -> Verified:
    """Run ``request(r, first row, row behind the last)`` for each request and pad; no token: refused."""
    tokens = np.full((len(draft_tokens), draft_tokens.shape[1] + 1), REFUSED, np.int64)
    accepted = np.empty(len(draft_tokens), np.int64)
    for r, (start, end) in enumerate(pairwise(offsets)):
        committed = request(r, int(start), int(end))
        tokens[r, : len(committed)] = committed
        accepted[r] = len(committed) - 1
    return Verified(accepted, tokens)
