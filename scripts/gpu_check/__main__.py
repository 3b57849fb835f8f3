# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201 -- it prints its report
"""Runs the parts one process each, within a budget, and writes one JSON report.

A part that fails, hangs or takes the process down stops no other. Exit code: number of failed parts.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Seconds each part may take on a GPU; together with starting six processes less than six minutes.
BUDGETS_S = {
    "kernels": 90, "graphs": 50, "shapes": 50, "rounds": 40, "latency": 60, "engines": 60,
}  # fmt: skip
TOTAL_S = 350.0


def main() -> int:
    options = parse()
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if options.part:
        from gpu_check.run import run_part

        print(json.dumps(run_part(options)))
        return 0
    started, parts = time.monotonic(), dict[str, dict[str, Any]]()
    wanted = [
        n for n in BUDGETS_S if n in (options.only or BUDGETS_S) and n not in options.skip
    ]
    for name in BUDGETS_S:
        left = TOTAL_S - (time.monotonic() - started)
        if name not in wanted:
            parts[name] = {"state": "skipped", "reason": "not asked for"}
        elif left < 5:
            parts[name] = {"state": "skipped", "reason": "the time is used up"}
        else:
            parts[name] = in_process(name, min(BUDGETS_S[name], left))
        show(name, parts[name])
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - started, 1),
        "device": options.device,
        "small": options.small,
        "parts": parts,
    }
    temporary = options.out.with_suffix(".partial")
    temporary.write_text(json.dumps(report, indent=2) + "\n")
    temporary.replace(options.out)
    print(f"{options.out} written after {report['seconds']} s")
    return sum(part["state"] == "failed" for part in parts.values())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--small", action="store_true", help="tiny models: tests the flow")
    parser.add_argument(
        "--skip", action="append", default=[], choices=BUDGETS_S, metavar="PART"
    )
    parser.add_argument("--only", action="append", choices=BUDGETS_S, metavar="PART")
    parser.add_argument("--bundle", type=Path, help="float16 bundle to build engines from")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--part", choices=BUDGETS_S, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_process(name: str, budget_s: float) -> dict[str, Any]:
    """One part in a process of its own; it is told to end in time, and ended if it does not."""
    command = [sys.executable, "-m", "gpu_check", *sys.argv[1:], "--part", name]
    command += ["--seconds", str(budget_s * 0.8)]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=budget_s)
    except subprocess.TimeoutExpired:
        return {"state": "failed", "reason": f"not done after {budget_s:.0f} s"}
    seconds = {"seconds": round(time.monotonic() - started, 1)}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"state": "failed", "reason": last, "log": done.stderr[-3000:], **seconds}
    try:
        return {**json.loads(lines[-1]), **seconds}
    except ValueError:
        return {"state": "failed", "reason": f"no report: {lines[-1][:200]}", **seconds}


def show(name: str, part: dict[str, Any]) -> None:
    figures = {k: v for k, v in part.items() if k not in ("state", "log", "machine")}
    print(f"{part['state']:8} {name:8} {json.dumps(figures)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
