# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt check`: is a bundle whole, valid, and equal to the modules it came from?"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dspark_trt.cli.output import console, print_json


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.", show_default=False)],
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Verify hashes, run the ONNX checker, and compare every graph with its torch module."""
    import onnx
    from rich.table import Table

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
        table = Table("graph", "output", "max error", "tolerance", "")
        for result in results:
            table.add_row(
                result.name,
                result.output,
                "not finite" if result.max_abs_error is None else f"{result.max_abs_error:.2e}",
                f"{result.tolerance:.0e}",
                "[green]ok[/]" if result.passed else "[bold red]FAILED[/]",
            )
        console.print(table)
    if not passed:
        raise typer.Exit(1)
