# SPDX-License-Identifier: Apache-2.0
"""Drafter modules against float64 NumPy derived from the paper's equations, and what attention sees."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark_trt.checkpoint import DraftOverrides, read_draft, read_target
from dspark_trt.config import SlotSemantics
from dspark_trt.errors import CheckpointError
from dspark_trt.models.drafter import Drafter
from dspark_trt.models.loading import draft_tensors, load_drafter
from tests.checkpoints import (
    Weights,
    edit_tensors,
    write_draft,
    write_target,
)
from tests.export.draft_reference import (
    ANCHORS,
    SIZES,
    Reference,
    all_taps,
    doubles,
    prepared,
)
from tests.export.toys import empty_caches

HEADS = ("none", "vanilla", "gated", "rnn")
CONFIDENCES = ("none", "hidden", "hidden+markov")


def loaded(path: Path, **how: Any) -> Drafter:
    sizes = {"layers": SIZES.layers, "gamma": SIZES.gamma, "rank": SIZES.rank}
    return load_drafter(read_draft(write_draft(path, **(sizes | how))))


@torch.inference_mode()
def step(module: Drafter, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    copies = [x.clone() for x in inputs]
    return tuple(module(*copies)[: 3 if hasattr(module, "confidence_head") else 2])


@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize("head", HEADS)
def test_draft_step_equals_float64(tmp_path: Path, head: str, confidence: str) -> None:
    if head == "none" and confidence == "hidden+markov":
        with pytest.raises(CheckpointError, match="markov_rank"):
            loaded(tmp_path / "draft", head=head, confidence=confidence)
        return
    module = loaded(tmp_path / "draft", head=head, confidence=confidence)
    reference = Reference(doubles(head, confidence), SIZES, slots=4)
    taps = all_taps()
    tokens, logits, *scores = step(module, prepared(module, taps))
    assert len(scores) == (confidence != "none")
    for request, (rows, anchor) in enumerate(zip(taps, ANCHORS, strict=True)):
        hidden = reference.hidden(rows.astype(np.float64), anchor)
        drafted, expected, confident = reference.draft(hidden, anchor, head, confidence)
        assert tokens[request].tolist() == drafted
        np.testing.assert_allclose(logits[request], expected, atol=2e-5)
        if confident is not None:
            np.testing.assert_allclose(scores[0][request], confident, atol=2e-5)


def test_attention_biases_are_used(tmp_path: Path) -> None:
    biased = write_draft(
        tmp_path / "draft", layers=2, gamma=4, rank=8, config={"attention_bias": True}
    )
    added: dict[str, Tensor] = {}

    def add(weights: Weights) -> None:
        for name in [n for n in weights if "self_attn" in n and n.endswith("_proj.weight")]:
            rows = weights[name].shape[0]
            added[name.replace("weight", "bias")] = torch.linspace(-1, 1, rows)
        weights |= added

    edit_tensors(biased, add)
    module = load_drafter(read_draft(biased))
    weights = doubles("vanilla", "hidden+markov") | {
        n: b.double().numpy() for n, b in added.items()
    }
    reference = Reference(weights, SIZES, slots=4)
    taps = all_taps()
    _, logits, _ = step(module, prepared(module, taps))
    for request, (rows, anchor) in enumerate(zip(taps, ANCHORS, strict=True)):
        hidden = reference.hidden(rows.astype(np.float64), anchor)
        _, expected, _ = reference.draft(hidden, anchor, "vanilla", "hidden+markov")
        np.testing.assert_allclose(logits[request], expected, atol=2e-5)


def test_in_place_block_has_one_slot_more_and_discards_the_first(tmp_path: Path) -> None:
    """5 slots, 4 tokens: slot j predicts position anchor + j (sgl-project/sglang#30261)."""
    module = loaded(tmp_path / "draft", layout="speculators", in_place=True)
    assert (module.config.block_slots, module.config.gamma) == (5, 4)
    reference = Reference(doubles("vanilla", "hidden+markov"), SIZES, slots=5)
    taps = all_taps()
    tokens, logits, _ = step(module, prepared(module, taps))
    for request, (rows, anchor) in enumerate(zip(taps, ANCHORS, strict=True)):
        hidden = reference.hidden(rows.astype(np.float64), anchor)[1:]
        drafted, expected, _ = reference.draft(hidden, anchor, "vanilla", "hidden+markov")
        assert tokens[request].tolist() == drafted
        np.testing.assert_allclose(logits[request], expected, atol=2e-5)


def test_fewer_tokens_than_trained_is_a_shorter_block(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", layers=2, gamma=4, rank=8)
    module = load_drafter(read_draft(path, overrides=DraftOverrides(gamma=2)))
    reference = Reference(doubles("vanilla", "hidden+markov"), SIZES, slots=2)
    taps = all_taps()[0][:2]
    hidden = reference.hidden(taps.astype(np.float64), 17)
    drafted, expected, _ = reference.draft(hidden, 17, "vanilla", "hidden+markov")
    new_taps = torch.zeros(1, 3, module.config.tap_size)
    new_taps[0, :2] = torch.from_numpy(taps)
    one, two, zero = torch.tensor([17]), torch.tensor([2]), torch.tensor([0])
    caches = empty_caches(module.config.decoder, 1)
    tokens, logits, _ = step(
        module, [one, new_taps, two, zero, torch.zeros(1), torch.zeros(1, 2), *caches]
    )
    assert tokens[0].tolist() == drafted
    np.testing.assert_allclose(logits[0], expected, atol=2e-5)


@pytest.mark.parametrize("layout", ["specforge", "zlab-dflash"])
def test_borrowed_embedding_and_head_come_from_the_target(tmp_path: Path, layout: str) -> None:
    target = read_target(write_target(tmp_path / "target"))  # tied: the head is the embedding
    draft = read_draft(write_draft(tmp_path / "draft", layout=layout))
    module = load_drafter(draft, target)
    embedding = target.tensors["embed_tokens.weight"].load()
    assert torch.equal(module.backbone.embed_tokens.weight, embedding)
    assert torch.equal(module.lm_head.weight, embedding)
    with pytest.raises(
        CheckpointError, match=r"borrows them from its target. Give it with --target"
    ):
        draft_tensors(draft, None)


def _mask_embedding(module: Drafter, _: list[Tensor]) -> None:
    module.backbone.embed_tokens.weight[SIZES.mask] += 1


def _anchor(_: Drafter, inputs: list[Tensor]) -> None:
    inputs[0][0] += 1


def _new_row(_: Drafter, inputs: list[Tensor]) -> None:
    inputs[1][0, 4] += 1  # the last of request 0's five


def _first_cached_value(_: Drafter, inputs: list[Tensor]) -> None:
    inputs[7][2, :, 0] += 1  # request 2, layer 0


@pytest.mark.parametrize(
    ("request_row", "change"),
    [(0, _mask_embedding), (0, _anchor), (0, _new_row), (2, _first_cached_value)],
)
def test_every_slot_sees_the_block_and_the_context(
    tmp_path: Path, request_row: int, change: Callable[[Drafter, list[Tensor]], None]
) -> None:
    """A causal block shows as slot 0 blind to the masks (vllm-project/vllm#51009)."""
    module = loaded(tmp_path / "draft", head="none", confidence="none")
    inputs = prepared(module, all_taps())
    with torch.inference_mode():
        before = step(module, inputs)[1]
        change(module, inputs)
        after = step(module, inputs)[1]
    moved = (after - before)[request_row].abs().amax(-1)
    assert (moved > 1e-4).all(), moved


@pytest.mark.parametrize("semantics", SlotSemantics)
def test_nothing_beyond_the_valid_rows_is_seen(
    tmp_path: Path, semantics: SlotSemantics
) -> None:
    """Rejected rows, padding of new taps and a slot's previous owner, however large."""
    in_place = semantics is SlotSemantics.IN_PLACE
    module = loaded(tmp_path / "draft", layout="speculators", in_place=in_place)
    taps = all_taps()
    small = step(module, prepared(module, taps, garbage=0.0))
    large = step(module, prepared(module, taps, garbage=1e4))
    for ours, theirs in zip(small, large, strict=True):
        assert torch.equal(ours, theirs)


def test_the_step_leaves_its_new_rows_in_the_cache(tmp_path: Path) -> None:
    """After a step the context rows equal those of one append; block rows are never kept valid."""
    module = loaded(tmp_path / "draft")
    taps = all_taps()
    inputs = prepared(module, taps)
    with torch.inference_mode():
        *_, key, value, _, _ = module(*inputs)
    for request, rows in enumerate(taps):
        fresh = empty_caches(module.config.decoder, 1)
        start = torch.zeros(1, dtype=torch.int64)
        with torch.inference_mode():
            module.backbone.append_context(torch.from_numpy(rows)[None], start, *fresh)
        for ours, theirs in ((key, fresh[0]), (value, fresh[1])):
            torch.testing.assert_close(
                ours[request, :, : len(rows)], theirs[0, :, : len(rows)], atol=1e-5, rtol=1e-5
            )


def test_huge_taps_stay_finite_in_float16(tmp_path: Path) -> None:
    """Taps beyond 2e4 are real; the norm behind `fc` makes their scale irrelevant."""
    path = write_draft(tmp_path / "draft", layers=2, gamma=4, rank=8)
    module = load_drafter(read_draft(path), dtype=torch.float16)
    taps = torch.from_numpy(np.sign(all_taps()[0]))[None]
    scale = 3e4  # sums of products reach 1e5, beyond what float16 holds
    halves = [empty_caches(module.config.decoder, 1, dtype=torch.float16) for _ in range(2)]
    start = torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        module.backbone.append_context(taps, start, *halves[0])
        module.backbone.append_context(taps * scale, start, *halves[1])
    for plain, scaled in zip(*halves, strict=True):
        assert torch.isfinite(scaled).all()
        torch.testing.assert_close(scaled, plain, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_are_drawn_from_the_returned_logits(tmp_path: Path, temperature: float) -> None:
    """Draw and score from the same vector: frequencies follow softmax(logits / T)."""
    rows = 6000
    module = loaded(tmp_path / "draft", confidence="none", gamma=1)
    hidden = torch.randn(1, 1, SIZES.hidden, generator=torch.Generator().manual_seed(1))
    uniforms = torch.rand(rows, 1, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        tokens, logits, _ = module.draft(
            torch.full((rows,), 17), hidden.expand(rows, 1, -1), torch.full((rows,), temperature), uniforms
        )  # fmt: skip
    p = torch.softmax(logits[0, 0].double() / temperature, -1)
    frequency = torch.bincount(tokens[:, 0], minlength=SIZES.vocab) / rows
    assert ((frequency - p).abs() < 5 * (p * (1 - p) / rows).sqrt() + 1e-3).all()


def test_temperature_zero_takes_the_likeliest_whatever_the_uniforms(tmp_path: Path) -> None:
    module = loaded(tmp_path / "draft", confidence="none")
    inputs = prepared(module, all_taps())
    inputs[5].fill_(0.999)
    tokens, logits = step(module, inputs)
    assert torch.equal(tokens, logits.argmax(-1))
