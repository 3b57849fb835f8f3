# SPDX-License-Identifier: Apache-2.0
"""Static buffers of all graphs, planned before any memory is taken.

Captured graphs hold addresses, so every tensor has one place for good, sized for the largest bucket; smaller
buckets use its beginning. What the host writes lies together, and so does what it reads: one copy each.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from dspark_trt.bindings import Binding

ALIGNMENT = 256  # of every buffer: whole vectors can be loaded

ITEM_BYTES = {
    "bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4,
    "int64": 8,
}  # fmt: skip


class Traffic(StrEnum):
    """Who touches a buffer besides the device."""

    UPLOADED = "uploaded"  # written by the host before a step
    DOWNLOADED = "downloaded"  # read by the host after it
    RESIDENT = "resident"  # never leaves the device, unless asked for


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a buffer lies in the memory of its traffic."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    traffic: Traffic
    offset: int  # bytes

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class BufferPlan:
    placements: Mapping[str, Placement]
    sizes: Mapping[Traffic, int]  # bytes

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())


@dataclass(frozen=True, slots=True)
class Wanted:
    """A buffer to be placed; symbolic dimensions take the largest bucket's sizes."""

    name: str
    binding: Binding
    traffic: Traffic


def plan_buffers(wanted: Iterable[Wanted], sizes: Mapping[str, int]) -> BufferPlan:
    """Place buffers one behind the other, in the order given.

    Args:
        wanted: distinct names.
        sizes: of the symbolic dimensions, in the largest bucket.
    """
    placements: dict[str, Placement] = {}
    ends = dict.fromkeys(Traffic, 0)
    for each in wanted:
        assert each.name not in placements, each.name
        shape = tuple(d if isinstance(d, int) else sizes[d] for d in each.binding.shape)
        placement = Placement(
            each.name, each.binding.dtype, shape, each.traffic, ends[each.traffic]
        )
        placements[each.name] = placement
        end = placement.offset + placement.nbytes
        ends[each.traffic] = -(-end // ALIGNMENT) * ALIGNMENT
    return BufferPlan(placements, ends)
