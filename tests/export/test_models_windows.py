# SPDX-License-Identifier: Apache-2.0
"""Sliding windows of drafters, in every spelling, against float64 NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dspark_trt.checkpoint import read_draft
from dspark_trt.config import WindowRule
from dspark_trt.models.loading import load_drafter
from tests.checkpoints import Dims, write_draft
from tests.export.draft_reference import (
    ANCHORS,
    SIZES,
    Reference,
    all_taps,
    doubles,
    prepared,
)

WINDOW = 3  # shorter than contexts and block


def around_each_slot(rows: int, slots: int) -> NDArray[np.bool_]:
    columns, own = np.arange(rows + slots), rows + np.arange(slots)[:, None]
    return np.abs(columns - own) < WINDOW


def before_the_anchor(rows: int, slots: int) -> NDArray[np.bool_]:
    visible = np.ones((slots, rows + slots), np.bool_)
    visible[:, : max(rows - WINDOW, 0)] = False
    return visible


def before_the_anchor_causal(rows: int, slots: int) -> NDArray[np.bool_]:
    columns, own = np.arange(rows + slots), rows + np.arange(slots)[:, None]
    return before_the_anchor(rows, slots) & (columns <= own)


SEES = {
    WindowRule.SLOT: around_each_slot,
    WindowRule.ANCHOR: before_the_anchor,
    WindowRule.ANCHOR_CAUSAL: before_the_anchor_causal,
}
MIXED = ["full_attention", "sliding_attention"]


def inner(**changes: Any) -> dict[str, Any]:
    sizes = Dims(layers=SIZES.layers, gamma=SIZES.gamma, rank=SIZES.rank)
    return {"transformer_layer_config": sizes.decoder_json() | changes}


CASES: dict[str, tuple[str, dict[str, Any], WindowRule, tuple[int, ...]]] = {
    "deepspec": ("deepspec", {"layer_types": MIXED, "sliding_window": WINDOW}, WindowRule.SLOT, (1,)),
    "use_swa": (
        "deepspec", {"dflash_config": {"use_swa": True, "swa_window_size": WINDOW}},
        WindowRule.SLOT, (0, 1),
    ),
    "speculators": (
        "speculators", inner(layer_types=MIXED, sliding_window=WINDOW), WindowRule.ANCHOR_CAUSAL, (1,),
    ),
    "speculators-non-causal": (
        "speculators",
        inner(layer_types=MIXED, sliding_window=WINDOW) | {"sliding_window_non_causal": True},
        WindowRule.ANCHOR, (1,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_windows_equal_float64(tmp_path: Path, case: str) -> None:
    layout, config, rule, layers = CASES[case]
    draft = read_draft(
        write_draft(tmp_path / "draft", layout=layout, layers=2, gamma=4, rank=8, config=config)
    )
    assert draft.config.window_rule is rule
    expected = tuple(WINDOW if layer in layers else None for layer in range(SIZES.layers))
    assert draft.config.decoder.windows == expected
    module = load_drafter(draft)
    weights = doubles("vanilla", "hidden+markov")
    reference = Reference(weights, SIZES, 4, dict.fromkeys(layers, SEES[rule]))
    blind = Reference(weights, SIZES, 4)
    taps = all_taps()
    with torch.inference_mode():
        tokens, logits, *_ = module(*prepared(module, taps))
    for request, (rows, anchor) in enumerate(zip(taps, ANCHORS, strict=True)):
        hidden = reference.hidden(rows.astype(np.float64), anchor)
        drafted, scores, _ = reference.draft(hidden, anchor, "vanilla", "hidden+markov")
        assert tokens[request].tolist() == drafted
        np.testing.assert_allclose(logits[request], scores, atol=2e-5)
        if len(rows) > WINDOW:  # a window that is not there must show
            plain = blind.hidden(rows.astype(np.float64), anchor)
            assert np.abs(plain - hidden).max() > 1e-2
