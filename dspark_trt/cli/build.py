# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt build`: engines of a bundle."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dspark_trt.cli.output import console, err_console, print_json
from dspark_trt.engine_manifest import BACKENDS

if TYPE_CHECKING:
    from dspark_trt.engine_manifest import EngineSet, Profile
    from dspark_trt.export.engines.build import BuildPlan, Progress


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.", show_default=False)],
    backend: Annotated[str, typer.Option(help=f"{' or '.join(BACKENDS)}.", show_default=False)],
    graph: Annotated[
        list[str] | None,
        typer.Option(
            help="Graph to build, or all; may be repeated. Default: all but backbone, sequential_head, "
            "confidence_head and draft_greedy, which hosts with rounds of their own need.",
            show_default=False,
        ),
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            help="Architecture such as sm89, or ampere+ for all from Ampere on; may be repeated "
            "(tensorrt-rtx). Default: ampere+ (tensorrt-rtx), the GPU at hand (tensorrt).",
            show_default=False,
        ),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Most requests a step. Default: 8.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most target rows a step, prompts and drafts of all requests together. Default: 512.",
            show_default=False,
        ),
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(
            help="Cache rows a request. Default: the models' positions, at most 4096.",
            show_default=False,
        ),
    ] = None,
    strip_weights: Annotated[
        bool,
        typer.Option(
            "--strip-weights", help="Leave the weights out; needs a GPU. Fill with --refit."
        ),
    ] = False,
    refit: Annotated[
        Path | None,
        typer.Option(
            help="Folder of engines without weights, of a drafter of the same architecture, to fill "
            "from this bundle instead of building; needs a GPU.",
            show_default=False,
        ),
    ] = None,
    version_compatible: Annotated[
        bool,
        typer.Option(
            "--version-compatible",
            help="Let later TensorRT of the same major version load the engines.",
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Build TensorRT engines of a bundle's graphs.

    Backend tensorrt-rtx needs no GPU to build.
    """
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    from dspark_trt.bundle import load_bundle
    from dspark_trt.export.engines.build import BuildOptions, build_engines, plan_build
    from dspark_trt.export.engines.support import unfused_attention

    options = BuildOptions(
        backend=backend,
        graphs=tuple(graph or ()),
        archs=tuple(arch or ()),
        max_batch=max_batch,
        max_tokens=max_tokens,
        capacity=capacity,
        strip_weights=strip_weights,
        version_compatible=version_compatible,
        refit=refit,
    )
    plan = plan_build(load_bundle(bundle), options)
    for sentence in unfused_attention(plan.bundle, plan.graphs):
        err_console.print(f"[yellow]warning:[/] {sentence}", highlight=False, soft_wrap=True)
    if not json:
        _print_plan(plan)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=err_console, disable=json, transient=True) as bars:
        task = bars.add_task("", total=len(plan.graphs))

        def show(progress: "Progress") -> None:
            done = plan.graphs.index(progress.graph) + progress.fraction
            bars.update(task, description=f"{progress.graph}: {progress.phase}", completed=done)

        engines = build_engines(plan, on_progress=show)
    if json:
        print_json(_as_json(engines, plan.graphs))
    else:
        _print_engines(engines, plan.graphs)


def _print_plan(plan: "BuildPlan") -> None:
    limits = plan.engines.limits
    err_console.print(
        f"{plan.library.backend} {plan.library.version} for {', '.join(plan.engines.archs)}: "
        f"at most {limits.batch} requests (--max-batch), {limits.tokens} target rows a step "
        f"(--max-tokens), {limits.capacity} cache rows a request (--capacity)",
        highlight=False,
        soft_wrap=True,
    )
    for name, profile in plan.profiles.items():
        text = f"  {name}, {'; '.join(map(_shown, profile))}"
        err_console.print(text, highlight=False, soft_wrap=True)


def _shown(profile: "Profile") -> str:
    """Only what varies: `single: taps …`."""
    shapes = {
        name: "..".join("x".join(map(str, shape)) for shape in dict.fromkeys((low, high)))
        for name, (low, _, high) in profile.shapes.items()
        if not name.startswith("past_")
    }
    return f"{profile.name}: " + ", ".join(f"{name} {text}" for name, text in shapes.items())


def _as_json(engines: "EngineSet", graphs: tuple[str, ...]) -> dict[str, Any]:
    return {
        "folder": str(engines.path),
        "backend": engines.backend,
        "version": engines.version,
        "archs": list(engines.archs),
        "gpu": engines.gpu,
        "limits": {
            "max_batch": engines.limits.batch,
            "max_tokens": engines.limits.tokens,
            "capacity": engines.limits.capacity,
        },
        "engines": [
            {
                "graph": graph,
                "path": str(engines.path / engines.engines[graph].file),
                "bytes": engines.engines[graph].size_bytes,
                "seconds": engines.engines[graph].seconds,
                "peak_bytes": engines.engines[graph].peak_bytes,
            }
            for graph in graphs
        ],
    }


def _print_engines(engines: "EngineSet", graphs: tuple[str, ...]) -> None:
    table = Table("engine", "MB", "seconds", "peak memory, MB")
    for graph in graphs:
        record = engines.engines[graph]
        peak = "unknown" if record.peak_bytes is None else f"{record.peak_bytes / 1e6:.0f}"
        table.add_row(
            record.file, f"{record.size_bytes / 1e6:.1f}", f"{record.seconds:.1f}", peak
        )
    console.print(str(engines.path), highlight=False, soft_wrap=True)
    console.print(table)
