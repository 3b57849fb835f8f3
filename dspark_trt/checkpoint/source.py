# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint lies: a local folder, or a model hub repository in huggingface_hub's cache."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from dspark_trt.errors import CheckpointError, first_line

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

# `model*`: some repositories hold the same weights a second time under another name.
_HUB_FILES = ("*.json", "*.jinja", "model*.safetensors")


def resolve_source(source: str | Path, *, revision: str | None = None) -> Path:
    """The folder of ``source``; a hub id is downloaded, or found in the cache when offline.

    Raises:
        CheckpointError: neither a folder nor a hub id, the hub does not have it, or a revision of a folder.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"{path} is a local folder and has no revision {revision}: revisions are of hub ids. "
                "Leave it out, or check that version out yourself"
            )
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the folder that holds config.json")
    if isinstance(source, Path) or not _HUB_ID.fullmatch(source):
        raise CheckpointError(
            f"{source}: no such folder, and not a hub id of the form owner/name"
        )
    return _hub_snapshot(source, revision)


def _hub_snapshot(repo_id: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{repo_id} is no local folder, and downloading needs huggingface_hub: "
            "pip install 'dspark-trt[export]'"
        ) from error
    try:
        return Path(
            snapshot_download(repo_id, revision=revision, allow_patterns=list(_HUB_FILES))
        )
    except (OSError, ValueError) as error:  # every error of huggingface_hub is one of the two
        raise CheckpointError(
            f"{repo_id}: no such folder, and the hub gives nothing "
            f"(revision {revision or 'main'}): {first_line(error)}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from ``path``.

    Raises:
        CheckpointError: the file is missing, not UTF-8 JSON, or not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} holds no {path.name}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def hash_files(files: list[Path]) -> str:
    """sha256 over the names and contents of ``files`` in name order, streamed."""
    total = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.name} {digest}\n".encode())
    return total.hexdigest()
