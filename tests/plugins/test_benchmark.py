# SPDX-License-Identifier: Apache-2.0
"""The benchmark of verification runs, and the ONNX function beats what one writes first in torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def run_benchmark(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "benchmarks/verify.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
def test_twice_as_fast_as_plain_torch_at_a_real_vocabulary() -> None:
    assert run_benchmark("--repeats", "7")["speedup"] >= 2


def test_acceptance_of_both_modes_on_recorded_logits(tmp_path: Path) -> None:
    """Two distributions of which everything is known: p = (3/4, 1/4), q = (1/2, 1/2)."""
    p, q = np.log([[0.75, 0.25]]), np.log([[0.5, 0.5]])
    np.savez(
        tmp_path / "pair.npz", r0_corrected_logits=q, r0_target_logits=np.concatenate([p, p])
    )
    report = run_benchmark("--acceptance", str(tmp_path / "pair.npz"))["pair"]
    coupled = 1 / (1 + 1) + 1 / (3 + 1)  # x = 0: max(1/3, 1) + 1; x = 1: max(3, 1) + 1
    assert report == {
        "pairs": 1,
        "rejection": 0.75,
        "coupled": pytest.approx(coupled, abs=1e-3),
    }
