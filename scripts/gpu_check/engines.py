# SPDX-License-Identifier: Apache-2.0
"""Engines, where a TensorRT is installed: built, run, and held against the torch backend."""

import argparse
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dspark_trt.bundle import load_bundle
from dspark_trt.engine_manifest import MANIFEST
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.backends.interface import (
    Backend,
    DraftInputs,
    DraftModel,
    RunsRounds,
    TargetModel,
)
from dspark_trt.runtime.ragged import ragged_rows
from gpu_check.part import CheckError, Clock, Report
from gpu_check.rounds import greedy_rows, inputs

TOKENS = 32
TOLERANCE = 0.02  # of the largest logit: two float16 implementations


def engines(device: torch.device, options: argparse.Namespace, clock: Clock) -> Report:
    """Engines of a bundle, built here where there are none: logits and drafts held against torch's."""
    if options.bundle is None:
        return {"state": "skipped", "reason": "no --bundle to build engines from"}
    if device.type != "cuda":
        return {"state": "skipped", "reason": "engines run on a GPU"}
    libraries = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
    here = [backend for backend, module in libraries.items() if find_spec(module)]
    if not here:
        return {"state": "skipped", "reason": "neither tensorrt nor tensorrt_rtx is installed"}
    return {backend: compared(backend, options) for backend in here}


def compared(backend: str, options: argparse.Namespace) -> Report:
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
    torch_outputs, engine_outputs = (
        outputs(open_backend(n, bundle)) for n in ("torch", backend)
    )
    errors = {
        name: float(np.abs(engine_outputs[name] - own).max() / np.abs(own).max())
        for name, own in torch_outputs.items()
        if name.endswith("logits")
    }
    if not max(errors.values()) < TOLERANCE:
        raise CheckError(f"{backend}: logits differ from torch's by {errors} of their size")
    tokens = {
        name: torch_outputs[name].size for name in ("draft tokens", "round tokens")
    }  # two float16 implementations part ways at a near tie
    equal = {name: common(torch_outputs[name], engine_outputs[name]) for name in tokens}
    if not min(equal.values()):
        raise CheckError(f"{backend}: its first token is another than torch's: {equal}")
    return {
        "built_s": built_s,
        "errors": errors,
        "equal_tokens": {name: f"{equal[name]} of {count}" for name, count in tokens.items()},
    }


def common(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Tokens before the first that differs."""
    return int(np.equal(one, other).cumprod().sum())


def outputs(backend: Backend) -> dict[str, NDArray[Any]]:
    """What one request gets: a prompt, a block verified behind it, drafts behind its context."""
    config, random = backend.bundle.draft, np.random.default_rng(0)
    target, drafter = backend.target_model(1), backend.draft_model(1)
    tokens = random.integers(0, config.decoder.vocab_size, 20 + config.gamma + 1)
    found, everything = {}, np.ones(1, np.bool_)
    step = target.step(ragged_rows([tokens[:20]], np.array([0]), everything))
    found["prompt logits"] = np.array(step.logits)
    drafter.append(0, step.taps, 0)
    block = target.step(ragged_rows([tokens[20:]], np.array([20]), everything))
    found["verify logits"] = np.array(block.logits)
    drafted = drafter.draft(
        DraftInputs(
            anchor_ids=tokens[20:21],
            new_taps=np.zeros((1, config.gamma + 1, config.tap_size), np.float32),
            new_len=np.zeros(1, np.int64),
            context_len=np.array([20]),
            temperature=np.zeros(1, np.float32),
            uniforms=np.zeros((1, config.gamma), np.float32),
        )
    )
    found["draft logits"] = np.array(drafted.logits)[:, 0]  # behind it, they follow the tokens
    found["draft tokens"] = np.array(drafted.tokens[0])
    found["round tokens"] = rounds(backend, target, drafter, tokens[:20])
    target.close()
    drafter.close()
    return found


def rounds(
    backend: Backend, target: TargetModel, drafter: DraftModel, prompt: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Greedy tokens of one request in rounds that are launched as a whole."""
    assert isinstance(backend, RunsRounds)
    gamma = backend.bundle.draft.gamma
    step = target.step(ragged_rows([prompt], np.array([0]), np.zeros(1, np.bool_)))
    drafter.append(0, step.taps, 0)
    first = int(np.asarray(step.logits)[0].argmax())
    device_rounds, made = backend.rounds(1), [first]
    device_rounds.take(greedy_rows(backend.bundle.draft, [first], [len(prompt)]))
    while len(made) < TOKENS:
        committed = device_rounds.launch(inputs(1, gamma, gamma)).read()
        made += committed.tokens[0, : committed.accepted[0] + 1].tolist()
    return np.array(made[:TOKENS])
