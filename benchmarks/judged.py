# SPDX-License-Identifier: Apache-2.0
"""The speeds this project promises, measured and compared with what was promised.

    python benchmarks/judged.py [--only draft,target,...] [--folder DIR]

Groups: draft, target, generation, speculation, host, roofline, context, int8, start. Both sides of a ratio take
turns in one run and medians are divided; torch runs with 1 or all threads, whichever is faster for it, the
engine with the number it chooses. Bundles are exported to DIR and used again from there. The last line is JSON.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout, installed or not

import torch
from judged_engine import generation, host, int8, speculation, start
from judged_models import Bench, Figure
from judged_steps import context, draft, roofline, target

from dspark_trt.runtime.backends.interface import BackendOptions
from dspark_trt.runtime.machine import machine_name, usable_cpus

GROUPS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "draft": draft,
    "target": target,
    "generation": generation,
    "speculation": speculation,
    "host": host,
    "roofline": roofline,
    "context": context,
    "int8": int8,
    "start": start,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(GROUPS))
    parser.add_argument("--folder", type=Path, help="where bundles stay; default: nowhere")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each comparison")
    parser.add_argument(
        "--threads",
        type=int,
        help="for both sides; 1 also leaves other processes out of the times",
    )
    args = parser.parse_args()
    chosen = args.only.split(",")
    if unknown := set(chosen) - set(GROUPS):
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    figures = []
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(
            args.folder or Path(scratch),
            args.seconds,
            args.threads or usable_cpus(),
            BackendOptions(threads=args.threads),
        )
        bench.folder.mkdir(parents=True, exist_ok=True)
        for name in chosen:
            for figure in GROUPS[name](bench):
                figures.append(figure)
                print_figure(figure)
    print(
        json.dumps(
            {
                "figures": [asdict(each) | {"verdict": each.verdict} for each in figures],
                "machine": machine_name(),
                "load": os.getloadavg(),
                "torch": torch.__version__,
            }
        )
    )
    return 0


def print_figure(figure: Figure) -> None:
    measured = "-" if figure.measured is None else f"{figure.measured:.3f}"
    sign = "≥" if figure.is_floor else "≤"
    print(
        f"{figure.verdict:>12}  {measured:>7} {sign} {figure.bound:<5g} {figure.name}"
        f"{'  (' + figure.detail + ')' if figure.detail else ''}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
