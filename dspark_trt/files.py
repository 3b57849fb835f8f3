# SPDX-License-Identifier: Apache-2.0
"""Writing and fingerprinting files: nothing half-written is ever left under its final name."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 22


def sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` for a file that takes its place at the end, or disappears: a reader sees
    the old file or the new one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    with new_file(path) as temporary:
        temporary.write_text(
            json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )


@contextlib.contextmanager
def new_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name at the end, or disappears.

    Missing parents are made, and go again with it. With `replace`, a folder already there is removed
    only when the new one is whole. Cleans up on KeyboardInterrupt too; a killed process leaves only a
    hidden `.partial` folder.
    """
    made = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(
        tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    )
    try:
        temporary.chmod(0o755)  # mkdtemp makes it private
        yield temporary
        if replace and path.exists():
            _exchange(temporary, path)
        else:
            temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # somebody else uses it by now
                parent.rmdir()
        raise


def _exchange(new: Path, path: Path) -> None:
    old = new.with_suffix(".replaced")
    path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old)
