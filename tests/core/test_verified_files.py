# SPDX-License-Identifier: Apache-2.0
"""Remembered hashes: never of a file that was written to, never needed."""

import json
import os
import time
from pathlib import Path

import pytest

from dspark_trt import verified_files
from dspark_trt.files import sha256_of_file
from dspark_trt.verified_files import verified_sha256

MEGABYTES = 3 << 20


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(verified_files, "_SETTLED_S", 0.05)
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(MEGABYTES))
    time.sleep(0.1)
    return path


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    read: list[Path] = []

    def hash_of(path: Path) -> str:
        read.append(path)
        return sha256_of_file(path)

    monkeypatch.setattr(verified_files, "sha256_of_file", hash_of)
    return read


def test_an_unchanged_file_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = counted(monkeypatch)
    assert {verified_sha256(file) for _ in range(3)} == {sha256_of_file(file)}
    assert len(read) == 1


def test_a_written_file_is_read_again_whatever_its_times_say(file: Path) -> None:
    before, times = verified_sha256(file), file.stat()
    with file.open("r+b") as stream:
        stream.seek(MEGABYTES // 2)
        stream.write(b"changed")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # size and mtime are as they were
    assert file.stat().st_mtime_ns == times.st_mtime_ns
    assert verified_sha256(file) == sha256_of_file(file) != before


def test_a_file_put_in_its_place_is_read(file: Path, tmp_path: Path) -> None:
    verified_sha256(file)
    other = tmp_path / "other"
    other.write_bytes(os.urandom(MEGABYTES))
    other.replace(file)
    assert verified_sha256(file) == sha256_of_file(file)


def test_a_file_just_written_is_not_remembered(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified_files, "_SETTLED_S", 1e6)
    read = counted(monkeypatch)
    for _ in range(2):
        verified_sha256(file)
    assert len(read) == 2


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 3}'])
def test_a_damaged_memory_is_none(file: Path, tmp_path: Path, text: str) -> None:
    verified_sha256(file)
    memory = tmp_path / "cache" / "dspark-trt" / "verified.json"
    assert str(file) in json.loads(memory.read_text())
    memory.write_text(text)
    assert verified_sha256(file) == sha256_of_file(file)


def test_without_a_place_to_remember_files_are_read(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blocked").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    assert verified_sha256(file) == sha256_of_file(file)
