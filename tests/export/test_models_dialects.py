# SPDX-License-Identifier: Apache-2.0
"""One drafter in every dialect gives one proposal; toys whose right answer is known show a shifted slot
or a shifted layer.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_trt.checkpoint import (
    DraftCheckpoint,
    DraftOverrides,
    TargetCheckpoint,
    read_draft,
    read_target,
)
from dspark_trt.checkpoint.convert import convert_draft
from dspark_trt.config import SlotSemantics
from dspark_trt.models.loading import load_draft, load_drafter, load_target
from tests.checkpoints import (
    EAGLE3_LAYOUTS,
    LAYOUTS,
    Weights,
    edit_tensors,
    write_draft,
    write_eagle3_draft,
    write_gemma_draft,
    write_target,
)
from tests.export.draft_reference import ANCHORS, all_taps, prepared
from tests.export.toys import empty_caches, make_sums_visible, ragged_inputs

DSPARK_LAYOUTS = [layout for layout in LAYOUTS if layout != "zlab-dflash"]
SUCCESSOR_OF_ANCHOR, OF_A_MASK, ANCHOR, MASK = 7, 11, 5, 319


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
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
    check_identical(drafters, served)


def test_the_same_dflash_weights_give_identical_proposals(tmp_path: Path) -> None:
    """In place and without a sequential head, in every dialect that has words for it."""
    target = write_target(tmp_path / "target", tied=False)
    in_place = DraftOverrides(slot_semantics=SlotSemantics.IN_PLACE)
    sizes: dict[str, Any] = {"gamma": 4, "head": "none", "confidence": "none", "target": target}
    drafters = [read_draft(write_draft(tmp_path / "z", layout="zlab-dflash", gamma=4))]
    for layout in ("speculators", "model-optimizer"):
        path = write_draft(tmp_path / layout, layout=layout, in_place=True, **sizes)
        drafters.append(read_draft(path))
    deepspec = write_draft(tmp_path / "deepspec", **sizes | {"gamma": 5})  # of as many slots
    drafters.append(read_draft(deepspec, overrides=in_place))
    check_identical(drafters, read_target(target))


def check_identical(drafters: list[DraftCheckpoint], served: TargetCheckpoint) -> None:
    expected = None
    for draft in drafters:
        module = load_drafter(draft, served)
        with torch.inference_mode():
            outputs = module(*prepared(module, all_taps()))[
                : -2 * draft.config.decoder.num_layers
            ]
        if expected is None:
            expected = outputs
        assert len(outputs) == len(expected)
        for ours, theirs in zip(outputs, expected, strict=True):
            assert torch.equal(ours, theirs), draft.format


def silence_layers(weights: Weights) -> None:
    """Layers and sequential head add nothing, norms have no weight."""
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) or "markov" in name:
            tensor.zero_()
    weights["norm.weight"].fill_(1)


def show_slots(weights: Weights) -> None:
    """The head answers an anchor's slot with one token, a mask's with another."""
    embedding = weights["model.embed_tokens.weight"]
    head = weights["lm_head.weight"]
    head.zero_()
    head[SUCCESSOR_OF_ANCHOR] = embedding[ANCHOR]
    head[OF_A_MASK] = embedding[MASK]


MISREAD = {
    True: DraftOverrides(slot_semantics=SlotSemantics.ANCHOR_FIRST),
    False: DraftOverrides(slot_semantics=SlotSemantics.IN_PLACE),
}
WITH_A_KEY = ("speculators", "model-optimizer")  # that says which of the two a file is


@pytest.mark.parametrize("misread", [False, True])
@pytest.mark.parametrize(
    ("layout", "in_place"),
    [*((layout, False) for layout in DSPARK_LAYOUTS), *((layout, True) for layout in WITH_A_KEY),
     ("zlab-dflash", True)],
)  # fmt: skip
def test_a_shifted_slot_shows(
    tmp_path: Path, layout: str, in_place: bool, misread: bool
) -> None:
    """Slots with the anchor's first, or masks only: sgl-project/sglang#30261."""
    target = write_target(tmp_path / "target", tied=False)
    edit_tensors(target, show_slots)
    path = write_draft(
        tmp_path / "draft", layout=layout, in_place=in_place, gamma=5, target=target
    )
    edit_tensors(path, silence_layers)
    draft = read_draft(path, overrides=MISREAD[in_place] if misread else DraftOverrides())
    module = load_drafter(draft, read_target(target))
    with torch.inference_mode():
        tokens = module(*prepared(module, all_taps()))[0][ANCHORS.index(ANCHOR)].tolist()
    masks = 5 if in_place else 4
    first = in_place == misread  # an in-place file read as it is discards the anchor's slot
    right = [SUCCESSOR_OF_ANCHOR] * first + [OF_A_MASK] * masks
    assert tokens == right
    assert (len(tokens) == 5) != misread  # the mistake also changes how many are proposed


