# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt compare`: several drafters of one target, measured on the same prompts."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from dspark_trt.cli.output import console, err_console, print_json
from dspark_trt.cli.prompts import PROMPTS_HELP, read_prompts
from dspark_trt.cli.running import BackendName, DeviceName, Threads, require_bundled_target
from dspark_trt.errors import RequestError

if TYPE_CHECKING:
    from dspark_trt.runtime.comparison import DrafterResult


def command(
    bundles: Annotated[
        list[Path], typer.Argument(help="Bundles with one target.", show_default=False)
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help=f"{PROMPTS_HELP}; default: shipped ones. Your own traffic is better.",
            show_default=False,
        ),
    ] = None,
    most_prompts: Annotated[
        int | None,
        typer.Option(help="Take so many of them, of each domain alike.", show_default=False),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of the answers.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 64,
    requests: Annotated[int, typer.Option(help="Requests decoded at the same time.")] = 4,
    turns: Annotated[int, typer.Option(help="Of plain and of scheduled decoding.")] = 3,
    threads: Threads = None,
    backend: BackendName = "onnxruntime",
    device: DeviceName = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="PNG: acceptance by position, and speed.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare drafters: acceptance, draft cost, speed.

    Every draft is verified while acceptance is measured; speed is plain decoding against drafts under
    the scheduler. A bundle without a cost table gets a quick one, which is not kept.
    """
    from dspark_trt.bundle import load_bundle
    from dspark_trt.files import require_place
    from dspark_trt.runtime.backends.interface import BackendOptions
    from dspark_trt.runtime.comparison import ComparisonPlan, compare_drafters

    plan = ComparisonPlan(
        temperature=temperature, max_new_tokens=max_new_tokens, requests=requests, turns=turns
    )
    loaded = [load_bundle(bundle, verify_hashes=False) for bundle in bundles]
    for each in loaded:
        require_bundled_target(each)
    if most_prompts is not None and most_prompts < 1:
        raise RequestError(f"--most-prompts must be at least 1, got {most_prompts}")
    listed = read_prompts(loaded[0], prompts)
    if plot is not None:
        require_place(plot)
    if most_prompts is not None and most_prompts < len(listed):
        listed = [listed[index * len(listed) // most_prompts] for index in range(most_prompts)]
    with err_console.status("comparing") as status:
        results = compare_drafters(
            loaded,
            listed,
            plan,
            backend=backend,
            options=BackendOptions(threads=threads, device=device),
            progress=lambda text: status.update(escape(text)),
        )
    saved = None
    if plot is not None:
        from dspark_trt.runtime.plots import plot_comparison

        saved = str(plot_comparison(results, plot))
    if as_json:
        report = {"prompts": len(listed), "plan": asdict(plan), "plot": saved}
        print_json(report | {"drafters": [asdict(result) for result in results]})
        return
    _print(results, requests)
    if saved is not None:
        console.print(f"written: {escape(saved)}", highlight=False, soft_wrap=True)


def _print(results: "list[DrafterResult]", requests: int) -> None:
    figures = Table(title=f"{requests} requests at a time", title_justify="left")
    figures.add_column("drafter", overflow="fold")
    figures.add_column("tokens\na round", justify="right", no_wrap=True)
    for column in ("draft\nms", "pays\nat", "best\nγ", "tok/s", "×\nplain"):
        figures.add_column(column, justify="right")
    most = max(result.gamma for result in results)
    positions = Table(title="accepted, if reached, by position", title_justify="left")
    positions.add_column("drafter", overflow="fold")
    for position in range(1, most + 1):
        positions.add_column(str(position), justify="right")
    for result in results:
        name = escape(Path(result.bundle).name)
        low, high = result.accepted_length_interval
        least = result.break_even_acceptance
        figures.add_row(
            name,
            f"{result.accepted_length:.2f} ({low:.2f}-{high:.2f})",
            f"{result.draft_ms:.2f}",
            "never" if least >= 1 else f"{least:.2f}",
            str(result.recommended_gamma),
            f"{result.tokens_per_second:.0f}",
            f"{result.speed_up:.2f}",
        )
        shown = ["-" if c is None else f"{c:.2f}" for c in result.conditional_acceptance]
        positions.add_row(name, *shown, *[""] * (most - result.gamma))
    console.print(figures)
    console.print(positions)
    console.print(
        "tokens a round with its 95 % interval over requests; pays at: acceptance at which some fixed "
        "length beats plain decoding; best γ: fixed length with the most tokens a second (0: do not draft); "
        "× plain: drafts under the scheduler against plain decoding, in turns"
    )
