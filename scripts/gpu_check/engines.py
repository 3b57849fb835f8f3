# SPDX-License-Identifier: Apache-2.0
"""Engines, where a TensorRT is installed: built, run, and their tokens compared."""

import argparse
import subprocess
import sys
import time
from importlib.util import find_spec

import torch

from dspark_trt.bundle import load_bundle
from dspark_trt.engine_manifest import MANIFEST
from dspark_trt.runtime.backends import open_backend
from gpu_check.part import CheckError, Clock, Report
from gpu_check.rounds import decode


def engines(device: torch.device, options: argparse.Namespace, clock: Clock) -> Report:
    """Engines of a bundle, built here and run in device rounds: tokens compared with the torch backend's."""
    if options.bundle is None:
        return {"state": "skipped", "reason": "no --bundle to build engines from"}
    if device.type != "cuda":
        return {"state": "skipped", "reason": "engines run on a GPU"}
    libraries = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
    here = [backend for backend, module in libraries.items() if find_spec(module)]
    if not here:
        return {"state": "skipped", "reason": "neither tensorrt nor tensorrt_rtx is installed"}
    return {backend: engine_tokens(backend, options, clock) for backend in here}


def engine_tokens(backend: str, options: argparse.Namespace, clock: Clock) -> Report:
    bundle = load_bundle(options.bundle)
    started = time.monotonic()
    if not list(bundle.path.glob(f"engines/{backend}-*/{MANIFEST}")):
        command = [sys.executable, "-m", "dspark_trt", "build", str(bundle.path)]
        done = subprocess.run(
            [*command, "--backend", backend], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CheckError(f"{backend}: building failed: {done.stderr.strip()[-400:]}")
    built_s = round(time.monotonic() - started, 1)
    prompts = [(1, *range(20, 29 + r)) for r in range(3)]
    made = {}
    for name in ("torch", backend):
        opened = open_backend(name, bundle)
        target = opened.target_model(1)
        made[name] = [decode(target, prompt, 24) for prompt in prompts]
        target.close()
    same = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        for one, other in zip(made["torch"], made[backend], strict=True)
    ]
    if min(same) < 8:
        raise CheckError(f"{backend}: tokens differ from torch's after {same} tokens")
    return {"built_s": built_s, "equal_tokens": same, "of": 24, "left": clock.has()}
