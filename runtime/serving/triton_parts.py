# SPDX-License-Identifier: Apache-2.0
"""Graphs of a bundle, and TensorRT engines of them, as models of their own for Triton's backends.

A graph whose tensors all begin with the batch, and that has no caches, is batched by the server. The others take a
whole batch in one request: rows of several requests are one dimension, or caches would be copied together.

Graphs with caches can be models of sequences instead: one request of the engine is one sequence, and the server
keeps its caches (Triton's implicit state). Each model keeps its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dspark_trt.bindings import Binding, GraphBindings
from dspark_trt.bundle import ENGINES, WEIGHTS, Bundle
from dspark_trt.engine_manifest import (
    AMPERE_PLUS,
    MANIFEST,
    EngineSet,
    check_engine,
    read_engine_manifest,
)
from dspark_trt.errors import RequestError
from dspark_trt.runtime.serving.triton_tensors import ModelState, ModelTensor

_DTYPES = {
    "float32": "TYPE_FP32",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "int64": "TYPE_INT64",
    "int32": "TYPE_INT32",
    "bool": "TYPE_BOOL",
}
_GRAPH = "model.onnx"
_ANY_GPU = "model.plan"  # what the server opens where no file is named for a GPU


class Platform(StrEnum):
    """Triton's names; the backends are `onnxruntime` and `tensorrt`."""

    ONNX = "onnxruntime_onnx"
    PLAN = "tensorrt_plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One model. `max_batch` 0: a request's tensors are a whole batch."""

    name: str  # behind the engine's
    platform: Platform
    files: Mapping[str, str]  # name in the version's folder -> file of the bundle
    inputs: tuple[ModelTensor, ...]
    outputs: tuple[ModelTensor, ...]
    max_batch: int
    profiles: int = 0
    plans: Mapping[str, str] = field(default_factory=dict)  # compute capability -> file
    states: tuple[ModelState, ...] = ()


def onnx_parts(
    bundle: Bundle,
    graphs: Mapping[str, GraphBindings],
    *,
    max_batch: int,
    cache_rows: int | None = None,
) -> tuple[tuple[Part, ...], dict[str, str]]:
    """Graphs as models: files, or folders with weights, as the server has models of several files.

    Args:
        bundle: that has them.
        graphs: with their contracts.
        max_batch: what the server may join.
        cache_rows: of each cache that the server keeps for a sequence; None: caches are inputs and outputs.

    Returns:
        The models, and by name what is left out and why.

    Raises:
        BundleError: the bundle has no such graph.
    """
    parts, left_out = [], {}
    for graph, contract in graphs.items():
        if cache_rows is not None and all(_is_cache(b) for b in contract.outputs):
            left_out[graph] = (
                "it fills caches for other graphs, and the server keeps the caches of each model apart. "
                "Prompts go through the draft graphs, as new_taps"
            )
        else:
            parts.append(_onnx_part(bundle, graph, contract, max_batch, cache_rows))
    return tuple(parts), left_out


def _onnx_part(
    bundle: Bundle, graph: str, contract: GraphBindings, max_batch: int, cache_rows: int | None
) -> Part:
    path = bundle.graph_path(graph)
    files = {_GRAPH: path.name}
    if WEIGHTS.encode() in path.read_bytes():
        files = {f"{_GRAPH}/{_GRAPH}": path.name, f"{_GRAPH}/{WEIGHTS}": WEIGHTS}
    sent, states = contract, tuple[ModelState, ...]()
    if cache_rows is not None:
        sent = GraphBindings(
            tuple(b for b in contract.inputs if not _is_cache(b)),
            tuple(b for b in contract.outputs if not _is_cache(b)),
        )
        states = _states(contract, cache_rows, _is_batched(sent))
    is_batched = _is_batched(sent)
    return Part(
        name=graph,
        platform=Platform.ONNX,
        files=files,
        inputs=_tensors(sent.inputs, is_batched),
        outputs=_tensors(sent.outputs, is_batched),
        max_batch=max_batch if is_batched else 0,
        states=states,
    )


def _states(contract: GraphBindings, rows: int, is_batched: bool) -> tuple[ModelState, ...]:
    """Of one request: the server joins those of several where it batches."""
    sizes: dict[int | str, int | str] = {"batch": 1, "capacity": rows}
    return tuple(
        ModelState(
            past.name,
            present.name,
            _DTYPES[past.dtype],
            tuple(int(sizes.get(size, size)) for size in past.shape)[is_batched:],
        )
        for past, present in zip(
            filter(_is_cache, contract.inputs), filter(_is_cache, contract.outputs), strict=True
        )
    )


