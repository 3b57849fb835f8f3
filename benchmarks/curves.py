# SPDX-License-Identifier: Apache-2.0
"""How the cost of a step grows: with requests, context up to the capacity, γ and verified drafts, vocabulary; and
that memory does not.

    python benchmarks/curves.py [--folder DIR] [--plots DIR]

The shipped example; for γ and vocabulary random drafters of its size, exported to DIR and used again from there.
A curve is a line a + b·x by least squares. `doubling` is the worst ratio of costs at 2x and x: at most 2 is at most
linear. `slope / least` compares b with what the work per x takes at the machine's limits. The last line is JSON.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout, installed or not

from judged_models import Bench, Models, prompts
from judged_steps import draft_arm, draft_inputs, step_rows

from dspark_trt.bundle import WEIGHTS, Bundle, load_bundle
from dspark_trt.checkpoint import read_draft
from dspark_trt.config import DraftConfig
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.backends.interface import BackendOptions
from dspark_trt.runtime.bench_limits import MachineLimits, measure_limits
from dspark_trt.runtime.bench_work import draft_work, target_work
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.machine import machine_name, usable_cpus
from dspark_trt.runtime.request import Request, SamplingParams

Arms = Mapping[int, Callable[[], object]]  # x -> what costs


@dataclass(frozen=True)
class Curve:
    """Milliseconds over x, and the least milliseconds that the work takes."""

    name: str
    x: list[int]
    ms: list[float]
    least_ms: list[float]

    @property
    def line(self) -> tuple[float, float]:
        slope, start = np.polyfit(self.x, self.ms, 1)
        return float(start), float(slope)

    @property
    def doubling(self) -> float:
        pairs = zip(self.x, self.x[1:], self.ms, self.ms[1:], strict=False)
        return max((after / before) ** (1 / np.log2(b / a)) for a, b, before, after in pairs)

    @property
    def slope_over_least(self) -> float:
        return self.line[1] / float(np.polyfit(self.x, self.least_ms, 1)[0])


def curves(bench: Bench, limits: MachineLimits) -> list[Curve]:
    models, bundle = bench.tiny, bench.tiny.bundle
    draft, target = bundle.draft, bundle.target
    assert target is not None
    backend = models.backend(bench)
    measured = partial(curve, bench, backend.options.threads)

    def draft_least(batch: int = 1, context: int = 256, config: DraftConfig = draft) -> float:
        work = draft_work(config, batch=batch, context=context)
        return 1e3 * work.seconds(limits)

    def target_least(batch: int = 1, rows: int = 8, context: int = 256) -> float:
        work = target_work(
            target, batch=batch, rows=batch * rows, logit_rows=batch * rows, context=context,
        )  # fmt: skip
        return 1e3 * work.seconds(limits)

    batches, lengths = (1, 2, 4, 8, 16, 32), (62, 125, 250, 500, 1000)
    found = [
        measured(
            "draft step over requests",
            {b: draft_arm(backend, b, 0.0) for b in batches},
            draft_least,
        ),
        measured(
            "target step of 8 rows each over requests",
            {
                b: partial(backend.target_model(b).step, step_rows(bundle, b, 8))
                for b in batches
            },
            target_least,
        ),
        measured(
            "draft step over context tokens",
            {c: at_context(bench, models, "draft", c) for c in lengths},
            lambda c: draft_least(context=c),
        ),
        measured(
            "target step of 8 rows over context tokens",
            {c: at_context(bench, models, "target", c) for c in lengths},
            lambda c: target_least(context=c),
        ),
        measured(
            "target step over its rows, one request",
            {
                n: partial(backend.target_model(1).step, step_rows(bundle, 1, n))
                for n in (1, 2, 4, 8, 16)
            },
            lambda n: target_least(rows=n),
        ),
    ]
    by_gamma = {gamma: random_drafter(bench.folder, gamma=gamma) for gamma in (3, 7, 15)}
    by_vocab = {
        vocab: random_drafter(bench.folder, vocab=vocab) for vocab in (2048, 8192, 32_768)
    }
    for name, made in (("γ", by_gamma), ("the vocabulary", by_vocab)):
        for heat in (0.0, 1.0):
            arms = {
                value: draft_arm(open_backend("onnxruntime", own, bench.options), 1, heat)
                for value, own in made.items()
            }
            least = {value: draft_least(config=own.draft) for value, own in made.items()}
            found.append(
                measured(f"draft step over {name}, T = {heat:g}", arms, least.__getitem__)
            )
    return found


def curve(
    bench: Bench, threads: int | None, name: str, arms: Arms, least: Callable[[int], float]
) -> Curve:
    taken = bench.compare({str(x): arm for x, arm in arms.items()}, threads)
    ms = [1e3 * taken[str(x)] for x in arms]
    found = Curve(name, list(arms), ms, [least(x) for x in arms])
    print(
        f"{name:>45}: {', '.join(f'{x}: {y:.2f}' for x, y in zip(found.x, ms, strict=True))} ms; "
        f"doubling {found.doubling:.2f}, slope / least {found.slope_over_least:.1f}",
        flush=True,
    )
    return found


def at_context(bench: Bench, models: Models, kind: str, length: int) -> Callable[[], object]:
    backend = models.backend(bench)
    if kind == "draft":
        return partial(
            backend.draft_model(1).draft, draft_inputs(models.bundle, 1, 0.0, length)
        )
    return partial(backend.target_model(1).step, step_rows(models.bundle, 1, 8, length))


def random_drafter(folder: Path, *, gamma: int = 7, vocab: int = 2048) -> Bundle:
    """The example's sizes but for γ and vocabulary, random weights."""
    from dspark_trt.export.bundle_from_checkpoints import export_bundle
    from tests.checkpoints import write_draft

    path = folder / f"drafter-{gamma}-{vocab}"
    if not path.exists():
        checkpoint = write_draft(
            folder / f"{path.name}-checkpoint", hidden=128, intermediate=384, heads=4, kv_heads=2,
            head_dim=64, vocab=vocab, max_positions=1024, target_layers=6, target_hidden=128,
            target_layer_ids=(1, 3, 4), gamma=gamma, rank=32, mask=3,
        )  # fmt: skip
        export_bundle(read_draft(checkpoint), None, path)
    return load_bundle(path, verify_hashes=False)


