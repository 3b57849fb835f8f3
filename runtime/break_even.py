# SPDX-License-Identifier: Apache-2.0
"""What drafting has to return on this machine before it pays.

The unit is a *plain round*: one target step that gives every running request one token. Drafting pays
a request when the drafts it keeps outnumber the plain rounds they cost, drafting included.

Legend: R requests, K = γ drafted tokens.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.errors import RequestError
from dspark_trt.runtime.cost_model import CostModel

Floats = NDArray[np.float64]


class Spent(NamedTuple):
    """Plain rounds by request; of the shape of the lengths."""

    together: Floats  # the draft step is shared by those that drafted, the longer step by verified tokens
    alone: Floats  # what a request would save that stops while the others go on


def plain_rounds_spent(
    table: CostModel,
    lengths: ArrayLike,  # [R] or [n, R] ℓ_r
    drafted: ArrayLike,  # the same shape; whether the request drafted at all
    *,
    context_tokens: float | None = None,
) -> Spent:
    """What drafting and verification cost each request beyond its plain round."""
    verified = np.asarray(lengths, dtype=np.int64)
    took_part = np.asarray(drafted, dtype=np.float64)
    requests = verified.shape[-1]
    if requests == 1:  # it shares with nobody
        last = 1 + int(verified.max())
        step = table.seconds(1, last, requests=1, context_tokens=context_tokens)
        drafting = took_part * table.draft_cost(1, context_tokens)
        own = (step[verified] - step[0] + drafting) / step[0]
        return Spent(own, own)
    tokens = np.add.reduce(verified, axis=-1, keepdims=True)
    longest = np.maximum.reduce(verified, axis=-1, keepdims=True)
    step = _step_seconds(table, requests, int(tokens.max()), int(longest.max()), context_tokens)
    plain = step[0, 0]
    seconds = step[longest, tokens]
    drafting = np.add.reduce(took_part, axis=-1, keepdims=True)
    rows = np.array([table.draft_cost(n, context_tokens) for n in range(requests + 1)])
    count = drafting.astype(np.int64)
    draft, fewer = rows[count], rows[np.maximum(count - 1, 0)]
    together = took_part * draft / np.maximum(drafting, 1.0)
    together += verified * (seconds - plain) / np.maximum(tokens, 1)
    without = step[_longest_of_others(verified, longest), tokens - verified]
    alone = took_part * (draft - fewer) + (seconds - without)
    return Spent(together * (requests / plain), alone * (requests / plain))


def _step_seconds(
    table: CostModel, requests: int, tokens: int, longest: int, context: float | None
) -> Floats:  # [longest + 1, tokens + 1]
    """Of a step that verifies so many drafts, the longest block among them."""
    last = requests + tokens
    even = table.seconds(requests, last, requests=requests, context_tokens=context)
    if not table.pays_longest:
        return np.broadcast_to(even, (longest + 1, even.size))
    uneven = [
        table.seconds(requests, last, requests=requests, context_tokens=context, longest=length)
        for length in range(longest + 1)
    ]
    return np.maximum(even, uneven)


def _longest_of_others(
    verified: NDArray[np.int64], longest: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The longest length of a round if a request verified nothing, [.., R]."""
    is_longest = verified == longest
    several = np.add.reduce(is_longest, axis=-1, keepdims=True) > 1
    second = np.maximum.reduce(np.where(is_longest, 0, verified), axis=-1, keepdims=True)
    return np.where(is_longest & ~several, second, longest)


def fixed_length_speed(
    table: CostModel,
    conditional: ArrayLike,  # [K] P(x_k accepted | prefix accepted)
    *,
    requests: int,
    context_tokens: float | None = None,
) -> Floats:  # [K + 1]
    """Tokens a second of R requests that always verify k drafts, k = 0..K; 0 does not draft."""
    survival = np.cumprod(np.asarray(conditional, dtype=np.float64))
    gamma = survival.size
    tokens = requests * np.concatenate([[1.0], 1.0 + np.cumsum(survival)])
    seconds = table.seconds(
        requests, requests * (gamma + 1), requests=requests, context_tokens=context_tokens
    )
    seconds = seconds[::requests].copy()
    seconds[1:] += table.draft_cost(requests, context_tokens)
    return np.asarray(tokens / seconds)


def expected_gain(
    table: CostModel,
    conditional: ArrayLike,  # [K]
    *,
    requests: int,
    context_tokens: float | None = None,
) -> tuple[float, float]:
    """Mean and variance of accepted drafts minus plain rounds spent, for one of R requests at the best
    fixed length.
    """
    survival = np.cumprod(np.asarray(conditional, dtype=np.float64))
    speed = fixed_length_speed(
        table, conditional, requests=requests, context_tokens=context_tokens
    )
    length = 1 + int(speed[1:].argmax())
    likely = survival[:length]
    accepted = float(likely.sum())
    # E[a²] of a count a is Σ (2k − 1) P(a ≥ k).
    squared = float((likely * (2 * np.arange(length) + 1)).sum())
    spent = plain_rounds_spent(
        table, np.full(requests, length), np.ones(requests), context_tokens=context_tokens
    )
    return accepted - float(spent.together[0]), squared - accepted**2


def recommended_length(
    table: CostModel,
    conditional: ArrayLike,  # [K]
    *,
    requests: int,
    context_tokens: float | None = None,
) -> int:
    """The fixed length with the most tokens a second; 0: do not draft on this machine."""
    speed = fixed_length_speed(
        table, conditional, requests=requests, context_tokens=context_tokens
    )
    return int(speed.argmax())


def break_even_acceptance(
    table: CostModel, gamma: int, *, requests: int, context_tokens: float | None = None
) -> float:
    """Conditional acceptance, equal at all positions, above which some fixed length beats plain.

    1.0 if not even certain drafts pay.
    """
    if gamma < 1:
        raise RequestError(f"break-even needs at least one drafted token, got {gamma}")

    def pays(acceptance: float) -> bool:
        return bool(
            recommended_length(
                table,
                np.full(gamma, acceptance),
                requests=requests,
                context_tokens=context_tokens,
            )
        )

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
