# SPDX-License-Identifier: Apache-2.0
"""Per-request state as arrays indexed by cache row: what one round hands to the backend, already in place."""

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.request import Request, SamplingParams


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

    def assign(self, row: int, request_id: int, slot: int, params: SamplingParams) -> None:
        """Start a request in a row: nothing of the previous owner remains visible."""
        self.request_ids[row], self.slots[row] = request_id, slot
        self.anchor_ids[row] = 0
        self.new_len[row] = self.draft_len[row] = self.target_len[row] = 0
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p

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
    arrays: list[NDArray[np.generic]] = list(vars(table).values())
    for array in arrays:
        array[[first, second]] = array[[second, first]]
