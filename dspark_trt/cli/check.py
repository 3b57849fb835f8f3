# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt check`: is a bundle whole, valid, and equal to the modules it came from?"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from dspark_trt.cli.output import console, print_json

if TYPE_CHECKING:
    from dspark_trt.export.parity import OutputParity


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.", show_default=False)],
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Verify hashes, run the ONNX checker, and compare every graph with its torch module."""
    import onnx

    from dspark_trt.bundle import load_bundle
    from dspark_trt.errors import BundleError
    from dspark_trt.export.parity import check_parity

    loaded = load_bundle(bundle)
    for name in loaded.graph_names:
        try:
            onnx.checker.check_model(str(loaded.graph_path(name)))
        except onnx.checker.ValidationError as error:
            reason = str(error).strip().splitlines()[0]
            raise BundleError(f"{name}.onnx is no valid ONNX model: {reason}") from error
    results = list(check_parity(loaded, seed=seed))
    passed = all(result.passed for result in results)
    if json:
        print_json({"passed": passed, "graphs": [asdict(result) for result in results]})
    else:
        console.print(_table(results))
    if not passed:
        raise typer.Exit(1)


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
