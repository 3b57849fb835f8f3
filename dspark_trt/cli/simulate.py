# SPDX-License-Identifier: Apache-2.0
"""``dspark-trt simulate``: what verification policies would do to a serving engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dspark_trt.cli.output import console, err_console, print_json
from dspark_trt.errors import RequestError

if TYPE_CHECKING:
    from dspark_trt.runtime.cost_model import CostModel
    from dspark_trt.runtime.simulation import Load
    from dspark_trt.runtime.workload import Workload


def command(
    traces: Annotated[
        Path | None, typer.Option(help="Recorded rounds (.npz) to replay.", show_default=False)
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="calibration.json for the traces' logits.", show_default=False),
    ] = None,
    acceptance: Annotated[
        str,
        typer.Option(
            help="Without traces: conditional acceptance by position, domains apart by '/'."
        ),
    ] = ".90,.88,.87,.86,.86,.85,.85/.86,.84,.83,.82,.81,.81,.80/.76,.74,.72,.71,.70,.70,.69",
    table: Annotated[
        Path | None,
        typer.Option(
            help="Measured cost table (sps.json or a foreign one).", show_default=False
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            help="Without a table: roofline of this GPU; also h200, a100-80gb, b200, l40s."
        ),
    ] = "h100-sxm",
    model: Annotated[
        str,
        typer.Option(help="Without a table: target model; also qwen3-4b, qwen3-14b."),
    ] = "qwen3-8b",
    concurrency: Annotated[
        str, typer.Option(help="Running requests of each closed loop, comma-separated.")
    ] = "1,4,16,64,128,256,512",
    arrivals: Annotated[
        str | None,
        typer.Option(
            help="Poisson arrivals a second, comma-separated, instead of closed loops; the largest "
            "concurrency is then the number of slots.",
            show_default=False,
        ),
    ] = None,
    output_tokens: Annotated[float, typer.Option(help="Mean output length.")] = 256.0,
    prompt_tokens: Annotated[float, typer.Option(help="Mean prompt length.")] = 512.0,
    policies: Annotated[
        str | None,
        typer.Option(
            help="Some of the engine's schedulers fixed:K (0: never draft), threshold:C, algorithm1, async, "
            "and of mtp-1 and oracle; by default all, and every K.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Request rounds of each simulation.")] = 50_000,
    max_tokens_per_step: Annotated[
        int | None, typer.Option(help="Cap on the tokens of a step.", show_default=False)
    ] = None,
    sla: Annotated[
        float | None,
        typer.Option(
            help="Plan capacity: tokens a second that every user must get.", show_default=False
        ),
    ] = None,
    load_requests: Annotated[
        int | None,
        typer.Option(
            help="With --sla: concurrent requests to serve in all.", show_default=False
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of lengths, arrivals and outcomes.")
    ] = 0,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for PNG figures.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare verification policies without a GPU.

    Rounds are recorded or synthetic; costs are a cost table or a roofline.
    """
    from dspark_trt.files import make_folder
    from dspark_trt.runtime.capacity import plan_capacity
    from dspark_trt.runtime.simulation import compare, policies_named, standard_policies

    _refuse_unused(traces, calibration, sla, load_requests, arrivals, plots)
    if plots is not None:
        make_folder(plots)
    workload = _workload(traces, calibration, acceptance, seed)
    costs = _cost_table(table, gpu, model)
    gamma, most = workload.gamma, max_tokens_per_step
    if policies is None:
        chosen = standard_policies(costs, gamma, max_tokens_per_step=most)
    else:
        names = [name.strip() for name in policies.split(",")]
        chosen = policies_named(names, costs, gamma, max_tokens_per_step=most)
    report: dict[str, Any] = {
        "cost_table": {"origin": dict(costs.origin), "fingerprint": costs.fingerprint},
        "domains": list(workload.domain_names),
    }
    if sla is not None:
        with err_console.status("simulating: a minute or so"):
            capacities = plan_capacity(
                workload,
                costs,
                chosen,
                sla=sla,
                load_requests=load_requests,
                output_tokens=output_tokens,
                prompt_tokens=prompt_tokens,
                rounds=rounds,
                seed=seed,
            )
        report["sla_tokens_per_second"] = sla
        report["capacity"] = {name: value.to_json() for name, value in capacities.items()}
    else:
        loads = _loads(concurrency, arrivals, output_tokens, prompt_tokens)
        with err_console.status("simulating"):
            outcomes = compare(workload, costs, chosen, loads, rounds=rounds, seed=seed)
        report["outcomes"] = {
            name: {label: outcome.to_json() for label, outcome in by_load.items()}
            for name, by_load in outcomes.items()
        }
        if plots is not None:
            from dspark_trt.runtime.plots import plot_simulation

            report["plots"] = [str(path) for path in plot_simulation(outcomes, plots)]
    if as_json:
        print_json(report)
    else:
        _print(report)


