# SPDX-License-Identifier: Apache-2.0
"""A bench as a document: everything two people need to compare their numbers; JSON, Markdown."""

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from importlib import import_module
from statistics import median
from typing import Any

import numpy as np

from dspark_trt import __version__
from dspark_trt.runtime.backends import Backend
from dspark_trt.runtime.bench import (
    ALL,
    PARTS,
    BenchPlan,
    BenchResult,
    Cell,
    Tally,
    interval_of_mean,
    least_seconds,
)
from dspark_trt.runtime.bench_limits import MachineLimits
from dspark_trt.runtime.bench_models import ON_BACKEND
from dspark_trt.runtime.machine import cost_origin, usable_cpus
from dspark_trt.runtime.trace_collection import Prompt

Report = dict[str, Any]


def bench_report(
    backend: Backend,
    prompts: Sequence[Prompt],
    plan: BenchPlan,
    result: BenchResult,
    limits: MachineLimits | None,
) -> Report:
    """Everything as plain values.

    Args:
        backend: what ran.
        prompts: what was asked.
        plan: what was compared.
        result: what came out.
        limits: of this machine; None where they were not measured (another device than its CPUs).
    """
    bundle = backend.bundle
    origin = cost_origin(backend)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "bundle": {
            "fingerprint": bundle.fingerprint(),
            **bundle.precision,
            "drafter": bundle.draft_source.name,
            "target": bundle.target_source and bundle.target_source.name,
            "gamma": bundle.draft.gamma,
        },
        "machine": origin["machine"],
        "backend": origin["backend"],
        "threads": result.threads,
        "clock": result.clock,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "cpus": usable_cpus(),
        "versions": {
            "dspark-trt": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "tokenizers": import_module("tokenizers").__version__,
        },
        "prompts": {
            "sha256": prompts_hash(prompts),
            "count": {
                domain: sum(p.domain == domain for p in prompts)
                for domain in dict.fromkeys(p.domain for p in prompts)
            },
        },
        "sampling": {
            "temperatures": list(plan.temperatures),
            "top_k": 0, "top_p": 1.0, "min_p": 0.0,
            "seed": plan.seed,
            "max_new_tokens": plan.max_new_tokens,
        },
        "turns": plan.repeats,
        "tokens_a_turn": plan.new_tokens,
        "limits": limits
        and {
            "gigabytes_per_second": limits.bytes_per_second / 1e9,
            "gigaflops": limits.flops / 1e9,
        },
        "notes": sorted({note for own in result.notes.values() for note in own}),
        "cells": [
            _cell(backend, cell, tally, _plain(result, plan, cell), limits)
            for cell, tally in sorted(result.tallies.items(), key=lambda item: _place(plan, item[0]))
        ],
    }  # fmt: skip


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """Short name of a set of prompts, as token ids with their domains."""
    listing = json.dumps([[list(p.token_ids), p.domain] for p in prompts])
    return sha256(listing.encode()).hexdigest()[:16]


def _place(plan: BenchPlan, cell: Cell) -> tuple[int, int, bool, str, int]:
    """Loads in the order asked for, all domains together first."""
    return (
        plan.requests.index(cell.requests),
        plan.temperatures.index(cell.temperature),
        cell.domain != ALL,
        cell.domain,
        plan.schedulers.index(cell.scheduler),
    )


def _plain(result: BenchResult, plan: BenchPlan, cell: Cell) -> Tally:
    return result.tallies[
        Cell(
            scheduler=plan.schedulers[0],
            requests=cell.requests,
            temperature=cell.temperature,
            domain=cell.domain,
        )
    ]


def _cell(
    backend: Backend, cell: Cell, tally: Tally, plain: Tally, limits: MachineLimits | None
) -> Report:
    rounds, speeds = tally.rounds, tally.tokens_per_second
    ratios = [a / b for a, b in zip(speeds, plain.tokens_per_second, strict=True)]
    parts = {part: 1e3 * tally.parts[part] / rounds for part in PARTS}
    whole = sum(parts.values())
    accepted = interval_of_mean(tally.accepted)
    reached, kept = tally.reached.tolist(), tally.kept.tolist()
    report: Report = {
        "scheduler": cell.scheduler,
        "requests": cell.requests,
        "temperature": cell.temperature,
        "domain": cell.domain,
        "tokens_per_second": median(speeds),
        "over_first": median(ratios),
        "over_first_range": [min(ratios), max(ratios)],
        "rounds": rounds,
        "round_ms": whole,
        "parts_ms": parts,
        "host_share": 1 - sum(parts[part] for part in ON_BACKEND) / whole,
        "target_rows": tally.rows / rounds,
        "context_tokens": tally.context / tally.decoding,
        "drafting_share": tally.drafted / tally.decoding,
        "mean_verified": tally.verified / tally.decoding,
        "accepted_length": accepted
        and {
            "mean": accepted[0],
            "low": accepted[1],
            "high": accepted[2],
            "requests": len(tally.accepted),
            "rounds": tally.drafted,
        },
        "position_acceptance": [
            k / r if r else None for k, r in zip(kept, reached, strict=True)
        ],
        "position_reached": reached,
    }
    if limits is not None:
        least = least_seconds(backend, cell, tally, limits)
        report["limit_ms"] = {part: 1e3 * seconds for part, seconds in least.items()}
        report["over_limit"] = {
            part: parts[part] / (1e3 * seconds) if seconds else None
            for part, seconds in least.items()
        }
    return report


