# SPDX-License-Identifier: Apache-2.0
"""Descriptions refuse nonsense where they are built, and survive JSON; the contract follows them."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from dspark_trt import bindings
from dspark_trt.config import (
    ConfidenceInput,
    DecoderConfig,
    DraftConfig,
    HeadType,
    RopeConfig,
    SlotSemantics,
    TargetConfig,
    TargetFamily,
)

DECODER = DecoderConfig(
    hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    vocab_size=320, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e4), max_positions=512, qk_norm=True,
)  # fmt: skip
DRAFT = DraftConfig(
    decoder=DECODER, block_slots=8, slot_semantics=SlotSemantics.ANCHOR_FIRST, mask_token_id=319,
    target_layer_ids=(-1, 1, 3), num_target_layers=6, target_hidden_size=48,
    head_type=HeadType.RNN, markov_rank=16, confidence=ConfidenceInput.HIDDEN_MARKOV,
)  # fmt: skip
TARGET = TargetConfig(
    family=TargetFamily.LLAMA, decoder=DECODER, tie_word_embeddings=True, stop_token_ids=(1, 2)
)


def test_gamma_counts_proposals_not_slots() -> None:
    assert DRAFT.gamma == 8
    assert replace(DRAFT, slot_semantics=SlotSemantics.IN_PLACE).gamma == 7
    assert DRAFT.tap_size == 3 * 48


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"block_slots": 0}, "block of 0 slots proposes no token"),
        ({"block_slots": 257}, "257 drafts a round are more than the 256"),
        ({"block_slots": 1, "slot_semantics": SlotSemantics.IN_PLACE}, "proposes no token"),
        ({"head_type": HeadType.NONE}, "head none contradicts markov_rank 16"),
        ({"markov_rank": 0}, "head rnn contradicts markov_rank 0"),
        ({"head_type": HeadType.NONE, "markov_rank": 0}, "needs markov_rank > 0"),
        ({"mask_token_id": 320}, "mask_token_id 320 is outside the vocabulary of 320"),
        ({"mask_token_id": -1}, "mask_token_id -1 is outside"),
    ],
)
def test_drafters_that_cannot_be(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(DRAFT, **change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"vocab_size": -3}, "vocab_size must be at least 1, got -3"),
        ({"num_heads": 3}, "num_heads 3 must be a multiple of num_kv_heads 2"),
        ({"rms_norm_eps": -1e-6}, r"rms_norm_eps must lie in \[0, 1\), got -1e-06"),
        ({"head_dim": 33}, "head_dim must be even for rotary embedding, got 33"),
    ],
)
def test_decoders_that_cannot_be(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(DECODER, **change)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"theta": 0}, "rope theta must be above 1, got 0"),
        ({"theta": float("nan")}, "rope theta must be above 1, got nan"),
        ({"theta": 1e4, "yarn_factor": 0.5}, "YaRN factor must be at least 1, got 0.5"),
        ({"theta": 1e4, "yarn_factor": 4}, "YaRN needs original_max_position_embeddings"),
    ],
)
def test_rotary_settings_that_cannot_be(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RopeConfig(**settings)


@pytest.mark.parametrize(
    ("head", "confidence"),
    [
        pair
        for pair in itertools.product(HeadType, ConfidenceInput)
        if pair != (HeadType.NONE, ConfidenceInput.HIDDEN_MARKOV)  # refused above
    ],
)
def test_json_round_trip(head: HeadType, confidence: ConfidenceInput) -> None:
    rank = 0 if head is HeadType.NONE else 16
    yarn = replace(DECODER, rope=RopeConfig(theta=1e6, yarn_factor=4, original_positions=4096))
    draft = replace(
        DRAFT, decoder=yarn, head_type=head, markov_rank=rank, confidence=confidence
    )
    assert DraftConfig.from_json(json.loads(json.dumps(draft.to_json()))) == draft
    assert TargetConfig.from_json(json.loads(json.dumps(TARGET.to_json()))) == TARGET


def test_the_contract_has_the_tensors_of_the_design() -> None:
    """DESIGN section 2, read off the table by hand."""
    draft = bindings.draft_bindings(DRAFT, "float16")
    caches = tuple(f"past_{kind}_{layer}" for layer in (0, 1) for kind in ("key", "value"))
    first = ("anchor_ids", "new_taps", "new_len", "context_len", "temperature", "uniforms")
    assert draft.input_names == first + caches
    present = tuple(name.replace("past", "present") for name in caches)
    assert draft.output_names == ("tokens", "logits", "confidence_logits", *present)
    shapes = {binding.name: (binding.dtype, binding.shape) for binding in draft.inputs}
    assert shapes["new_taps"] == ("float32", ("batch", 9, 144))
    assert shapes["uniforms"] == ("float32", ("batch", 8))
    assert shapes["past_key_0"] == ("float16", ("batch", 2, "capacity", 32))
    context = bindings.context_bindings(DRAFT, "float16")
    assert context.input_names == ("taps", "context_len", *caches)
    assert context.output_names == present
    target = bindings.target_bindings(TARGET, DRAFT.tap_size, "float32")
    rows = ("token_ids", "positions", "pad_index", "unpad_index", "logit_rows", "context_len")
    assert target.input_names == rows + caches
    assert target.output_names == ("logits", "taps", *present)


@pytest.mark.parametrize(
    ("head", "inputs", "outputs"),
    [
        (HeadType.VANILLA, ("base_logits", "previous_ids"), ("logits",)),
        (HeadType.GATED, ("base_logits", "previous_ids", "hidden"), ("logits",)),
        (
            HeadType.RNN,
            ("base_logits", "previous_ids", "hidden", "state"),
            ("logits", "next_state"),
        ),
    ],
)
def test_heads_ask_only_for_what_they_read(
    head: HeadType, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> None:
    contract = bindings.sequential_head_bindings(replace(DRAFT, head_type=head))
    assert (contract.input_names, contract.output_names) == (inputs, outputs)
