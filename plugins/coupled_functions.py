# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# ruff: noqa: N802 -- ONNX operators are spelled in capitals
"""Gumbel-coupled sampling and verification as ONNX functions; the noise is that of `philox`.

For onnxruntime only: TensorRT and TensorRT-RTX have no integer xor (a TensorRT engine takes the plugin).
"""

from onnxscript import script
from onnxscript.onnx_opset import opset24 as op

from dspark_trt.plugins.distribution import GREEDY_BELOW
from dspark_trt.plugins.filter_functions import RowThresholds
from dspark_trt.plugins.functions import (
    FLOAT,
    BestTokens,
    MatchTokens,
    RequestOfRows,
    VerifyGreedy,
    dspark,
)
from dspark_trt.plugins.philox import LARGEST, MULTIPLIERS, SERIES_BELOW, WEYL, WORDS

UINT32, UINT64 = 12, 13  # onnx.TensorProto.DataType
FIRST_MULTIPLIER, SECOND_MULTIPLIER = MULTIPLIERS
FIRST_WEYL, SECOND_WEYL = WEYL
WORD_STEP = 2.0**-32
THIRD = 1 / 3


@script(dspark, default_opset=op)
def HighWord(word, multiplier):  # uint32, uint64 [] -> uint32
    product = op.Cast(word, to=UINT64) * multiplier
    return op.Cast(op.BitShift(product, op.CastLike(32, product), direction="RIGHT"), to=UINT32)


@script(dspark, default_opset=op)
def PhiloxRound(c0, c1, c2, c3, k0, k1):  # uint32 -> four uint32
    n0 = op.BitwiseXor(
        op.BitwiseXor(HighWord(c2, op.Cast(SECOND_MULTIPLIER, to=UINT64)), c1), k0
    )
    n2 = op.BitwiseXor(
        op.BitwiseXor(HighWord(c0, op.Cast(FIRST_MULTIPLIER, to=UINT64)), c3), k1
    )
    return n0, c2 * SECOND_MULTIPLIER, n2, c0 * FIRST_MULTIPLIER


@script(dspark, default_opset=op)
def PhiloxTwoRounds(c0, c1, c2, c3, k0, k1):
    d0, d1, d2, d3 = PhiloxRound(c0, c1, c2, c3, k0, k1)
    l0, l1 = k0 + FIRST_WEYL, k1 + SECOND_WEYL
    e0, e1, e2, e3 = PhiloxRound(d0, d1, d2, d3, l0, l1)
    return e0, e1, e2, e3, l0 + FIRST_WEYL, l1 + SECOND_WEYL


@script(dspark, default_opset=op)
def RandomWords(seeds, positions, vocab):  # int64 [T], int64 [T], int64 [1] -> uint32 [T, V]
    key = op.Unsqueeze(op.Cast(seeds, to=UINT64), [1])
    k0 = op.Cast(op.BitwiseAnd(key, op.CastLike(0xFFFFFFFF, key)), to=UINT32)
    k1 = op.Cast(op.BitShift(key, op.CastLike(32, key), direction="RIGHT"), to=UINT32)
    calls = op.Range(0, op.Squeeze((vocab + (WORDS - 1)) / WORDS), 1)
    a0 = op.Unsqueeze(op.Cast(calls, to=UINT32), [0])
    a1 = op.Unsqueeze(op.Cast(positions, to=UINT32), [1])
    zero = op.CastLike([[0]], k0)
    b0, b1, b2, b3, bk0, bk1 = PhiloxTwoRounds(a0, a1, zero, zero, k0, k1)
    c0, c1, c2, c3, ck0, ck1 = PhiloxTwoRounds(b0, b1, b2, b3, bk0, bk1)
    d0, d1, d2, d3, dk0, dk1 = PhiloxTwoRounds(c0, c1, c2, c3, ck0, ck1)
    e0, e1, e2, e3, ek0, ek1 = PhiloxTwoRounds(d0, d1, d2, d3, dk0, dk1)
    f0, f1, f2, f3, _fk0, _fk1 = PhiloxTwoRounds(e0, e1, e2, e3, ek0, ek1)
    words = op.Concat(
        op.Unsqueeze(f0, [2]),
        op.Unsqueeze(f1, [2]),
        op.Unsqueeze(f2, [2]),
        op.Unsqueeze(f3, [2]),
        axis=2,
    )
    flat = op.Reshape(words, [0, -1])
    return op.Slice(flat, [0], vocab, [1])


@script(dspark, default_opset=op)
def GumbelScores(scaled, seeds, positions):  # [T, V], [T], [T] -> [T, V]
    """Scaled logits plus standard Gumbel noise: scaled - log(-log(1 - x))."""
    words = RandomWords(seeds, positions, op.Shape(scaled, start=1, end=2))
    x = op.Min((op.Cast(words, to=FLOAT) + 0.5) * WORD_STEP, LARGEST)
    series = x * (x * (x * THIRD + 0.5) + 1.0)
    exponential = op.Where(x < SERIES_BELOW, series, -op.Log(1.0 - x))
    return scaled - op.Log(exponential)


@script(dspark, default_opset=op)
def SampleCoupled(logits, temperature, seeds, positions):  # [B, V], 3 of [B] -> int64 [B]
    """A drafter's token at an absolute position, with the noise the target will use there."""
    greedy = temperature < GREEDY_BELOW
    divisor = op.Unsqueeze(op.Where(greedy, 1.0, temperature), [1])
    scores = GumbelScores(logits / divisor, seeds, positions)
    return op.ArgMax(op.Where(op.Unsqueeze(greedy, [1]), logits, scores), axis=1, keepdims=0)


@script(dspark, default_opset=op)
def OwnTokens(target_logits, offsets, temperature, top_k, top_p, min_p, seeds, positions):
    # [T, V], [B+1], 6 of [B] -> int64 [T]
    """What the target itself samples at each row; -1 where a row cannot be sampled from."""
    request = RequestOfRows(target_logits, offsets)
    rows = op.Range(0, op.Squeeze(op.Shape(target_logits, start=0, end=1)), 1)
    place = rows - op.Gather(offsets, request)
    row_temperature = op.Gather(temperature, request)
    greedy = op.Unsqueeze(row_temperature < GREEDY_BELOW, [1])
    scaled = target_logits / op.Where(greedy, 1.0, op.Unsqueeze(row_temperature, [1]))
    scores = GumbelScores(
        scaled, op.Gather(seeds, request), op.Gather(positions, request) + place
    )
    threshold = RowThresholds(
        scaled,
        op.Softmax(scaled, axis=1),
        op.Gather(top_k, request),
        op.Gather(top_p, request),
        op.Gather(min_p, request),
    )
    kept = op.Where(scaled < threshold, op.Constant(value_float=float("-inf")), scores)
    return BestTokens(op.Where(greedy, target_logits, kept))


@script(dspark, default_opset=op)
def VerifyCoupled(
    target_logits, offsets, draft_tokens, temperature, top_k, top_p, min_p, seeds, positions
):
    """Keep drafts while they are the target's own samples; see `specification.verify_coupled`."""
    if op.ReduceMax(temperature, keepdims=0) < GREEDY_BELOW:
        counts, tokens = VerifyGreedy(target_logits, offsets, draft_tokens)
    else:
        own = OwnTokens(
            target_logits, offsets, temperature, top_k, top_p, min_p, seeds, positions
        )
        counts, tokens = MatchTokens(own, offsets, draft_tokens)
    return counts, tokens