def memory(bench: Bench, requests: int) -> dict[str, object]:
    """Peak memory of this process while requests come and go."""
    bundle = bench.tiny.bundle
    listed = [ids for own in prompts(bundle, 16).values() for ids in own]
    peaks = []
    with Engine.load(
        bundle, backend_options=bench.options, options=EngineOptions(max_batch=8)
    ) as engine:
        for start in range(0, requests, 48):
            asked = [
                Request(
                    prompt_ids=listed[n % len(listed)],
                    params=SamplingParams(
                        temperature=float(n % 2), max_new_tokens=64, seed=n, ignore_eos=True
                    ),
                )
                for n in range(start, start + 48)
            ]
            engine.generate(asked)
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    half = len(peaks) // 2
    grown = peaks[-1] - peaks[half]
    print(
        f"memory: peak {peaks[-1] / 1e6:.0f} MB after {requests} requests, "
        f"{grown / 1e3:.0f} kB of it in the second half"
    )
    return {"requests": requests, "peak_bytes": peaks, "grown_in_second_half_bytes": grown}


def plot(found: list[Curve], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.4 * -(-len(found) // 3)), layout="constrained")
    for index, own in enumerate(found, 1):
        axes = figure.add_subplot(-(-len(found) // 3), 3, index)
        axes.plot(own.x, own.ms, marker="o", markersize=3, label="measured")
        axes.plot(own.x, own.least_ms, color="0.6", label="limit of the machine")
        axes.set(ylabel="ms", ylim=(0, None), xlim=(0, None))
        axes.set_title(own.name, fontsize=8)
        if index == 1:
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--plots", type=Path)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each curve")
    parser.add_argument("--requests", type=int, default=480, help="of the long run")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(
            args.folder or Path(scratch),
            args.seconds,
            args.threads or usable_cpus(),
            BackendOptions(threads=args.threads),
        )
        bench.folder.mkdir(parents=True, exist_ok=True)
        bundle = bench.tiny.bundle
        threads = bench.tiny.backend(bench).options.threads or 1
        limits = measure_limits(threads, bundle.files[WEIGHTS].size_bytes)
        found = curves(bench, limits)
        held = memory(bench, args.requests)
        if args.plots is not None:
            args.plots.mkdir(parents=True, exist_ok=True)
            plot(found, args.plots / "curves.png")
    print(
        json.dumps(
            {
                "curves": [
                    {
                        "name": own.name, "x": own.x, "ms": own.ms, "least_ms": own.least_ms,
                        "line": own.line, "doubling": own.doubling,
                        "slope_over_least": own.slope_over_least,
                    }
                    for own in found
                ],
                "memory": held,
                "machine": machine_name(),
                "threads": threads,
                "load": os.getloadavg(),
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
