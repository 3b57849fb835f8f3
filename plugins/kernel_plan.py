# SPDX-License-Identifier: Apache-2.0
"""Which Triton kernels one verification launches, on which buffers: one table for launcher, compiler and plugin.

Legend: B requests, K = γ, V vocabulary, S chunks a row, N blocks of the two-level draw.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import triton

from dspark_trt.plugins.contract import VerifyMode
from dspark_trt.plugins.kernel_filters import threshold_kernel
from dspark_trt.plugins.kernel_verify import (
    accept_kernel,
    coupled_kernel,
    draft_kernel,
    last_token_kernel,
    mass_kernel,
    match_kernel,
    target_kernel,
)
from dspark_trt.plugins.specification import BLOCK

CHUNK = 8192  # tokens of a row that one program reads
GROUP = 8  # blocks of the draw that one program sums
ROW_WARPS = 8  # threads of a row's chunk: 32 tokens each

# No fused multiply-add: every implementation rounds alike.
COMPILE_OPTIONS = {"enable_fp_fusion": False}

DRAFT_STEP = "DraftRows"

ITEM_BYTES = {"float32": 4, "int32": 4, "int64": 8}

_LAST_ROW = (
    "target_logits", "offsets", "draft_tokens", "draft_logits", "draft_temperature", "temperature",
)  # fmt: skip
_LIMITS = ("target_logits", "offsets", "temperature", "top_k", "top_p", "min_p")
_TARGET_SUMMARY = ("target_top", "target_sum", "target_best")
_STATE = ("thresholds", "remaining", "summary")


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor between two kernels, or a result: ``[B, *shape]``."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes_a_request(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Step:
    """One launch of ``B x grid`` programs; arguments are inputs, then outputs."""

    name: str
    kernel: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, int]
    grid: tuple[int, ...]
    warps: int = 4


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """Steps in order; ``buffers`` are what they write, ``accepted`` and ``tokens`` among them."""

    steps: tuple[Step, ...]
    buffers: dict[str, Buffer]

    def workspace_bytes(self, batch: int) -> int:
        """Device memory beside inputs and results.

        With S = ceil(V / 8192) chunks and N = ceil(V / 256) blocks a request takes
        12·S·(K + 1) + 8·S·K + 8·N + 12·K + 48 bytes: nothing of size V for a drafted token.
        """
        between = (b for name, b in self.buffers.items() if name not in ("accepted", "tokens"))
        return batch * sum(buffer.bytes_a_request for buffer in between)


def verify_plan(mode: VerifyMode, *, gamma: int, vocab_size: int) -> VerifyPlan:
    """The launches of `specification.verify_rejection` or `verify_coupled` (which do greedy requests too)."""
    chunk = min(CHUNK, triton.next_power_of_2(vocab_size))
    chunk = max(chunk, 16)
    chunks = triton.cdiv(vocab_size, chunk)
    blocks = triton.cdiv(vocab_size, BLOCK)
    row_sizes = {"V": vocab_size, "K": gamma}
    chunked = {**row_sizes, "S": chunks, "CHUNK": chunk}
    combined = {
        "K": gamma,
        "S": chunks,
        "PLACES": triton.next_power_of_2(gamma + 1),
        "S_PAD": triton.next_power_of_2(chunks),
    }
    drawn = {**row_sizes, "BLOCKS": blocks, "BLOCK": BLOCK}
    rows = gamma + 1
    buffers = {
        "thresholds": Buffer("float32", (rows,)),
        "target_top": Buffer("float32", (rows, chunks)),
        "target_sum": Buffer("float32", (rows, chunks)),
        "target_best": Buffer("int32", (rows, chunks)),
    }
    results = {"accepted": Buffer("int64", ()), "tokens": Buffer("int64", (rows,))}
    threshold = Step(
        "Thresholds",
        threshold_kernel,
        _LIMITS,
        ("thresholds",),
        {**row_sizes, "CHUNK": chunk},
        (rows,),
        ROW_WARPS,
    )
    if mode is VerifyMode.COUPLED:
        noisy = ("target_logits", "offsets", "temperature", "thresholds", "seeds", "positions")
        return VerifyPlan(
            (
                threshold,
                Step(
                    "CoupledRows",
                    coupled_kernel,
                    noisy,
                    _TARGET_SUMMARY,
                    chunked,
                    (rows, chunks),
                ),
                Step(
                    "Match",
                    match_kernel,
                    ("offsets", "draft_tokens", *_TARGET_SUMMARY),
                    ("accepted", "tokens"),
                    combined,
                    (),
                ),
            ),
            buffers | results,
        )
    buffers |= {
        "draft_top": Buffer("float32", (gamma, chunks)),
        "draft_sum": Buffer("float32", (gamma, chunks)),
        "kept": Buffer("int64", ()),
        "kept_tokens": Buffer("int64", (rows,)),
        "remaining": Buffer("int32", (2,)),
        "summary": Buffer("float32", (4,)),
        "masses": Buffer("float32", (2, blocks)),
    }
    return VerifyPlan(
        (
            threshold,
            Step(
                "TargetRows",
                target_kernel,
                ("target_logits", "offsets", "temperature", "thresholds"),
                _TARGET_SUMMARY,
                chunked,
                (rows, chunks),
                2 * ROW_WARPS,
            ),
            Step(
                DRAFT_STEP,
                draft_kernel,
                ("draft_logits", "offsets", "temperature", "draft_temperature"),
                ("draft_top", "draft_sum"),
                chunked,
                (gamma, chunks),
                ROW_WARPS,
            ),
            Step(
                "Accept",
                accept_kernel,
                (
                    *_LAST_ROW,
                    "uniforms",
                    "thresholds",
                    *_TARGET_SUMMARY,
                    "draft_top",
                    "draft_sum",
                ),
                ("kept", "kept_tokens", "remaining", "summary"),
                {**combined, "V": vocab_size},
                (),
            ),
            Step(
                "Masses",
                mass_kernel,
                (*_LAST_ROW, *_STATE),
                ("masses",),
                {**drawn, "GROUP": GROUP},
                (triton.cdiv(blocks, GROUP),),
                ROW_WARPS,
            ),
            Step(
                "LastToken",
                last_token_kernel,
                (*_LAST_ROW, "uniforms", *_STATE, "masses", "kept", "kept_tokens"),
                ("accepted", "tokens"),
                {
                    **drawn,
                    "BLOCKS_PAD": triton.next_power_of_2(blocks),
                    "PLACES": triton.next_power_of_2(rows),
                },
                (),
            ),
        ),
        buffers | results,
    )
