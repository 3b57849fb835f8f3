# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt convert`: a drafter in another dialect."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dspark_trt.checkpoint import read_draft, read_target
from dspark_trt.checkpoint.convert import convert_draft
from dspark_trt.cli.output import console, err_console, print_json
from dspark_trt.cli.reading import (
    MaskTokenId,
    Revision,
    SampleFromAnchor,
    Settings,
    TargetLayerIds,
    overrides_from_flags,
    require_target,
)


def command(
    checkpoint: Annotated[
        str, typer.Argument(help="Drafter: a folder or a hub id.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder to make.", show_default=False)
    ],
    to: Annotated[
        str,
        typer.Option(
            help="deepspec, speculators, specforge or model-optimizer.", show_default=False
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="Its target, where one dialect holds embedding and head and the other does not.",
            show_default=False,
        ),
    ] = None,
    sample_from_anchor: SampleFromAnchor = None,
    mask_token_id: MaskTokenId = None,
    target_layer_ids: TargetLayerIds = None,
    settings: Settings = None,
    revision: Revision = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing drafter.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a drafter in another project's layout, bit for bit."""
    overrides = overrides_from_flags(
        sample_from_anchor=sample_from_anchor,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids,
        settings=settings,
        revision=revision,
    )
    require_target(overrides, target)
    draft = read_draft(checkpoint, overrides=overrides)
    served = None if target is None else read_target(target, settings=overrides.target_settings)
    written = convert_draft(
        draft,
        output,
        to=to,
        target=served,
        settings=overrides.settings,
        overwrite=overwrite,
    )
    size = sum(ref.nbytes for ref in written.tensors.values())
    warnings = [*draft.warnings, *written.warnings]
    for warning in warnings:
        err_console.print(
            f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True
        )
    if as_json:
        print_json(
            {
                "checkpoint": str(output),
                "from": draft.format,
                "to": written.format,
                "tensors": len(written.tensors),
                "bytes": size,
                "warnings": warnings,
            }
        )
        return
    console.print(
        f"{output}: {draft.format} → {written.format}, {len(written.tensors)} tensors, {size / 1e6:.1f} MB",
        highlight=False,
    )
