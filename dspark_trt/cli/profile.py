# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt profile`: what a round costs on this machine, and what drafting has to return here."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dspark_trt.cli.output import console, err_console, print_json
from dspark_trt.cli.running import BackendName, DeviceName, require_bundled_target
from dspark_trt.errors import RequestError

if TYPE_CHECKING:
    from dspark_trt.runtime.cost_model import CostModel
    from dspark_trt.runtime.cost_table import CostTable

_EXPORTS = ("sglang-flat", "sglang-additive", "tensorrt-llm")


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.", show_default=False)],
    max_requests: Annotated[
        int, typer.Option(help="Most requests at a time to measure: max_batch of your engines.")
    ] = 8,
    seconds: Annotated[
        float, typer.Option(help="For each number of requests at each context.")
    ] = 1.5,
    temperature: Annotated[float, typer.Option(help="Of the measured requests.")] = 0.0,
    threads: Annotated[
        int | None, typer.Option(help="As of other commands; engines must use as many.")
    ] = None,
    backend: BackendName = "onnxruntime",
    device: DeviceName = None,
    plot: Annotated[
        Path | None, typer.Option(help="PNG of the curve.", show_default=False)
    ] = None,
    import_file: Annotated[
        Path | None,
        typer.Option(
            "--import",
            help="Take SGLang's or TensorRT-LLM's table instead of measuring.",
            show_default=False,
        ),
    ] = None,
    export_format: Annotated[
        str | None,
        typer.Option(
            help=f"Also print the table as {', '.join(_EXPORTS)}.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure what rounds cost here and write sps.json.

    Whole rounds through the engine: what schedulers and the bypass weigh.
    """
    from dataclasses import replace

    from dspark_trt.bundle import COST_TABLE, load_bundle
    from dspark_trt.files import require_place, write_json
    from dspark_trt.runtime.backends import open_backend
    from dspark_trt.runtime.backends.interface import BackendOptions
    from dspark_trt.runtime.cost_table_formats import load_cost_table
    from dspark_trt.runtime.profiling import default_plan, profile

    if export_format is not None and export_format not in _EXPORTS:
        raise RequestError(
            f"--export-format {export_format!r} is unknown; expected one of {', '.join(_EXPORTS)}"
        )
    if max_requests < 1 or not 0 < seconds < math.inf:
        raise RequestError(
            f"--max-requests and --seconds must be positive and finite, got {max_requests}, {seconds}"
        )
    loaded = load_bundle(bundle, verify_hashes=False)
    written = bundle / COST_TABLE
    for file in (written, plot):
        if file is not None:
            require_place(file)
    if import_file is not None:
        costs: CostModel = load_cost_table(import_file).require_informative()
        report: dict[str, Any] = {"imported": str(import_file)}
    else:
        require_bundled_target(loaded)
        opened = open_backend(backend, loaded, BackendOptions(threads=threads, device=device))
        plan = replace(
            default_plan(opened, max_requests=max_requests),
            seconds=seconds,
            temperature=temperature,
        )
        with err_console.status("profiling") as status:
            measured = profile(
                opened,
                plan,
                progress=lambda done, of: status.update(f"profiling: {done} of {of} loads"),
            )
        costs = measured.costs
        report = {"prediction_errors": [round(float(e), 4) for e in measured.errors]}
    write_json(written, costs.to_json())
    report |= {"written": str(written), "origin": dict(costs.origin)}
    report["break_even"] = _break_even(costs, loaded.draft.gamma, max_requests)
    if plot is not None:
        from dspark_trt.runtime.plots import plot_cost_table

        report["plot"] = str(plot_cost_table(_flat(costs), plot))
    if export_format is not None:
        report["exported"] = _exported(costs, export_format)
    if as_json:
        print_json(report)
    else:
        _print(report)


def _break_even(costs: "CostModel", gamma: int, most: int) -> list[dict[str, Any]]:
    """For each number of requests: what drafts must reach, and γ for drafters of several qualities."""
    import numpy as np

    from dspark_trt.runtime.break_even import break_even_acceptance, recommended_length

    rows = []
    for requests in [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n <= most]:
        lengths = {
            f"{acceptance:.1f}": recommended_length(
                costs, np.full(gamma, acceptance), requests=requests
            )
            for acceptance in (0.3, 0.5, 0.7, 0.9)
        }
        least = break_even_acceptance(costs, gamma, requests=requests)
        rows.append(
            {"requests": requests, "break_even_acceptance": least, "recommended_gamma": lengths}
        )
    return rows


def _flat(costs: "CostModel") -> "CostTable":
    """The curve of one request, where costs are a grid of requests and lengths."""
    from dspark_trt.runtime.cost_table import CostTable
    from dspark_trt.runtime.round_costs import RoundCosts

    if isinstance(costs, RoundCosts):
        return costs.cost_table(1)
    assert isinstance(costs, CostTable)
    return costs


def _exported(costs: "CostModel", name: str) -> dict[str, Any]:
    from dspark_trt.runtime.cost_table_formats import sglang_additive, sglang_flat, trtllm_curve
    from dspark_trt.runtime.scheduler import MIN_GAIN

    table = _flat(costs)
    if name == "sglang-flat":
        return sglang_flat(table)
    if name == "sglang-additive":
        return sglang_additive(table)
    return trtllm_curve(table, min_gain=MIN_GAIN)


def _print(report: dict[str, Any]) -> None:
    table = Table("requests", "drafting pays above", "γ at 0.3", "0.5", "0.7", "0.9")
    for row in report["break_even"]:
        least = row["break_even_acceptance"]
        table.add_row(
            str(row["requests"]),
            "never" if least >= 1 else f"{least:.2f}",
            *(str(length) for length in row["recommended_gamma"].values()),
        )
    console.print(table)
    console.print(
        "γ: recommended verification length for that conditional acceptance; 0: do not draft"
    )
    errors = sorted(abs(error) for error in report.get("prediction_errors", []))
    if errors:
        middle = errors[len(errors) // 2]
        console.print(
            f"predicted against measured uneven rounds: median error {100 * middle:.0f} %"
        )
    if "exported" in report:
        print_json(report["exported"])
    console.print(f"written: {report['written']}", highlight=False, soft_wrap=True)
