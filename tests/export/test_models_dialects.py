# SPDX-License-Identifier: Apache-2.0
"""One drafter in every dialect gives one proposal; toys whose right answer is known show a shifted slot
or a shifted layer.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_trt.checkpoint import DraftOverrides, read_draft, read_target
from dspark_trt.checkpoint.convert import convert_draft
from dspark_trt.config import SlotSemantics
from dspark_trt.models.loading import load_drafter, load_target
from tests.checkpoints import LAYOUTS, Weights, edit_tensors, write_draft, write_target
from tests.export.draft_reference import ANCHORS, all_taps, prepared
from tests.export.toys import empty_caches, make_sums_visible, ragged_inputs

DSPARK_LAYOUTS = [layout for layout in LAYOUTS if layout != "zlab-dflash"]
SUCCESSOR_OF_ANCHOR, OF_A_MASK, ANCHOR, MASK = 7, 11, 5, 319


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_the_same_weights_give_identical_proposals(tmp_path: Path, head: str) -> None:
    """Written by the toy writers and by `convert`, whose output the readers read again."""
    target = write_target(tmp_path / "target", tied=False)
    served = read_target(target)
    sizes: dict[str, Any] = {"layers": 2, "gamma": 4, "rank": 8, "head": head}
    first = read_draft(write_draft(tmp_path / "first", target=target, **sizes))
    drafters = [
        read_draft(write_draft(tmp_path / layout, layout=layout, target=target, **sizes))
        for layout in DSPARK_LAYOUTS
    ]
    drafters += [
        convert_draft(first, tmp_path / f"to-{to}", to=to, target=served)
        for to in ("speculators", "specforge", "model-optimizer")
    ]
    expected = None
    for draft in drafters:
        module = load_drafter(draft, served)
        with torch.inference_mode():
            tokens, logits, scores, *_ = module(*prepared(module, all_taps()))
        if expected is None:
            expected = tokens, logits, scores
        for ours, theirs in zip((tokens, logits, scores), expected, strict=True):
            assert torch.equal(ours, theirs), draft.format


def show_slots(weights: Weights) -> None:
    """Layers add nothing; the head answers an anchor's slot with one token, a mask's with another."""
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) or "markov" in name:
            tensor.zero_()
    embedding, head = weights["embed_tokens.weight"], weights["lm_head.weight"]
    head.zero_()
    weights["norm.weight"].fill_(1)
    head[SUCCESSOR_OF_ANCHOR] = embedding[ANCHOR]
    head[OF_A_MASK] = embedding[MASK]


@pytest.mark.parametrize(
    ("layout", "in_place", "slot_semantics"),
    [
        ("deepspec", False, None),
        ("speculators", False, None),
        ("speculators", True, None),
        ("speculators", True, SlotSemantics.ANCHOR_FIRST),  # misread on purpose
        ("speculators", False, SlotSemantics.IN_PLACE),
    ],
)
def test_a_shifted_slot_shows(
    tmp_path: Path, layout: str, in_place: bool, slot_semantics: SlotSemantics | None
) -> None:
    """γ slots with the anchor's first, or masks only: sgl-project/sglang#30261."""
    path = write_draft(tmp_path / "draft", layout=layout, in_place=in_place, gamma=5)
    edit_tensors(path, show_slots)
    draft = read_draft(path, overrides=DraftOverrides(slot_semantics=slot_semantics))
    module = load_drafter(draft)
    with torch.inference_mode():
        tokens = module(*prepared(module, all_taps()))[0][ANCHORS.index(ANCHOR)].tolist()
    first = draft.config.slot_semantics is SlotSemantics.ANCHOR_FIRST
    slots = 6 if in_place else 5
    right = [SUCCESSOR_OF_ANCHOR] * first + [OF_A_MASK] * (slots - 1)
    assert tokens == right
    if slot_semantics is not None:  # the mistake changes what is proposed, and its number
        own = read_draft(path).config
        assert own.gamma != draft.config.gamma


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shifted_layer_shows(tmp_path: Path, layout: str) -> None:
    """Layer i of the target adds 2^i: the taps of every dialect's layers 0 and 2 are known sums."""
    served = write_target(tmp_path / "target", family="llama", attention_bias=True, tied=False)
    edit_tensors(served, make_sums_visible)
    draft = read_draft(write_draft(tmp_path / "draft", layout=layout))
    target = load_target(read_target(served), draft.config.target_layer_ids)
    prompt = [3, 14, 15]
    caches = empty_caches(target.config.decoder, 1)
    with torch.inference_mode():
        _, taps, *_ = target(*ragged_inputs([prompt]), *caches)
    embedded = target.embed_tokens.weight[torch.tensor(prompt)]
    assert torch.equal(taps, torch.cat([embedded + 1, embedded + 1 + 2 + 4], -1))
