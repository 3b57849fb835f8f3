# SPDX-License-Identifier: Apache-2.0
"""Engines of a drafter of the Qwen3-4B drafter's size, built from random weights on this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_a_drafter_of_released_size_builds_in_a_minute_and_three_times_its_weights(
    tmp_path: Path,
) -> None:
    """Processor time, because other tests run beside this one; the build itself uses one thread most of the time."""
    script = ROOT / "benchmarks" / "engine_build.py"
    command = [sys.executable, str(script), "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["weight_bytes"] > 2.7e9
    assert report["cpu_seconds"] <= 60
    assert report["peak_over_weights"] <= 3
    stored = {engine["graph"]: engine["bytes"] for engine in report["engines"]}
    assert stored["draft"] > 0.95 * report["weight_bytes"]
    assert not any(tmp_path.iterdir())
