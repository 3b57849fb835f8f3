# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# ruff: noqa: N802 -- ONNX operators are spelled in capitals
"""Top-k, top-p and min-p as ONNX functions, without sorting the vocabulary.

Thresholds are read off the 1024 largest logits where these hold them, as they nearly always do. Otherwise
they are searched in 32 ever smaller steps. A graph for TensorRT should not loop, so these are a function
of four that is called eight times.
"""

from onnxscript import script
from onnxscript.onnx_opset import opset24 as op

from dspark_trt.plugins.distribution import GREEDY_BELOW
from dspark_trt.plugins.functions import FLOAT, INT64, dspark

CANDIDATES = 1024  # TensorRT's TopK stops at 3840
UNDERFLOW = 104.0  # exp(-104) is 0 in float32: nothing below is worth searching
LOWEST = -3.4028234e38


@script(dspark, default_opset=op)
def Raise(
    scaled, weights, wanted, low, step
):  # [T, V], [T, V], [T, 1], [T, 1], [] -> [T, 1], []
    """Raise low by step where the tokens at or above it still weigh at least ``wanted``; half the step.

    One bound and a step, not two bounds: TensorRT-RTX's compiler takes exponential time over two that
    depend on each other.
    """
    # Casts instead of Where: onnxruntime's Where takes three times as long over a vocabulary, and the
    # compile time of TensorRT-RTX 1.7 is exponential in the steps if a bound is chosen by one.
    above = weights * op.Cast(scaled >= low + step, to=FLOAT)
    enough = op.ReduceSum(above, [1], keepdims=1) >= wanted
    return low + step * op.Cast(enough, to=FLOAT), step * 0.5


@script(dspark, default_opset=op)
def Raise4(scaled, weights, wanted, low, step):
    low1, step1 = Raise(scaled, weights, wanted, low, step)
    low2, step2 = Raise(scaled, weights, wanted, low1, step1)
    low3, step3 = Raise(scaled, weights, wanted, low2, step2)
    low4, step4 = Raise(scaled, weights, wanted, low3, step3)
    return low4, step4


@script(dspark, default_opset=op)
def Search(scaled, weights, wanted, top):  # [T, V], [T, V] or [1, 1], [T, 1], [T, 1] -> [T, 1]
    """The largest logit such that the tokens at or above it weigh at least ``wanted``, to 3e-8."""
    half = op.CastLike(0.5 * UNDERFLOW, top)
    low1, step1 = Raise4(scaled, weights, wanted, top - UNDERFLOW, half)
    low2, step2 = Raise4(scaled, weights, wanted, low1, step1)
    low3, step3 = Raise4(scaled, weights, wanted, low2, step2)
    low4, step4 = Raise4(scaled, weights, wanted, low3, step3)
    low5, step5 = Raise4(scaled, weights, wanted, low4, step4)
    low6, step6 = Raise4(scaled, weights, wanted, low5, step5)
    low7, step7 = Raise4(scaled, weights, wanted, low6, step6)
    low8, _step8 = Raise4(scaled, weights, wanted, low7, step7)
    return low8


@script(dspark, default_opset=op)
def Nucleus(p, scaled, floor, top_p):  # [T, V], [T, V], [T, 1], [T, 1] -> [T, 1]
    """The mass that top-p asks for, of what a floor on the logits keeps."""
    kept = p * op.Cast(scaled >= floor, to=FLOAT)
    return op.ReduceSum(kept, [1], keepdims=1) * top_p


