# SPDX-License-Identifier: Apache-2.0
"""Limits, buckets and optimisation profiles: pure functions of a bundle's description."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_trt.bundle import Bundle, Source
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
from dspark_trt.engine_manifest import BACKENDS, Limits
from dspark_trt.errors import BuildError
from dspark_trt.export.engines.profiles import (
    buckets,
    graph_bindings,
    profiles_for,
    resolve_limits,
)

GRAPHS = (
    "context", "draft", "draft_greedy", "backbone", "sequential_head", "confidence_head", "target",
    "verify", "verify_greedy", "verify_processed",
)  # fmt: skip


def make_bundle(*, gamma: int = 7, positions: int = 40_960, dtype: str = "float16") -> Bundle:
    decoder = DecoderConfig(
        hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=64, vocab_size=320, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e4),
        max_positions=positions, qk_norm=True,
    )  # fmt: skip
    draft = DraftConfig(
        decoder=decoder, block_slots=gamma, slot_semantics=SlotSemantics.ANCHOR_FIRST,
        mask_token_id=319, target_layer_ids=(0, 2), num_target_layers=4, target_hidden_size=64,
        head_type=HeadType.RNN, markov_rank=16, confidence=ConfidenceInput.HIDDEN_MARKOV,
    )  # fmt: skip
    source = Source(name="toy", format="deepspec", sha256="0")
    target = TargetConfig(family=TargetFamily.QWEN3, decoder=decoder, tie_word_embeddings=True)
    return Bundle(
        path=Path("toy"), dtype=dtype, draft=draft, draft_source=source, target=target,
        target_source=source, files={}, tool_versions={},
    )  # fmt: skip


def test_defaults_fit_a_long_context_model() -> None:
    assert resolve_limits(make_bundle()) == Limits(batch=8, tokens=512, capacity=4096)


def test_defaults_fit_a_short_context_model() -> None:
    assert resolve_limits(make_bundle(positions=256)) == Limits(
        batch=8, tokens=256, capacity=256
    )


def test_the_default_budget_holds_a_full_round_of_a_large_batch() -> None:
    assert resolve_limits(make_bundle(), batch=100).tokens == 800


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"batch": 0}, r"--max-batch must be at least 1, got 0"),
        (
            {"batch": 4, "tokens": 31},
            r"--max-tokens 31 .*4 requests verify 8 rows.*at least 32",
        ),
        ({"capacity": 14}, r"--capacity 14 is out of range: a draft step writes 15 rows"),
        ({"capacity": 50_000}, r"--capacity 50000 .*the models have 40960 positions"),
    ],
)
def test_limits_that_leave_no_room_are_refused(limits: dict[str, int], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        resolve_limits(make_bundle(), **limits)


@given(st.integers(1, 10_000))
def test_buckets_waste_less_than_half(largest: int) -> None:
    chosen = buckets(largest)
    assert chosen[0] == 1
    assert chosen[-1] == largest
    assert list(chosen) == sorted(set(chosen))
    assert all(after <= 2 * before for before, after in pairwise(chosen))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("graph", GRAPHS)
@given(batch=st.integers(1, 64), gamma=st.integers(1, 16), spare=st.integers(0, 1000))
def test_profiles_hold_every_shape_of_the_contract(
    graph: str, backend: str, batch: int, gamma: int, spare: int
) -> None:
    bundle = make_bundle(gamma=gamma)
    limits = resolve_limits(bundle, batch=batch, tokens=batch * (gamma + 1) + spare)
    contract = graph_bindings(bundle, graph)
    profiles = profiles_for(bundle, graph, limits, backend)
    for profile in profiles:
        assert set(profile.shapes) == set(contract.input_names)
        symbols: dict[str, set[tuple[int, ...]]] = {}
        for binding in contract.inputs:
            three = profile.shapes[binding.name]
            for axis, dim in enumerate(binding.shape):
                extents = tuple(shape[axis] for shape in three)
                assert list(extents) == sorted(extents)
                assert extents[0] >= 1
                symbols.setdefault(str(dim), set()).add(extents)
        assert all(len(extents) == 1 for extents in symbols.values())  # one range a symbol
        assert symbols.get("capacity", {(4096,) * 3}) == {(4096,) * 3}
        if "offsets" in symbols:
            assert symbols["offsets"] == {tuple(b + 1 for b in next(iter(symbols["batch"])))}
    largest = {
        dim: max(profile.shapes[binding.name][2][axis] for profile in profiles)
        for binding in contract.inputs
        for axis, dim in enumerate(binding.shape)
        if isinstance(dim, str)
    }
    rows = batch * (gamma + 1)
    assert largest.get("batch", batch) == batch
    assert largest.get("logit_rows", rows) == rows
    verified_only = graph.startswith("verify")
    assert largest.get("rows", limits.tokens) == (rows if verified_only else limits.tokens)
    assert largest.get("context_rows", limits.tokens) == limits.tokens


def test_tensorrt_is_tuned_for_one_request_a_full_batch_and_a_prompt() -> None:
    bundle = make_bundle()
    limits = resolve_limits(bundle)
    target = profiles_for(bundle, "target", limits, "tensorrt")
    assert [(p.name, p.shapes["token_ids"][1], p.shapes["pad_index"][1]) for p in target] == [
        ("single", (8,), (1, 8)),
        ("batch", (64,), (8, 8)),
        ("prefill", (512,), (1, 512)),
    ]
    draft = profiles_for(bundle, "draft", limits, "tensorrt")
    assert [(p.name, p.shapes["anchor_ids"]) for p in draft] == [
        ("single", ((1,), (1,), (1,))),
        ("batch", ((1,), (8,), (8,))),
    ]
    alone = replace(limits, batch=1)
    assert [p.name for p in profiles_for(bundle, "draft", alone, "tensorrt")] == ["single"]


def test_tensorrt_rtx_gets_one_profile_for_everything() -> None:
    bundle = make_bundle()
    limits = resolve_limits(bundle)
    for graph in GRAPHS:
        assert [p.name for p in profiles_for(bundle, graph, limits, "tensorrt-rtx")] == ["all"]


def test_unknown_graphs_have_no_contract() -> None:
    with pytest.raises(BuildError, match=r"mystery is no graph that engines are built for"):
        graph_bindings(make_bundle(), "mystery")
    with pytest.raises(BuildError, match=r"target is no graph"):
        graph_bindings(replace(make_bundle(), target=None), "target")
