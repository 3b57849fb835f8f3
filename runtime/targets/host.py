# SPDX-License-Identifier: Apache-2.0
"""A target we do not control, behind one method.

The engine asks for three things of a target: prefill a prompt, verify ℓ drafts, and forget rejected ones. All
three are `forward`: it continues a sequence at a given position, dropping whatever the host cached from
there on. That is the rollback.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dspark_trt.config import DraftConfig
from dspark_trt.errors import BackendError
from dspark_trt.runtime.backends.interface import CacheRows, TargetOutput
from dspark_trt.runtime.ragged import RaggedRows

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class HostOutput(NamedTuple):
    logits: Floats  # [n, V]
    taps: Floats  # [n, m*H]: outputs of the drafter's `target_layer_ids`, concatenated in id order


class HostTarget(Protocol):
    """What a host implements. `sequence` is a small number that names one sequence until `release`."""

    def forward(self, sequence: int, token_ids: Ints, start: int) -> HostOutput:
        """Run tokens `[n]` at positions `start .. start + n - 1` of a sequence, after forgetting all that
        was cached from position `start` on; causal over everything before.
        """

    def release(self, sequence: int) -> None:
        """The sequence is over: free what is cached for it. Called also before a number is used again."""


class HostTargetModel:
    """A `HostTarget` as the engine sees a target: one row a request, ragged steps.

    Sequences run one after another; a host that batches can implement
    `dspark_trt.runtime.backends.interface.TargetModel` itself.
    """

    def __init__(self, host: HostTarget, *, max_batch: int) -> None:
        self._host = host
        self._sequence_of = list(range(max_batch))  # by row
        self._draft: DraftConfig | None = None

    def serve(self, draft: DraftConfig) -> None:
        """What the taps must be: from now on `step` compares them. The engine calls this."""
        self._draft = draft

    def reserve(self, context_tokens: int) -> None:
        """The host makes its own room."""

    def swap_rows(self, first: int, second: int) -> None:
        names = self._sequence_of
        names[first], names[second] = names[second], names[first]

    def step(self, rows: RaggedRows) -> TargetOutput:
        """Run every request's rows.

        Raises:
            BackendError: the host raised; the engine then runs each request alone.
        """
        logits, taps = [], []
        wanted = np.zeros(len(rows.token_ids), np.bool_)
        wanted[rows.logit_rows] = True
        for row, context_len in enumerate(rows.context_len.tolist()):
            own = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
            sequence = self._sequence_of[row]
            try:
                if context_len == 0:
                    self._host.release(sequence)
                output = self._host.forward(sequence, rows.token_ids[own], context_len)
            except Exception as error:
                raise BackendError(f"the host's target failed: {error}") from error
            self._check_taps(output, rows.token_ids[own].shape)
            logits.append(output.logits[wanted[own]])
            taps.append(output.taps)
        return TargetOutput(
            np.ascontiguousarray(np.concatenate(logits), np.float32),
            np.ascontiguousarray(np.concatenate(taps), np.float32),
        )

    def _check_taps(self, output: HostOutput, shape: tuple[int, ...]) -> None:
        draft = self._draft
        taps = np.shape(output.taps)
        if draft is None or taps == (*shape, draft.tap_size):
            return
        ids = list(draft.target_layer_ids)
        raise BackendError(
            f"the host's target returned logits {np.shape(output.logits)} and taps {taps or 'None'}, expected "
            f"taps {(*shape, draft.tap_size)}: the outputs of layers {ids}, {draft.target_hidden_size} wide each, "
            "side by side. Return them from HostTarget.forward (with transformers, layer i is hidden_states[i + 1])"
        )

    def read_rows(self, row: int, count: int) -> CacheRows:
        raise BackendError(
            "a host's target keeps its own caches: run the engine without prefix cache"
        )

    def write_rows(self, row: int, saved: CacheRows) -> None:
        raise BackendError(
            "a host's target keeps its own caches: run the engine without prefix cache"
        )

    def close(self) -> None:
        for sequence in self._sequence_of:
            self._host.release(sequence)
