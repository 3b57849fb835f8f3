# SPDX-License-Identifier: Apache-2.0
"""A drafter of random weights: useless, and harmless to the text."""

from pathlib import Path

import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.checkpoint import read_draft, read_target
from dspark_trt.export.bundle_from_checkpoints import export_bundle
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from tests.checkpoints import write_draft
from tests.conftest import TINY_TARGET
from tests.runtime.golden import golden_json

ITEMS = golden_json("greedy_outputs")["items"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, traced_once: None) -> Bundle:
    """A gated head, which no trained fixture has, in SpecForge's layout: embeddings are the target's."""
    folder = tmp_path_factory.mktemp("random")
    drafter: Path = write_draft(
        folder / "drafter",
        layout="specforge",
        head="gated",
        hidden=128,
        intermediate=96,
        heads=2,
        kv_heads=1,
        head_dim=64,
        vocab=2048,
        target_layers=6,
        target_hidden=128,
        target_layer_ids=(-1, 2, 4),
        max_positions=1024,
        gamma=5,
        mask=3,
    )
    return export_bundle(read_draft(drafter), read_target(TINY_TARGET), folder / "bundle")


def test_greedy_text_is_the_targets_own(bundle: Bundle) -> None:
    engine = Engine.load(bundle, options=EngineOptions(max_batch=8))
    requests = [
        Request(
            prompt_ids=tuple(item["prompt_ids"]),
            params=SamplingParams(max_new_tokens=64, stop_token_ids=(2, 0)),
        )
        for item in ITEMS
    ]
    done = engine.generate(requests)
    assert [list(d.token_ids) for d in done] == [item["output_ids"] for item in ITEMS]
    lengths = [n for d in done for n in d.stats.accepted_lengths]
    assert sum(lengths) / len(lengths) < 1.3  # it really is useless
    assert {n for d in done for n in d.stats.verification_lengths} == {5}
