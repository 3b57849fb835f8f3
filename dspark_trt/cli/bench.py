# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt bench`: how fast a bundle is on this machine, with and without drafts, and against its limits."""

from pathlib import Path
from typing import Annotated

import typer

from dspark_trt.cli.output import console, err_console, print_json
from dspark_trt.cli.prompts import PROMPTS_HELP, read_prompts
from dspark_trt.cli.running import BackendName, DeviceName, Threads, require_bundled_target
from dspark_trt.errors import RequestError


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.", show_default=False)],
    schedulers: Annotated[
        str | None,
        typer.Option(
            help="Compared, the others with the first; default: fixed:0,fixed:γ,auto.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[str, typer.Option(help="Decoded at the same time.")] = "1,8,32",
    temperatures: Annotated[str, typer.Option(help="0: greedy.")] = "0,1",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help=f"{PROMPTS_HELP}; default: shipped ones.",
            show_default=False,
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens a request in every turn.")] = 12,
    repeats: Annotated[int, typer.Option(help="Turns of each; medians are reported.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling and of the order.")] = 0,
    threads: Threads = None,
    backend: BackendName = "onnxruntime",
    device: DeviceName = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for bench.json and bench.md.", show_default=False),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for PNG figures.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare schedulers: tokens/s, accepted length, time.

    All of them in one run, in turns on the same models.
    """
    from dspark_trt.bundle import WEIGHTS, load_bundle
    from dspark_trt.files import make_folder, new_file, write_json
    from dspark_trt.runtime.backends import open_backend
    from dspark_trt.runtime.backends.interface import BackendOptions
    from dspark_trt.runtime.bench import BenchPlan, run_bench
    from dspark_trt.runtime.bench_limits import measure_limits
    from dspark_trt.runtime.bench_report import bench_report, markdown

    loaded = load_bundle(bundle, verify_hashes=False)
    require_bundled_target(loaded)
    names = schedulers or f"fixed:0,fixed:{loaded.draft.gamma},auto"
    plan = BenchPlan(
        schedulers=tuple(name.strip() for name in names.split(",")),
        requests=tuple(int(n) for n in _numbers("--requests", requests)),
        temperatures=_numbers("--temperatures", temperatures),
        new_tokens=new_tokens,
        repeats=repeats,
        seed=seed,
    )
    asked = read_prompts(loaded, prompts)
    for folder in (output, plots):
        if folder is not None:
            make_folder(folder)
    opened = open_backend(backend, loaded, BackendOptions(threads=threads, device=device))
    with err_console.status("measuring") as status:
        result = run_bench(
            opened,
            asked,
            plan,
            progress=lambda done, of: status.update(f"measuring: turn {done} of {of}"),
        )
        limits = None
        if opened.name == "onnxruntime" and opened.options.threads is not None:
            limits = measure_limits(opened.options.threads, loaded.files[WEIGHTS].size_bytes)
    report = bench_report(opened, asked, plan, result, limits)
    text = markdown(report)
    if output is not None:
        write_json(output / "bench.json", report)
        with new_file(output / "bench.md") as temporary:
            temporary.write_text(text, encoding="utf-8")
    if plots is not None:
        from dspark_trt.runtime.bench_plots import plot_bench

        report["plots"] = [str(path) for path in plot_bench(report, plots)]
    if as_json:
        print_json(report)
    else:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise RequestError(f"{option} must be numbers like 1,8,32, got {text!r}") from error
    if option == "--requests" and not all(value.is_integer() for value in values):
        raise RequestError(f"{option} must be whole numbers, got {text!r}")
    return values
