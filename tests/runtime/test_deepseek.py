# SPDX-License-Identifier: Apache-2.0
"""A DeepSeek-V4 drafter as graphs and in the engine: parity with its module, rounds of a loop in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_trt.bundle import Bundle
from dspark_trt.checkpoint import TargetCheckpoint, read_draft
from dspark_trt.export.bundle_from_checkpoints import export_bundle
from dspark_trt.export.parity import check_parity
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from tests.bigram import bigram_target, successors
from tests.checkpoints import Weights, edit_tensors
from tests.checkpoints_deepseek import (
    StageDims,
    deepseek_weights,
    write_deepseek_draft,
)
from tests.export.deepseek_reference import Reference
from tests.export.draft_reference import Doubles

pytestmark = pytest.mark.slow  # the export

# One stage: tracing costs by the number of operators.
SIZES = StageDims(stages=1, sinkhorn=2, rank=320)
PROMPTS = ((5, 17, 200, 3), tuple(range(40, 60)))
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepseek")


@pytest.fixture(scope="module")
def target(folder: Path) -> TargetCheckpoint:
    return bigram_target(folder / "target")


@pytest.fixture(scope="module")
def bundle(folder: Path, target: TargetCheckpoint) -> Bundle:
    """A drafter whose head knows the target's bigrams, but not so well that the context is drowned."""
    path = write_deepseek_draft(
        folder / "draft", stages=SIZES.stages, sinkhorn=SIZES.sinkhorn, rank=SIZES.rank
    )
    follows = successors(target)
    edit_tensors(path, lambda weights: weights.update(bigram_head(follows)))
    return export_bundle(read_draft(path), target, folder / "bundle")


def bigram_head(follows: list[int]) -> Weights:
    table = torch.zeros(SIZES.vocab, SIZES.rank)
    table[follows, range(SIZES.vocab)] = 3.0
    stem = f"mtp.{SIZES.stages - 1}.markov_head."
    return {
        stem + "markov_w1.weight": torch.eye(SIZES.vocab),
        stem + "markov_w2.weight": table,
    }


def test_graphs_equal_the_modules(bundle: Bundle) -> None:
    results: list[Any] = list(check_parity(bundle))
    assert {result.name for result in results} >= {
        "context", "draft", "draft_greedy", "backbone", "sequential_head", "confidence_head",
    }  # fmt: skip
    assert [result for result in results if not result.passed] == []


def loop(
    reference: Reference, embedding: Doubles, follows: list[int], prompt: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Tokens after the prompt and tokens committed a round, by the textbook."""
    tokens = [*prompt, follows[prompt[-1]]]
    lengths = []
    while len(tokens) - len(prompt) < NEW_TOKENS:
        taps = np.concatenate([embedding[tokens[:-1]]] * len(SIZES.target_layer_ids), 1)
        drafts, _, _ = reference.draft(taps, tokens[-1])
        committed = 0
        while committed < SIZES.gamma and drafts[committed] == follows[tokens[-1]]:
            tokens.append(drafts[committed])
            committed += 1
        tokens.append(follows[tokens[-1]])
        lengths.append(committed + 1)
    return tokens[len(prompt) :][:NEW_TOKENS], lengths


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_rounds_are_those_of_a_loop_in_float64(
    bundle: Bundle, target: TargetCheckpoint, backend: str
) -> None:
    follows = successors(target)
    weights = deepseek_weights(SIZES) | bigram_head(follows)
    reference = Reference(
        {name: tensor.double().numpy() for name, tensor in weights.items()}, SIZES, limit=0.75
    )
    embedding = target.tensors["embed_tokens.weight"].load().double().numpy()
    params = SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=())
    requests = [Request(prompt_ids=prompt, params=params) for prompt in PROMPTS]
    with Engine.load(
        bundle,
        backend=backend,
        options=EngineOptions(max_batch=2),
        scheduler=f"fixed:{SIZES.gamma}",
    ) as engine:
        answers = engine.generate(requests)
    seen = set()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens, lengths = loop(reference, embedding, follows, prompt)
        assert list(answer.token_ids) == tokens
        ours = list(answer.stats.accepted_lengths)
        assert ours[:-1] == lengths[: len(ours) - 1]
        seen |= set(ours[:-1])
    assert len(seen) > 2  # neither all nor none: the context decides
