# SPDX-License-Identifier: Apache-2.0
"""What was verified is not verified again: never if a file was written to, and memory is never needed."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark_trt import verified_files
from dspark_trt.verified_files import verify_once

NANOSECONDS = 1_000_000_000


class Verifier:
    """Calls of `verify_once` on some files, counted where the files are really looked at."""

    def __init__(self, *files: Path, what: str = "abc") -> None:
        self.expected = {str(file): what for file in files}
        self.calls = 0

    def __call__(self, *, again: bool = False, meanwhile: Callable[[], object] = int) -> bool:
        """Whether files were looked at."""
        before = self.calls

        def verify() -> None:
            self.calls += 1
            meanwhile()

        verify_once(self.expected, verify, again=again)
        return self.calls > before


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dspark-trt" / "verified"


@pytest.fixture
def file(tmp_path: Path, cache: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"weights")
    time.sleep(2 * verified_files._FINE_TICK_S)
    return path


def test_unchanged_files_are_verified_once(file: Path) -> None:
    other = file.with_name("draft.onnx")
    other.hardlink_to(file)
    time.sleep(2 * verified_files._FINE_TICK_S)  # a link is a change of the file
    verifier = Verifier(file, other)
    assert [verifier() for _ in range(3)] == [True, False, False]
    assert verifier(again=True)
    assert Verifier(file)()  # it alone never was


def test_what_fails_is_not_remembered(file: Path) -> None:
    def fail() -> None:
        raise ValueError("damaged")

    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"):
            Verifier(file)(meanwhile=fail)
    assert [Verifier(file)() for _ in range(2)] == [True, False]
    with pytest.raises(ValueError, match="damaged"):  # a disk that decayed
        Verifier(file)(again=True, meanwhile=fail)
    assert Verifier(file)()


def test_other_expectations_are_verified(file: Path) -> None:
    """A manifest written anew for the same files."""
    Verifier(file)()
    assert Verifier(file, what="def")()
    assert not Verifier(file)()


def test_a_written_file_is_verified_whatever_its_times_say(file: Path) -> None:
    verifier, times = Verifier(file), file.stat()
    verifier()
    with file.open("r+b") as stream:
        stream.write(b"W")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # size and mtime are as they were
    assert file.stat().st_mtime_ns == times.st_mtime_ns
    assert verifier()


def test_a_file_put_in_its_place_is_verified(file: Path) -> None:
    verifier, times = Verifier(file), file.stat()
    verifier()
    copy = file.with_name("copy")
    copy.write_bytes(b"WEIGHTS")
    os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))
    copy.replace(file)
    assert verifier()


def test_a_folder_that_moved_is_known(file: Path, tmp_path: Path) -> None:
    """Renaming it touches none of its files; a copy is another file."""
    Verifier(file)()
    (tmp_path / "moved").mkdir()
    folder = tmp_path / "folder"
    folder.mkdir()
    inside = folder / "weights.bin"
    inside.write_bytes(b"weights")
    time.sleep(2 * verified_files._FINE_TICK_S)
    assert Verifier(inside)()
    folder.rename(tmp_path / "renamed")
    assert not Verifier(tmp_path / "renamed" / "weights.bin")()


def test_a_file_just_written_is_not_remembered(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second write could carry the same time."""
    monkeypatch.setattr(verified_files, "_FINE_TICK_S", 1e6)
    verifier = Verifier(file)
    assert [verifier() for _ in range(2)] == [True, True]


@pytest.mark.parametrize(
    ("ctime_ns", "age_s", "settled"),
    [
        (NANOSECONDS + 123, 0.01, False),
        (NANOSECONDS + 123, 0.2, True),
        (NANOSECONDS, 0.2, False),  # a clock of seconds
        (NANOSECONDS, 2.1, False),  # FAT: of two seconds
        (NANOSECONDS, 3.0, True),
        (NANOSECONDS + 20_000_000, 0.2, False),  # of hundredths
        (NANOSECONDS + 123, -5.0, False),  # from the future: clocks disagree
    ],
)
def test_a_clock_has_to_have_ticked(ctime_ns: int, age_s: float, settled: bool) -> None:
    state = verified_files._State(1, 2, 3, ctime_ns, ctime_ns)
    assert verified_files._settled(state, ctime_ns / NANOSECONDS + age_s) == settled


def test_a_file_written_while_it_was_verified_is_not_remembered(file: Path) -> None:
    verifier = Verifier(file)
    assert verifier(meanwhile=lambda: file.write_bytes(b"WEIGHTS"))
    time.sleep(2 * verified_files._FINE_TICK_S)
    assert [verifier() for _ in range(2)] == [True, False]


def test_the_oldest_are_forgotten(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified_files, "_MOST", 2)
    verifiers = [Verifier(file, what=str(number)) for number in range(3)]
    for verifier in verifiers:
        assert verifier()
        time.sleep(0.02)
    assert len(list(cache.iterdir())) == 2
    assert [verifier() for verifier in reversed(verifiers)] == [False, False, True]


def test_without_a_place_to_remember_files_are_verified(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blocked").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    verifier = Verifier(file)
    assert [verifier() for _ in range(2)] == [True, True]
