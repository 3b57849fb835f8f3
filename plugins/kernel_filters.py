# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803 -- compile-time constants are spelled in capitals
"""Triton kernel for top-k, top-p and min-p: one threshold a row, found bit by bit without sorting."""

import triton
import triton.language as tl

from dspark_trt.plugins.kernel_rows import GREEDY_BELOW, scaled_logits


@triton.jit
def float_of_key(key):
    """Float32 whose place in the order of all floats is ``key`` (uint32); -inf for the NaNs below it."""
    key = tl.where(key < 0x007FFFFF, 0x007FFFFF, key)
    bits = tl.where(key >= 0x80000000, key ^ 0x80000000, ~key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def row_maximum(logits, row, temperature, V: tl.constexpr, CHUNK: tl.constexpr):
    top = -float("inf")
    for start in range(0, V, CHUNK):
        scaled = scaled_logits(logits, row, start + tl.arange(0, CHUNK), temperature, V)
        top = tl.maximum(top, tl.max(scaled, axis=0))
    return top


@triton.jit
def amount_above(
    logits, row, temperature, threshold, top, BY_MASS: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Number of logits at or above the threshold, or their sum of exp(logit - top)."""
    amount = 0.0
    for start in range(0, V, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        scaled = scaled_logits(logits, row, columns, temperature, V)
        weights = tl.exp(scaled - top) if BY_MASS else tl.where(columns < V, 1.0, 0.0)
        amount += tl.sum(tl.where(scaled >= threshold, weights, 0.0), axis=0)
    return amount


@triton.jit
def largest_reaching(
    logits, row, temperature, wanted, top, BY_MASS: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The largest float such that the logits at or above it amount to at least ``wanted``."""
    key = tl.full([], 0, tl.uint32)
    step = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        candidate = key | step
        step = step >> 1
        threshold = float_of_key(candidate)
        amount = amount_above(logits, row, temperature, threshold, top, BY_MASS, V, CHUNK)
        key = tl.where(amount >= wanted, candidate, key)
    return float_of_key(key)


@triton.jit
def threshold_kernel(
    target_logits, offsets, temperature, top_k, top_p, min_p, thresholds,
    V: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (B, K+1): thresholds float32 [B, K+1] on scaled logits, -inf where nothing is dropped."""
    request, place = tl.program_id(0), tl.program_id(1)
    row = tl.load(offsets + request) + place
    if row < tl.load(offsets + request + 1):
        t = tl.load(temperature + request)
        k, p, m = tl.load(top_k + request), tl.load(top_p + request), tl.load(min_p + request)
        threshold = -float("inf")
        limited = (k > 0) | (p < 1.0) | (m > 0.0)
        if limited & (t >= GREEDY_BELOW):
            top = row_maximum(target_logits, row, t, V, CHUNK)
            if (k > 0) & (k < V):
                wanted = k.to(tl.float32)
                threshold = largest_reaching(
                    target_logits, row, t, wanted, top, False, V, CHUNK
                )
            if p < 1.0:
                budget = p * amount_above(target_logits, row, t, threshold, top, True, V, CHUNK)
                budget = tl.maximum(
                    budget, 1e-30
                )  # top-p 0 keeps the maximum, whose weight is 1
                nucleus = largest_reaching(target_logits, row, t, budget, top, True, V, CHUNK)
                threshold = tl.maximum(threshold, nucleus)
            if m > 0.0:
                threshold = tl.maximum(threshold, top + tl.log(m))
        tl.store(thresholds + request * (K + 1) + place, threshold)
