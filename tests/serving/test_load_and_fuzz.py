# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of the server, short: 64 clients for five seconds, overhead, some hundred generated
requests.
"""

import json
import os
import subprocess
import sys
from typing import Any

from dspark_trt.bundle import Bundle
from tests.conftest import ROOT


def run_benchmark(name: str, bundle: Bundle, *options: str) -> dict[str, Any]:
    command = [sys.executable, f"benchmarks/{name}.py", str(bundle.path), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_sixty_four_streams_without_error_or_starvation(tiny_bundle: Bundle) -> None:
    options = ("--clients", "64", "--seconds", "5", "--tokens", "24")
    report = run_benchmark("serve_load", tiny_bundle, *options)
    assert report["errors"] == []
    assert report["left_behind"] == 0
    assert report["fewest_and_most_requests"][0] >= 1
    assert report["fairness"] > 0.8
    assert report["first_token_ms"]["p50"] <= report["first_token_ms"]["p99"]


def test_overhead_is_measured_beside_the_engine(tiny_bundle: Bundle) -> None:
    """The figures themselves are docs/serving.md's: such short answers on a shared machine say nothing."""
    options = ("--streams", "8", "--tokens", "16", "--repeats", "1", "--threads", "1")
    report = run_benchmark("serve_overhead", tiny_bundle, *options)
    assert (report["streams"], report["tokens"], report["threads"]) == (8, 16, 1)
    assert report["engine_s"] > 0
    assert report["ratios"] == [round(1 + report["overhead"], 3)]


def test_generated_requests_find_nothing(tiny_bundle: Bundle) -> None:
    report = run_benchmark("serve_fuzz", tiny_bundle, "--requests", "240", "--seed", "5")
    assert report["failures"] == []
    assert report["engine_is_empty"]
    statuses = report["statuses"]
    assert sum(statuses.values()) == 240
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert statuses[f"POST {path} 200"] > 5
        assert statuses[f"POST {path} 400"] > 20
    assert not [name for name in statuses if name.rsplit(" ", 1)[1].startswith("5")]
