# SPDX-License-Identifier: Apache-2.0
"""What works on drafters and targets alike."""

from dataclasses import replace
from pathlib import Path

from dspark_trt.checkpoint.dialects import is_target
from dspark_trt.checkpoint.draft import read_draft
from dspark_trt.checkpoint.mtp import mtp_sign
from dspark_trt.checkpoint.records import DraftCheckpoint, DraftOverrides, TargetCheckpoint
from dspark_trt.checkpoint.source import hash_files, resolve_source
from dspark_trt.checkpoint.target import read_target
from dspark_trt.checkpoint.tensors import read_tensors


def read_checkpoint(
    source: str | Path,
    *,
    overrides: DraftOverrides = DraftOverrides(),  # noqa: B008 (frozen)
) -> DraftCheckpoint | TargetCheckpoint:
    """Read ``source`` as what its tensor names show it to be; a target with a layer that drafts, as the
    drafter.

    Raises:
        CheckpointError: as ``read_draft`` and ``read_target``.
    """
    folder = resolve_source(source, revision=overrides.revision)
    files = read_tensors(folder)
    if is_target(files) and mtp_sign(files) is None:
        return read_target(folder, settings=overrides.target_settings)
    return read_draft(folder, overrides=replace(overrides, revision=None))  # found already


def source_hash(checkpoint: DraftCheckpoint | TargetCheckpoint) -> str:
    """sha256 over config.json and the safetensors files, streamed."""
    weights = {file for ref in checkpoint.tensors.values() for file in ref.files}
    return hash_files([checkpoint.path / "config.json", *weights])