def markdown(report: Report) -> str:
    """The tables of a report."""
    bundle, limits = report["bundle"], report["limits"]
    lines = [
        f"# Bench of {bundle['drafter']} with {bundle['target']}",
        "",
        f"{report['date']}, {report['machine']}, {report['backend']}, threads {report['threads']}, "
        f"{report['clock']}; {bundle['dtype']}, weights {bundle['weights']}, drafter's {bundle['draft_weights']}, γ = {bundle['gamma']}, bundle {bundle['fingerprint']}; "
        f"prompts {report['prompts']['sha256']}, sampling {_sampling(report)}; "
        f"{report['turns']} turns, medians.",
        "",
    ]
    if limits:
        lines += [
            f"Limits of this machine: {limits['gigabytes_per_second']:.1f} GB/s, "
            f"{limits['gigaflops']:.1f} GFLOP/s.",
            "",
        ]
    lines += [f"Note: {note}\n" for note in report["notes"]]
    lines += _table(
        (
            "scheduler",
            "requests",
            "T",
            "domain",
            "tokens/s",
            "× first",
            "τ (95 %)",
            "ℓ",
            "host %",
        ),
        [_speed_row(cell) for cell in report["cells"]],
    )
    lines += [
        "",
        "Milliseconds of a round, and how many times the least possible it is (measured ÷ limit):",
        "",
    ]
    whole = [cell for cell in report["cells"] if is_whole(report, cell)]
    lines += _table(
        ("scheduler", "requests", "T", "rows", *PARTS, "draft ÷", "target ÷", "verify ÷"),
        [_part_row(cell) for cell in whole],
    )
    drafted = [cell for cell in whole if cell["accepted_length"]]
    if drafted:
        lines += ["", "Accepted at each position, if reached:", ""]
        positions = [str(k + 1) for k in range(bundle["gamma"])]
        lines += _table(
            ("scheduler", "requests", "T", *positions),
            [
                (
                    cell["scheduler"], cell["requests"], f"{cell['temperature']:g}",
                    *("–" if a is None else f"{a:.2f}" for a in cell["position_acceptance"]),
                )
                for cell in drafted
            ],
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def _sampling(report: Report) -> str:
    sampling = report["sampling"]
    heat = ", ".join(f"{t:g}" for t in sampling["temperatures"])
    return f"T = {heat}, seed {sampling['seed']}, answers of at most {sampling['max_new_tokens']} tokens"


def is_whole(report: Report, cell: Report) -> bool:
    """Whether a cell is about all prompts, not about one of several domains."""
    return len(report["prompts"]["count"]) == 1 or cell["domain"] == "all"


def _speed_row(cell: Report) -> tuple[object, ...]:
    accepted = cell["accepted_length"]
    tau = (
        f"{accepted['mean']:.2f} ({accepted['low']:.2f}–{accepted['high']:.2f})"
        if accepted
        else "–"
    )
    return (
        cell["scheduler"], cell["requests"], f"{cell['temperature']:g}", cell["domain"],
        f"{cell['tokens_per_second']:.0f}", f"{cell['over_first']:.2f}", tau,
        f"{cell['mean_verified']:.2f}", f"{100 * cell['host_share']:.0f}",
    )  # fmt: skip


def _part_row(cell: Report) -> tuple[object, ...]:
    over = cell.get("over_limit", {})
    return (
        cell["scheduler"], cell["requests"], f"{cell['temperature']:g}", f"{cell['target_rows']:.1f}",
        *(f"{cell['parts_ms'][part]:.2f}" for part in PARTS),
        *("–" if over.get(part) is None else f"{over[part]:.1f}" for part in ON_BACKEND),
    )  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [
        "| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)
    ]
