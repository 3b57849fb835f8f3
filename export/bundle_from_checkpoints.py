# SPDX-License-Identifier: Apache-2.0
"""Checkpoints -> bundle: read, check, trace every graph, write each weight once."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir

from dspark_trt import __version__
from dspark_trt.bindings import sampling_inputs
from dspark_trt.bundle import (
    DTYPES,
    FUSED_TARGET,
    GREEDY_DRAFT,
    MANIFEST,
    MOST_TOP_LOGPROBS,
    TOKENIZER,
    WEIGHTS,
    Bundle,
    Source,
    load_bundle,
    record_files,
    write_manifest,
)
from dspark_trt.checkpoint import (
    DraftCheckpoint,
    TargetCheckpoint,
    check_pair,
    source_hash,
)
from dspark_trt.config import WEIGHT_BITS, DraftConfig
from dspark_trt.errors import ExportError
from dspark_trt.export.functions import add_dspark_functions, greedy_draft
from dspark_trt.export.graphs import TORCH_DTYPES, Graph, draft_graphs, target_graph
from dspark_trt.export.onnx_from_module import onnx_from_module
from dspark_trt.export.quantise import quantise_products
from dspark_trt.export.tool_versions import tool_versions
from dspark_trt.export.weights import WeightFile
from dspark_trt.files import new_directory
from dspark_trt.models.loading import (
    ParameterSource,
    draft_skeleton,
    draft_tensors,
    parameter_sources,
    reserve,
    target_skeleton,
)

_TOOLS = ("torch", "onnx", "onnx-ir", "onnxscript", "safetensors", "numpy")


@dataclass(frozen=True, slots=True)
class Progress:
    """One report: `done` of `total` units of `stage` ("trace" in graphs, "write" in bytes, "hash")."""

    stage: str
    detail: str
    done: int
    total: int


def export_bundle(
    draft: DraftCheckpoint,
    target: TargetCheckpoint | None,
    output: Path,
    *,
    dtype: str = "float32",
    weights: str | None = None,
    draft_weights: str | None = None,
    fused_verify: bool = False,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Bundle:
    """Export all graphs of a drafter, and of its target unless the host owns it.

    `weights` "int8" or "int4" stores the matrices in so many bits (`block_weights`), for onnxruntime;
    `draft_weights`, or `dtype`, says it of the drafter alone: the target's answers stay what they are.
    `fused_verify` adds `target_verify.onnx`: the target's step with verification behind its logits, for
    engines that return tokens and counts instead of `[R, V]` logits.

    Raises:
        CheckpointError: drafter and target do not belong together, or a tensor cannot be read.
        ExportError: unknown dtype, the output exists, the disk is full, or a graph cannot be traced.
    """
    if dtype not in DTYPES:
        raise ExportError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    target_weights = _fewer_bits("--weights", weights, dtype)
    draft_weights = _fewer_bits("--draft-weights", draft_weights or weights, dtype)
    _check_output(output, overwrite)
    if target is not None:
        check_pair(draft, target)
        if draft.config.num_target_layers == 0:  # some formats do not record it
            layers = target.config.decoder.num_layers
            draft = replace(draft, config=replace(draft.config, num_target_layers=layers))
    parts = _parts(draft, target, dtype, target_weights, draft_weights)
    _check_disk(output, _stored_bytes(parts))
    try:
        with new_directory(output, replace=overwrite) as folder:
            _write_graphs(parts, draft.config, folder, on_progress)
            _write_verifiers(draft, folder)
            if target is not None and fused_verify:
                _write_fused_target(draft.config.gamma, folder)
            _copy_tokenizer(target, folder)
            on_progress(Progress("hash", "sha256", 0, 1))
            write_manifest(
                _describe(draft, target, dtype, target_weights, draft_weights, folder)
            )
    except OSError as error:
        raise ExportError(f"cannot write {output}: {error.strerror or error}") from error
    return load_bundle(output)  # read once more, so that the next load need not


class _Part(NamedTuple):
    """A graph to write."""

    graph: Graph
    sources: dict[str, ParameterSource]  # by the module's parameter names
    bits: int | None  # of its matrices, where they have fewer


def _parts(
    draft: DraftCheckpoint,
    target: TargetCheckpoint | None,
    dtype: str,
    weights: str | None,
    draft_weights: str | None,
) -> list[_Part]:
    torch_dtype = TORCH_DTYPES[dtype]
    drafter = draft_skeleton(draft.config)
    sources = parameter_sources(drafter, draft_tensors(draft, target), torch_dtype)
    reserve(drafter, sources)
    bits = WEIGHT_BITS.get(draft_weights or "")
    parts = [_Part(graph, sources, bits) for graph in draft_graphs(drafter, dtype)]
    if target is not None:
        module = target_skeleton(target.config, draft.config.target_layer_ids)
        sources = parameter_sources(module, target.tensors, torch_dtype)
        reserve(module, sources)
        graph = target_graph(module, draft.config, dtype)
        parts.append(_Part(graph, sources, WEIGHT_BITS.get(weights or "")))
    return parts


def _write_graphs(
    parts: list[_Part],
    config: DraftConfig,
    folder: Path,
    on_progress: Callable[[Progress], None],
) -> None:
    traced = []
    for done, (graph, _, bits) in enumerate(parts):
        on_progress(Progress("trace", graph.name, done, len(parts)))
        traced.append(onnx_from_module(graph))
        if bits is not None:
            quantise_products(traced[-1], bits)
    total = _stored_bytes(parts)
    written = 0

    def on_bytes(count: int) -> None:
        nonlocal written
        written += count
        on_progress(Progress("write", WEIGHTS, min(written, total), total))

    with (folder / WEIGHTS).open("wb") as stream:
        weights = WeightFile(stream, WEIGHTS, on_bytes)
        for (graph, sources, bits), model in zip(parts, traced, strict=True):
            weights.attach(model, sources, bits)
            if graph.name == "draft":
                greedy = greedy_draft(model, sampling_inputs(config), GREEDY_DRAFT)
                _save(greedy, folder / f"{GREEDY_DRAFT}.onnx")
            _save(add_dspark_functions(model), folder / f"{graph.name}.onnx")


def _write_verifiers(draft: DraftCheckpoint, folder: Path) -> None:
    """`verify.onnx` (exact rejection sampling), the small graph for batches that are all greedy, and the
    one for penalties, masks and log-probabilities.
    """
    from dspark_trt.plugins.contract import VerifyMode
    from dspark_trt.plugins.verify_model import verify_model

    make = partial(
        verify_model, gamma=draft.config.gamma, vocab_size=draft.config.decoder.vocab_size
    )
    alternatives = min(MOST_TOP_LOGPROBS, draft.config.decoder.vocab_size)
    models = {
        "verify": make(mode=VerifyMode.REJECTION),
        "verify_greedy": make(mode=VerifyMode.GREEDY),
        "verify_processed": make(
            mode=VerifyMode.REJECTION, processors=True, top_logprobs=alternatives
        ),
    }
    for name, model in models.items():
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())


def _write_fused_target(gamma: int, folder: Path) -> None:
    from dspark_trt.plugins.attach import attach_to_file
    from dspark_trt.plugins.contract import VerifyMode

    target, fused = folder / "target.onnx", folder / f"{FUSED_TARGET}.onnx"
    attach_to_file(target, fused, mode=VerifyMode.REJECTION, gamma=gamma, logits="logits")


def _save(model: ir.Model, path: Path) -> None:
    path.write_bytes(ir.to_proto(model).SerializeToString())


def _stored_bytes(parts: list[_Part]) -> int:
    """Of all weights with all their bits, each once."""
    distinct = {source for part in parts for source in part.sources.values()}
    return sum(source.nbytes for source in distinct)


def _fewer_bits(flag: str, weights: str | None, dtype: str) -> str | None:
    if weights in (None, dtype):
        return None
    if weights not in WEIGHT_BITS:
        raise ExportError(
            f"{flag} {weights!r} is not one of {', '.join(WEIGHT_BITS)}, or {dtype} for all bits"
        )
    if dtype != "float32":
        raise ExportError(
            f"{flag} {weights} goes with --dtype float32: the kernels for it are onnxruntime's on a CPU, "
            f"TensorRT has none. Export for a GPU with --dtype {dtype} alone."
        )
    return weights


def _check_output(output: Path, overwrite: bool) -> None:
    if not output.exists():
        return
    if not overwrite:
        raise ExportError(
            f"{output} exists already. Choose another folder, or pass --overwrite."
        )
    if not (output / MANIFEST).is_file():
        raise ExportError(
            f"{output} is no bundle, so --overwrite does not remove it. Choose another folder."
        )


def _check_disk(output: Path, needed: int) -> None:
    parent = next(p for p in (output.absolute(), *output.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ExportError(
            f"{output} needs about {needed / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free on that disk"
        )


def _copy_tokenizer(target: TargetCheckpoint | None, folder: Path) -> None:
    if target is None or not target.tokenizer_files:
        return
    (folder / TOKENIZER).mkdir()
    for file in target.tokenizer_files:
        shutil.copyfile(file, folder / TOKENIZER / file.name)


def _describe(
    draft: DraftCheckpoint,
    target: TargetCheckpoint | None,
    dtype: str,
    weights: str | None,
    draft_weights: str | None,
    folder: Path,
) -> Bundle:
    return Bundle(
        path=folder,
        dtype=dtype,
        weights=weights,
        draft_weights=draft_weights,
        draft=draft.config,
        draft_source=_source(draft, draft.format),
        target=None if target is None else target.config,
        target_source=None if target is None else _source(target, target.config.family.value),
        files=record_files(folder),
        tool_versions={"dspark-trt": __version__, **tool_versions(_TOOLS)},
    )


def _source(checkpoint: DraftCheckpoint | TargetCheckpoint, format_name: str) -> Source:
    digest = source_hash(checkpoint)
    return Source(name=_name(checkpoint.path), format=format_name, sha256=digest)


def _name(folder: Path) -> str:
    """The folder's own name, or the hub id of `models--owner--name/snapshots/<commit>`."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name
