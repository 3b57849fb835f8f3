# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803 -- compile-time constants are spelled in capitals
"""Triton building blocks that read rows of logits: scaling, filters, noise, and one summary a chunk.

A row of V logits is split into S chunks, one program each, so that a single request also fills a GPU.
Legend: V vocabulary, K = γ, S chunks a row. All tensors are contiguous; logits float16, bfloat16 or float32.
"""

import triton
import triton.language as tl

GREEDY_BELOW = tl.constexpr(1e-5)  # distribution.GREEDY_BELOW


@triton.jit
def scaled_logits(logits, row, columns, temperature, V: tl.constexpr):
    """Logits / temperature of some columns of one row in float32, -inf behind the vocabulary."""
    address = logits + row.to(tl.int64) * V + columns
    values = tl.load(address, mask=columns < V, other=-float("inf")).to(tl.float32)
    return tl.div_rn(values, tl.where(temperature < GREEDY_BELOW, 1.0, temperature))


@triton.jit
def kept_logits(logits, row, columns, temperature, threshold, V: tl.constexpr):
    """The same with -inf below the row's threshold; NaN stays NaN."""
    scaled = scaled_logits(logits, row, columns, temperature, V)
    return tl.where(scaled < threshold, -float("inf"), scaled)


@triton.jit
def gumbel_noise(seed, position, first_column, COUNT: tl.constexpr):
    """Standard Gumbel noise of consecutive columns, the first a multiple of four (see `philox`)."""
    calls = first_column // 4 + tl.arange(0, COUNT // 4)
    zero = tl.zeros_like(calls)
    words = tl.philox(seed, calls, zero + position.to(tl.int32), zero, zero)
    even = tl.join(words[0], words[2])
    odd = tl.join(words[1], words[3])
    word = tl.reshape(tl.join(even, odd), [COUNT]).to(tl.uint32, bitcast=True)
    x = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    x = tl.minimum(x, 0.999999940395355)
    series = x * (x * (x * 0.3333333333333333 + 0.5) + 1.0)
    return -tl.log(tl.where(x < 0.0078125, series, -tl.log(1.0 - x)))


@triton.jit
def store_summary(scores, slot, chunk_top, chunk_sum):
    """Maximum and sum of exp(score - maximum) of one chunk; its maximum is returned.

    The sum is NaN if a score is NaN or +inf, and 0 if all are -inf.
    """
    top = tl.max(scores, axis=0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    tl.store(chunk_top + slot, top)
    tl.store(chunk_sum + slot, tl.sum(tl.exp(scores - shift), axis=0))
    return top


@triton.jit
def store_best(scores, top, columns, slot, chunk_best):
    """First maximum of one chunk."""
    tl.store(chunk_best + slot, tl.min(tl.where(scores == top, columns, 2147483647), axis=0))


@triton.jit
def row_summaries(chunk_top, chunk_sum, rows, used, S: tl.constexpr, S_PAD: tl.constexpr):
    """Combine the chunks of several rows [R]: maximum and sum of exp(score - maximum)."""
    chunks = tl.arange(0, S_PAD)
    slots = rows[:, None] * S + chunks[None, :]
    mask = used[:, None] & (chunks < S)[None, :]
    tops = tl.load(chunk_top + slots, mask=mask, other=-float("inf"))
    sums = tl.load(chunk_sum + slots, mask=mask, other=0.0)
    top = tl.max(tops, axis=1)
    shift = tl.where(top == -float("inf"), 0.0, top)
    return top, tl.sum(sums * tl.exp(tops - shift[:, None]), axis=1)


@triton.jit
def row_best(chunk_top, chunk_best, rows, used, S: tl.constexpr, S_PAD: tl.constexpr):
    """The first maximum of several rows [R]."""
    chunks = tl.arange(0, S_PAD)
    slots = rows[:, None] * S + chunks[None, :]
    mask = used[:, None] & (chunks < S)[None, :]
    tops = tl.load(chunk_top + slots, mask=mask, other=-float("inf"))
    ids = tl.load(chunk_best + slots, mask=mask, other=2147483647)
    top = tl.max(tops, axis=1)
    return tl.min(tl.where(tops == top[:, None], ids, 2147483647), axis=1)


@triton.jit
def pick(weights, uniform, index):
    """The last index of positive weight whose preceding mass is at most uniform · total."""
    mass = tl.cumsum(weights, axis=0)
    reached = (mass - weights) <= uniform * tl.sum(weights, axis=0)
    return tl.max(tl.where(reached & (weights > 0), index, 0), axis=0)
