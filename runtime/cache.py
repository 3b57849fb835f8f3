# SPDX-License-Identifier: Apache-2.0
"""Key and value caches on the host: one row per request, as long as contexts are."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import BackendError, first_line

# Attention kernels pay for capacity, not for valid rows, so caches grow in small steps: at most this
# factor beyond what is needed, each row being copied a constant number of times over a long context.
GROWTH = 1.25
QUANTUM_ROWS = 64
# How many times the room that is needed caches may have before they shrink: growing again costs copies.
_IDLE_ROOM = 1.5


class CacheBuffers:
    """`2L` arrays `[requests, Hkv, S, D]`. Addresses change only in `reserve` and `shrink`, which count
    `version` up.
    """

    def __init__(self, *, sizes: Iterable[tuple[int, int]], requests: int, dtype: str) -> None:
        """`sizes` gives the key-value heads and the head size of each array."""
        self.version = 0
        self.arrays = [
            np.zeros((requests, kv_heads, 0, head_dim), dtype) for kv_heads, head_dim in sizes
        ]

    @property
    def capacity_rows(self) -> int:
        return int(self.arrays[0].shape[2])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def reserve(self, rows: int) -> bool:
        """Make room for `rows` a request; True if the arrays moved. How long a context may get is the
        caller's to decide.

        Raises:
            BackendError: there is no memory; nothing has changed.
        """
        if rows <= self.capacity_rows:
            return False
        self._move(_room(rows))
        return True

    def shrink(self, rows: int) -> bool:
        """Give back what is far beyond `rows` a request, all that are valid; True if the arrays moved."""
        capacity = _room(max(rows, 1))
        if self.capacity_rows <= _IDLE_ROOM * capacity:
            return False
        try:
            self._move(capacity)
        except BackendError:  # what would have been given back stays
            return False
        return True

    def _move(self, capacity: int) -> None:
        before = self.capacity_rows
        kept = min(before, capacity)
        try:
            moved = [
                np.zeros((*array.shape[:2], capacity, array.shape[3]), array.dtype)
                for array in self.arrays
            ]
        except MemoryError as error:
            raise BackendError(
                f"no memory for caches of {capacity} rows instead of {before}: {first_line(error)}"
            ) from error
        self.version += 1
        for i, array in enumerate(moved):
            # Memory is taken as it is written to: the peak is one array above the total.
            array[:, :, :kept] = self.arrays[i][:, :, :kept]
            self.arrays[i] = array

    def swap(self, first: int, second: int) -> None:
        for array in self.arrays:
            array[[first, second]] = array[[second, first]]

    def read_rows(self, request: int, rows: int) -> list[NDArray[np.generic]]:
        """Copies of the first `rows` rows of one request, `2L x [Hkv, rows, D]`."""
        return [array[request, :, :rows].copy() for array in self.arrays]

    def write_rows(self, request: int, saved: list[NDArray[np.generic]]) -> None:
        """Put back what `read_rows` gave, possibly into another request."""
        self.reserve(saved[0].shape[1])
        for array, rows in zip(self.arrays, saved, strict=True):
            array[request, :, : rows.shape[1]] = rows


def _room(rows: int) -> int:
    return -(-int(rows * GROWTH) // QUANTUM_ROWS) * QUANTUM_ROWS
