# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# ruff: noqa: N802 -- ONNX operators are spelled in capitals
"""Top-k, top-p and min-p as ONNX functions, without sorting the vocabulary.

Thresholds are read off the 1024 largest logits where these hold them, as they nearly always do. Otherwise
they are searched by halving an interval of logits. A graph for TensorRT should not loop, so 32 halvings
are a function of four that is called eight times.
"""

from onnxscript import script
from onnxscript.onnx_opset import opset24 as op

from dspark_trt.plugins.distribution import GREEDY_BELOW
from dspark_trt.plugins.functions import FLOAT, INT64, dspark

CANDIDATES = 1024  # TensorRT's TopK stops at 3840
UNDERFLOW = 104.0  # exp(-104) is 0 in float32: nothing below is worth searching


@script(dspark, default_opset=op)
def Halve(scaled, weights, wanted, low, high):  # [T, V], [T, V], [T, 1], [T, 1], [T, 1]
    """Halve [low, high] so that the tokens at or above low still weigh at least ``wanted``."""
    middle = (low + high) * 0.5
    above = weights * op.Cast(
        scaled >= middle, to=FLOAT
    )  # onnxruntime's Where takes three times as long
    enough = op.ReduceSum(above, [1], keepdims=1) >= wanted
    return op.Where(enough, middle, low), op.Where(enough, high, middle)


@script(dspark, default_opset=op)
def Halve4(scaled, weights, wanted, low, high):
    low1, high1 = Halve(scaled, weights, wanted, low, high)
    low2, high2 = Halve(scaled, weights, wanted, low1, high1)
    low3, high3 = Halve(scaled, weights, wanted, low2, high2)
    low4, high4 = Halve(scaled, weights, wanted, low3, high3)
    return low4, high4


@script(dspark, default_opset=op)
def Search(scaled, weights, wanted, top):  # [T, V], [T, V] or [1, 1], [T, 1], [T, 1] -> [T, 1]
    """The largest logit such that the tokens at or above it weigh at least ``wanted``, to 3e-8."""
    low1, high1 = Halve4(scaled, weights, wanted, top - UNDERFLOW, top)
    low2, high2 = Halve4(scaled, weights, wanted, low1, high1)
    low3, high3 = Halve4(scaled, weights, wanted, low2, high2)
    low4, high4 = Halve4(scaled, weights, wanted, low3, high3)
    low5, high5 = Halve4(scaled, weights, wanted, low4, high4)
    low6, high6 = Halve4(scaled, weights, wanted, low5, high5)
    low7, high7 = Halve4(scaled, weights, wanted, low6, high6)
    low8, _high8 = Halve4(scaled, weights, wanted, low7, high7)
    return low8


@script(dspark, default_opset=op)
def TopKThreshold(
    scaled, candidates, top_k
):  # [T, V], [T, C] descending, int64 [T, 1] -> [T, 1]
    """The k-th largest logit; the smallest float for k = 0."""
    vocab = op.Shape(scaled, start=1, end=2)
    count = op.Shape(candidates, start=1, end=2)
    limited = op.And(top_k > 0, top_k < vocab)
    place = op.Max(op.Min(top_k, count) - 1, [0])
    found = op.GatherElements(candidates, place, axis=1)
    beyond = op.And(limited, top_k > count)
    if op.ReduceMax(op.Cast(beyond, to=INT64), keepdims=0) > 0:
        searched = Search(
            scaled, op.CastLike([[1]], scaled), op.Cast(top_k, to=FLOAT), candidates[:, :1]
        )
        threshold = op.Where(beyond, searched, found)
    else:
        threshold = op.Identity(found)
    return op.Where(limited, threshold, -3.4028235e38)


@script(dspark, default_opset=op)
def TopPThreshold(scaled, weights, candidates, top_p, floor):
    # [T, V], [T, V], [T, C] descending, [T, 1], [T, 1] -> [T, 1]
    """The largest logit such that the tokens at or above it hold ``top_p`` of what ``floor`` keeps."""
    top = candidates[:, :1]
    kept = weights * op.Cast(scaled >= floor, to=FLOAT)
    budget = op.ReduceSum(kept, [1], keepdims=1) * top_p
    before = op.CumSum(op.Exp(candidates - top), 1, exclusive=1)
    inside = op.ReduceSum(op.Cast(before < budget, to=INT64), [1], keepdims=1)
    found = op.GatherElements(candidates, op.Max(inside - 1, [0]), axis=1)
    limited = top_p < 1.0
    count = op.Shape(candidates, start=1, end=2)
    hidden = op.And(inside == count, count < op.Shape(scaled, start=1, end=2))
    beyond = op.And(limited, hidden)
    if op.ReduceMax(op.Cast(beyond, to=INT64), keepdims=0) > 0:
        searched = Search(scaled, weights, budget, top)
        threshold = op.Where(beyond, searched, found)
    else:
        threshold = op.Identity(found)
    return op.Where(limited, threshold, floor)


@script(dspark, default_opset=op)
def Filter(scaled, top_k, top_p, min_p):  # [T, V], int64 [T], [T], [T] -> [T, V], bool [T, V]
    """exp(scaled - maximum), and what top-k, top-p or min-p drop (never a NaN, which has to be seen)."""
    candidates, _places = op.TopK(
        scaled,
        op.Min(op.Constant(value_ints=[CANDIDATES]), op.Shape(scaled, start=1, end=2)),
        axis=1,
    )
    weights = op.Exp(scaled - candidates[:, :1])
    floor = TopKThreshold(scaled, candidates, op.Unsqueeze(top_k, [1]))
    nucleus = TopPThreshold(scaled, weights, candidates, op.Unsqueeze(top_p, [1]), floor)
    dropped = op.Or(scaled < op.Max(floor, nucleus), weights < op.Unsqueeze(min_p, [1]))
    return weights, dropped


@script(dspark, default_opset=op)
def IsLimited(top_k, top_p, min_p):  # 3 of [B] -> bool []
    """Whether any request of the batch uses top-k, top-p or min-p."""
    nucleus = op.Or(
        op.ReduceMin(top_p, keepdims=0) < 1.0, op.ReduceMax(min_p, keepdims=0) > 0.0
    )
    return op.Or(op.ReduceMax(top_k, keepdims=0) > 0, nucleus)


@script(dspark, default_opset=op)
def FilterDraft(logits, temperature, top_k, top_p, min_p):  # [B, V], 4 of [B] -> [B, V]
    """The same filters on a drafter's logits (before temperature): what is dropped becomes -inf.

    Optional: verification is exact with any draft distribution, but one that proposes what the target's
    filters forbid is accepted less.
    """
    divisor = op.Where(temperature < GREEDY_BELOW, 1.0, temperature)
    _weights, dropped = Filter(logits / op.Unsqueeze(divisor, [1]), top_k, top_p, min_p)
    return op.Where(dropped, op.Constant(value_float=float("-inf")), logits)
