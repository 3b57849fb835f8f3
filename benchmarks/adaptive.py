# SPDX-License-Identifier: Apache-2.0
"""Adaptive verification lengths against every fixed one, through the whole engine, in one run.

    dspark-trt profile BUNDLE && dspark-trt calibrate BUNDLE
    python benchmarks/adaptive.py BUNDLE [--random-drafter] [--temperature 1]

For each number of concurrent requests and each kind of prompt all arms take turns, in another order every
time; an arm's figure is the median over turns of its speed relative to the turn's mean. The table gives the
adaptive arms against the best fixed length, chosen afterwards, and against plain decoding (fixed-0). With
one thread on a CPU its own time is taken, so that other processes do not count. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout, installed or not

from dspark_trt.bundle import CALIBRATION, COST_TABLE, Bundle, load_bundle
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.backends.interface import BackendOptions
from dspark_trt.runtime.cost_model import CostModel
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.machine import machine_name
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.scheduling import bundled_costs

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "tests" / "data" / "golden" / "official_tau.json"
ADAPTIVE = ("async", "algorithm1")


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
    arms = {
        name: Engine(
            backend, EngineOptions(max_batch=concurrent), scheduler=name, cost_table=costs
        )
        for name in names
    }
    order = np.random.default_rng(0)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    batches = requests(prompts, concurrent, args)
    for repeat in range(args.repeats + 1):
        batch = next(batches)
        turn = {name: speed(arms[name], batch, clock) for name in order.permutation(names)}
        if repeat:  # the first warms caches up, and the adaptive arms get to know the drafter
            for name, value in turn.items():
                speeds[name].append(value)
    plain = statistics.median(speeds["fixed:0"])
    turns = np.array([speeds[name] for name in names])
    relative = dict(
        zip(names, np.median(turns / turns.mean(axis=0), axis=1).tolist(), strict=True)
    )
    best = max((name for name in names if name.startswith("fixed")), key=relative.__getitem__)
    status = {name: arms[name].status() for name in ADAPTIVE}
    for engine in arms.values():
        engine.close()
    return {
        "plain_tokens_per_second": round(plain, 1),
        "over_plain": {name: round(relative[name] / relative["fixed:0"], 4) for name in names},
        "best_fixed": best,
        "over_best": {name: round(relative[name] / relative[best], 4) for name in ADAPTIVE},
        "verified": {name: status[name]["verification_lengths"] for name in ADAPTIVE},
        "reasons": {name: status[name]["reasons"] for name in ADAPTIVE},
    }


def requests(
    prompts: list[tuple[int, ...]], concurrent: int, args: argparse.Namespace
) -> Iterator[list[Request]]:
    """Batch after batch, several times as many requests as run at once: a free place is taken at once."""
    count, start = 3 * concurrent if concurrent > 1 else 6, 0
    while True:
        yield [
            Request(
                prompt_ids=prompts[n % len(prompts)],
                params=SamplingParams(
                    temperature=args.temperature,
                    max_new_tokens=args.new_tokens,
                    seed=n,
                    ignore_eos=True,
                ),
            )
            for n in range(start, start + count)
        ]
        start += count


def speed(engine: Engine, batch: list[Request], clock: Callable[[], float]) -> float:
    """Tokens a second."""
    started = clock()
    done = engine.generate(batch)
    return sum(len(each.token_ids) for each in done) / (clock() - started)


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
            weights[name] = torch.randn_like(tensor) * tensor.float().std().to(tensor.dtype)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    return export_bundle(
        read_draft(draft), read_target(example / "target"), folder / "bundle", dtype="float32"
    )


if __name__ == "__main__":
    main()
