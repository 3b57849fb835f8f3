# SPDX-License-Identifier: Apache-2.0
"""Writes a model repository for Triton Inference Server: the engine as one model, graphs as others."""

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dspark_trt.bindings import Binding, GraphBindings
from dspark_trt.bundle import CALIBRATION, COST_TABLE, ENGINES, MANIFEST, WEIGHTS, Bundle
from dspark_trt.errors import BundleError, RequestError
from dspark_trt.files import new_directory
from dspark_trt.runtime.serving.triton_tensors import INPUTS, OUTPUTS, ModelTensor

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_DTYPES = {
    "float32": "TYPE_FP32",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "int64": "TYPE_INT64",
    "int32": "TYPE_INT32",
    "bool": "TYPE_BOOL",
}
_MODEL = """\
# SPDX-License-Identifier: Apache-2.0
from dspark_trt.runtime.serving.triton_backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Of the engine's model; the repository's `config.pbtxt` holds them as parameters."""

    max_batch: int = 8
    prefix_cache_mib: int = 256
    threads: int | None = None  # None: all usable
    scheduler: str = "auto"
    backend: str = "onnxruntime"
    on_gpu: bool = False


def write_repository(
    bundle: Bundle,
    output: Path,
    *,
    name: str | None = None,
    settings: EngineSettings | None = None,
    graphs: Mapping[str, GraphBindings] | None = None,
    overwrite: bool = False,
) -> tuple[str, ...]:
    """Write a repository; returns the names of its models.

    Files are linked where the disk allows and copied where not: a repository beside its bundle takes no
    room, and both stay whole when one is deleted.

    Args:
        bundle: with a target.
        output: folder to make.
        name: of the engine's model; default: the bundle's folder. Graphs are `<name>_<graph>`.
        settings: of the engine.
        graphs: graphs to serve by themselves, with their contracts.
        overwrite: replace a repository that this function wrote.

    Raises:
        BundleError: the bundle has no target, or lacks a graph.
        RequestError: a name that Triton refuses, or an output that exists.
    """
    name = name or bundle.path.resolve().name
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{name!r} is no model name: letters, digits, '.', '_' and '-' only. Give one with --name"
        )
    if bundle.target is None:
        raise BundleError(f"{bundle.path} has no target. Export it again with --target")
    _check_output(output, name, overwrite)
    with new_directory(output, replace=overwrite) as folder:
        _write_engine(bundle, folder / name, settings or EngineSettings())
        models = [name]
        for graph, contract in (graphs or {}).items():
            models.append(f"{name}_{graph}")
            _write_graph(bundle, graph, contract, folder / models[-1])
    return tuple(models)


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
    (folder / "config.pbtxt").write_text(
        _engine_config(folder.name, settings), encoding="utf-8"
    )


def _write_graph(bundle: Bundle, graph: str, contract: GraphBindings, folder: Path) -> None:
    """A graph finds its weights beside it."""
    _place(bundle.graph_path(graph), folder / "1" / "model.onnx")
    _place(bundle.path / WEIGHTS, folder / "1" / WEIGHTS)
    text = "".join(
        [
            f'name: "{folder.name}"\nbackend: "onnxruntime"\nmax_batch_size: 0\n',
            _tensors("input", map(_of_binding, contract.inputs)),
            _tensors("output", map(_of_binding, contract.outputs)),
        ]
    )
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")


def _place(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)


# config.pbtxt ------------------------------------------------------------------------------------


def _engine_config(name: str, settings: EngineSettings) -> str:
    parameters = {
        "max_batch": settings.max_batch,
        "prefix_cache_mib": settings.prefix_cache_mib,
        "scheduler": settings.scheduler,
        "backend": settings.backend,
        "threads": "" if settings.threads is None else settings.threads,
    }
    kind = "KIND_GPU" if settings.on_gpu else "KIND_CPU"
    return "".join(
        [
            f'name: "{name}"\nbackend: "python"\n',
            "max_batch_size: 0  # the engine batches\n",
            "model_transaction_policy { decoupled: true }\n",
            f"instance_group [ {{ count: 1 kind: {kind} }} ]\n",
            *(
                f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
                for key, value in parameters.items()
            ),
            _tensors("input", INPUTS),
            _tensors("output", OUTPUTS),
        ]
    )


def _tensors(field: str, tensors: Iterable[ModelTensor]) -> str:
    return "".join(
        f'{field} {{ name: "{t.name}" data_type: {t.data_type} '
        f"dims: [ {', '.join(map(str, t.dims))} ]{' optional: true' if t.is_optional else ''} }}\n"
        for t in tensors
    )


def _of_binding(binding: Binding) -> ModelTensor:
    dims = tuple(size if isinstance(size, int) else -1 for size in binding.shape)
    return ModelTensor(binding.name, _DTYPES[binding.dtype], dims)
