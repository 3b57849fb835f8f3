# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# ruff: noqa: N802 -- ONNX operators are spelled in capitals
"""`PackRows`: from padded logits to the ragged rows that verification reads."""

from onnxscript import script
from onnxscript.onnx_opset import opset24 as op

from dspark_trt.plugins.functions import RequestOf, dspark


@script(dspark, default_opset=op)
def PackRows(logits, draft_tokens, draft_lengths, anchor_places):
    # [B, L, V], [B, K], [B], [B] -> [B (K+1), V], int64 [B+1]
    """Rows anchor .. anchor + l_r of each request one after another, and their offsets.

    The result has room for K drafts a request; what is not needed repeats the last request's last row.
    """
    offsets = op.Concat([0], op.CumSum(draft_lengths + 1, 0), axis=0)
    batch = op.Shape(draft_tokens, start=0, end=1)
    room = batch * (op.Shape(draft_tokens, start=1, end=2) + 1)
    rows = op.Range(0, op.Squeeze(room), 1)
    request = RequestOf(rows, offsets)
    place = op.Min(rows - op.Gather(offsets, request), op.Gather(draft_lengths, request))
    padded = op.Shape(logits, start=1, end=2)
    source = request * padded + op.Gather(anchor_places, request) + place
    flat = op.Reshape(logits, op.Concat([-1], op.Shape(logits, start=2, end=3), axis=0))
    return op.Gather(flat, source), offsets
