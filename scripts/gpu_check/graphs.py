# SPDX-License-Identifier: Apache-2.0
"""Captured graphs against eager steps, bit for bit."""

import argparse
from typing import Any

import numpy as np
import torch

from dspark_trt.runtime.backends.interface import DraftInputs
from dspark_trt.runtime.ragged import RaggedRows, ragged_rows
from gpu_check.models import Models, Pair, open_models, toy_pair
from gpu_check.part import CheckError, Clock, Report


class Simulated:
    """The same requests on two sets of models; every output has to be equal bit for bit."""

    def __init__(self, pair: Pair, one: Models, other: Models, requests: int) -> None:
        self._pair, self._both = pair, (one, other)
        self._context = np.zeros(requests, np.int64)
        self.compared = 0

    def round(self, random: np.random.Generator, batch: int) -> None:
        """Draft and target of the first `batch` requests, with rows and taps of unequal number."""
        gamma = self._pair.draft.gamma
        self._begin_or_replace(random, batch)
        lengths = random.integers(1, gamma + 2, batch)
        context = self._context[:batch].copy()
        new_len = np.minimum(random.integers(0, gamma + 2, batch), context)
        inputs = DraftInputs(
            anchor_ids=random.integers(0, self._vocab, batch),
            new_taps=random.normal(0, 1, (batch, gamma + 1, self._pair.draft.tap_size)).astype(
                np.float32
            ),
            new_len=new_len,
            context_len=context - new_len,
            temperature=random.choice([0.0, 0.8], batch).astype(np.float32),
            uniforms=random.random((batch, gamma), np.float32),
        )
        rows = self._rows(random, lengths, context)
        outputs = []
        for models in self._both:
            drafted = models.draft.draft(inputs)
            found = [drafted.tokens.copy(), drafted.logits.copy()]
            target = models.target.step(rows)
            outputs.append([*found, np.array(target.logits), np.array(target.taps)])
        for name, one, other in zip(
            ("tokens", "draft logits", "logits", "taps"), *outputs, strict=True
        ):
            if one.tobytes() != other.tobytes():
                raise CheckError(
                    f"{name} of {batch} requests with {lengths.tolist()} rows differ from the eager step"
                )
        self._context[:batch] += random.integers(1, lengths + 1)
        self.compared += 1

    @property
    def _vocab(self) -> int:
        return self._pair.target.decoder.vocab_size

    def _rows(self, random: np.random.Generator, lengths: Any, context: Any) -> RaggedRows:
        tokens = [random.integers(0, self._vocab, n) for n in lengths]
        return ragged_rows(tokens, context, np.ones(len(lengths), np.bool_))

    def _begin_or_replace(self, random: np.random.Generator, batch: int) -> None:
        """Slots are reused: a new prompt where a request is long enough, or none has begun."""
        limit = self._pair.target.decoder.max_positions // 4
        for row in range(batch):
            if 0 < self._context[row] < limit and random.random() > 0.05:
                continue
            length = int(random.integers(2, 20))
            taps = random.normal(0, 1, (length, self._pair.draft.tap_size)).astype(np.float32)
            lengths, context = np.ones(row + 1, np.int64), self._context[: row + 1].copy()
            lengths[row], context[row] = (
                length,
                0,
            )  # the others write a row that they never commit
            rows = self._rows(random, lengths, context)
            for models in self._both:
                models.draft.append(row, taps, 0)
                models.target.step(rows)
            self._context[row] = length
        if batch > 1 and random.random() < 0.2:
            first, second = random.choice(batch, 2, replace=False)
            for models in self._both:
                models.draft.swap_rows(first, second)
                models.target.swap_rows(first, second)
            self._context[[first, second]] = self._context[[second, first]]


def graphs(device: torch.device, options: argparse.Namespace, clock: Clock) -> Report:
    """Replays against eager steps, bit for bit, over ragged batches and reused slots."""
    pair, requests = toy_pair(device, options), 3 if options.small else 8
    random = np.random.default_rng(1)
    captured = open_models(pair, device, requests=requests, max_graphs=64)
    eager = open_models(pair, device, requests=requests, max_graphs=0)
    simulated = Simulated(pair, captured, eager, requests)
    for i in clock.rounds(3 if options.small else 300):
        simulated.round(random, 1 + i % requests)
    return {"rounds": simulated.compared, **graph_report(device, captured)}


def shapes(device: torch.device, options: argparse.Namespace, clock: Clock) -> Report:
    """A thousand steps, no two in a row of one batch; then some with room for three graphs only."""
    pair, requests = toy_pair(device, options), 3 if options.small else 8
    found: Report = {}
    for name, max_graphs, steps in (("many graphs", 64, 1000), ("three graphs", 3, 60)):
        captured = open_models(pair, device, requests=requests, max_graphs=max_graphs)
        eager = open_models(pair, device, requests=requests, max_graphs=0)
        for models in (
            captured,
            eager,
        ):  # a growing cache drops all graphs: not what is checked here
            models.draft.reserve(pair.target.decoder.max_positions // 2)
            models.target.reserve(pair.target.decoder.max_positions // 2)
        simulated, random = Simulated(pair, captured, eager, requests), np.random.default_rng(2)
        batch, allocated = 1, list[int]()
        for _ in clock.rounds(
            2 if options.small else steps // 2
        ):  # a draft and a target step each
            batch = int(random.choice([b for b in range(1, requests + 1) if b != batch]))
            simulated.round(random, batch)
            if device.type == "cuda":
                allocated.append(torch.cuda.memory_allocated(device))
        found[name] = {"steps": 2 * simulated.compared, **graph_report(device, captured)}
        if allocated:
            middle = len(allocated) // 2
            growth = max(allocated[middle:]) - max(allocated[: max(middle, 1)])
            found[name]["memory_growth_bytes"] = growth
    return found


def graph_report(device: torch.device, models: Models) -> Report:
    both = (models.draft.graphs, models.target.graphs)
    refused = [g.refusal for g in both if g.refusal is not None]
    if refused:
        raise CheckError(f"graphs were refused: {refused[0]}")
    if device.type == "cuda" and not all(g.replayed for g in both):
        raise CheckError("no graph was replayed")
    return {
        "captured": sum(g.captured for g in both),
        "replayed": sum(g.replayed for g in both),
    }
