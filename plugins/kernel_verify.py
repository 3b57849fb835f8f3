# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803 -- compile-time constants are spelled in capitals
"""Triton kernels of one verification: summaries, acceptance, residual masses, the last token.

Arguments stand as inputs, then outputs, and no size is passed at run time: TensorRT launches the same
kernels. Nothing is allocated and no length leaves the device. Grids and buffers: `kernel_launch`.
"""

import triton
import triton.language as tl

from dspark_trt.plugins.kernel_rows import (
    GREEDY_BELOW,
    gumbel_noise,
    kept_logits,
    pick,
    row_best,
    row_summaries,
    scaled_logits,
    store_best,
    store_summary,
)

# What is left to do for a request after acceptance.
FINISHED = tl.constexpr(0)
BONUS = tl.constexpr(1)
RESIDUAL = tl.constexpr(2)


@triton.jit
def target_kernel(
    target_logits, offsets, temperature, thresholds, chunk_top, chunk_sum, chunk_best,
    V: tl.constexpr, K: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (B, K+1, S): summaries [B, K+1, S] of the target's rows."""
    request, place, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(offsets + request) + place
    if row < tl.load(offsets + request + 1):
        t = tl.load(temperature + request)
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        threshold = tl.load(thresholds + request * (K + 1) + place)
        scores = kept_logits(target_logits, row, columns, t, threshold, V)
        slot = (request * (K + 1) + place) * S + chunk
        top = store_summary(scores, slot, chunk_top, chunk_sum)
        store_best(scores, top, columns, slot, chunk_best)


@triton.jit
def coupled_kernel(
    target_logits, offsets, temperature, thresholds, seeds, positions,
    chunk_top, chunk_sum, chunk_best,
    V: tl.constexpr, K: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (B, K+1, S): summaries of the target's rows with Gumbel noise added (none for greedy requests)."""
    request, place, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(offsets + request) + place
    if row < tl.load(offsets + request + 1):
        t = tl.load(temperature + request)
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        threshold = tl.load(thresholds + request * (K + 1) + place)
        scores = kept_logits(target_logits, row, columns, t, threshold, V)
        if t >= GREEDY_BELOW:
            position = tl.load(positions + request) + place
            scores += gumbel_noise(tl.load(seeds + request), position, chunk * CHUNK, CHUNK)
        slot = (request * (K + 1) + place) * S + chunk
        top = store_summary(scores, slot, chunk_top, chunk_sum)
        store_best(scores, top, columns, slot, chunk_best)


@triton.jit
def draft_kernel(
    draft_logits, offsets, temperature, draft_temperature, chunk_top, chunk_sum,
    V: tl.constexpr, K: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (B, K, S): summaries [B, K, S] of the drafted rows whose probabilities matter."""
    request, place, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    drafted = tl.load(offsets + request + 1) - tl.load(offsets + request) - 1
    t = tl.load(draft_temperature + request)
    sampled = (t >= GREEDY_BELOW) & (tl.load(temperature + request) >= GREEDY_BELOW)
    if (place < drafted) & sampled:
        row = request * K + place
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        scores = scaled_logits(draft_logits, row, columns, t, V)
        store_summary(scores, row * S + chunk, chunk_top, chunk_sum)


@triton.jit
def token_probabilities(
    logits, rows, ids, used, temperature, threshold, top, total, V: tl.constexpr
):
    """Softmax of several rows at one token each; 0 below the threshold."""
    address = logits + rows.to(tl.int64) * V + ids
    values = tl.load(address, mask=used, other=0.0).to(tl.float32)
    scaled = tl.div_rn(values, tl.where(temperature < GREEDY_BELOW, 1.0, temperature))
    return tl.where(scaled < threshold, 0.0, tl.div_rn(tl.exp(scaled - top), total))


@triton.jit
def commit(
    request, places, kept, drafted, own, usable, ids, accepted, tokens, K: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """Write accepted drafts and the target's own token of the next row, or refuse; returns place and usability."""
    n = tl.min(tl.where((places < drafted) & kept, LIMIT, places), axis=0)
    here = places == n
    is_usable = tl.max(tl.where(here & usable, 1, 0), axis=0) > 0
    row = tl.where(places < n, ids, tl.where(here, own, -1))
    tl.store(
        tokens + request * (K + 1) + places, tl.where(is_usable, row, -1), mask=places < K + 1
    )
    tl.store(accepted + request, tl.where(is_usable, n, -1).to(tl.int64))
    return n, is_usable


@triton.jit
def match_kernel(
    offsets, draft_tokens, chunk_top, chunk_sum, chunk_best, accepted, tokens,
    K: tl.constexpr, S: tl.constexpr, PLACES: tl.constexpr, S_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (B): keep drafts while they are the target's own tokens; accepted [B], tokens [B, K+1]."""
    request = tl.program_id(0)
    places = tl.arange(0, PLACES)
    drafted = tl.load(offsets + request + 1) - tl.load(offsets + request) - 1
    slots = request * (K + 1) + places
    used = places <= drafted
    total = row_summaries(chunk_top, chunk_sum, slots, used, S, S_PAD)[1]
    own = row_best(chunk_top, chunk_best, slots, used, S, S_PAD).to(tl.int64)
    ids = tl.load(draft_tokens + request * K + places, mask=places < drafted, other=-1)
    usable = total > 0
    kept = usable & (own == ids)
    commit(request, places, kept, drafted, own, usable, ids, accepted, tokens, K, PLACES)


@triton.jit
def accept_kernel(
    target_logits, offsets, draft_tokens, draft_logits, draft_temperature, temperature, uniforms,
    thresholds, target_top, target_sum, target_best, draft_top, draft_sum,
    accepted, tokens, remaining, summary,
    V: tl.constexpr, K: tl.constexpr, S: tl.constexpr, PLACES: tl.constexpr, S_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (B): accept while u·q < p. Tokens [B, K+1] but the last one of sampling requests, for which
    ``remaining`` int32 [B, 2] says what to draw from (and where), ``summary`` float32 [B, 4] the two softmaxes.
    """
    request = tl.program_id(0)
    places = tl.arange(0, PLACES)
    start = tl.load(offsets + request)
    drafted = tl.load(offsets + request + 1) - start - 1
    is_drafted = places < drafted
    t = tl.load(temperature + request)
    draft_t = tl.load(draft_temperature + request)
    greedy, draft_greedy = t < GREEDY_BELOW, draft_t < GREEDY_BELOW

    slots = request * (K + 1) + places
    used = places <= drafted
    top, total = row_summaries(target_top, target_sum, slots, used, S, S_PAD)
    best = row_best(target_top, target_best, slots, used, S, S_PAD).to(tl.int64)
    threshold = tl.load(thresholds + slots, mask=used, other=0.0)
    ids = tl.load(draft_tokens + request * K + places, mask=is_drafted, other=-1)
    p = token_probabilities(
        target_logits, start + places, ids, is_drafted, t, threshold, top, total, V
    )
    rows = request * K + places
    sampled = (t >= GREEDY_BELOW) & (draft_t >= GREEDY_BELOW)
    from_q = places < tl.where(sampled, drafted, 0)
    draft_top_, draft_total = row_summaries(draft_top, draft_sum, rows, from_q, S, S_PAD)
    q = token_probabilities(
        draft_logits, rows, ids, from_q, draft_t, -float("inf"), draft_top_, draft_total, V
    )
    u = tl.load(uniforms + request * (K + 1) + places, mask=is_drafted, other=0.0)
    sampled_kept = u * tl.where(draft_greedy, 1.0, q) < p
    kept = (total > 0) & tl.where(greedy, best == ids, sampled_kept)
    usable = (total > 0) & tl.where(from_q, draft_total > 0, total > 0)
    own = tl.where(greedy, best, -1)
    n, is_usable = commit(
        request, places, kept, drafted, own, usable, ids, accepted, tokens, K, PLACES
    )

    kind = tl.where(n < drafted, RESIDUAL, BONUS)
    kind = tl.where(is_usable & (t >= GREEDY_BELOW), kind, FINISHED)
    tl.store(remaining + request * 2, kind)
    tl.store(remaining + request * 2 + 1, n.to(tl.int32))
    here = places == n
    tl.store(summary + request * 4, tl.sum(tl.where(here, top, 0.0), axis=0))
    tl.store(summary + request * 4 + 1, tl.sum(tl.where(here, total, 0.0), axis=0))
    tl.store(
        summary + request * 4 + 2, tl.sum(tl.where(here & from_q, draft_top_, 0.0), axis=0)
    )
    tl.store(
        summary + request * 4 + 3, tl.sum(tl.where(here & from_q, draft_total, 0.0), axis=0)
    )


@triton.jit
def last_weights(
    target_logits, offsets, draft_tokens, draft_logits, draft_temperature, temperature,
    thresholds, remaining, summary, request, columns, V: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Of some columns: p, and max(p - q, 0) without the rejected token, of the row the last token comes from."""
    kind, place = tl.load(remaining + request * 2), tl.load(remaining + request * 2 + 1)
    row = tl.load(offsets + request) + place
    t = tl.load(temperature + request)
    threshold = tl.load(thresholds + request * (K + 1) + place)
    scaled = kept_logits(target_logits, row, columns, t, threshold, V)
    top, total = tl.load(summary + request * 4), tl.load(summary + request * 4 + 1)
    p = tl.div_rn(tl.exp(scaled - top), total)
    residual = tl.zeros_like(p)
    if kind == RESIDUAL:
        q = tl.zeros_like(p)
        draft_t = tl.load(draft_temperature + request)
        if draft_t >= GREEDY_BELOW:
            draft_row = request * K + place
            draft_scaled = scaled_logits(draft_logits, draft_row, columns, draft_t, V)
            draft_top = tl.load(summary + request * 4 + 2)
            draft_total = tl.load(summary + request * 4 + 3)
            q = tl.div_rn(tl.exp(draft_scaled - draft_top), draft_total)
        rejected = tl.load(draft_tokens + request * K + place)
        residual = tl.where(columns == rejected, 0.0, tl.maximum(p - q, 0.0))
    return p, residual


@triton.jit
def mass_kernel(
    target_logits, offsets, draft_tokens, draft_logits, draft_temperature, temperature,
    thresholds, remaining, summary, masses,
    V: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (B, ceil(BLOCKS / GROUP)): float32 masses [B, 2, BLOCKS] of p and of the residual, a block each."""
    request, group = tl.program_id(0), tl.program_id(1)
    if tl.load(remaining + request * 2) != FINISHED:
        columns = group * GROUP * BLOCK + tl.arange(0, GROUP * BLOCK)
        p, residual = last_weights(
            target_logits, offsets, draft_tokens, draft_logits, draft_temperature, temperature,
            thresholds, remaining, summary, request, columns, V, K,
        )  # fmt: skip
        blocks = group * GROUP + tl.arange(0, GROUP)
        address = masses + request * 2 * BLOCKS + blocks
        tl.store(address, tl.sum(tl.reshape(p, [GROUP, BLOCK]), axis=1), mask=blocks < BLOCKS)
        tl.store(
            address + BLOCKS,
            tl.sum(tl.reshape(residual, [GROUP, BLOCK]), axis=1),
            mask=blocks < BLOCKS,
        )


@triton.jit
def last_token_kernel(
    target_logits, offsets, draft_tokens, draft_logits, draft_temperature, temperature, uniforms,
    thresholds, remaining, summary, masses, accepted, tokens, all_accepted, all_tokens,
    V: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Grid (B): draw a block, then a token inside it, and complete the request's tokens."""
    request = tl.program_id(0)
    places = tl.arange(0, PLACES)
    row = tl.load(tokens + request * (K + 1) + places, mask=places < K + 1, other=-1)
    if tl.load(remaining + request * 2) != FINISHED:
        u = tl.load(uniforms + request * (K + 1) + K)
        blocks = tl.arange(0, BLOCKS_PAD)
        address = masses + request * 2 * BLOCKS + blocks
        p_mass = tl.load(address, mask=blocks < BLOCKS, other=0.0)
        residual_mass = tl.load(address + BLOCKS, mask=blocks < BLOCKS, other=0.0)
        from_residual = tl.sum(residual_mass, axis=0) > 0.0
        block = pick(tl.where(from_residual, residual_mass, p_mass), u, blocks)
        columns = block * BLOCK + tl.arange(0, BLOCK)
        p, residual = last_weights(
            target_logits, offsets, draft_tokens, draft_logits, draft_temperature, temperature,
            thresholds, remaining, summary, request, columns, V, K,
        )  # fmt: skip
        steps = (u * 16777216.0).to(tl.int64)  # specification.UNIFORM_STEPS and SPREAD
        second = (steps * 10368889 % 16777216).to(tl.float32) / 16777216.0
        token = pick(tl.where(from_residual, residual, p), second, columns)
        place = tl.load(remaining + request * 2 + 1)
        row = tl.where(places == place, token.to(tl.int64), row)
    tl.store(all_tokens + request * (K + 1) + places, row, mask=places < K + 1)
    tl.store(all_accepted + request, tl.load(accepted + request))
