# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# ruff: noqa: N802 -- ONNX operators are spelled in capitals
"""`VerifyRejection`: acceptance u·q < p, residual and bonus, as an ONNX function (see `functions`)."""

from onnxscript import script
from onnxscript.onnx_opset import opset24 as op

from dspark_trt.plugins.distribution import GREEDY_BELOW
from dspark_trt.plugins.filter_functions import IsLimited, RowThresholds
from dspark_trt.plugins.functions import (
    FLOAT,
    INT64,
    AcceptedPrefix,
    BestTokens,
    Commit,
    Draw,
    RequestOfRows,
    RowsOfRequests,
    dspark,
)
from dspark_trt.plugins.specification import REFUSED


@script(dspark, default_opset=op)
def KeptMass(scaled, p, threshold, limited):  # [T, V], [T, V], [T, 1], bool [] -> [T, 1]
    """What the filters leave of each row's probability: 1 without a pass over the logits if there are none."""
    if limited:
        mass = op.ReduceSum(p * op.Cast(op.Not(scaled < threshold), to=FLOAT), [1], keepdims=1)
    else:
        mass = threshold * 0.0 + 1.0
    return mass


@script(dspark, default_opset=op)
def FilteredRow(scaled, p, threshold, mass, row, limited):
    # [T, V], [T, V], [T, 1], [T, 1], int64 [B, 1], bool [] -> [B, V]
    """Probabilities of one row a request after the filters."""
    if limited:
        dropped = op.GatherND(scaled, row) < op.GatherND(threshold, row)
        found = op.Where(dropped, 0.0, op.GatherND(p, row)) / op.GatherND(mass, row)
    else:
        found = op.GatherND(p, row)
    return found


@script(dspark, default_opset=op)
def GreedyTokens(target_logits, greedy):  # [T, V], bool [T] -> int64 [T]
    """`BestTokens` if any row is greedy: a pass over the logits that a sampling batch need not pay for."""
    if op.ReduceMax(op.Cast(greedy, to=INT64), keepdims=0) > 0:
        best = BestTokens(target_logits)
    else:
        best = op.Cast(greedy, to=INT64)
    return best


@script(dspark, default_opset=op)
def LastWeights(p_row, q_row, rejected_id, rejected):  # [B, V], [B, V], [B, 1], bool [B, 1]
    """What the last token is drawn from: max(p - q, 0) without the rejected token, or p for a bonus."""
    difference = op.Max(p_row - q_row, 0.0)
    # p(x) < q(x) for a rejected x, whatever rounding says; with a greedy draft q is all on x. NaN stays NaN.
    nothing = op.GatherElements(q_row, rejected_id, axis=1) * 0.0
    residual = op.ScatterElements(difference, rejected_id, nothing, axis=1)
    empty = op.ReduceSum(residual, [1], keepdims=1) == 0.0
    return op.Where(op.And(rejected, op.Not(empty)), residual, p_row)


@script(dspark, default_opset=op)
def VerifyRejection(
    target_logits, offsets, draft_tokens, draft_logits, draft_temperature,
    temperature, top_k, top_p, min_p, uniforms,
):  # fmt: skip
    """Rejection sampling of a ragged batch; see `specification.verify_rejection` and the contract.

    Greedy requests may be in the batch. One that is all greedy is cheaper through `VerifyGreedy`; a branch
    for it here would hold the others, which TensorRT-RTX 1.7 cannot build.
    """
    request = RequestOfRows(target_logits, offsets)
    row_temperature = op.Gather(temperature, request)
    row_greedy = row_temperature < GREEDY_BELOW
    scaled = target_logits / op.Unsqueeze(op.Where(row_greedy, 1.0, row_temperature), [1])
    p = op.Softmax(scaled, axis=1)
    limited = IsLimited(top_k, top_p, min_p)
    threshold = RowThresholds(
        scaled,
        p,
        op.Gather(top_k, request),
        op.Gather(top_p, request),
        op.Gather(min_p, request),
    )
    mass = KeptMass(scaled, p, threshold, limited)
    best = GreedyTokens(target_logits, row_greedy)
    rows, drafted = RowsOfRequests(offsets, draft_tokens)
    draft_greedy = op.Unsqueeze(draft_temperature < GREEDY_BELOW, [1])
    divisor = op.Where(draft_greedy, 1.0, op.Unsqueeze(draft_temperature, [1]))
    q = op.Softmax(draft_logits / op.Unsqueeze(divisor, [2]), axis=2)

    draft_rows = rows[:, :-1]
    ids = op.Where(drafted, draft_tokens, 0)  # behind ℓ_r a token may be anything
    row_columns = op.Unsqueeze(draft_rows, [2])
    columns = op.Unsqueeze(ids, [2])
    places = op.Concat(row_columns, columns, axis=2)
    dropped = op.GatherND(scaled, places) < op.Squeeze(op.GatherND(threshold, row_columns), [2])
    p_ids = op.GatherND(p, places) / op.Squeeze(op.GatherND(mass, row_columns), [2])
    q_ids = op.Where(draft_greedy, 1.0, op.Squeeze(op.GatherElements(q, columns, axis=2), [2]))
    greedy = op.Gather(row_greedy, draft_rows)
    unlikely = op.Or(dropped, op.Not(uniforms[:, :-1] * q_ids < p_ids))
    sampled_keep = op.Not(op.Or(greedy, unlikely))
    keep = op.Or(sampled_keep, op.And(greedy, op.Gather(best, draft_rows) == ids))
    accepted = AcceptedPrefix(op.And(drafted, keep))

    last_row = op.GatherElements(rows, accepted, axis=1)
    place = op.Min(accepted, op.Shape(draft_tokens, start=1, end=2) - 1)
    rejected = op.And(accepted == place, op.GatherElements(drafted, place, axis=1))
    p_row = FilteredRow(scaled, p, threshold, mass, last_row, limited)
    q_row = op.Where(draft_greedy, 0.0, op.GatherND(q, place, batch_dims=1))
    weights = LastWeights(p_row, q_row, op.GatherElements(ids, place, axis=1), rejected)
    drawn = op.Unsqueeze(Draw(weights, uniforms[:, -1]), [1])
    unusable = op.IsNaN(op.ReduceSum(weights, [1], keepdims=1))
    sampled_last = op.Where(unusable, REFUSED, drawn)
    last = op.Where(op.Gather(row_greedy, last_row), op.Gather(best, last_row), sampled_last)
    counts, tokens = Commit(draft_tokens, accepted, last)
    return counts, tokens
