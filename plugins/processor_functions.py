# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# ruff: noqa: N802 -- ONNX operators are spelled in capitals
"""What stands before and behind verification on request: `ProcessLogits` and `TokenLogprobs`."""

from onnxscript import script
from onnxscript.onnx_opset import opset24 as op

from dspark_trt.plugins.functions import FLOAT, RequestOfRows, RowsOfRequests, dspark
from dspark_trt.plugins.specification import REFUSED


@script(dspark, default_opset=op)
def BlockCounts(target_logits, offsets, draft_tokens, output_counts):
    # [T, V], [B+1], [B, K], int32 [B, V] -> [T, V]
    """Output tokens counted as row k of a block sees them: the drafts before it are output."""
    request = RequestOfRows(target_logits, offsets)
    rows = op.Range(0, op.Squeeze(op.Shape(target_logits, start=0, end=1)), 1)
    first = op.Gather(offsets, request)
    drafted = op.Gather(offsets, request + 1) - first - 1
    place = op.Unsqueeze(op.Min(rows - first, drafted), [1])
    earlier = op.Range(0, op.Squeeze(op.Shape(draft_tokens, start=1, end=2)), 1) < place
    ids = op.Where(earlier, op.Gather(draft_tokens, request), 0)
    counts = op.Gather(op.Cast(output_counts, to=FLOAT), request)
    # Scatter with reduction "add" would say this, but TensorRT-RTX 1.7 has it not: write final values.
    equal = op.And(op.Unsqueeze(ids, [2]) == op.Unsqueeze(ids, [1]), op.Unsqueeze(earlier, [1]))
    repeats = op.ReduceSum(op.Cast(equal, to=FLOAT), [2], keepdims=0)
    return op.ScatterElements(
        counts, ids, op.GatherElements(counts, ids, axis=1) + repeats, axis=1
    )


@script(dspark, default_opset=op)
def ProcessLogits(
    target_logits, offsets, draft_tokens,
    logit_bias, repetition_penalty, presence_penalty, frequency_penalty,
    prompt_mask, output_counts, allowed,
):  # fmt: skip
    """Bias, repetition, presence and frequency penalties, allowed tokens; see `distribution.process_logits`."""
    request = RequestOfRows(target_logits, offsets)
    counts = BlockCounts(target_logits, offsets, draft_tokens, output_counts)
    occurred = counts > 0.0
    logits = target_logits + op.Gather(logit_bias, request)
    penalty = op.Unsqueeze(op.Gather(repetition_penalty, request), [1])
    punished = op.Where(logits < 0.0, logits * penalty, logits / penalty)
    repeated = op.Where(op.Or(op.Gather(prompt_mask, request), occurred), punished, logits)
    presence = op.Unsqueeze(op.Gather(presence_penalty, request), [1])
    frequency = op.Unsqueeze(op.Gather(frequency_penalty, request), [1])
    present = repeated - presence * op.Cast(occurred, to=FLOAT)
    return op.Where(
        allowed, present - frequency * counts, op.Constant(value_float=float("-inf"))
    )


@script(dspark, default_opset=op)
def TokenLogprobs(target_logits, offsets, tokens):  # [T, V], [B+1], [B, K+1] -> [B, K+1]
    """Log-probability of each committed token under the target's raw logits; 0 behind them."""
    rows, _drafted = RowsOfRequests(offsets, tokens[:, 1:])
    committed = tokens > REFUSED
    ids = op.Unsqueeze(op.Where(committed, tokens, 0), [2])
    logprobs = op.LogSoftmax(target_logits, axis=1)
    found = op.GatherND(logprobs, op.Concat(op.Unsqueeze(rows, [2]), ids, axis=2))
    return op.Where(committed, found, 0.0)


@script(dspark, default_opset=op)
def TopLogprobs(target_logits, offsets, tokens, count):
    # [T, V], [B+1], [B, K+1], int64 [1] -> int64 [B, K+1, N], [B, K+1, N]
    """The likeliest tokens at each committed place, likeliest first; -1 and 0 behind them."""
    rows, _drafted = RowsOfRequests(offsets, tokens[:, 1:])
    committed = op.Unsqueeze(tokens > REFUSED, [2])
    values, ids = op.TopK(op.LogSoftmax(target_logits, axis=1), count, axis=1)
    top_tokens = op.Where(committed, op.Gather(ids, rows), REFUSED)
    return top_tokens, op.Where(committed, op.Gather(values, rows), 0.0)
