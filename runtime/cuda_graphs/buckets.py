# SPDX-License-Identifier: Apache-2.0
"""Which captured graph serves a batch: the smallest (batch, rows) bucket that holds it."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Self, TypeVar

from dspark_trt.errors import CapacityError

T = TypeVar("T")


class GraphKey(NamedTuple):
    """Shapes of one captured graph."""

    batch: int  # requests
    rows: int  # flattened target rows


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes that graphs are captured for, ascending. Every request has one row at least, γ+1 at most."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("batch", "rows"):
            sizes = getattr(self, name)
            if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise ValueError(
                    f"{name} buckets must be positive, distinct and ascending, got {sizes}"
                )
        if self.rows[-1] < self.batch[-1]:
            raise ValueError(
                f"the largest rows bucket {self.rows[-1]} does not hold {self.batch[-1]} requests"
            )

    @classmethod
    def up_to(cls, requests: int, rows_a_request: int) -> Self:
        """Powers of two, and the largest sizes themselves."""
        return cls(_powers(requests), _powers(requests * rows_a_request))

    def find(self, batch: int, rows: int) -> GraphKey | None:
        """The smallest bucket for `batch` requests with `rows` rows together; None: too large for any.

        Requests that fill the batch up take a row each, so `rows` has to hold those too.
        """
        padded = _smallest(self.batch, batch)
        if padded is None:
            return None
        wanted = _smallest(self.rows, rows + padded - batch)
        return None if wanted is None else GraphKey(padded, wanted)

    def require(self, batch: int, rows: int) -> GraphKey:
        """What `find` finds.

        Raises:
            CapacityError: no bucket is large enough.
        """
        key = self.find(batch, rows)
        if key is None:
            raise CapacityError(
                f"{batch} requests with {rows} rows exceed the largest graph: "
                f"{self.batch[-1]} requests, {self.rows[-1]} rows"
            )
        return key


def _smallest(sizes: Sequence[int], wanted: int) -> int | None:
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


def _powers(largest: int) -> tuple[int, ...]:
    return tuple(sorted({*(1 << i for i in range(largest.bit_length())), largest}))


class RecentGraphs(Generic[T]):
    """At most `limit` graphs; the least recently used one goes first."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"at least one graph has to fit, got {limit}")
        self.limit = limit
        self.evicted = 0
        self._graphs: OrderedDict[GraphKey, T] = OrderedDict()

    def get(self, key: GraphKey) -> T | None:
        if key in self._graphs:
            self._graphs.move_to_end(key)
        return self._graphs.get(key)

    def put(self, key: GraphKey, graph: T) -> None:
        self._graphs[key] = graph
        self._graphs.move_to_end(key)
        while len(self._graphs) > self.limit:
            self._graphs.popitem(last=False)
            self.evicted += 1

    def clear(self) -> None:
        self._graphs.clear()

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Least recently used first."""
        return tuple(self._graphs)
