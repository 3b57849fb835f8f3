# SPDX-License-Identifier: Apache-2.0
"""Rounds on the device: what they commit, and what launching one costs the host."""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from dspark_trt.config import DraftConfig
from dspark_trt.runtime.backends.interface import (
    Committed,
    DecodingRows,
    RoundInputs,
    TargetModel,
)
from dspark_trt.runtime.backends.torch_rounds import TorchRounds
from dspark_trt.runtime.ragged import ragged_rows
from gpu_check.models import Models, Pair, open_models, toy_pair
from gpu_check.part import CheckError, Clock, Report, synchronise


def rounds(device: torch.device, options: argparse.Namespace, clock: Clock) -> Report:
    """Greedy device rounds commit what one row at a time decides; what launching a round costs the host."""
    pair = toy_pair(device, options, "float32")
    requests, tokens = 2 if options.small else 4, 6 if options.small else 64
    prompts = [tuple(range(3 + r, 12 + 2 * r)) for r in range(requests)]
    models = open_models(pair, device, requests=requests, max_graphs=16)
    device_rounds, outputs = begin(pair, models, prompts)
    gamma, way = pair.draft.gamma, None
    for i in range(tokens):
        launched = device_rounds.launch(inputs(requests, gamma, (i % 3) * gamma))
        if way is not None:
            take(way.read(), outputs)  # one round late, while the next one runs
        way = launched
    assert way is not None
    take(way.read(), outputs)
    alone = open_models(pair, device, requests=1, max_graphs=16)
    for prompt, own in zip(prompts, outputs, strict=True):
        expected = decode(alone.target, prompt, min(len(own), tokens))
        if own[: len(expected)] != expected:
            raise CheckError(f"a round committed {own[: len(expected)]}, alone {expected}")
    refusals = [device_rounds.draft_graphs.refusal, device_rounds.round_graphs.refusal]
    if any(refusals):
        raise CheckError(f"graphs were refused: {refusals}")
    launch_us, round_us = [], []
    every_draft = inputs(requests, gamma, requests * gamma)
    for _ in clock.rounds(3 if options.small else 200):
        synchronise(device)
        start = time.perf_counter()
        with never_waiting(device):
            launched = device_rounds.launch(every_draft)
        launch_us.append(1e6 * (time.perf_counter() - start))
        launched.read()
        round_us.append(1e6 * (time.perf_counter() - start))
    return {
        "tokens": sum(map(len, outputs)),
        "launch_us": round(statistics.median(launch_us), 1),
        "launch_target_us": 50,
        "round_us": round(statistics.median(round_us), 1),
    }


def begin(
    pair: Pair, models: Models, prompts: list[tuple[int, ...]]
) -> tuple[TorchRounds, list[list[int]]]:
    requests = len(prompts)
    rows = ragged_rows(prompts, np.zeros(requests, np.int64), np.zeros(requests, np.bool_))
    output = models.target.step(rows)
    first = np.asarray(output.logits).argmax(1).tolist()
    for r in range(requests):
        models.draft.append(r, output.taps[rows.offsets[r] : rows.offsets[r + 1]], 0)
    made = TorchRounds(models.parts, models.parts.module_steps(pair.drafter, pair.served))
    made.take(greedy_rows(pair.draft, first, list(map(len, prompts))))
    return made, [[token] for token in first]


def greedy_rows(config: DraftConfig, anchors: list[int], lengths: list[int]) -> DecodingRows:
    """Requests whose prompts both caches hold."""
    count, cached = len(anchors), np.array(lengths, np.int64)
    zeros = np.zeros(count, np.int64)
    return DecodingRows(
        anchor_ids=np.array(anchors, np.int64),
        new_taps=np.zeros((count, config.gamma + 1, config.tap_size), np.float32),
        new_len=zeros,
        draft_len=cached,
        target_len=cached,
        temperature=np.zeros(count, np.float32),
        top_k=zeros,
        top_p=np.ones(count, np.float32),
        min_p=np.zeros(count, np.float32),
    )


def inputs(requests: int, gamma: int, budget: int) -> RoundInputs:
    return RoundInputs(
        budget=budget,
        limits=np.full(requests, gamma),
        shifts=np.zeros((requests, gamma)),
        draft_uniforms=np.zeros((requests, gamma), np.float32),
        verify_uniforms=np.zeros((requests, gamma + 1), np.float32),
    )


@contextmanager
def never_waiting(device: torch.device) -> Iterator[None]:
    """Any wait for the device in here is an error."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def take(committed: Committed, outputs: list[list[int]]) -> None:
    for row, accepted in enumerate(committed.accepted):
        outputs[row] += committed.tokens[row, : accepted + 1].tolist()


def decode(target: TargetModel, prompt: tuple[int, ...], tokens: int) -> list[int]:
    context, own, made = 0, list(prompt), list[int]()
    for _ in range(tokens):
        step = ragged_rows([own], np.array([context]), np.zeros(1, np.bool_))
        context += len(own)
        own = [int(np.asarray(target.step(step).logits)[0].argmax())]
        made += own
    return made
