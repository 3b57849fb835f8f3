# SPDX-License-Identifier: Apache-2.0
"""Writing and fingerprinting files: nothing half-written is ever left under its final name."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark_trt.errors import OutputError

_CHUNK_BYTES = 1 << 22
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)


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

    Raises:
        OutputError: no such folder, no right to write there, a folder of that name, a full disk.
    """
    require_place(path)
    writer = f"{os.getpid()}-{threading.get_ident()}"
    temporary = path.with_name(f".{path.name}.{writer}.partial")
    try:
        yield temporary
        temporary.replace(path)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def require_place(path: Path) -> None:
    """Refuse a name that no file can take, before the work for it is done.

    Raises:
        OutputError: no such folder, no right to write there, or a folder of that name.
    """
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder. Give the name of a file")
    if not path.parent.is_dir():
        raise OutputError(
            f"cannot write {path}: there is no folder {path.parent}. Make it first"
        )
    if not os.access(path.parent, os.W_OK):
        raise OutputError(
            f"cannot write {path}: no right to write in {path.parent}. Choose another folder"
        )


def make_folder(path: Path) -> None:
    """A folder for files, with its parents; one that is there stays as it is.

    Raises:
        OutputError: a file has that name, or no right to write there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        in_the_way = next((each for each in (path, *path.parents) if each.is_file()), None)
        reason = error.strerror or error if in_the_way is None else f"{in_the_way} is a file"
        raise OutputError(f"cannot make the folder {path}: {reason}") from error


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

    Raises:
        OutputError: a file has the name of a parent, or no right to make one.
    """
    made = [parent for parent in path.parents if not parent.exists()]
    make_folder(path.parent)
    temporary = Path(
        tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    )
    try:
        temporary.chmod(0o755)  # mkdtemp makes it private
        yield temporary
        if replace:
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
    """Whoever comes last stays, where several processes write one folder."""
    old = new.with_suffix(".replaced")
    while True:
        is_moved = _is_moved(path, old)
        try:
            new.rename(path)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in _TAKEN:
                if is_moved:
                    _remove(old)
                continue  # another process took the name in between
            if is_moved:
                old.rename(path)
            raise
        break
    if is_moved:
        _remove(old)


def _is_moved(path: Path, old: Path) -> bool:
    try:
        path.rename(old)
    except FileNotFoundError:
        return False
    return True


def _remove(old: Path) -> None:
    if old.is_symlink():
        old.unlink()  # the folder it led to is somebody else's
    else:
        shutil.rmtree(old)
