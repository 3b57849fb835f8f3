# SPDX-License-Identifier: Apache-2.0
"""Hashes of large files, remembered for as long as nothing about a file changes.

Hashing the weights takes several times as long as mapping them. What is remembered lies in the user's cache
folder, by path; inode, size and the times of the last change, of which `ctime` cannot be set back, must all be
the same. That finds every file that was written to, not a disk that decays: `dspark-trt check` reads everything.
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from dspark_trt.files import sha256_of_file, write_json

_SMALLEST_BYTES = 1 << 20  # below, hashing is as fast as looking up
_MOST_FILES = 256
# Clocks of file systems tick slowly: a second write right after the first could carry the same time.
_SETTLED_S = 2.0


def verified_sha256(path: Path) -> str:
    """The file's hash, computed only if the file is new here or has changed."""
    state = _state(path)
    if state["size"] < _SMALLEST_BYTES:
        return sha256_of_file(path)
    name = str(path.resolve())
    known = _read().get(name)
    if isinstance(known, dict) and known.get("state") == state and known.get("sha256"):
        return str(known["sha256"])
    digest = sha256_of_file(path)
    if _state(path) == state and time.time() - state["ctime_ns"] / 1e9 > _SETTLED_S:
        _remember(name, {"state": state, "sha256": digest})
    return digest


def _state(path: Path) -> dict[str, int]:
    found = path.stat()
    return {
        "device": found.st_dev,
        "inode": found.st_ino,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
    }


def _file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dspark-trt" / "verified.json"


def _read() -> dict[str, Any]:
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # none yet, damaged, or no home
        return {}
    return found if isinstance(found, dict) else {}


def _remember(name: str, entry: dict[str, Any]) -> None:
    """Newest last; the oldest go. Where nothing can be written, nothing is remembered."""
    entries = _read()
    entries.pop(name, None)
    kept = dict(list(entries.items())[-(_MOST_FILES - 1) :])
    with contextlib.suppress(OSError, RuntimeError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_json(_file(), {**kept, name: entry})
