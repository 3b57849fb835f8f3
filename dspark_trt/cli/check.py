# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt check`: is a bundle whole, valid, and equal to the modules it came from?"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from dspark_trt.cli.extras import require_extra
from dspark_trt.cli.output import console, print_json

if TYPE_CHECKING:
    from dspark_trt.bundle import Bundle
    from dspark_trt.checkpoint import DraftCheckpoint
    from dspark_trt.export.parity import OutputParity


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.", show_default=False)],
    draft: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint of the drafter: compare with its weights, not the bundle's.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Checkpoint of the target, likewise.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare every graph of a bundle with its torch module.

    Hashes are verified and the ONNX checker is run as well.
    """
    require_extra("export", ("torch", "onnx", "onnx_ir", "polygraphy"))
    require_extra("cpu", ("onnxruntime",))
    from dspark_trt.bundle import load_bundle
    from dspark_trt.checkpoint import read_target

    loaded = load_bundle(bundle, trust_earlier=False)
    drafter = None if draft is None else _read_draft(draft, loaded)
    served = None if target is None else read_target(target)
    _check_models(loaded)
    from dspark_trt.export.parity import check_parity  # torch: after bad input
    from dspark_trt.export.stored_weights import changed_weights

    changed = changed_weights(loaded)
    results = list(check_parity(loaded, draft=drafter, target=served, seed=seed))
    passed = not changed and all(result.passed for result in results)
    if json:
        graphs = [asdict(result) for result in results]
        print_json({"passed": passed, "graphs": graphs, "changed_weights": changed})
    else:
        console.print(_table(results))
        for name in changed:
            console.print(f"[bold red]changed since the export:[/] {escape(name)}")
    if not passed:
        raise typer.Exit(1)


def _check_models(bundle: "Bundle") -> None:
    import onnx

    from dspark_trt.errors import BundleError, first_line

    for name in bundle.graph_names:
        try:
            onnx.checker.check_model(str(bundle.graph_path(name)))
        except onnx.checker.ValidationError as error:
            raise BundleError(
                f"{name}.onnx is no valid ONNX model: {first_line(error)}"
            ) from error


def _read_draft(source: str, bundle: "Bundle") -> "DraftCheckpoint":
    """The drafter as the bundle was told to read it."""
    from dspark_trt.checkpoint import DraftOverrides, read_draft

    config = bundle.draft
    overrides = DraftOverrides(
        slot_semantics=config.slot_semantics,
        mask_token_id=config.mask_token_id,
        gamma=config.gamma,
    )
    return read_draft(source, overrides=overrides)


def _table(results: "list[OutputParity]") -> Table:
    """A row an output; the caches of a graph, dozens for a real model, share the row of the worst."""
    rows: dict[tuple[str, str], OutputParity] = {}
    for result in results:
        key = (result.name, "caches" if result.output.startswith("present_") else result.output)
        if key not in rows or _badness(result) > _badness(rows[key]):
            rows[key] = result
    table = Table("graph", "output", "max error", "tolerance", "")
    for (graph, output), result in rows.items():
        error = result.max_abs_error
        table.add_row(
            graph,
            output,
            "not finite" if error is None else f"{error:.1e}",
            f"{result.tolerance:.1e}",
            "[green]ok[/]" if result.passed else "[bold red]FAILED[/]",
        )
    return table


def _badness(result: "OutputParity") -> float:
    error = float("inf") if result.max_abs_error is None else result.max_abs_error
    return error / (result.tolerance or 1.0)
