# SPDX-License-Identifier: Apache-2.0
"""Per-request state as arrays indexed by cache row: what one round hands to the backend, already in place."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.backends.interface import DraftInputs
from dspark_trt.runtime.request import Request, SamplingParams

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class FirstRows(NamedTuple):
    """Views of a table's first B rows."""

    draft: DraftInputs
    target_len: Ints  # [B]
    temperature: Floats  # [B]
    top_k: Ints  # [B]
    top_p: Floats  # [B]
    min_p: Floats  # [B]
    verify_uniforms: Floats  # [B, K+1]


class RowTable:
    """Row r belongs to the r-th active request. Rows move only through `swap`."""

    def __init__(self, *, rows: int, gamma: int, tap_size: int) -> None:
        self.request_ids = np.zeros(rows, np.int64)
        self.slots = np.zeros(rows, np.int64)
        self.anchor_ids = np.zeros(rows, np.int64)
        self.new_taps = np.zeros(
            (rows, gamma + 1, tap_size), np.float32
        )  # not yet in the drafter's cache
        self.new_len = np.zeros(rows, np.int64)
        self.draft_len = np.zeros(rows, np.int64)  # rows in the drafter's cache
        self.target_len = np.zeros(rows, np.int64)  # rows in the target's cache
        self.temperature = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int64)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.draft_uniforms = np.zeros((rows, gamma), np.float32)
        self.verify_uniforms = np.zeros((rows, gamma + 1), np.float32)
        self._first: dict[int, FirstRows] = {}

    def first(self, count: int) -> FirstRows:
        """The same views every time: a backend sees by them that nothing has moved."""
        views = self._first.get(count)
        if views is None:
            views = self._first[count] = self._views(slice(0, count))
        return views

    def _views(self, rows: slice) -> FirstRows:
        temperature = self.temperature[rows]
        return FirstRows(
            draft=DraftInputs(
                anchor_ids=self.anchor_ids[rows],
                new_taps=self.new_taps[rows],
                new_len=self.new_len[rows],
                context_len=self.draft_len[rows],
                temperature=temperature,
                uniforms=self.draft_uniforms[rows],
            ),
            target_len=self.target_len[rows],
            temperature=temperature,
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            verify_uniforms=self.verify_uniforms[rows],
        )

    def assign(self, row: int, request_id: int, slot: int, params: SamplingParams) -> None:
        """Start a request in a row: nothing of the previous owner remains visible."""
        self.request_ids[row], self.slots[row] = request_id, slot
        self.anchor_ids[row] = 0
        self.new_len[row] = self.draft_len[row] = self.target_len[row] = 0
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p

    def taps_are_cached(self, count: int) -> None:
        """New taps of the first rows went into the drafter's cache."""
        for row, taken in enumerate(self.new_len[:count].tolist()):
            self.draft_len[row] += taken
            self.new_len[row] = 0

    def swap(self, first: int, second: int) -> None:
        swap_rows(self, first, second)


class ProcessorTable:
    """Penalties, biases and counts of each row; made when the first request needs any."""

    def __init__(self, *, rows: int, vocab: int) -> None:
        self.logit_bias = np.zeros((rows, vocab), np.float32)
        self.repetition_penalty = np.ones(rows, np.float32)
        self.presence_penalty = np.zeros(rows, np.float32)
        self.frequency_penalty = np.zeros(rows, np.float32)
        self.prompt_mask = np.zeros((rows, vocab), np.bool_)
        self.output_counts = np.zeros((rows, vocab), np.int32)

    def assign(self, row: int, request: Request, output: list[int]) -> None:
        params = request.params
        self.logit_bias[row] = 0
        for token, bias in params.logit_bias:
            self.logit_bias[row, token] += bias
        self.repetition_penalty[row] = params.repetition_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.prompt_mask[row] = False
        self.prompt_mask[row, list(request.prompt_ids)] = True
        self.output_counts[row] = 0
        self.count(row, output)

    def count(self, row: int, tokens: list[int]) -> None:
        np.add.at(self.output_counts[row], tokens, 1)

    def swap(self, first: int, second: int) -> None:
        swap_rows(self, first, second)


def swap_rows(table: object, first: int, second: int) -> None:
    for array in vars(table).values():
        if isinstance(array, np.ndarray):
            array[[first, second]] = array[[second, first]]
