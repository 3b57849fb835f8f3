# SPDX-License-Identifier: Apache-2.0
"""Reduced draft vocabularies: drafts are target tokens, and q is zero exactly where nothing is drafted.
The bundle here also has windows in both models and a target with experts.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark_trt.bundle import Bundle
from dspark_trt.checkpoint import read_draft, read_target
from dspark_trt.config import DraftConfig
from dspark_trt.export.bundle_from_checkpoints import export_bundle
from dspark_trt.models.loading import load_drafter
from dspark_trt.models.vocabulary import UNDRAFTABLE
from dspark_trt.plugins.specification import verify_rejection
from tests.checkpoints import Dims, write_draft, write_target
from tests.export.draft_reference import (
    ANCHORS,
    SIZES,
    Reference,
    all_taps,
    doubles,
    prepared,
)
from tests.export.test_rtx_parse import check

DRAFTED = (0, 2, 3, 5, 17, 100, 101, 200, 250, 318)
MISSING = [token for token in range(SIZES.vocab) if token not in DRAFTED]
HOW: dict[str, Any] = {"layout": "speculators", "layers": 2, "gamma": 4, "rank": 8}


@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
def test_a_reduced_drafter_is_the_full_one_without_the_other_tokens(
    tmp_path: Path, head: str
) -> None:
    """Anchors outside the draft vocabulary included: W1 reads the target's tokens."""
    draft = read_draft(
        write_draft(tmp_path / "d", head=head, confidence="hidden", drafted=DRAFTED, **HOW)
    )
    module = load_drafter(draft)
    reference = Reference(doubles(head, "hidden"), SIZES, slots=4)
    taps = all_taps()
    with torch.inference_mode():
        tokens, logits, scores, *_ = module(*prepared(module, taps))
    assert tokens.shape == (3, 4)
    assert logits.shape == (3, 4, SIZES.vocab)
    assert (logits[..., MISSING] == UNDRAFTABLE).all()
    q = torch.softmax(logits.double() / 0.7, -1)
    assert (q[..., MISSING] == 0).all()
    torch.testing.assert_close(q.sum(-1), torch.ones(3, 4, dtype=torch.float64))
    for request, (rows, anchor) in enumerate(zip(taps, ANCHORS, strict=True)):
        hidden = reference.hidden(rows.astype(np.float64), anchor)
        drafted, expected, _ = reference.draft(hidden, anchor, head, "hidden", DRAFTED)
        assert tokens[request].tolist() == drafted
        kept = list(DRAFTED)
        np.testing.assert_allclose(logits[request][:, kept], expected[:, kept], atol=2e-5)
    assert torch.isfinite(scores).all()


def test_config_survives_json(tmp_path: Path) -> None:
    config = read_draft(write_draft(tmp_path / "d", drafted=DRAFTED, **HOW)).config
    assert config.draft_vocab_size == len(DRAFTED)
    assert DraftConfig.from_json(config.to_json()) == config


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("reduced")
    how = HOW | {"layers": 1, "head": "rnn", "gamma": 2, "target_layers": 2}
    windows = {"layer_types": ["sliding_attention"], "sliding_window": 4}
    inner = {"transformer_layer_config": Dims(layers=1).decoder_json() | windows}
    draft = write_draft(
        folder / "draft", drafted=DRAFTED, config=inner, target_layer_ids=(0,), **how
    )
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    target = write_target(folder / "target", family="qwen3_moe", layers=2, config=windows)
    return export_bundle(
        read_draft(draft), read_target(target), folder / "bundle", dtype="float16"
    )


@pytest.mark.trt
def test_tensorrt_parses_windows_experts_and_the_map(reduced: Bundle) -> None:
    for graph in ("context", "draft", "backbone", "sequential_head", "target"):
        check(reduced, graph)


def test_graphs_equal_the_modules(reduced: Bundle) -> None:
    from dspark_trt.export.parity import check_parity

    results = list(check_parity(reduced))
    assert {result.name for result in results} >= {"draft", "backbone", "sequential_head"}
    assert [result for result in results if not result.passed] == []
    assert all(result.tolerance < 1 for result in results)


def test_output_is_distributed_as_the_target_alone(reduced: Bundle) -> None:
    """Draws of the exported drafter, verified against a target that prefers tokens it cannot draft."""
    from dspark_trt.runtime.session import DraftSession

    rounds, heat = 4000, 1.0
    random = np.random.default_rng(3)
    vocab = reduced.draft.decoder.vocab_size
    target = np.full((3, vocab), -1e30, np.float32)
    # Half of the target's weight is on tokens that are never drafted.
    support = [2, 4, 17, 19, 100, 250]
    target[:, support] = random.standard_normal((3, len(support)), np.float32)
    p = np.exp(target[0, support] - target[0, support].max())
    p /= p.sum()
    taps = random.standard_normal((3, reduced.draft.tap_size), np.float32)
    with DraftSession.load(reduced, slots=1) as session:
        session.append(0, taps, start=0)
        uniforms = random.random((rounds, 1, reduced.draft.gamma), np.float32)
        proposals = [session.propose([0], [4], heat, uniforms=u) for u in uniforms]
    tokens = np.concatenate([proposal.tokens for proposal in proposals])
    logits = np.concatenate([proposal.logits for proposal in proposals])
    assert set(np.unique(tokens)) <= set(DRAFTED)
    verified = verify_rejection(
        target_logits=np.tile(target, (rounds, 1)),
        offsets=np.arange(rounds + 1, dtype=np.int64) * 3,
        draft_tokens=tokens,
        draft_logits=logits,
        draft_temperature=np.full(rounds, heat, np.float32),
        temperature=np.full(rounds, heat, np.float32),
        top_k=np.zeros(rounds, np.int64),
        top_p=np.ones(rounds, np.float32),
        min_p=np.zeros(rounds, np.float32),
        uniforms=random.random((rounds, 3), np.float32),
    )
    first = verified.tokens[:, 0]
    counts = np.array([(first == token).sum() for token in support])
    assert counts.sum() == rounds
    error = np.sqrt(p * (1 - p) * rounds)
    assert (np.abs(counts - p * rounds) < 4.5 * error).all(), (counts, p * rounds)
    assert 0 < (verified.accepted > 0).mean() < 1
