# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct with its drafter: prepare, export, measure, answer, compare with the target alone.

Falls back to the toy of `examples/tiny` where the target cannot be had.
"""

import runpy
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import TypeVar

from prepare import Report, prepare_target, progress_bar
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dspark_trt.bundle import CALIBRATION, COST_TABLE, Bundle, load_bundle
from dspark_trt.checkpoint import read_draft, read_target, source_hash
from dspark_trt.cli.token_writer import TokenWriter
from dspark_trt.errors import BundleError, CheckpointError
from dspark_trt.export.bundle_from_checkpoints import Progress, export_bundle
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.profiling import ProfilePlan, profile
from dspark_trt.runtime.request import Completion, Request, SamplingParams
from dspark_trt.runtime.scheduling import bundled_costs
from dspark_trt.runtime.text import TextCodec

HERE = Path(__file__).parent
TINY = HERE.parent / "tiny" / "demo.py"
WORK = HERE.parents[1] / ".demo" / "smollm2"
PROMPTS = (HERE / "prompts.txt").read_text(encoding="utf-8").splitlines()
PARAMS = SamplingParams(max_new_tokens=64)
DRAFT_WEIGHTS = "int8"  # half a draft step; the target keeps float32 and with it every answer

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """Answers of one way to decode, and what they cost."""

    completions: list[Completion] = field(default_factory=list)
    stage_seconds: Counter[str] = field(default_factory=Counter)


def main() -> None:
    console = Console()
    try:
        with progress_bar(console) as report:
            _timed(console, "target", lambda: prepare_target(WORK / "target", report=report))
            bundle = _timed(console, "bundle", lambda: _exported(report))
            _timed(console, "cost table", lambda: _measured(bundle, report))
    except CheckpointError as error:
        console.print(
            f"[yellow]No SmolLM2 here, so the toy instead:[/] {escape(str(error))}\n",
            soft_wrap=True,
        )
        runpy.run_path(str(TINY), run_name="__main__")
        return
    drafted, alone = Run(), Run()
    with Engine.load(bundle, options=EngineOptions(max_batch=1)) as engine:
        codec = TextCodec(bundle)
        for number, prompt in enumerate(PROMPTS):
            request = Request(
                prompt_ids=codec.encode_chat([{"role": "user", "content": prompt}]),
                params=PARAMS,
            )
            if number == 0:  # the first rounds touch weights and grow caches
                _answer(
                    engine, replace(request, params=SamplingParams(max_new_tokens=8)), Run()
                )
            console.print(f"\n[bold]> {prompt}", highlight=False)
            _answer(engine, request, drafted, TokenWriter(console, codec, is_coloured=True))
            with console.status("the same by the target alone"):
                _answer(engine, replace(request, speculate=False), alone)
    console.print("\n[green]drafted[/] [bold cyan]bonus[/] [yellow]corrected[/] tokens\n")
    console.print(_speed_table(drafted, alone), _stage_table(drafted, alone))
    same = [done.token_ids for done in drafted.completions] == [
        done.token_ids for done in alone.completions
    ]
    console.print(f"same tokens with and without speculation: {'yes' if same else 'NO'}")
    console.print(f"go on: .venv/bin/dspark-trt chat {WORK / 'bundle'} --show", soft_wrap=True)


def _timed(console: Console, what: str, work: Callable[[], T]) -> T:
    started = time.perf_counter()
    result = work()
    console.print(f"{what} ready in {time.perf_counter() - started:.0f} s", highlight=False)
    return result


def _exported(report: Report) -> Bundle:
    """The bundle of drafter and target, made anew unless the one there is of the same checkpoints."""
    drafter, target = read_draft(HERE / "drafter"), read_target(WORK / "target")
    folder = WORK / "bundle"
    report(description="reading", completed=0, total=None)
    try:
        bundle = load_bundle(folder)
        sources = bundle.draft_source, bundle.target_source
        hashes = [source and source.sha256 for source in sources]
        is_same = hashes == [source_hash(drafter), source_hash(target)]
        if is_same and bundle.draft_weights == DRAFT_WEIGHTS:
            return bundle
    except BundleError:
        pass  # none yet, or of another version

    def show(progress: Progress) -> None:
        text = f"exporting: {progress.stage} {progress.detail}"
        report(description=text, completed=progress.done, total=progress.total)

    return export_bundle(
        drafter, target, folder, draft_weights=DRAFT_WEIGHTS, overwrite=True, on_progress=show
    )


def _measured(bundle: Bundle, report: Report) -> None:
    """What the scheduler weighs: the calibration, and what rounds of one request cost here."""
    shutil.copyfile(HERE / CALIBRATION, bundle.path / CALIBRATION)
    backend = open_backend("onnxruntime", bundle)
    if bundled_costs(backend)[0] is not None:
        return
    plan = ProfilePlan(
        requests=(1,),
        lengths=tuple(range(bundle.draft.gamma + 1)),
        context_tokens=(128,),
        seconds=1.0,
        rounds=3,
    )

    def show(done: int, total: int) -> None:
        report(description="measuring what rounds cost", completed=done, total=total)

    show(0, 1)
    profile(backend, plan, progress=show).costs.save(bundle.path / COST_TABLE)


def _answer(
    engine: Engine, request: Request, run: Run, writer: TokenWriter | None = None
) -> None:
    """Decode a request into `run`, shown by `writer` as it comes."""
    before = engine.status()["stage_seconds"]
    request_id = -1
    for event in engine.stream(request):
        request_id = event.request_id
        if writer is not None:
            writer.write(event.token_ids, event.kinds)
    if writer is not None:
        writer.end()
    run.completions.append(engine.take(request_id))
    run.stage_seconds.update(engine.status()["stage_seconds"])
    run.stage_seconds.subtract(before)


def _speed_table(drafted: Run, alone: Run) -> Table:
    table = Table(
        caption="accepted: tokens a drafted round commits; verified: drafts it checks"
    )
    for name in ("prompt", "accepted", "verified", "tokens/s", "alone", "speed-up"):
        table.add_column(name, no_wrap=True)
    pairs = zip(PROMPTS, drafted.completions, alone.completions, strict=True)
    for prompt, fast, slow in pairs:
        stats = fast.stats
        rates = [done.stats.tokens_per_second or 0.0 for done in (fast, slow)]
        table.add_row(
            f"{prompt[:20]}…",
            f"{stats.accepted_length:.2f}" if stats.accepted_length else "–",
            f"{mean(stats.verification_lengths):.1f}" if stats.verification_lengths else "",
            *(f"{rate:.1f}" for rate in rates),
            f"{rates[0] / rates[1]:.2f} x" if rates[1] else "",
        )
    return table


def _stage_table(drafted: Run, alone: Run) -> Table:
    table = Table("where the time went", "ms a token", "alone")
    tokens = sum(done.stats.output_tokens for done in alone.completions)
    for stage, seconds in drafted.stage_seconds.items():
        each = seconds, alone.stage_seconds[stage]
        table.add_row(stage, *(f"{1000 * part / tokens:.1f}" for part in each))
    return table


if __name__ == "__main__":
    main()
