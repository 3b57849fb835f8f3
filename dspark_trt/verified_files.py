# SPDX-License-Identifier: Apache-2.0
"""Files that were found to be what they should be, remembered for as long as nothing about them changes.

What is remembered is one hash over what was expected of each file and over its inode, size and times of the last
change, of which `ctime` cannot be set back. That finds every file that was written to, not a disk that decays:
`dspark-trt inspect --verify` and `check` read everything. It is the name of an empty file in the user's cache
folder: looking it up reads nothing, and processes that remember at the same time cannot damage it.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_MOST = 256
# A second write may carry the time of the first: clocks of file systems tick. With nanoseconds they tick as
# the kernel's (at most 10 ms), others every second or two (ext3, HFS+, FAT).
_FINE_TICK_S = 0.02
_COARSE_TICK_S = 2.5


class _State(NamedTuple):
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


def verify_once(
    expected: Mapping[str, str], verify: Callable[[], None], *, again: bool = False
) -> None:
    """Call `verify`, unless it returned before with these very files and nothing about them has changed since.

    Args:
        expected: for each path what `verify` compares the file's content with.
        verify: raises if a file is not what is expected of it.
        again: call it in any case.

    Raises:
        OSError: a file is not there.
    """
    started_s = time.time()
    before = _states(expected)
    name = _name(expected, before)
    if not again and _is_known(name):
        return
    _forget(name)  # a disk may have decayed: then `verify` raises
    verify()
    settled = all(_settled(state, started_s) for state in before)
    if settled and _states(expected) == before:
        _remember(name)


def _states(paths: Iterable[str]) -> list[_State]:
    found = map(os.stat, paths)
    return [
        _State(each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns)
        for each in found
    ]


def _settled(state: _State, now_s: float) -> bool:
    """Whatever is written from `now_s` on gives the file another time."""
    is_fine = state.ctime_ns % 10_000_000
    return now_s - state.ctime_ns / 1e9 > (_FINE_TICK_S if is_fine else _COARSE_TICK_S)


def _name(expected: Mapping[str, str], states: list[_State]) -> str:
    text = repr([*zip(expected.values(), map(tuple, states), strict=True)])
    return hashlib.sha256(text.encode()).hexdigest()


def memory() -> Path:
    """The folder of what was verified.

    Raises:
        RuntimeError: there is no home.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dspark-trt" / "verified"


def _is_known(name: str) -> bool:
    try:
        return (memory() / name).exists()
    except (OSError, RuntimeError):  # no right to look, or no home
        return False


def _forget(name: str) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        (memory() / name).unlink(missing_ok=True)


def _remember(name: str) -> None:
    """The oldest go. Where nothing can be written, nothing is remembered."""
    with contextlib.suppress(OSError, RuntimeError):
        folder = memory()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        if len(found := list(folder.iterdir())) > _MOST:
            for file in sorted(found, key=lambda file: file.stat().st_mtime_ns)[:-_MOST]:
                file.unlink()
