# SPDX-License-Identifier: Apache-2.0
"""Writes a model repository for Triton Inference Server: the engine as its model, and in that model's folder a
second repository of its parts. The server passes over folders that are no version number: who names the
repository alone loads the engine alone.
"""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark_trt.bindings import GraphBindings
from dspark_trt.bundle import CALIBRATION, COST_TABLE, ENGINES, MANIFEST, Bundle
from dspark_trt.errors import BundleError, OutputError, RequestError
from dspark_trt.files import new_directory
from dspark_trt.runtime.cuda_graphs.padding import scratch_rows
from dspark_trt.runtime.serving.triton_config import EngineSettings, engine_config, part_config
from dspark_trt.runtime.serving.triton_parts import Part, onnx_parts, plan_parts

PARTS = "parts"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_MODEL = """\
# SPDX-License-Identifier: Apache-2.0
from dspark_trt.runtime.serving.triton_backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """What was written."""

    model: str
    parts: tuple[str, ...]
    parts_path: Path | None  # the repository of the parts, if there are any
    left_out: Mapping[str, str]  # engines and graphs that are no models, and why


def write_repository(
    bundle: Bundle,
    output: Path,
    *,
    name: str | None = None,
    settings: EngineSettings | None = None,
    graphs: Mapping[str, GraphBindings] | None = None,
    tensorrt_version: str | None = None,
    cache_rows: int | None = None,
    overwrite: bool = False,
) -> Repository:
    """Write a repository.

    Files are linked where the disk allows and copied where not: a repository beside its bundle takes no
    room, and both stay whole when one is deleted. Parts are linked to the repository's own bundle.

    Args:
        bundle: with a target.
        output: folder to make.
        name: of the engine's model; default: the bundle's folder. Parts are `<name>_<graph>`, engines of them
            `<name>_<graph>_plan`.
        settings: of the engine; its batch, threads and kind of device are those of parts too.
        graphs: graphs to serve by themselves, with their contracts.
        tensorrt_version: of the engines to serve, where the bundle has several.
        cache_rows: of each cache that the server keeps for a sequence; None: caches are inputs and outputs of
            graphs.
        overwrite: replace a repository that this function wrote.

    Raises:
        BundleError: the bundle has no target, or lacks a graph; an engine does not fit it.
        RequestError: a name that Triton refuses, an output that exists, engines of several versions, or caches
            that hold no context or more than there can be.
        OutputError: no right to write there, or a full disk.
    """
    name = name or bundle.path.resolve().name
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{name!r} is no model name: letters, digits, '.', '_' and '-' only. Give one with --name"
        )
    if bundle.target is None:
        raise BundleError(f"{bundle.path} has no target. Export it again with --target")
    if cache_rows is not None:
        _check_cache_rows(bundle, cache_rows)
    _check_output(output, name, overwrite)
    settings, graphs = settings or EngineSettings(), graphs or {}
    onnx, unshared = onnx_parts(
        bundle, graphs, max_batch=settings.max_batch, cache_rows=cache_rows
    )
    plans, left_out = plan_parts(bundle, graphs, version=tensorrt_version)
    parts = (*onnx, *plans)
    try:
        with new_directory(output, replace=overwrite) as folder:
            _write_engine(bundle, folder / name, settings)
            _write_parts(folder / name, parts, settings)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {output}: {error.strerror or error}") from error
    return Repository(
        model=name,
        parts=tuple(f"{name}_{part.name}" for part in parts),
        parts_path=output / name / PARTS if parts else None,
        left_out=unshared | left_out,
    )


def _check_cache_rows(bundle: Bundle, rows: int) -> None:
    """A draft step writes new context, block and padding in one go, behind the valid end."""
    context = bundle.max_context_tokens
    behind = scratch_rows(bundle.draft.gamma, bundle.draft.block_slots)
    if not behind < rows <= context + behind:
        raise RequestError(
            f"cache rows must lie in {behind + 1}..{context + behind}, got {rows}: contexts of this bundle have "
            f"up to {context} tokens, and a draft step writes {behind} rows behind them"
        )


def _check_output(output: Path, name: str, overwrite: bool) -> None:
    if not output.exists():
        return
    if not overwrite:
        raise RequestError(
            f"{output} exists already. Choose another folder, or pass --overwrite."
        )
    if not (output / name / "1" / "bundle" / MANIFEST).is_file():
        raise RequestError(
            f"{output} holds no model {name} of this command, so --overwrite does not remove it. "
            "Choose another folder."
        )


def _write_engine(bundle: Bundle, folder: Path, settings: EngineSettings) -> None:
    version = folder / "1"
    files = [*bundle.files, MANIFEST]
    files += [each for each in (CALIBRATION, COST_TABLE) if (bundle.path / each).is_file()]
    engines = bundle.path / ENGINES
    files += [f.relative_to(bundle.path).as_posix() for f in engines.rglob("*") if f.is_file()]
    for file in files:
        _place(bundle.path / file, version / "bundle" / file)
    (version / "model.py").write_text(_MODEL, encoding="utf-8")
    (folder / "config.pbtxt").write_text(engine_config(folder.name, settings), encoding="utf-8")


def _write_parts(folder: Path, parts: Sequence[Part], settings: EngineSettings) -> None:
    held = folder / "1" / "bundle"
    for part in parts:
        home = folder / PARTS / f"{folder.name}_{part.name}"
        for file, source in part.files.items():
            _place(held / source, home / "1" / file)
        text = part_config(home.name, part, settings)
        (home / "config.pbtxt").write_text(text, encoding="utf-8")


def _place(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)
