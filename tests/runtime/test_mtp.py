# SPDX-License-Identifier: Apache-2.0
"""MTP-1 in the engine and in `compare`: rounds of a loop in float64, and output that is the target's."""

from typing import Any

import numpy as np
import pytest
import torch

from dspark_trt.bundle import Bundle
from dspark_trt.checkpoint import TargetCheckpoint, read_draft
from dspark_trt.config import FINAL_NORM
from dspark_trt.errors import CheckpointError
from dspark_trt.export.bundle_from_checkpoints import export_bundle
from dspark_trt.export.parity import check_parity
from dspark_trt.runtime.comparison import ComparisonPlan, compare_drafters
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.session import DraftSession
from dspark_trt.runtime.targets.host import HostTargetModel
from dspark_trt.runtime.trace_collection import Prompt
from tests.bigram import bigram_target, successors
from tests.checkpoints import Weights, edit_tensors
from tests.checkpoints_mtp import MtpDims, mtp_weights, write_mtp
from tests.export.draft_reference import Doubles, rms
from tests.export.mtp_reference import MtpReference

pytestmark = pytest.mark.slow  # the export

SIZES = MtpDims(experts=4, groups=2, groups_taken=1, per_token=2)
PROMPTS = ((5, 17, 200, 3), tuple(range(40, 60)))
NEW_TOKENS = 30


def knowing(weights: Weights) -> Weights:
    """The embedding of the last token reaches the head, disturbed by everything else in the layer."""
    eye = torch.eye(SIZES.hidden)
    return weights | {
        "eh_proj.weight": torch.cat(
            (2.5 * eye, weights["eh_proj.weight"][:, SIZES.hidden :]), 1
        ),
        "enorm.weight": torch.ones(SIZES.hidden),
        "shared_head.norm.weight": torch.ones(SIZES.hidden),
    }


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetCheckpoint:
    return bigram_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def bundle(target: TargetCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("mtp")
    path = write_mtp(
        folder / "draft",
        owns_vocabulary=False,
        experts=4,
        groups=2,
        groups_taken=1,
        per_token=2,
    )
    stem = f"model.layers.{SIZES.target_layers}."

    def teach(stored: Weights) -> None:
        own = knowing(mtp_weights(SIZES))
        stored.update({name: own[name.removeprefix(stem)] for name in stored if stem in name})

    edit_tensors(path, teach)
    return export_bundle(read_draft(path), target, folder / "bundle")


def test_graphs_equal_the_modules(bundle: Bundle) -> None:
    assert not {"backbone", "sequential_head", "confidence_head"} & set(bundle.graph_names)
    results: list[Any] = list(check_parity(bundle))
    assert {result.name for result in results} >= {"context", "draft", "draft_greedy", "target"}
    assert [result for result in results if not result.passed] == []


def doubles(target: TargetCheckpoint) -> dict[str, Doubles]:
    weights = {name: w.double().numpy() for name, w in knowing(mtp_weights(SIZES)).items()}
    served = {name: target.tensors[name].load().double().numpy() for name in target.tensors}
    return weights | {
        "embed_tokens.weight": served["embed_tokens.weight"],
        "shared_head.head.weight": served["lm_head.weight"],
        "target's norm": served["norm.weight"],
    }


def loop(
    target: TargetCheckpoint, prompt: tuple[int, ...], follows: list[int]
) -> tuple[list[int], list[int]]:
    """Tokens after the prompt and tokens committed a round, by the textbook."""
    weights = doubles(target)
    reference = MtpReference(weights, SIZES)
    tokens, lengths = [*prompt, follows[prompt[-1]]], []
    while len(tokens) - len(prompt) < NEW_TOKENS:
        hidden = rms(weights["embed_tokens.weight"][tokens[:-1]], weights["target's norm"])
        drafted = int(reference.logits(hidden, tokens[1:]).argmax())
        accepted = drafted == follows[tokens[-1]]
        for _ in range(1 + accepted):
            tokens.append(follows[tokens[-1]])
        lengths.append(1 + accepted)
    return tokens[len(prompt) :][:NEW_TOKENS], lengths


def assert_rounds_of_the_loop(target: TargetCheckpoint, engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=())
    answers = engine.generate([Request(prompt_ids=prompt, params=params) for prompt in PROMPTS])
    seen = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens, lengths = loop(target, prompt, successors(target))
        assert list(answer.token_ids) == tokens
        ours = list(answer.stats.accepted_lengths)
        assert ours[:-1] == lengths[: len(ours) - 1]
        seen += ours[:-1]
    assert min(seen.count(1), seen.count(2)) > 4  # the context decides


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_rounds_are_those_of_a_loop_in_float64(
    bundle: Bundle, target: TargetCheckpoint, backend: str
) -> None:
    options = EngineOptions(max_batch=2)
    with Engine.load(bundle, backend=backend, options=options, scheduler="fixed:1") as engine:
        assert_rounds_of_the_loop(target, engine)


def test_a_session_proposes_what_the_layer_predicts(
    bundle: Bundle, target: TargetCheckpoint
) -> None:
    weights = doubles(target)
    text = list(range(40, 60))
    hidden = rms(weights["embed_tokens.weight"][text], weights["target's norm"])
    expected = MtpReference(weights, SIZES).logits(hidden, [*text[1:], 7])
    with DraftSession.load(bundle) as session:
        session.append(0, hidden.astype(np.float32), 0, [*text[1:], 7])
        proposal = session.propose([0], [7])
    assert proposal.tokens.tolist() == [[int(expected.argmax())]]
    np.testing.assert_allclose(proposal.logits[0, 0], expected, atol=1e-4)


def test_a_target_of_transformers_gives_its_final_norm(
    bundle: Bundle, target: TargetCheckpoint
) -> None:
    from transformers import AutoModelForCausalLM

    from dspark_trt.runtime.targets.transformers_model import TransformersTarget

    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
    host = HostTargetModel(
        TransformersTarget(model, bundle.draft.target_layer_ids), max_batch=2
    )
    options = EngineOptions(max_batch=2)
    with Engine.load(bundle, options=options, scheduler="fixed:1", target=host) as engine:
        assert_rounds_of_the_loop(target, engine)


def test_a_model_without_a_final_norm_is_refused() -> None:
    from dspark_trt.runtime.targets.transformers_model import TransformersTarget

    class Model(torch.nn.Module):
        layers = torch.nn.ModuleList()

        def get_decoder(self) -> "Model":
            return self

    with pytest.raises(
        CheckpointError, match=r"Model has no final norm .* implement HostTarget"
    ):
        TransformersTarget(Model(), (FINAL_NORM,))


def test_it_is_compared_like_any_drafter(bundle: Bundle) -> None:
    plan = ComparisonPlan(max_new_tokens=16, requests=2, turns=1)
    (result,) = compare_drafters([bundle], [Prompt(ids) for ids in PROMPTS], plan)
    assert result.gamma == 1
    assert 1 < result.accepted_length < 2
    assert len(result.conditional_acceptance) == 1
