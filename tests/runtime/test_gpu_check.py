# SPDX-License-Identifier: Apache-2.0
"""`scripts/gpu_check.sh`: its whole flow on a CPU, with tiny models and Triton's interpreter."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dspark_trt.bundle import Bundle
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.backends.interface import BackendOptions
from tests.conftest import ROOT
from tests.runtime.test_torch_graph_steps import LaunchingOrt

# What a GPU machine need not have: importing it fails.
BARE = """
import sys
absent = {"jinja2", "prometheus_client", "rich", "tokenizers", "typer", "safetensors", "onnxruntime", "onnx_ir",
          "onnxscript", "transformers", "hypothesis", "ml_dtypes", "pytest", "polygraphy", "huggingface_hub"}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in absent:
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
"""


def run_check(out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    bare = out.parent / "bare"
    bare.mkdir(exist_ok=True)
    (bare / "sitecustomize.py").write_text(BARE)
    done = subprocess.run(
        ["sh", str(ROOT / "scripts" / "gpu_check.sh"), "--small", "--out", str(out), *options],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(bare),
        },
        cwd=out.parent,
        capture_output=True,
        text=True,
        timeout=360,
    )
    assert out.exists(), done.stderr
    return done.returncode, json.loads(out.read_text())


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    """With torch, triton, numpy and onnx alone."""
    code, report = run_check(tmp_path / "report.json", "--device", "cpu")
    states = {name: part["state"] for name, part in report["parts"].items()}
    assert states == {
        "kernels": "passed", "graphs": "passed", "shapes": "passed", "rounds": "passed",
        "latency": "passed", "engines": "skipped",
    }, report  # fmt: skip
    assert code == 0
    parts = report["parts"]
    assert parts["kernels"]["decisions"] >= 4
    assert parts["graphs"]["rounds"] == 3
    assert parts["rounds"]["tokens"] > 8
    assert parts["latency"]["draft"]["batch 1, temperature 0"]["ms"] > 0
    assert parts["kernels"]["machine"]["gpu"] is None
    assert report["seconds"] < 360
    assert {p.name for p in tmp_path.iterdir()} == {"report.json", "bare"}


def test_a_failed_part_stops_no_other_and_counts(tmp_path: Path) -> None:
    """A device that torch refuses outright: one part fails, what was not asked for is skipped."""
    options = ("--device", "nowhere", "--only", "graphs", "--only", "engines")
    code, report = run_check(tmp_path / "report.json", *options)
    parts = report["parts"]
    assert parts["graphs"]["state"] == parts["engines"]["state"] == "failed"
    assert "nowhere" in parts["graphs"]["reason"]
    assert parts["latency"] == {"state": "skipped", "reason": "not asked for"}
    assert code == 2


def test_a_difference_fails_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    models, graphs, part = (
        importlib.import_module(f"gpu_check.{name}") for name in ("models", "graphs", "part")
    )
    device, options = torch.device("cpu"), SimpleNamespace(small=True)
    pair = models.toy_pair(device, options)
    one, other = (models.open_models(pair, device, requests=2, max_graphs=0) for _ in range(2))
    simulated, random = graphs.Simulated(pair, one, other, 2), np.random.default_rng(0)
    for _ in range(4):
        simulated.round(random, 2)
    other.target.caches.tensors[0][0].mul_(1.001)
    with pytest.raises(part.CheckError, match=r"logits of 2 requests with .* rows differ"):
        simulated.round(random, 2)


def test_what_engines_are_held_against(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison itself, with onnxruntime in the place of an engine."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    engines = importlib.import_module("gpu_check.engines")
    options = BackendOptions(device="cpu", threads=1)
    one = engines.outputs(open_backend("torch", tiny_bundle, options))
    other = engines.outputs(LaunchingOrt(tiny_bundle, options))
    assert one.keys() == {
        "prompt logits", "verify logits", "draft logits", "draft tokens", "round tokens",
    }  # fmt: skip
    assert engines.common(one["round tokens"], other["round tokens"]) == engines.TOKENS
    for name, values in one.items():
        np.testing.assert_allclose(values, other[name], atol=1e-3, err_msg=name)


@pytest.mark.gpu
def test_every_part_passes_on_a_gpu(tmp_path: Path) -> None:
    code, report = run_check(tmp_path / "report.json")
    assert code == 0, report
