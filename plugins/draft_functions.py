# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"
# ruff: noqa: N802 -- ONNX operators are spelled in capitals
"""`SampleDraft`, one slot of a draft, as an ONNX function of one vocabulary size (see `functions`).

A draft step runs this γ times on few rows, where a node costs more than what it computes. So shapes are
constants, and what is the same for all slots comes from the same inputs, so that a backend computes it once.
"""

from typing import Any

from onnxscript import script
from onnxscript.onnx_opset import opset24 as op

from dspark_trt.plugins.distribution import GREEDY_BELOW
from dspark_trt.plugins.functions import FLOAT, INT64, STEPS, dspark
from dspark_trt.plugins.specification import BLOCK, SPREAD, UNIFORM_STEPS

# Divides the logits of greedy rows: whatever lies below the maximum by one bit has probability zero then. The
# uniform 0 takes the first token of those that have the maximum.
COLD = 1e-30


@script(dspark, default_opset=op)
def PickColumn(weights, uniforms):  # [B, n], [B, 1] -> int64 [B, 1]
    """The first place where the running sum is above uniform · total: `functions.Pick` where sums only grow.

    The total is the last of the same running sums, and uniforms are at most 1 - 2^-24: one is above.
    """
    mass = op.CumSum(weights, 1)
    passed = mass <= uniforms * mass[:, -1:]
    return op.ReduceSum(op.Cast(passed, to=INT64), [1], keepdims=1)


@script(dspark, default_opset=op)
def SpreadUniforms(uniforms):
    """`specification.spread`."""
    steps = op.Cast(uniforms * STEPS, to=INT64)
    return op.Cast(steps * SPREAD % UNIFORM_STEPS, to=FLOAT) / STEPS


def sample_draft_function(vocab_size: int) -> Any:
    """`SampleDraft`: tokens from softmax(logits / temperature); temperature 0: the first maximum."""
    size = min(BLOCK, vocab_size)
    blocks = -(-vocab_size // size)
    padding = [0, 0, 0, 0, 0, blocks * size - vocab_size]
    shape = [-1, blocks, size]

    @script(dspark, default_opset=op)
    def DrawToken(p, first, second):  # [B, 1, V], 2 of [B, 1] -> int64 [B, 1]
        """`functions.Draw`."""
        weights = op.Reshape(p, op.Constant(value_ints=shape))
        block = PickColumn(op.ReduceSum(weights, [2], keepdims=0), first)
        inside = op.GatherND(weights, block, batch_dims=1)
        return block * size + PickColumn(inside, second)

    @script(dspark, default_opset=op)
    def DrawPadded(p, first, second):
        return DrawToken(op.Pad(p, op.Constant(value_ints=padding)), first, second)

    draw = DrawPadded if padding[-1] else DrawToken

    @script(dspark, default_opset=op)
    def SampleDraft(logits, temperature, uniforms, slot: list[int]):
        # [B, 1, V], [B], [B, K], [1] -> int64 [B, 1]
        heat = op.Unsqueeze(temperature, [1])
        greedy = heat < GREEDY_BELOW
        divisor = op.Unsqueeze(op.Where(greedy, COLD, heat), [2])
        own = op.Where(greedy, 0.0, uniforms)
        place = op.Constant(value_ints=slot)
        first = op.Gather(own, place, axis=1)
        second = op.Gather(SpreadUniforms(own), place, axis=1)
        return draw(op.Softmax(logits / divisor, axis=2), first, second)

    return SampleDraft
