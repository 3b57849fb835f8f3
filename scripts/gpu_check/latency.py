# SPDX-License-Identifier: Apache-2.0
"""Draft step and verification at the Qwen3-4B drafter's size."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dspark_trt.config import DecoderConfig, DraftConfig, RopeConfig
from dspark_trt.models.drafter import Drafter
from dspark_trt.runtime.backends.interface import DraftInputs
from dspark_trt.runtime.backends.torch_backend import DeviceParts
from gpu_check.models import drafter_config, with_random_weights
from gpu_check.part import CheckError, Clock, Report, synchronise


def latency(device: torch.device, options: argparse.Namespace, clock: Clock) -> Report:
    """Draft step and verification at the Qwen3-4B drafter's size against the time to read weights once."""
    small = options.small
    decoder = DecoderConfig(
        hidden_size=64 if small else 2560, intermediate_size=96 if small else 9728,
        num_layers=1 if small else 5, num_heads=4 if small else 32,
        num_kv_heads=2 if small else 8, head_dim=16 if small else 128,
        vocab_size=97 if small else 151_936, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6),
        max_positions=4096, qk_norm=True,
    )  # fmt: skip
    config = drafter_config(decoder, gamma=2 if small else 7, rank=8 if small else 256, taps=5)
    drafter = with_random_weights(
        lambda: Drafter(config), "float16" if not small else "float32", device
    )
    bandwidth = copy_bandwidth(device, 1 << (20 if small else 30))
    weights = sum(
        p.numel() * p.element_size()
        for n, p in drafter.named_parameters()
        if "embed_tokens" not in n and "markov_w1" not in n
    )  # looked up, not read
    found: Report = {
        "weight_bytes": weights,
        "bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "floor_ms": round(1e3 * weights / bandwidth, 4),
        "draft_target_ratio": 1.35,
    }
    for batch in (1,) if small else (1, 8):
        for temperature in (0.0,) if small else (0.0, 1.0):
            if found.get("draft") and not clock.has(5):
                return found
            drafted, verified = step_times(drafter, config, device, options, batch, temperature)
            name = f"batch {batch}, temperature {temperature:g}"
            ratio = drafted * bandwidth / (1e3 * weights)
            found.setdefault("draft", {})[name] = {"ms": drafted, "ratio": round(ratio, 3)}
            rows = batch * (2 * config.gamma + 1)
            floor = 1e3 * rows * decoder.vocab_size * 4 / bandwidth  # each row of logits once
            found.setdefault("verify", {})[name] = {"ms": verified, "floor_ms": round(floor, 4)}
    return found


def step_times(
    drafter: Drafter,
    config: DraftConfig,
    device: torch.device,
    options: argparse.Namespace,
    batch: int,
    temperature: float,
) -> tuple[float, float]:
    """Milliseconds of a draft step behind 1,000 context rows, and of verifying γ drafts a request."""
    dtype = "float32" if options.small else "float16"
    parts = DeviceParts(
        config, None, dtype=dtype, requests=batch, device=device, max_graphs=4, top_logprobs=1
    )
    steps = parts.module_steps(drafter, None)
    model, verifier = parts.draft_model(steps), parts.verifier(steps)
    context = 20 if options.small else 1000
    model.reserve(context + 8)
    random, gamma = np.random.default_rng(0), config.gamma
    inputs = DraftInputs(
        anchor_ids=random.integers(0, 90, batch),
        new_taps=np.ones((batch, gamma + 1, config.tap_size), np.float32),
        new_len=np.full(batch, 3),
        context_len=np.full(batch, context),
        temperature=np.full(batch, temperature, np.float32),
        uniforms=random.random((batch, gamma), np.float32),
    )
    model.draft(inputs)
    key, buffers = parts.buckets.require(batch, batch), parts.buffers
    drafted = launch_ms(device, lambda: model.graphs.run(key, model.caches.version), options)
    rows = batch * (gamma + 1)
    place = buffers["verify.target_logits"][:rows].view(batch, gamma + 1, -1)
    place[:, :gamma] = buffers["draft.logits"][:batch]  # drafts that are often accepted
    buffers["verify.offsets"][: batch + 1] = torch.arange(0, rows + 1, gamma + 1, device=device)
    buffers["verify.draft_tokens"][:batch] = buffers["draft.tokens"][:batch]
    buffers["verify.temperature"][:batch] = temperature
    buffers["verify.top_p"][:batch] = 1
    verify_key = parts.buckets.require(batch, rows)
    verified = launch_ms(device, lambda: verifier.graphs.run(verify_key), options)
    for each in (model.graphs, verifier.graphs):
        if each.refusal is not None:
            raise CheckError(f"graphs were refused: {each.refusal}")
    model.close()
    return round(drafted, 4), round(verified, 4)


def launch_ms(
    device: torch.device, launch: Callable[[], None], options: argparse.Namespace
) -> float:
    """Median time on the device, between events around single launches."""
    repeats = 2 if options.small else 100
    launch()
    times = list[float]()
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = _event(), _event()
            start.record()
            launch()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begun = time.perf_counter()
            launch()
            times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


def copy_bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes a second of a large copy, read and write counted: what reading weights is held against."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    place = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        synchronise(device)
        start = time.perf_counter()
        place.copy_(source)
        synchronise(device)
        best = max(best, 2 * nbytes / (time.perf_counter() - start))
    return best


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
