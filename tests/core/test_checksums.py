# SPDX-License-Identifier: Apache-2.0
"""Checksums: the same by every way of reading, and another for every kind of accident."""

import hashlib
from pathlib import Path

import pytest
import xxhash

from dspark_trt import checksums
from dspark_trt.checksums import checksums_of, digests_of

PIECE = 1000


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(checksums, "_BLOCK_BYTES", 300)  # no divisor of a piece


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "size", [0, 1, 299, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE, 5 * PIECE + 7]
)
@pytest.mark.parametrize("threads_from", [0, 1 << 30])
def test_both_ways_give_what_the_definition_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, threads_from: int
) -> None:
    monkeypatch.setattr(checksums, "_WORTH_THREADS_BYTES", threads_from)
    data = bytes(number * number % 251 for number in range(size))
    file, other = written(tmp_path / "a", data), written(tmp_path / "b", b"other")
    pieces = [data[start : start + PIECE] for start in range(0, size, PIECE)] or [b""]
    expected = xxhash.xxh3_128(b"".join(map(xxhash.xxh3_128_digest, pieces))).hexdigest()
    assert digests_of(file) == (hashlib.sha256(data).hexdigest(), expected)
    assert checksums_of([other, file, other])[1] == expected
    assert checksums_of([other, other]) == [digests_of(other).xxh3] * 2
    assert checksums_of([]) == []


def test_pieces_of_the_real_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A published manifest depends on it: 16 MiB, and blocks are not part of the definition."""
    monkeypatch.undo()
    data = bytes(range(256)) * (40 << 12)  # 40 MiB: two pieces and a half, read by threads
    pieces = [data[start : start + (16 << 20)] for start in range(0, len(data), 16 << 20)]
    expected = xxhash.xxh3_128(b"".join(map(xxhash.xxh3_128_digest, pieces))).hexdigest()
    file = written(tmp_path / "file", data)
    assert checksums_of([file]) == [digests_of(file).xxh3] == [expected]


def test_every_accident_gives_another(tmp_path: Path) -> None:
    data = bytes(number % 249 for number in range(3 * PIECE))
    accidents = [
        data,
        data[:-1],
        data + b"\0",
        data[:PIECE],
        data[PIECE : 2 * PIECE] + data[:PIECE] + data[2 * PIECE :],  # two pieces swapped
        *(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(0, 3 * PIECE, 97)),
    ]
    files = [written(tmp_path / str(number), each) for number, each in enumerate(accidents)]
    assert len(set(checksums_of(files))) == len(accidents)


@pytest.mark.parametrize("threads_from", [0, 1 << 30])
def test_a_file_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads_from: int
) -> None:
    monkeypatch.setattr(checksums, "_WORTH_THREADS_BYTES", threads_from)
    with pytest.raises(FileNotFoundError, match="gone"):
        checksums_of([written(tmp_path / "here", b"x"), tmp_path / "gone"])
