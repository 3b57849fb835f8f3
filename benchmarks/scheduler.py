# SPDX-License-Identifier: Apache-2.0
"""Host cost of one scheduling decision, by scheduler and number of requests.

    python benchmarks/scheduler.py [--json]

Each figure is the best of batches of calls, in microseconds: what else runs on a machine only adds.
The last line says whether the limits hold (128 requests: 100 µs, 1024 requests: 600 µs, growth no
faster than R log R). Exit code 1 if not.
"""

import argparse
import json
import platform
import sys
import timeit
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout, installed or not

from dspark_trt.runtime.cost_table import CostTable
from dspark_trt.runtime.roofline import named_table
from dspark_trt.runtime.scheduler import Algorithm1, Asynchronous, Fixed, Global, Threshold

GAMMA = 7
REQUESTS = (1, 8, 32, 128, 512, 1024)
LIMITS_US = {128: 100.0, 1024: 600.0}
REPEATS, CALLS = 30, 10


def decisions(table: CostTable, confidence: np.ndarray) -> dict[str, Callable[[], object]]:
    """What an engine calls once a round; the asynchronous form pays for budget and ranking."""
    stale = np.roll(confidence, 1, axis=0)
    asynchronous = Asynchronous(table)
    return {
        "fixed:4": lambda: Fixed(4).plan(confidence),
        "threshold": lambda: Threshold(0.5).plan(confidence),
        "algorithm1": lambda: Algorithm1(table).plan(confidence),
        "global": lambda: Global(table, verification="coupled").plan(confidence),
        "async": lambda: asynchronous.plan(confidence, stale=stale),
    }


def best_us(call: Callable[[], object]) -> float:
    call()  # warm up
    return 1e6 * min(timeit.repeat(call, number=CALLS, repeat=REPEATS)) / CALLS


def measure() -> dict[str, dict[int, float]]:
    table = named_table("h100-sxm", "qwen3-8b")
    rng = np.random.default_rng(0)
    figures: dict[str, dict[int, float]] = {}
    for requests in REQUESTS:
        confidence = rng.beta(4.0, 1.0, (requests, GAMMA))
        for name, call in decisions(table, confidence).items():
            figures.setdefault(name, {})[requests] = best_us(call)
    return figures


def failures(figures: dict[str, dict[int, float]]) -> list[str]:
    """Limits that do not hold."""
    found = [
        f"{name}: {by_requests[requests]:.0f} us for {requests} requests, limit {limit:.0f}"
        for name, by_requests in figures.items()
        for requests, limit in LIMITS_US.items()
        if by_requests[requests] > limit
    ]
    small, large = 128, 1024
    growth = large * np.log(large * GAMMA) / (small * np.log(small * GAMMA))
    found += [
        f"{name}: grows {by_requests[large] / by_requests[small]:.1f} times from {small} to "
        f"{large} requests, R log R grows {growth:.1f} times"
        for name, by_requests in figures.items()
        if by_requests[large] / by_requests[small] > growth
    ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON only")
    as_json = parser.parse_args().json
    figures = measure()
    failed = failures(figures)
    if not as_json:
        print(f"{'requests':>14}" + "".join(f"{requests:>10}" for requests in REQUESTS))
        for name, by_requests in figures.items():
            print(f"{name:>14}" + "".join(f"{by_requests[r]:>8.0f}us" for r in REQUESTS))
    report = {
        "gamma": GAMMA,
        "best_us": figures,
        "failures": failed,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    print(json.dumps(report))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