EAGLE3 = [f"eagle3-{layout}" for layout in EAGLE3_LAYOUTS]


@pytest.mark.parametrize("layout", [*LAYOUTS, *EAGLE3, "gemma4"])
def test_a_shifted_layer_shows(tmp_path: Path, layout: str) -> None:
    """Layer i of the target adds 2^i: the taps of every dialect's layers 0 and 2 are known sums."""
    served = write_target(tmp_path / "target", family="llama", attention_bias=True, tied=False)
    edit_tensors(served, make_sums_visible)
    path = tmp_path / "draft"
    if layout in EAGLE3:
        write_eagle3_draft(path, layout=layout.removeprefix("eagle3-"))
    elif layout == "gemma4":
        write_gemma_draft(path)
    else:
        write_draft(path, layout=layout)
    draft = read_draft(path, overrides=DraftOverrides(gamma=4))
    target = load_target(read_target(served), draft.config.target_layer_ids)
    prompt = [3, 14, 15]
    caches = empty_caches(target.config.decoder, 1)
    with torch.inference_mode():
        _, taps, *_ = target(*ragged_inputs([prompt]), *caches)
    embedded = target.embed_tokens.weight[torch.tensor(prompt)]
    assert torch.equal(taps, torch.cat([embedded + 1, embedded + 1 + 2 + 4], -1))


CHAIN = [5, 7, 11, 20]  # each token's successor is the next
OWN = 3  # token of the only context row


def show_pairs(weights: Weights) -> None:
    """The layer adds the mean of the tokens behind all rows, and the head prefers the latest one's successor.

    Scores are 0, values are the embedded half of a pair, tokens orthogonal; each successor weighs four times as
    much as the one before.
    """
    for name, tensor in weights.items():
        if name.endswith(("fc.weight", "q_proj.weight", "down_proj.weight", "lm_head.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1)
    embedding = weights["embed_tokens.weight"]
    for axis, token in enumerate([OWN, *CHAIN]):
        embedding[token] = torch.eye(embedding.shape[1])[axis]
    stem = next(name for name in weights if name.endswith("v_proj.weight"))
    values, mixed = weights[stem], weights[stem.replace("v_proj", "o_proj")]
    values.zero_()
    mixed.zero_()
    size = embedding.shape[1]
    values[:, :size] = torch.eye(size)
    for head in range(4):  # two heads of queries share one of values
        rows = slice(head // 2 * 32, head // 2 * 32 + 32)
        mixed[rows, head * 32 : head * 32 + 32] = torch.eye(32) / 2
    for place, (token, successor) in enumerate(pairwise([*CHAIN, CHAIN[0]])):
        weights["lm_head.weight"][successor] = 4.0**place * embedding[token]
    weights["lm_head.weight"][OWN + 1] = 64 * embedding[OWN]


@pytest.mark.parametrize("layout", EAGLE3_LAYOUTS)
def test_a_shifted_pair_shows(tmp_path: Path, layout: str) -> None:
    """A context row goes with the token behind it: were it its own, the first draft would be another."""
    path = write_eagle3_draft(tmp_path / "draft", layout=layout, gamma=3, qk_norm=False)
    edit_tensors(path, show_pairs)
    module = load_draft(read_draft(path, overrides=DraftOverrides(gamma=3)))
    config = module.config
    rows = torch.zeros(1, config.gamma + 1, config.context_size)
    for behind in (0.0, float(OWN)):  # the graph puts the anchor there itself
        rows[0, 0, -1] = behind
        caches = empty_caches(config.decoder, 1)
        with torch.inference_mode():
            tokens = module(
                torch.tensor([CHAIN[0]]), rows, torch.tensor([1]), torch.tensor([0]),
                torch.zeros(1), torch.zeros(1, config.gamma), *caches,
            )[0]  # fmt: skip
        assert tokens[0].tolist() == CHAIN[1:]
