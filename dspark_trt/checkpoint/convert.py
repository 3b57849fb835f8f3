# SPDX-License-Identifier: Apache-2.0
"""Write a drafter in another dialect: the same bytes under other names, the same facts under other keys.

Nothing is approximated: what the other dialect has no words for is refused, and the result is read back
and compared before it takes its name.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dspark_trt.checkpoint.block import UNKNOWN_DEPTH
from dspark_trt.checkpoint.dialect_config import (
    OWNS_EMBEDDING,
    WRITABLE,
    config_in,
    inexpressible,
)
from dspark_trt.checkpoint.dialects import SPECULATORS, Dialect
from dspark_trt.checkpoint.draft import read_draft
from dspark_trt.checkpoint.pair import check_pair
from dspark_trt.checkpoint.records import (
    EMBEDDING,
    LM_HEAD,
    DraftCheckpoint,
    TargetCheckpoint,
)
from dspark_trt.checkpoint.safetensors_file import write_safetensors
from dspark_trt.checkpoint.source import read_json
from dspark_trt.checkpoint.tensors import TensorRef
from dspark_trt.checkpoint.vocabulary import D2T, target_tokens
from dspark_trt.errors import CheckpointError
from dspark_trt.files import new_directory, write_json


def convert_draft(
    draft: DraftCheckpoint,
    output: Path,
    *,
    to: str,
    target: TargetCheckpoint | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    overwrite: bool = False,
) -> DraftCheckpoint:
    """Write ``draft`` to the folder ``output`` in the dialect ``to`` and return it as read from there.

    Args:
        draft: what to write, overrides applied.
        output: folder to make.
        to: deepspec, speculators, specforge or model-optimizer.
        target: its embedding and head go into dialects that hold their own, and are compared with the
            drafter's for dialects that borrow them.
        settings: what the drafter's config.json should have said, as it was read (``DraftOverrides``).
        overwrite: replace a folder that holds a drafter.

    Raises:
        CheckpointError: an unknown dialect, what the dialect cannot say, or embeddings that would be lost.
    """
    dialect = _dialect(to)
    _check_output(output, overwrite)
    if target is not None:
        check_pair(draft, target)
        draft = _with_depth(draft, target)
    if faults := inexpressible(draft.config, dialect.name):
        raise CheckpointError(
            f"{draft.path} cannot be written as {dialect.name}, which has no words for "
            + "; ".join(faults)
        )
    tensors = _tensors(draft, dialect, target)
    source = _with_settings(read_json(draft.path / "config.json"), settings)
    try:
        with new_directory(output, replace=overwrite) as folder:
            write_json(folder / "config.json", config_in(dialect.name, draft.config, source))
            write_safetensors(folder / "model.safetensors", tensors)
            _compare(draft, read_draft(folder))
    except OSError as error:
        raise CheckpointError(f"cannot write {output}: {error.strerror or error}") from error
    return read_draft(output)


def _with_settings(source: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with other settings, wherever it has them."""
    places = {
        key: {k: v for k, v in value.items() if k not in settings}
        if isinstance(value, dict)
        else value
        for key, value in source.items()
        if key not in settings
    }
    return places | dict(settings)


def _dialect(name: str) -> Dialect:
    for dialect in WRITABLE:
        if dialect.name == name:
            return dialect
    raise CheckpointError(
        f"dialect {name!r} cannot be written; choose one of "
        + ", ".join(dialect.name for dialect in WRITABLE)
    )


def _check_output(output: Path, overwrite: bool) -> None:
    if not output.exists():
        return
    if not overwrite:
        raise CheckpointError(
            f"{output} exists already. Choose another folder, or pass --overwrite."
        )
    if not (output / "config.json").is_file():
        raise CheckpointError(
            f"{output} is no checkpoint, so --overwrite does not remove it. Choose another folder."
        )


def _with_depth(draft: DraftCheckpoint, target: TargetCheckpoint) -> DraftCheckpoint:
    """Some formats do not record the target's depth, others must."""
    depth = target.config.decoder.num_layers
    return replace(draft, config=replace(draft.config, num_target_layers=depth))


def _tensors(
    draft: DraftCheckpoint, dialect: Dialect, target: TargetCheckpoint | None
) -> dict[str, TensorRef | bytes]:
    """What goes into the file, by the dialect's names."""
    tensors = dict(draft.tensors)
    if dialect in OWNS_EMBEDDING:
        tensors |= _from_target(draft, dialect, target)
    elif not draft.borrowed:
        _check_same(draft, dialect, target)
        del tensors[EMBEDDING], tensors[LM_HEAD]
    named: dict[str, TensorRef | bytes] = {
        dialect.stored(name): ref for name, ref in sorted(tensors.items())
    }
    if dialect is SPECULATORS and D2T in tensors:
        kept = bytearray(draft.config.decoder.vocab_size)
        for token in target_tokens(tensors[D2T]):
            kept[token] = 1
        named["t2d"] = bytes(kept)
    return named


def _from_target(
    draft: DraftCheckpoint, dialect: Dialect, target: TargetCheckpoint | None
) -> Mapping[str, TensorRef]:
    if not draft.borrowed:
        return {}
    if target is None:
        raise CheckpointError(
            f"{draft.path} has no {' and '.join(sorted(draft.borrowed))}, which {dialect.name} keeps in "
            "the file: give the target with --target"
        )
    return {name: _of_target(target, name) for name in draft.borrowed}


def _of_target(target: TargetCheckpoint, name: str) -> TensorRef:
    return target.tensors[name if name in target.tensors else EMBEDDING]  # a tied head


def _check_same(
    draft: DraftCheckpoint, dialect: Dialect, target: TargetCheckpoint | None
) -> None:
    """Embedding and head may be left out only where the target's are the same, bit for bit."""
    if target is None:
        raise CheckpointError(
            f"{draft.path} has its own {EMBEDDING} and {LM_HEAD}, which {dialect.name} takes from the "
            "target: give it with --target, so that they can be compared"
        )
    for name in (EMBEDDING, LM_HEAD):
        ours, theirs = draft.tensors[name], _of_target(target, name)
        pairs = zip_longest(ours.chunks(), theirs.chunks())
        if ours.dtype != theirs.dtype or any(left != right for left, right in pairs):
            raise CheckpointError(
                f"{ours.key} of {draft.path} ({ours.dtype}) is not {theirs.key} of {target.path} "
                f"({theirs.dtype}): {dialect.name} would replace the one with the other. Convert to "
                f"{' or '.join(item.name for item in OWNS_EMBEDDING)}."
            )


def _compare(draft: DraftCheckpoint, written: DraftCheckpoint) -> None:
    """A last look: what was written reads as what was given."""
    wanted = draft.config
    if written.config.num_target_layers == UNKNOWN_DEPTH:
        wanted = replace(wanted, num_target_layers=UNKNOWN_DEPTH)
    if written.config != wanted:
        ours, theirs = wanted.to_json(), written.config.to_json()
        keys = sorted(key for key in ours if ours[key] != theirs[key])
        raise CheckpointError(
            f"{draft.path} would not read the same as {written.format}: "
            + "; ".join(f"{key} {ours[key]} became {theirs[key]}" for key in keys)
        )
