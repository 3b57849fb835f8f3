# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt export`: checkpoints to a bundle."""

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from dspark_trt.cli.extras import require_extra
from dspark_trt.cli.output import console, err_console, print_json

if TYPE_CHECKING:
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
    gamma: Annotated[
        int | None,
        typer.Option(
            help="Draft fewer tokens than the checkpoint's block.", show_default=False
        ),
    ] = None,
    mask_token_id: Annotated[
        int | None,
        typer.Option(help="Mask token, where the checkpoint names none.", show_default=False),
    ] = None,
    sample_from_anchor: Annotated[
        bool | None,
        typer.Option(
            "--sample-from-anchor/--no-sample-from-anchor",
            help="Read slot 0 as a prediction, or as discarded, whatever the files say.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing bundle.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Export a drafter and its target to ONNX graphs in one folder, the bundle."""
    require_extra("export", ("torch", "onnx", "onnx_ir", "onnxscript", "safetensors"))
    # A stopped export cleans up as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    from dspark_trt.checkpoint import DraftOverrides, check_pair, read_draft, read_target
    from dspark_trt.config import SlotSemantics
    from dspark_trt.export.bundle_from_checkpoints import export_bundle

    semantics = {None: None, True: SlotSemantics.ANCHOR_FIRST, False: SlotSemantics.IN_PLACE}
    started = time.perf_counter()
    drafter = read_draft(
        draft,
        overrides=DraftOverrides(
            slot_semantics=semantics[sample_from_anchor],
            mask_token_id=mask_token_id,
            gamma=gamma,
        ),
    )
    host = read_target(target) if target is not None else None
    warnings = list(drafter.warnings)
    if host is not None:
        warnings += [*host.warnings, *check_pair(drafter, host)]
    for warning in warnings:
        err_console.print(
            f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True
        )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=err_console, disable=json, transient=True) as bars:
        task = bars.add_task("reading", total=None)

        def show(progress: "Progress") -> None:
            text = f"{_STAGES[progress.stage]} {progress.detail}"
            bars.update(task, description=text, completed=progress.done, total=progress.total)

        bundle = export_bundle(
            drafter, host, output, dtype=dtype, overwrite=overwrite, on_progress=show
        )
    seconds = time.perf_counter() - started
    size = sum(record.size_bytes for record in bundle.files.values())
    if json:
        print_json(
            {
                "bundle": str(bundle.path),
                "graphs": list(bundle.graph_names),
                "gamma": bundle.draft.gamma,
                "dtype": bundle.dtype,
                "bytes": size,
                "seconds": round(seconds, 3),
                "warnings": warnings,
            }
        )
        return
    console.print(
        f"{bundle.path}: {len(bundle.graph_names)} graphs, {size / 1e6:.1f} MB, γ = {bundle.draft.gamma}, "
        f"{bundle.dtype}, {seconds:.1f} s",
        highlight=False,
    )