@script(dspark, default_opset=op)
def CandidateThresholds(scaled, p, top_k, top_p, min_p):
    # [T, V], [T, V], int64 [T, 1], [T, 1], [T, 1] -> [T, 1], bool [T, 1], [T, 1]
    """Threshold of top-k and top-p, whether it lies beyond the candidates, and that of min-p."""
    vocab = op.Shape(scaled, start=1, end=2)
    count = op.Min(op.Constant(value_ints=[CANDIDATES]), vocab)
    candidates, tokens = op.TopK(scaled, count, axis=1)
    by_count = op.And(top_k > 0, top_k < vocab)
    last = op.GatherElements(candidates, op.Max(op.Min(top_k, count) - 1, [0]), axis=1)
    floor = op.Where(by_count, last, LOWEST)
    before = op.CumSum(op.GatherElements(p, tokens, axis=1), 1, exclusive=1)
    inside = before < Nucleus(p, scaled, floor, top_p)
    wanted = op.ReduceSum(op.Cast(inside, to=INT64), [1], keepdims=1)
    nucleus = op.GatherElements(candidates, op.Max(wanted - 1, [0]), axis=1)
    by_mass = top_p < 1.0
    hidden = op.And(wanted == count, count < vocab)
    beyond = op.Or(op.And(by_count, top_k > count), op.And(by_mass, hidden))
    threshold = op.Max(floor, op.Where(by_mass, nucleus, LOWEST))
    return threshold, beyond, candidates[:, :1] + op.Log(min_p)


@script(dspark, default_opset=op)
def SearchThresholds(scaled, p, top_k, top_p):  # as above -> [T, 1]
    """The threshold of top-k and top-p, wherever it is."""
    top = op.ReduceMax(scaled, [1], keepdims=1)
    one = op.CastLike([[1]], scaled)
    by_count = op.And(top_k > 0, top_k < op.Shape(scaled, start=1, end=2))
    last = Search(scaled, one, op.Cast(top_k, to=FLOAT), top)
    floor = op.Where(by_count, last, LOWEST)
    nucleus = Search(scaled, p, Nucleus(p, scaled, floor, top_p), top)
    return op.Max(floor, op.Where(top_p < 1.0, nucleus, LOWEST))


@script(dspark, default_opset=op)
def IsLimited(top_k, top_p, min_p):  # 3 of [B] -> bool []
    """Whether any request of the batch uses top-k, top-p or min-p."""
    nucleus = op.Or(
        op.ReduceMin(top_p, keepdims=0) < 1.0, op.ReduceMax(min_p, keepdims=0) > 0.0
    )
    return op.Or(op.ReduceMax(top_k, keepdims=0) > 0, nucleus)


@script(dspark, default_opset=op)
def RowThresholds(
    scaled, p, top_k, top_p, min_p
):  # [T, V], [T, V], int64 [T], [T], [T] -> [T, 1]
    """What a scaled logit must reach not to be dropped by top-k, top-p or min-p.

    Branches follow one another: TensorRT-RTX 1.7 cannot build one inside another with dynamic shapes.
    """
    count = op.Unsqueeze(top_k, [1])
    mass = op.Unsqueeze(top_p, [1])
    least = op.Unsqueeze(min_p, [1])
    if IsLimited(top_k, top_p, min_p):
        threshold, beyond, floor = CandidateThresholds(scaled, p, count, mass, least)
    else:
        threshold = least + LOWEST
        beyond = least < 0.0
        floor = least + LOWEST
    if op.ReduceMax(op.Cast(beyond, to=INT64), keepdims=0) > 0:
        found = op.Where(beyond, SearchThresholds(scaled, p, count, mass), threshold)
    else:
        found = op.Identity(threshold)
    return op.Max(found, floor)


@script(dspark, default_opset=op)
def FilterDraft(logits, temperature, top_k, top_p, min_p):  # [B, V], 4 of [B] -> [B, V]
    """The same filters on a drafter's logits (before temperature): what is dropped becomes -inf.

    Optional: verification is exact with any draft distribution, but one that proposes what the target's
    filters forbid is accepted less.
    """
    divisor = op.Where(temperature < GREEDY_BELOW, 1.0, temperature)
    scaled = logits / op.Unsqueeze(divisor, [1])
    threshold = RowThresholds(scaled, op.Softmax(scaled, axis=1), top_k, top_p, min_p)
    return op.Where(scaled < threshold, op.Constant(value_float=float("-inf")), logits)
