# SPDX-License-Identifier: Apache-2.0
"""Thousands of generated requests against a real server: no undocumented answer, no leak.

    python benchmarks/serve_fuzz.py BUNDLE --requests 10000

Schemathesis makes requests from the server's own OpenAPI description, nearly half of them broken on
purpose, and checks every answer: no 5xx, only documented statuses, content types and bodies, broken
requests refused. A server answers any model name but its own with 404, so most valid bodies are given the
name; and few tokens, for speed. Afterwards the engine must be empty and the server's memory must have
stopped growing. The last line is JSON.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi_checks
from served import served

MODEL = "fuzzed"
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
]
GENERATING = ("/v1/completions", "/v1/chat/completions")
_ROUND = 250  # requests an operation gets before the next one's turn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    options = ("--model-name", MODEL, "--no-access-log", "--prefix-cache-mib", "16")
    with served(args.bundle, *options) as (url, pid):
        report = fuzz(url, args.requests, args.seed, pid)
    print(json.dumps(report))
    return 0 if report["is_clean"] else 1


def fuzz(url: str, count: int, first_seed: int, pid: int) -> dict[str, Any]:
    """Send so many requests; most of them to the operations that generate, the only ones with a body to break."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [each.ok() for each in schema.get_all_operations()]
    busy = [each for each in operations if each.path in GENERATING]
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    others = [each for each in operations if each.path not in GENERATING]
    turns = cycle(
        [
            *2 * [(each, mode) for mode in modes for each in busy],
            *((each, GenerationMode.POSITIVE) for each in others),
        ]
    )
    statuses: Counter[str] = Counter()
    session = requests.Session()
    started, resident = time.monotonic(), []
    failures: list[str] = []
    number = 0
    while (sent := statuses.total()) < count:
        size = min(_ROUND, count - sent, max(count // 12, 1))
        try:
            send(*next(turns), size, first_seed + number, session, statuses)
        except Exception as error:  # of any check, or of the connection: the next turn goes on
            failures.append(f"seed {first_seed + number}: {error}"[:3000])
        resident.append(resident_mib(pid))
        number += 1
    empty = is_empty(session, url)
    middle = len(resident) // 2
    growth = resident[-1] - resident[middle]
    return {
        "requests": statuses.total(),
        "statuses": dict(sorted(statuses.items())),
        "seconds": round(time.monotonic() - started, 1),
        "resident_mib": {
            "first": resident[0],
            "middle": resident[middle],
            "last": resident[-1],
        },
        "failures": failures,
        "engine_is_empty": empty,
        "is_clean": empty and not failures and growth < 0.1 * resident[middle],
    }


def send(
    operation: Any,
    mode: GenerationMode,
    size: int,
    number: int,
    session: requests.Session,
    statuses: "Counter[str]",
) -> None:
    """`size` requests of one operation; raises at the first bad answer."""

    @seed(number)
    @settings(
        max_examples=size,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        is_valid = mode is GenerationMode.POSITIVE
        if is_valid and isinstance(case.body, dict) and "model" in case.body:
            direct(case.body, statuses.total())
        answer = case.call(session=session, timeout=60)
        statuses[f"{operation.method.upper()} {operation.path} {answer.status_code}"] += 1
        case.validate_response(answer, checks=CHECKS)

    ask()


def direct(body: dict[str, Any], number: int) -> None:
    """Most valid bodies ask for the model there is, and for answers that do not take long."""
    if number % 8:
        body["model"] = MODEL
        body["max_tokens"] = 1 + number % 6
        body.pop("max_completion_tokens", None)
    if isinstance(body.get("n"), int):
        body["n"] = min(body["n"], 4)


def is_empty(session: requests.Session, url: str) -> bool:
    """Whether nothing runs or waits any more."""
    status = session.get(f"{url}/status", timeout=10).json()
    return (status["active"], status["waiting"], status["generating"]) == (0, 0, 0)


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


if __name__ == "__main__":
    sys.exit(main())
