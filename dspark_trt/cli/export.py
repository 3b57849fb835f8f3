# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt export`: checkpoints to a bundle."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from dspark_trt.cli.extras import require_extra
from dspark_trt.cli.output import console, err_console, print_json
from dspark_trt.cli.reading import (
    Gamma,
    MaskTokenId,
    SampleFromAnchor,
    Settings,
    TargetLayerIds,
    overrides_from_flags,
    require_target,
)

if TYPE_CHECKING:
    from dspark_trt.bundle import Bundle
    from dspark_trt.checkpoint import DraftCheckpoint, TargetCheckpoint
    from dspark_trt.export.bundle_from_checkpoints import Progress

_STAGES = {"trace": "tracing", "write": "writing", "hash": "hashing"}


def command(
    draft: Annotated[
        str, typer.Option("--draft", help="Drafter: a folder or a hub id.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Bundle folder to make.", show_default=False)
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="Target model: a folder or a hub id. Without it the host owns the target.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32 (CPU), float16 or bfloat16 (GPU).")
    ] = "float32",
    weights: Annotated[
        str | None,
        typer.Option(
            help="int8 or int4: matrices of fewer bits, for float32 on a CPU.",
            show_default=False,
        ),
    ] = None,
    draft_weights: Annotated[
        str | None,
        typer.Option(
            help="The same for the drafter alone: faster drafts, and answers stay those of the target. "
            "Without it as --weights says.",
            show_default=False,
        ),
    ] = None,
    gamma: Gamma = None,
    mask_token_id: MaskTokenId = None,
    target_layer_ids: TargetLayerIds = None,
    settings: Settings = None,
    sample_from_anchor: SampleFromAnchor = None,
    fused_verify: Annotated[
        bool,
        typer.Option(
            "--fused-verify", help="Also write a target graph that returns verified tokens."
        ),
    ] = False,
    draft_revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a hub drafter.", show_default=False),
    ] = None,
    target_revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a hub target.", show_default=False),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing bundle.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Export a drafter and its target as ONNX graphs: a bundle."""
    require_extra("export", ("torch", "onnx", "onnx_ir", "onnxscript", "safetensors"))
    # A stopped export cleans up as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from dspark_trt.checkpoint import read_draft, read_target

    started = time.perf_counter()
    overrides = overrides_from_flags(
        sample_from_anchor=sample_from_anchor,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids,
        settings=settings,
        gamma=gamma,
        revision=draft_revision,
    )
    require_target(overrides, target)
    drafter = read_draft(draft, overrides=overrides)
    if target is not None:
        from dspark_trt.export.graph_as_target import refuse_graph_as_target

        refuse_graph_as_target(target, drafter)
    host = (
        None
        if target is None
        else read_target(target, revision=target_revision, settings=overrides.target_settings)
    )
    warnings = _show_warnings(drafter, host)
    from dspark_trt.export.bundle_from_checkpoints import (
        export_bundle,  # torch: after bad input
    )

    with _progress_bar(hidden=json) as show:
        bundle = export_bundle(
            drafter,
            host,
            output,
            dtype=dtype,
            weights=weights,
            draft_weights=draft_weights,
            fused_verify=fused_verify,
            overwrite=overwrite,
            on_progress=show,
        )
    seconds = time.perf_counter() - started
    size = sum(record.size_bytes for record in bundle.files.values())
    if json:
        print_json(
            {
                "bundle": str(bundle.path),
                "graphs": list(bundle.graph_names),
                "gamma": bundle.draft.gamma,
                **bundle.precision,
                "bytes": size,
                "seconds": round(seconds, 3),
                "warnings": warnings,
            }
        )
        return
    console.print(
        f"{bundle.path}: {len(bundle.graph_names)} graphs, {size / 1e6:.1f} MB, γ = {bundle.draft.gamma}, "
        f"{_precision(bundle)}, {seconds:.1f} s",
        highlight=False,
    )


def _precision(bundle: "Bundle") -> str:
    target = f"{bundle.dtype}{f' with {bundle.weights} weights' if bundle.weights else ''}"
    if bundle.draft_weights == bundle.weights:
        return target
    return f"{target}, the drafter with {bundle.precision['draft_weights']} weights"


def _show_warnings(draft: "DraftCheckpoint", target: "TargetCheckpoint | None") -> list[str]:
    from dspark_trt.checkpoint import check_pair

    warnings = list(draft.warnings)
    if target is not None:
        warnings += [*target.warnings, *check_pair(draft, target)]
    for warning in warnings:
        err_console.print(
            f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True
        )
    return warnings


@contextlib.contextmanager
def _progress_bar(*, hidden: bool) -> "Iterator[Callable[[Progress], None]]":
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=err_console, disable=hidden, transient=True) as bars:
        task = bars.add_task("reading", total=None)

        def show(progress: "Progress") -> None:
            text = f"{_STAGES[progress.stage]} {progress.detail}"
            bars.update(task, description=text, completed=progress.done, total=progress.total)

        yield show