def plan_parts(
    bundle: Bundle, graphs: Mapping[str, GraphBindings], *, version: str | None = None
) -> tuple[tuple[Part, ...], dict[str, str]]:
    """Engines of `graphs` as models: those that TensorRT built, one file for each architecture.

    Args:
        bundle: whose `engines/` to take.
        graphs: with their contracts.
        version: of TensorRT, where the bundle has engines of several.

    Returns:
        The models, and by name what is left out and why.

    Raises:
        BundleError: an engine that was changed, or built from another bundle.
        RequestError: engines of several versions and none chosen, or of other versions than that.
    """
    manifests = sorted((bundle.path / ENGINES).glob(f"*/{MANIFEST}"))
    found = [read_engine_manifest(manifest.parent) for manifest in manifests]
    left_out = {each.path.name: reason for each in found if (reason := _refusal(each))}
    sets = _of_one_version([each for each in found if each.path.name not in left_out], version)
    parts = []
    for graph, contract in graphs.items():
        built = [each for each in sets if graph in each.engines]
        if any(each.engines[graph].aliases for each in built):
            left_out[f"{graph}.engine"] = (
                "its caches must be one memory as input and output, and Triton's TensorRT backend gives "
                "each tensor a memory of its own, states of sequences too. "
                "The engine's model runs it: --backend tensorrt"
            )
        elif built:
            parts.append(_plan_part(bundle, graph, contract, built))
    return tuple(parts), left_out


def fused_target_bindings(target: GraphBindings, verify: GraphBindings) -> GraphBindings:
    """The contract of a target with verification behind its logits: neither takes them, nor gives them."""
    return GraphBindings(
        (*target.inputs, *(b for b in verify.inputs if b.name != "target_logits")),
        (*(b for b in target.outputs if b.name != "logits"), *verify.outputs),
    )


def _plan_part(
    bundle: Bundle, graph: str, contract: GraphBindings, built: Sequence[EngineSet]
) -> Part:
    plans: dict[str, str] = {}
    files = {}
    for engines in built:
        source = check_engine(engines, graph, bundle).relative_to(bundle.path).as_posix()
        for arch in engines.archs:
            if arch == AMPERE_PLUS:
                files[_ANY_GPU] = source
            else:
                files[f"{arch}.plan"] = source
                plans[_capability(arch)] = f"{arch}.plan"
    records = [engines.engines[graph] for engines in built]
    is_batched = _is_batched(contract)
    return Part(
        name=f"{graph}_plan",
        platform=Platform.PLAN,
        files=files,
        inputs=_tensors(records[0].inputs, is_batched),
        outputs=_tensors(records[0].outputs, is_batched),
        max_batch=min(engines.limits.batch for engines in built) if is_batched else 0,
        profiles=min(len(record.profiles) for record in records),
        plans=plans,
    )


def _refusal(engines: EngineSet) -> str | None:
    if engines.backend != "tensorrt":
        return f"Triton has a backend for TensorRT, none for {engines.backend}"
    return "its engines hold no weights" if engines.stripped else None


def _of_one_version(found: Sequence[EngineSet], version: str | None) -> list[EngineSet]:
    versions = sorted({each.version for each in found})
    if version is None and len(versions) > 1:
        raise RequestError(
            f"the bundle's engines were built by TensorRT {', '.join(versions)}. A server has one: "
            "say which with --tensorrt-version"
        )
    if version is not None and version not in versions:
        raise RequestError(
            f"the bundle has no engines of TensorRT {version}, only of: {', '.join(versions) or 'none'}. "
            "Build them with: dspark-trt build BUNDLE --backend tensorrt"
        )
    return [each for each in found if version in (None, each.version)]


def _is_batched(contract: GraphBindings) -> bool:
    tensors = (*contract.inputs, *contract.outputs)
    return all(b.shape[0] == "batch" and not _is_cache(b) for b in tensors)


def _is_cache(binding: Binding) -> bool:
    return "capacity" in binding.shape


def _tensors(tensors: Iterable[Binding], is_batched: bool) -> tuple[ModelTensor, ...]:
    return tuple(_tensor(binding, is_batched) for binding in tensors)


def _tensor(binding: Binding, is_batched: bool) -> ModelTensor:
    """Of a batched model the server counts the batch apart, and `dims` are never empty."""
    kind = _DTYPES[binding.dtype]
    dims = tuple(size if isinstance(size, int) else -1 for size in binding.shape)
    if is_batched:
        dims = dims[1:]
    if not dims:
        return ModelTensor(binding.name, kind, (1,), reshape=())
    return ModelTensor(binding.name, kind, dims)


def _capability(arch: str) -> str:
    """'sm90' -> '9.0'."""
    number = arch.removeprefix("sm")
    return f"{number[:-1]}.{number[-1]}"
