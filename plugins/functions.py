# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# ruff: noqa: N802 -- ONNX operators are spelled in capitals
"""Sampling and verification as ONNX model-local functions of domain ``dspark``, from standard operators only.

onnxruntime and TensorRT-RTX inline the bodies, so neither needs a custom library. No random operator, no
loop and no data-dependent shape. Each function computes what `dspark_trt.plugins.specification` says; the
bodies are not typed because their arguments are graph values (shapes: see the comments).

A graph that uses one holds the bare node and, in ``model.functions``, `verify_model.function_protos` of it.
torch's exporter cannot be handed the function itself: it translates in opset 18 and converts afterwards.
"""

from onnxscript import script
from onnxscript.onnx_opset import opset24 as op
from onnxscript.values import Opset

from dspark_trt.plugins.contract import DOMAIN
from dspark_trt.plugins.specification import BLOCK, REFUSED, SPREAD, UNIFORM_STEPS

FLOAT, INT32, INT64, BOOL = 1, 6, 7, 9  # onnx.TensorProto.DataType
STEPS = float(UNIFORM_STEPS)

dspark = Opset(DOMAIN, 1)


@script(dspark, default_opset=op)
def Pick(weights, uniforms):  # [B, n], [B] -> int64 [B]
    """The last token of positive weight whose preceding mass is at most uniform · total."""
    before = op.CumSum(weights, 1, exclusive=1)
    total = op.ReduceSum(weights, [1], keepdims=1)
    reached = before <= op.Unsqueeze(uniforms, [1]) * total
    index = op.Range(0, op.Squeeze(op.Shape(weights, start=1, end=2)), 1)
    hits = op.Where(op.And(weights > 0.0, reached), index, 0)
    return op.ReduceMax(hits, [1], keepdims=0)


@script(dspark, default_opset=op)
def Draw(weights, uniforms):  # [B, V], [B] -> int64 [B]
    """Two-level inverse CDF: a block of tokens, then a token inside it."""
    vocab = op.Shape(weights, start=1, end=2)
    size = op.Min(op.Constant(value_ints=[BLOCK]), vocab)
    padding = (size - vocab % size) % size
    padded = op.Pad(weights, op.Concat([0, 0, 0], padding, axis=0))
    blocks = op.Reshape(padded, op.Concat([0, -1], size, axis=0))
    block = Pick(op.ReduceSum(blocks, [2], keepdims=0), uniforms)
    inside = op.GatherND(blocks, op.Unsqueeze(block, [1]), batch_dims=1)
    steps = op.Cast(uniforms * STEPS, to=INT64)
    second = op.Cast(steps * SPREAD % UNIFORM_STEPS, to=FLOAT) / STEPS
    return block * size + Pick(inside, second)


@script(dspark, default_opset=op)
def RowsOfRequests(offsets, draft_tokens):  # [B+1], [B, K] -> int64 [B, K+1], bool [B, K]
    """Row of each place of the block (the last one repeated behind ℓ_r); which places were drafted."""
    starts = op.Unsqueeze(offsets[:-1], [1])
    lengths = op.Unsqueeze(offsets[1:], [1]) - starts - 1
    gamma = op.Squeeze(op.Shape(draft_tokens, start=1, end=2))
    rows = starts + op.Min(op.Range(0, gamma + 1, 1), lengths)
    return rows, op.Range(0, gamma, 1) < lengths


@script(dspark, default_opset=op)
def RequestOf(rows, offsets):  # int64 [T], [B+1] -> int64 [T]
    """The request each row index belongs to; rows behind the last request count as its."""
    starts = offsets[:-1]
    marks = op.ScatterElements(
        op.Cast(rows * 0, to=INT32), starts, op.Cast(starts * 0 + 1, to=INT32)
    )
    return op.Cast(op.CumSum(marks, 0), to=INT64) - 1


@script(dspark, default_opset=op)
def RequestOfRows(target_logits, offsets):  # [T, V], [B+1] -> int64 [T]
    rows = op.Range(0, op.Squeeze(op.Shape(target_logits, start=0, end=1)), 1)
    return RequestOf(rows, offsets)


@script(dspark, default_opset=op)
def AcceptedPrefix(kept):  # bool [B, K] -> int64 [B, 1]
    lost = op.CumSum(op.Cast(op.Not(kept), to=INT32), 1)
    return op.ReduceSum(op.Cast(op.Not(op.Cast(lost, to=BOOL)), to=INT64), [1], keepdims=1)


@script(dspark, default_opset=op)
def Commit(draft_tokens, accepted, last):  # [B, K], [B, 1], [B, 1] -> int64 [B], [B, K+1]
    """Accepted drafts, then ``last``, then -1; a ``last`` of -1 refuses the request."""
    refused = last == REFUSED
    row = op.Concat(draft_tokens, last, axis=1)
    places = op.Range(0, op.Squeeze(op.Shape(row, start=1, end=2)), 1)
    behind = op.Where(places == accepted, last, REFUSED)
    tokens = op.Where(places < accepted, row, behind)
    counts = op.Squeeze(op.Where(refused, REFUSED, accepted), [1])
    return counts, op.Where(refused, REFUSED, tokens)


@script(dspark, default_opset=op)
def BestTokens(logits):  # [T, V] -> int64 [T]
    """First maximum of each row; -1 where a row holds NaN or +inf or nothing finite."""
    total = op.ReduceSum(logits, [1], keepdims=0)  # NaN or +inf if any logit is
    infinite = op.Or(
        op.IsInf(total, detect_negative=0), op.IsInf(op.ReduceMax(logits, [1], keepdims=0))
    )
    return op.Where(
        op.Or(op.IsNaN(total), infinite), REFUSED, op.ArgMax(logits, axis=1, keepdims=0)
    )


@script(dspark, default_opset=op)
def MatchTokens(own, offsets, draft_tokens):  # [T], [B+1], [B, K] -> int64 [B], [B, K+1]
    """Keep drafts while they equal the target's own token of the row; then that token."""
    rows, drafted = RowsOfRequests(offsets, draft_tokens)
    wanted = op.Gather(own, rows)
    accepted = AcceptedPrefix(op.And(drafted, wanted[:, :-1] == draft_tokens))
    counts, tokens = Commit(draft_tokens, accepted, op.GatherElements(wanted, accepted, axis=1))
    return counts, tokens


@script(dspark, default_opset=op)
def VerifyGreedy(target_logits, offsets, draft_tokens):  # [T, V], [B+1], [B, K]
    """Verification of a batch in which every temperature is 0: reductions only, no softmax."""
    counts, tokens = MatchTokens(BestTokens(target_logits), offsets, draft_tokens)
    return counts, tokens
