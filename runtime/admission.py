# SPDX-License-Identifier: Apache-2.0
"""Requests that wait: by priority, then by arrival, within limits that are said clearly."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from dspark_trt.errors import CapacityError, QueueFullError
from dspark_trt.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """`cached_tokens`: positions all active requests together may come to hold; None: no limit."""

    waiting: int = 1024
    cached_tokens: int | None = None


class WaitingQueue:
    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._heap: list[tuple[int, int, Sequence]] = []
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, _, sequence in self._heap)

    def push(self, sequence: Sequence, positions: int) -> None:
        """Queue a request that may come to hold so many positions.

        Raises:
            QueueFullError: as many requests as allowed wait already.
            CapacityError: the request alone exceeds the limit on cached tokens.
        """
        limit = self._limits.cached_tokens
        if limit is not None and positions > limit:
            raise CapacityError(
                f"the request may hold {positions} tokens, the engine caches {limit} for all requests "
                "together. Ask for fewer with max_new_tokens"
            )
        if len(self._heap) >= self._limits.waiting:
            raise QueueFullError(
                f"{len(self._heap)} requests are waiting, the most this engine queues. Try again later"
            )
        heapq.heappush(self._heap, (-sequence.request.priority, next(self._arrivals), sequence))

    def pop_if_fits(
        self, held_positions: int, positions_of: Callable[[Sequence], int]
    ) -> Sequence | None:
        """The next request, unless memory is short for it: then it keeps its turn."""
        if not self._heap:
            return None
        first = self._heap[0][2]
        limit = self._limits.cached_tokens
        if limit is not None and held_positions + positions_of(first) > limit:
            return None
        return heapq.heappop(self._heap)[2]

    def remove(self, sequence: Sequence) -> bool:
        """Take a request out of the queue; False if it does not wait."""
        for index, (_, _, waiting) in enumerate(self._heap):
            if waiting is sequence:
                self._heap.pop(index)
                heapq.heapify(self._heap)
                return True
        return False
