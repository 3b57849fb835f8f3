# SPDX-License-Identifier: Apache-2.0
"""Checksums as fast as files are read: XXH3-128 (xxhash.com) of pieces, so that threads can share a file.

They find accidents: a flipped bit, half a copy, the file of another export. They do not stop an attacker, who
would write a manifest to match.
"""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

PIECE_BYTES = 16 << 20
# Read at a time, into one place: the second-level cache still holds it when it is hashed.
_BLOCK_BYTES = 1 << 20
# One hashes while the other reads; a third made disks slower and memory no faster.
_THREADS = 2
_WORTH_THREADS_BYTES = 2 * PIECE_BYTES


class Digests(NamedTuple):
    """Of a file, in hexadecimal."""

    sha256: str
    xxh3: str  # XXH3-128 of its pieces' XXH3-128 digests, one after the other


def digests_of(path: Path) -> Digests:
    """Both in one reading, at the speed of SHA-256.

    Raises:
        OSError: the file cannot be read.
    """
    whole, pieces = hashlib.sha256(), xxhash.xxh3_128()
    for start, end in _pieces(path.stat().st_size):
        piece = xxhash.xxh3_128()
        for block in _blocks(path, start, end):
            whole.update(block)
            piece.update(block)
        pieces.update(piece.digest())
    return Digests(whole.hexdigest(), pieces.hexdigest())


def checksums_of(paths: Sequence[Path]) -> list[str]:
    """`Digests.xxh3` of each file.

    Raises:
        OSError: a file cannot be read.
    """
    sizes = [path.stat().st_size for path in paths]
    work = [(number, *piece) for number, size in enumerate(sizes) for piece in _pieces(size)]

    def digest(numbered: tuple[int, int, int]) -> bytes:
        number, start, end = numbered
        piece = xxhash.xxh3_128()
        for block in _blocks(paths[number], start, end):
            piece.update(block)
        return piece.digest()

    if sum(sizes) < _WORTH_THREADS_BYTES:
        digests = list(map(digest, work))
    else:
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = list(pool.map(digest, work))
    files = [xxhash.xxh3_128() for _ in paths]
    for (number, _, _), found in zip(work, digests, strict=True):
        files[number].update(found)
    return [each.hexdigest() for each in files]


def _pieces(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Start and end of each; an empty file has one piece."""
    for start in range(0, max(size_bytes, 1), PIECE_BYTES):
        yield start, min(start + PIECE_BYTES, size_bytes)


def _blocks(path: Path, start: int, end: int) -> Iterator[memoryview]:
    """What is there of the bytes from `start` to `end`; each block holds until the next is asked for."""
    with path.open("rb", buffering=0) as stream:
        stream.seek(start)
        block = memoryview(bytearray(min(_BLOCK_BYTES, end - start)))
        while start < end and (count := stream.readinto(block[: end - start])):
            yield block[:count]
            start += count
