# SPDX-License-Identifier: Apache-2.0
"""Adaptive verification lengths against every fixed one, through the whole engine, in one run.

    dspark-trt profile BUNDLE && dspark-trt calibrate BUNDLE
    python benchmarks/adaptive.py BUNDLE [--random-drafter] [--temperature 1]

So many requests decode side by side from the first round to the last; prompts are read before, without
drafting whatever the arm: one that drafts meanwhile would be timed on later, easier text. All arms take turns
on the same models, in another order every time; an arm's figure is the median over turns of its speed relative
to the turn's mean. The best fixed length is chosen on every other turn and judged on the rest, and the other
way round: chosen and judged on the same turns, the luckiest of eight would win. With one thread on a CPU its
own time is taken, so that other processes do not count. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout, installed or not

from dspark_trt.bundle import CALIBRATION, COST_TABLE, Bundle, load_bundle
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.backends.interface import BackendOptions
from dspark_trt.runtime.bench_models import CallTimes, SharedModels
from dspark_trt.runtime.cost_model import CostModel
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.machine import machine_name
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.round_report import RoundReport
from dspark_trt.runtime.scheduler import Fixed
from dspark_trt.runtime.scheduling import bundled_costs

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "tests" / "data" / "golden" / "official_tau.json"
ADAPTIVE = ("async", "algorithm1")
_LEAST = 4  # requests of a turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument(
        "--prompts", type=Path, default=PROMPTS, help="JSON with prompts[domain, prompt_ids]"
    )
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--random-drafter", action="store_true", help="add one of random weights"
    )
    args = parser.parse_args()
    bundle = load_bundle(args.bundle, verify_hashes=False)
    costs, why = bundled_costs(
        open_backend("onnxruntime", bundle, BackendOptions(threads=args.threads))
    )
    if costs is None or not (bundle.path / CALIBRATION).exists():
        sys.exit(f"{bundle.path} needs {COST_TABLE} and {CALIBRATION} of this machine: {why}")
    prompts = by_domain(args.prompts)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        workloads = [(bundle, domain, own) for domain, own in prompts.items()]
        if args.random_drafter:
            mixed = [ids for own in zip(*prompts.values(), strict=True) for ids in own]
            workloads.append((random_drafter(Path(folder)), "random drafter", mixed))
        for concurrent in map(int, args.requests.split(",")):
            for used, name, own in workloads:
                row = compare(used, costs, own, concurrent, args)
                rows.append({"requests": concurrent, "prompts": name, **row})
                print_row(rows[-1], is_first=len(rows) == 1)
    report = {
        "rows": rows,
        **{
            name: getattr(args, name)
            for name in ("repeats", "new_tokens", "temperature", "threads")
        },
        "machine": machine_name(),
    }
    print(json.dumps(report))


def by_domain(path: Path) -> dict[str, list[tuple[int, ...]]]:
    found: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for item in json.loads(path.read_text())["prompts"]:
        found[item["domain"]].append(tuple(item["prompt_ids"]))
    return dict(found)


def compare(
    bundle: Bundle,
    costs: CostModel,
    prompts: list[tuple[int, ...]],
    concurrent: int,
    args: argparse.Namespace,
) -> dict[str, object]:
    """Speeds of every arm over the mean of its turns, and what the adaptive ones did."""
    options = BackendOptions(threads=args.threads)
    backend = open_backend("onnxruntime", bundle, options)
    clock = time.thread_time if backend.options.threads == 1 else time.perf_counter
    names = [f"fixed:{k}" for k in range(bundle.draft.gamma + 1)] + list(ADAPTIVE)
    shared = SharedModels(backend, concurrent, CallTimes(clock))
    shared.reserve(max(map(len, prompts)) + 2 * args.new_tokens)  # attention may pay for it
    arms = {
        name: Engine(
            shared, EngineOptions(max_batch=concurrent), scheduler=name, cost_table=costs
        )
        for name in names
    }
    order = np.random.default_rng(0)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(args.repeats + 1):
        batches = [
            [request(prompts[(n + i) % len(prompts)], args, n + i) for i in range(concurrent)]
            for n in range(7 * repeat, 7 * repeat + max(1, _LEAST // concurrent))
        ]
        turn = {
            name: speed(arms[name], batches, args.new_tokens, clock)
            for name in order.permutation(names)
        }
        if repeat:  # the first warms caches up, and the adaptive arms get to know the drafter
            for name, value in turn.items():
                speeds[name].append(value)
    turns = np.array([speeds[name] for name in names])
    relative = turns / turns.mean(axis=0)
    over_best, best = against_best_fixed(relative, names)
    middle = dict(zip(names, np.median(relative, axis=1).tolist(), strict=True))
    status = {name: arms[name].status() for name in ADAPTIVE}
    shared.close()
    return {
        "plain_tokens_per_second": round(statistics.median(speeds["fixed:0"]), 1),
        "over_plain": {name: round(middle[name] / middle["fixed:0"], 4) for name in names},
        "best_fixed": best,
        "over_best": over_best,
        "verified": {name: status[name]["verification_lengths"] for name in ADAPTIVE},
        "reasons": {name: status[name]["reasons"] for name in ADAPTIVE},
    }


def against_best_fixed(
    relative: NDArray[np.float64],  # [arms, turns]
    names: list[str],
) -> tuple[dict[str, float], str]:
    """Adaptive arms over a best fixed length that other turns have chosen, and the best of all turns."""
    fixed = [row for row, name in enumerate(names) if name.startswith("fixed")]
    over: dict[str, list[float]] = {name: [] for name in ADAPTIVE}
    for chosen, judged in (
        (relative[:, ::2], relative[:, 1::2]),
        (relative[:, 1::2], relative[:, ::2]),
    ):
        best = max(fixed, key=np.median(chosen, axis=1).__getitem__)
        for name in ADAPTIVE:
            over[name].append(float(np.median(judged[names.index(name)] / judged[best])))
    best = max(fixed, key=np.median(relative, axis=1).__getitem__)
    return {name: round(float(np.mean(values)), 4) for name, values in over.items()}, names[
        best
    ]


def request(prompt: tuple[int, ...], args: argparse.Namespace, seed: int) -> Request:
    params = SamplingParams(
        temperature=args.temperature, max_new_tokens=1 << 20, seed=seed, ignore_eos=True
    )
    return Request(prompt_ids=prompt, params=params)


def speed(
    engine: Engine, batches: list[list[Request]], new_tokens: int, clock: Callable[[], float]
) -> float:
    """Tokens a second of all requests together, from when all decode until they have ``new_tokens`` on average."""
    reports: list[RoundReport] = []
    engine.observers.append(reports.append)
    scheduler = engine.planner.scheduler
    tokens, seconds = 0, 0.0
    for batch in batches:
        engine.planner.scheduler = Fixed(0)
        ids = [engine.submit(each) for each in batch]
        reports.clear()
        while not reports or not (
            len(reports[-1].decoding) == len(ids) and reports[-1].decoding.all()
        ):
            engine.step()
        engine.planner.scheduler = scheduler
        wanted = tokens + new_tokens * len(ids)
        while tokens < wanted:
            started = clock()
            engine.step()
            seconds += clock() - started
            tokens += int(reports[-1].committed.sum())
        for request_id in ids:
            engine.abort(request_id)
            engine.discard(request_id)
    engine.observers.pop()
    return tokens / seconds


def print_row(row: dict[str, object], *, is_first: bool) -> None:
    if is_first:
        print(f"{'requests':>8} {'prompts':>15} {'plain':>7} {'best fixed':>16}", end="")
        print("".join(f"{name + ' / best':>19}{'/ plain':>9}" for name in ADAPTIVE))
    over_plain, over_best = row["over_plain"], row["over_best"]
    assert isinstance(over_plain, dict)
    assert isinstance(over_best, dict)
    best = f"{row['best_fixed']} {over_plain[row['best_fixed']]:.3f}"
    print(
        f"{row['requests']:8} {row['prompts']:>15} {row['plain_tokens_per_second']:7.0f} {best:>16}",
        end="",
    )
    print(
        "".join(f"{over_best[name]:19.3f}{over_plain[name]:9.3f}" for name in ADAPTIVE),
        flush=True,
    )


def random_drafter(folder: Path) -> Bundle:
    """The shipped drafter with weights drawn anew, but for embedding and output head."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    from dspark_trt.checkpoint import read_draft, read_target
    from dspark_trt.export.bundle_from_checkpoints import export_bundle

    example = ROOT / "examples" / "tiny"
    draft = folder / "drafter"
    shutil.copytree(example / "drafter", draft)
    weights = load_file(draft / "model.safetensors")
    torch.manual_seed(0)
    for name, tensor in weights.items():
        if "embed_tokens" not in name and "lm_head" not in name and "norm" not in name:
            weights[name] = torch.randn_like(tensor) * tensor.float().std(correction=0).to(
                tensor.dtype
            )
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    return export_bundle(
        read_draft(draft), read_target(example / "target"), folder / "bundle", dtype="float32"
    )


if __name__ == "__main__":
    main()
