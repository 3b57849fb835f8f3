# SPDX-License-Identifier: Apache-2.0
"""Reads tensors and profiles back from a TensorRT-RTX plan, where no GPU is there to deserialise it.

The format is not documented; what is read here was found by comparing plans of version 1.7. A plan is a
stream of tagged values: a tag is `kk 80 01 00`, a list `01 80 <tag> <count u64> <items>`.
"""

import re
import struct
from dataclasses import dataclass

DTYPES = {0: "float32", 1: "float16", 3: "int32", 4: "bool", 7: "bfloat16", 8: "int64"}


def tag(kind: int) -> bytes:
    return bytes((kind, 0x80, 0x01, 0x00))


INT32, INT64, TEXT, TENSOR, DIMS, PROFILES, BINDINGS = (
    tag(kind) for kind in (0x07, 0x09, 0x0C, 0x41, 0x59, 0x39, 0x37)
)
LIST = b"\x01\x80"
PRESENT = tag(0x1C)
MODE = tag(0x28) + INT32
INDEX = tag(0x06)

_LISTED = re.compile(rb"\b(inputs|outputs)=\{([^}]*)\}")


@dataclass(frozen=True)
class PlanTensor:
    name: str
    index: int
    is_input: bool
    dtype: str
    shape: tuple[int, ...]  # -1: varies


@dataclass(frozen=True)
class Plan:
    version: tuple[int, int, int, int]
    tensors: dict[str, PlanTensor]
    profiles: list[list[tuple[tuple[int, ...], ...] | None]]  # per profile and tensor index
    compiled_inputs: frozenset[str]  # what the compiled graph reads
    compiled_outputs: frozenset[str]


def read_plan(data: bytes) -> Plan:
    """Raises ValueError for anything that is not laid out as expected."""
    if data[:4] != b"vtrt":
        raise ValueError("no plan of TensorRT-RTX")
    version = struct.unpack("4B", data[24:28])
    tensors = {}
    for match in re.finditer(re.escape(TENSOR + tag(0x13)), data):
        tensor = _tensor(data, match.end())
        tensors[tensor.name] = tensor
    # The compiled graph as a whole comes first, then those of its kernels.
    lists = dict(reversed(_LISTED.findall(data)))
    reads, writes = (
        frozenset(name.decode() for name in re.findall(rb'"([^"]*)\.1"', lists[kind]))
        for kind in (b"inputs", b"outputs")
    )
    return Plan(version, tensors, _profiles(data), reads, writes)


def _tensor(data: bytes, at: int) -> PlanTensor:
    (length,) = struct.unpack_from("<Q", data, at)
    at = _expect(data, at + 8, LIST + TEXT) + 8
    name = data[at : at + length].decode()
    at = _expect(data, at + length, PRESENT)
    at = _after(data, at, tag(0x0D) + INT32)
    (dtype,) = struct.unpack_from("<i", data, at)
    shape, at = _dims(data, _after(data, at, DIMS))
    at = _after(data, at, MODE)
    (mode,) = struct.unpack_from("<i", data, at)
    at = _expect(data, at + 4, INDEX)
    (index,) = struct.unpack_from("<i", data, at)
    shape = tuple(max(d, -1) for d in shape)  # below 0: the number of a symbol
    return PlanTensor(name, index, mode == 0, DTYPES[dtype], shape)


def _profiles(data: bytes) -> list[list[tuple[tuple[int, ...], ...] | None]]:
    start = re.search(
        re.escape(LIST + PROFILES) + rb".{8}" + re.escape(LIST + BINDINGS), data, re.S
    )
    if start is None:
        raise ValueError("no optimisation profiles")
    (count,) = struct.unpack_from("<Q", data, start.start() + 6)
    at, profiles = start.start() + 14, []
    for _ in range(count):
        at = _expect(data, at, LIST + BINDINGS)
        (bindings,) = struct.unpack_from("<Q", data, at)
        at += 8
        shapes: list[tuple[tuple[int, ...], ...] | None] = []
        for _ in range(bindings):
            at = _expect(data, at, LIST + DIMS) + 8
            three = []
            for _ in range(3):
                dims, at = _dims(data, at)
                three.append(dims)
                at = _expect(data, at, b"\xa6\x7f")
            at = _expect(data, at, b"\xc8\x7f")
            shapes.append(None if () in three else tuple(three))
        profiles.append(shapes)
        at = data.find(LIST + BINDINGS, at) if len(profiles) < count else at
    return profiles


def _dims(data: bytes, at: int) -> tuple[tuple[int, ...], int]:
    at = _expect(data, at, INT32)
    (rank,) = struct.unpack_from("<i", data, at)
    at += 4
    if rank <= 0:
        return (), at
    at = _expect(data, at, LIST + INT64) + 8
    return struct.unpack_from(f"<{rank}q", data, at), at + 8 * rank


def _after(data: bytes, at: int, pattern: bytes) -> int:
    found = data.find(pattern, at, at + 256)
    if found < 0:
        raise ValueError(f"no {pattern.hex()} behind {at}")
    return found + len(pattern)


def _expect(data: bytes, at: int, pattern: bytes) -> int:
    if data[at : at + len(pattern)] != pattern:
        raise ValueError(
            f"{data[at : at + len(pattern)].hex()} at {at}, expected {pattern.hex()}"
        )
    return at + len(pattern)