def _refuse_unused(
    traces: Path | None,
    calibration: Path | None,
    sla: float | None,
    load_requests: int | None,
    arrivals: str | None,
    plots: Path | None,
) -> None:
    """What would change nothing."""
    if calibration is not None and traces is None:
        raise RequestError("--calibration is of recorded rounds: give them with --traces")
    if load_requests is not None and sla is None:
        raise RequestError("--load-requests needs the speed every user must get: give --sla")
    if sla is not None and (arrivals is not None or plots is not None):
        raise RequestError(
            "--sla plans for closed loops and draws nothing: leave --arrivals and --plots out"
        )


def _workload(
    traces: Path | None, calibration: Path | None, acceptance: str, seed: int
) -> "Workload":
    from dspark_trt.runtime.calibration import Calibration
    from dspark_trt.runtime.traces import load_traces
    from dspark_trt.runtime.workload import Workload

    if traces is not None:
        rounds = load_traces(traces)
        fitted = None
        if calibration is not None:
            fitted = Calibration.load(calibration).require_gamma(rounds.gamma)
        return Workload.from_traces(rounds, fitted)
    rows = [_numbers(row, "--acceptance") for row in acceptance.split("/")]
    if len({len(row) for row in rows}) != 1:
        raise RequestError(f"--acceptance domains must have one length, got {acceptance!r}")
    names = tuple(f"domain {index}" for index in range(len(rows)))
    return Workload.synthetic(rows, domain_names=names, seed=seed)


def _cost_table(table: Path | None, gpu: str, model: str) -> "CostModel":
    from dspark_trt.runtime.cost_table_formats import load_cost_table
    from dspark_trt.runtime.roofline import named_table

    if table is not None:
        return load_cost_table(table).require_informative()
    return named_table(gpu, model)


def _loads(
    concurrency: str, arrivals: str | None, output_tokens: float, prompt_tokens: float
) -> "dict[str, Load]":
    from dspark_trt.runtime.simulation import Load

    wanted = _numbers(concurrency, "--concurrency")
    if not all(value.is_integer() for value in wanted):
        raise RequestError(f"--concurrency must be whole numbers, got {concurrency!r}")
    sizes = [int(value) for value in wanted]
    if arrivals is None:
        return {
            str(slots): Load(
                slots=slots, output_tokens=output_tokens, prompt_tokens=prompt_tokens
            )
            for slots in sizes
        }
    return {
        f"{rate:g}/s": Load(
            slots=max(sizes),
            arrivals_per_second=rate,
            output_tokens=output_tokens,
            prompt_tokens=prompt_tokens,
        )
        for rate in _numbers(arrivals, "--arrivals")
    }


def _numbers(text: str, option: str) -> list[float]:
    try:
        return [float(value) for value in text.split(",")]
    except ValueError as error:
        raise RequestError(f"{option} must be comma-separated numbers, got {text!r}") from error


def _print(report: dict[str, Any]) -> None:
    if "capacity" in report:
        table = Table(title=f"one GPU at {report['sla_tokens_per_second']:g} tokens/s/user")
        for column in ("policy", "requests", "tokens/s", "tokens/s/user", "GPUs"):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for name, row in report["capacity"].items():
            table.add_row(
                name,
                str(row["requests"]),
                f"{row['tokens_per_second']:.0f}",
                f"{row['tokens_per_second_per_user']:.1f}",
                "-" if row["gpus"] is None else str(row["gpus"]),
            )
        console.print(table)
        return
    loads = list(next(iter(report["outcomes"].values())))
    table = Table(title="tokens/s (drafts verified a round) by load")
    table.add_column("policy")
    for label in loads:
        table.add_column(label, justify="right")
    for name, by_load in report["outcomes"].items():
        table.add_row(
            name,
            *(
                f"{row['tokens_per_second']:.0f} ({row['drafts_verified_per_round']:.1f})"
                for row in by_load.values()
            ),
        )
    console.print(table)
