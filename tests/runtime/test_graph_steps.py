# SPDX-License-Identifier: Apache-2.0
"""Captured steps and rounds on the device, as far as a CPU goes: when graphs are used and refused, that no step
reads a length on the host, and that device rounds commit what the engine commits.
"""

import logging
import weakref
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses import FakeTensorMode

from dspark_trt.bundle import Bundle
from dspark_trt.checkpoint import read_draft, read_target
from dspark_trt.errors import BackendError, RequestError
from dspark_trt.models.drafter import Drafter
from dspark_trt.models.fixed_shapes import attention_over_capacity, fixed_shapes
from dspark_trt.models.loading import (
    draft_skeleton,
    load_drafter,
    load_target,
    target_skeleton,
)
from dspark_trt.models.operators import cached_attention
from dspark_trt.models.target import Target
from dspark_trt.plugins.specification import sample_draft
from dspark_trt.runtime.backends.interface import Committed, DecodingRows, RoundInputs
from dspark_trt.runtime.backends.torch_backend import DeviceParts
from dspark_trt.runtime.backends.torch_graphs import Replay, StepGraphs
from dspark_trt.runtime.backends.torch_models import DeviceTargetModel
from dspark_trt.runtime.backends.torch_rounds import (
    TorchRounds,
    budgeted_lengths,
    ragged_on_device,
)
from dspark_trt.runtime.backends.torch_steps import ModuleSteps
from dspark_trt.runtime.cuda_graphs.buckets import GraphKey
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.ragged import ragged_rows
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.survival import best_lengths, candidates
from tests.conftest import DRAFTERS, TINY_TARGET

GAMMA, VOCAB = 7, 2048
CPU = torch.device("cpu")
PROMPTS = [(1, 5, 9, 20), (1, 5, 9, *range(30, 41)), (1, 80, 81), (1, *range(60, 67))]


# When graphs are used -------------------------------------------------------------------------------


class Counter:
    """A step with state: adds its bucket's batch to a sum and writes the sum out."""

    def __init__(self) -> None:
        self.total, self.output = torch.zeros(1), torch.zeros(1)
        self.runs = 0

    def step(self, key: GraphKey) -> None:
        self.runs += 1
        self.total += key.batch
        self.output.copy_(self.total)

    def graphs(self, capture: Callable[[Replay], Replay] | None, limit: int = 2) -> StepGraphs:
        return StepGraphs(
            "count", self.step, [self.output], state=[self.total], capture=capture, limit=limit
        )


def test_a_step_without_memory_is_a_failed_step() -> None:
    def step(_key: GraphKey) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nSee the documentation")

    for capture in (None, lambda step: step):
        graphs = StepGraphs("draft", step, [torch.zeros(1)], capture=capture, limit=2)
        with pytest.raises(
            BackendError, match=r"^step draft 2x8 failed: CUDA out of memory\.$"
        ):
            graphs.run(GraphKey(2, 8))
        assert graphs.refusal is None


def test_a_step_that_failed_in_its_first_run_counts_once_when_it_is_run_again() -> None:
    counter = Counter()

    def step(key: GraphKey) -> None:
        counter.step(key)
        if counter.runs == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    graphs = StepGraphs(
        "count", step, [counter.output], state=[counter.total], capture=lambda s: s, limit=2
    )
    with pytest.raises(BackendError, match="step count 3x3 failed"):
        graphs.run(GraphKey(3, 3))
    graphs.run(GraphKey(3, 3))
    assert counter.total.item() == counter.output.item() == 3


def test_what_a_failed_step_had_made_is_free_while_requests_are_run_again() -> None:
    made: list[weakref.ref[Tensor]] = []

    def step(_key: GraphKey) -> None:
        activations = torch.zeros(1000)
        made.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    graphs = StepGraphs("target", step, [torch.zeros(1)], capture=None, limit=2)
    try:
        graphs.run(GraphKey(2, 8))
    except BackendError:  # where the engine runs each request alone
        assert made[0]() is None


def test_an_accelerator_that_is_lost_is_no_failed_step() -> None:
    """No later step would work: whoever watches the service has to see it."""

    def step(_key: GraphKey) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    graphs = StepGraphs("draft", step, [torch.zeros(1)], capture=None, limit=2)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        graphs.run(GraphKey(2, 8))


def test_capturing_runs_a_step_several_times_and_counts_once() -> None:
    counter = Counter()
    graphs = counter.graphs(lambda step: step)
    for batch in (1, 2, 1, 2, 1):
        graphs.run(GraphKey(batch, 8))
    assert counter.output.item() == counter.total.item() == 7
    assert (graphs.captured, graphs.replayed) == (2, 3)
    graphs.run(GraphKey(3, 8))
    assert graphs.keys == (GraphKey(1, 8), GraphKey(3, 8))  # bounded: the oldest use went
    graphs.run(GraphKey(1, 8), version=1)  # caches have moved: every graph points at old memory
    assert len(graphs.keys) == 1
    assert counter.total.item() == 11


def _fails(_step: Replay) -> Replay:
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


def _engine_fails(_step: Replay) -> Replay:
    raise BackendError("engine draft: execute_async_v3 failed: it allocates")


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (lambda _step: lambda: None, "a replay gave other bits than the eager step"),
        (_fails, "capture failed: operation not permitted when stream is capturing"),
        (_engine_fails, "capture failed: engine draft: execute_async_v3 failed: it allocates"),
    ],
)
def test_a_graph_that_differs_is_refused_aloud(
    capture: Callable[[Replay], Replay], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    counter = Counter()
    graphs = counter.graphs(capture)
    with caplog.at_level(logging.WARNING):
        graphs.run(GraphKey(2, 8))
    assert graphs.refusal == f"count 2x8: {reason}"
    assert f"CUDA graphs are not used: count 2x8: {reason}" in caplog.text
    assert counter.output.item() == counter.total.item() == 2  # the step was done all the same
    graphs.run(GraphKey(2, 8))
    assert counter.total.item() == 4
    assert not graphs.keys


def test_the_self_test_at_start_captures_the_smallest_and_the_largest_bucket() -> None:
    """With a capture that records nothing but the step itself, all of a GPU's flow runs on a CPU."""
    drafter, target = modules(torch.float32)
    parts = DeviceParts(
        drafter.config, target.config, dtype="float32", requests=4, device=CPU, max_graphs=8,
        top_logprobs=5, capture=lambda step: step,
    )  # fmt: skip
    steps = parts.module_steps(drafter, target)
    draft, served = parts.draft_model(steps), parts.target_model(steps)
    assert {key.batch for key in draft.graphs.keys} == {1, 4}
    assert {key.rows for key in served.graphs.keys} == {8, 32}
    assert not any(cache.any() for model in (draft, served) for cache in model.caches.tensors)
    for model in (draft, served):
        model.reserve(120)  # growing would capture again
    rounds = parts.rounds(steps)
    assert isinstance(rounds, TorchRounds)
    assert {(key.batch, key.rows) for key in rounds.round_graphs.keys} == {(1, 8), (4, 32)}
    assert {key.batch for key in rounds.draft_graphs.keys} == {1, 4}
    assert not any(cache.any() for model in (draft, served) for cache in model.caches.tensors)
    first = prefilled(parts, steps).argmax(1).tolist()
    rounds.take(decoding_rows(first, list(map(len, PROMPTS))))
    outputs = [[token] for token in first]
    for _ in range(8):
        take(rounds.launch(inputs(4, 28)).read(), outputs)
    assert rounds.round_graphs.captured == 2
    assert rounds.round_graphs.replayed == 8
    plain, expected = greedy_rounds(*device_parts("float32", 4))
    for _ in range(8):
        take(plain.launch(inputs(4, 28)).read(), expected)
    assert outputs == expected


def test_without_capture_every_step_is_eager() -> None:
    counter = Counter()
    graphs = counter.graphs(None)
    for _ in range(3):
        graphs.run(GraphKey(1, 1))
    assert counter.runs == counter.total.item() == 3


# No length leaves the device ------------------------------------------------------------------------


@given(st.integers(0, 2**31), st.booleans(), st.sampled_from((1, 3)))
@settings(max_examples=20, deadline=None)
def test_attention_over_the_capacity_is_attention_over_valid_rows(
    seed: int, is_causal: bool, group: int
) -> None:
    torch.manual_seed(seed)
    valid = torch.randint(4, 30, (3,))
    query = torch.randn(3, 2 * group, 4, 16)
    key, value = torch.randn(3, 2, 40, 16), torch.randn(3, 2, 40, 16)
    expected = cached_attention(query, key, value, valid, is_causal=is_causal)
    found = attention_over_capacity(query, key, value, valid, is_causal=is_causal)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def _draw_nothing(logits: Tensor, _temperature: Tensor, _uniforms: Tensor) -> Tensor:
    return logits.argmax(1)


def test_steps_read_no_value_on_the_host() -> None:
    """Fake tensors have shapes but no values: whatever looks at one raises, as it would break a capture."""
    draft, served = (
        read_draft(DRAFTERS["dspark-vanilla"]).config,
        read_target(TINY_TARGET).config,
    )
    drafter, target = draft_skeleton(draft), target_skeleton(served, draft.target_layer_ids)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        for module in (drafter, target):
            module.to_empty(device="cpu")
        ints = torch.zeros(2, dtype=torch.int64)
        flat = torch.zeros(8, dtype=torch.int64)
        caches = [torch.zeros(2, 2, 64, 64) for _ in range(4)]
        step = (ints, torch.zeros(2, 8, 384), ints, ints, torch.zeros(2), torch.zeros(2, 7))
        with torch.no_grad(), fixed_shapes(_draw_nothing):
            tokens, _, scores, *_ = drafter(*step, *caches)
            pad = torch.zeros(2, 8, dtype=torch.int64)
            many = [torch.zeros(2, 2, 64, 64) for _ in range(12)]
            logits, _, *_ = target(flat, flat, pad, flat, flat, ints, *many)
        lengths = budgeted_lengths(scores.sigmoid().cumprod(1), ints, ints[:1])
        ragged = ragged_on_device(ints, tokens, lengths, ints, rows=8)
        assert logits.shape == (8, VOCAB)
        assert ragged.pad_index.shape == (2, 8)
        with (
            torch.no_grad(),
            pytest.raises(Exception, match=r"_local_scalar_dense|data-dependent|Cannot"),
        ):
            cached_attention(
                torch.zeros(2, 2, 1, 64), caches[0], caches[1], ints, is_causal=False
            )


@cache
def modules(dtype: torch.dtype) -> tuple[Drafter, Target]:
    draft, target = read_draft(DRAFTERS["dspark-vanilla"]), read_target(TINY_TARGET)
    layers = draft.config.target_layer_ids
    return load_drafter(draft, target, dtype), load_target(target, layers, dtype)


# Rounds on the device -------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(0, 2**31), st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_the_likeliest_drafts_share_the_budget(batch: int, seed: int, budget: int) -> None:
    random = np.random.default_rng(seed)
    confidence = random.random((batch, GAMMA))
    if seed % 3 == 0:
        confidence = np.round(confidence, 1)  # ties
    survival = confidence.cumprod(1)
    limits = random.integers(0, GAMMA + 1, batch)
    lengths = budgeted_lengths(
        torch.from_numpy(survival), torch.from_numpy(limits), torch.tensor([budget])
    )
    offered = candidates(confidence, limits=limits)
    expected = best_lengths(offered, min(budget, offered.available))
    np.testing.assert_array_equal(lengths.numpy(), expected)


@given(st.integers(1, 6), st.integers(0, 2**31), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_rows_worked_out_on_the_device_are_those_of_the_host(
    batch: int, seed: int, spare: int
) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, GAMMA + 1, batch)
    anchors, drafts = random.integers(0, 99, batch), random.integers(0, 99, (batch, GAMMA))
    context = random.integers(0, 50, batch)
    tokens = [np.append(anchors[r], drafts[r, : lengths[r]]) for r in range(batch)]
    expected = ragged_rows(tokens, context, np.ones(batch, np.bool_))
    total = len(expected.token_ids)
    found = ragged_on_device(
        *map(torch.from_numpy, (anchors, drafts, lengths, context)), rows=total + spare
    )
    for name in ("token_ids", "positions"):
        value = getattr(found, name).numpy()
        np.testing.assert_array_equal(value[:total], getattr(expected, name))
        assert (value[total:] == 0).all()
    np.testing.assert_array_equal(found.offsets.numpy(), expected.offsets)
    places = found.pad_index.numpy().ravel()[found.unpad_index.numpy()[:total]]
    np.testing.assert_array_equal(places, np.arange(total))
    for r in range(batch):
        own = np.arange(expected.offsets[r], expected.offsets[r + 1])
        assert set(found.pad_index[r].tolist()) == set(own.tolist())


def device_parts(dtype: str, requests: int) -> tuple[DeviceParts, ModuleSteps]:
    drafter, target = modules(getattr(torch, dtype))
    parts = DeviceParts(
        drafter.config, target.config, dtype=dtype, requests=requests, device=CPU,
        max_graphs=4, top_logprobs=5,
    )  # fmt: skip
    return parts, parts.module_steps(drafter, target)


def prefilled(parts: DeviceParts, steps: ModuleSteps) -> NDArray[np.float32]:
    """Both caches hold the prompts; logits `[B, V]` of what follows."""
    draft, target = parts.draft_model(steps), parts.target_model(steps)
    count = len(PROMPTS)
    rows = ragged_rows(PROMPTS, np.zeros(count, np.int64), np.zeros(count, np.bool_))
    output = target.step(rows)
    for r in range(count):
        draft.append(r, output.taps[rows.offsets[r] : rows.offsets[r + 1]], 0)
    return np.array(output.logits)


def decoding_rows(
    anchors: list[int], lengths: list[int], temperature: float = 0.0
) -> DecodingRows:
    """Requests whose context is cached whole."""
    count = len(anchors)
    zeros, cached = np.zeros(count, np.int64), np.array(lengths, np.int64)
    return DecodingRows(
        anchor_ids=np.array(anchors, np.int64),
        new_taps=np.zeros((count, GAMMA + 1, 384), np.float32),
        new_len=zeros,
        draft_len=cached,
        target_len=cached,
        temperature=np.full(count, temperature, np.float32),
        top_k=zeros,
        top_p=np.ones(count, np.float32),
        min_p=np.zeros(count, np.float32),
    )


def inputs(
    batch: int,
    budget: int,
    draft_uniforms: NDArray[np.float32] | None = None,
    verify_uniforms: NDArray[np.float32] | None = None,
) -> RoundInputs:
    return RoundInputs(
        budget=budget,
        limits=np.full(batch, GAMMA),
        shifts=np.zeros((batch, GAMMA)),
        draft_uniforms=np.zeros((batch, GAMMA), np.float32)
        if draft_uniforms is None
        else draft_uniforms,
        verify_uniforms=np.zeros((batch, GAMMA + 1), np.float32)
        if verify_uniforms is None
        else verify_uniforms,
    )


def begun(
    parts: DeviceParts, steps: ModuleSteps, first: list[int], temperature: float = 0.0
) -> TorchRounds:
    rounds = TorchRounds(parts, steps)
    rounds.take(decoding_rows(first, list(map(len, PROMPTS)), temperature))
    return rounds


def greedy_rounds(
    parts: DeviceParts, steps: ModuleSteps
) -> tuple[TorchRounds, list[list[int]]]:
    """Rounds of prefilled requests, and the first token of each."""
    first = prefilled(parts, steps).argmax(1).tolist()
    return begun(parts, steps, first), [[token] for token in first]


@pytest.mark.parametrize("late", [0, 1])
def test_device_rounds_commit_what_the_engine_commits(tiny_bundle: Bundle, late: int) -> None:
    """Budgets of every size, four requests in a batch that also runs smaller ones, read at once or late."""
    parts, steps = device_parts("float32", len(PROMPTS))
    rounds, outputs = greedy_rounds(parts, steps)
    under_way = []
    for i in range(36):
        batch = [4, 4, 3, 1][i % 4]
        under_way.append(rounds.launch(inputs(batch, [28, 3, 0, 7, 12][i % 5])))
        for each in under_way[: len(under_way) - late]:
            take(each.read(), outputs)
        under_way = under_way[len(under_way) - late :]
    engine = Engine.load(tiny_bundle, options=EngineOptions(max_batch=4))
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    expected = engine.generate([Request(prompt_ids=p, params=params) for p in PROMPTS])
    for ours, theirs in zip(outputs, expected, strict=True):
        length = min(len(ours), 60)
        assert ours[:length] == list(theirs.token_ids)[:length]
    assert sum(map(len, outputs)) > 120
    for each in under_way:
        each.read()
    assert rounds._most_rows.tolist() == rounds._target_len.tolist()  # room for what there is


def test_rows_that_change_hands_keep_the_room_of_their_new_requests() -> None:
    parts, steps = device_parts("float32", len(PROMPTS))
    rounds, _ = greedy_rounds(parts, steps)
    way = rounds.launch(inputs(4, 28))
    rounds.take(decoding_rows([5, 5, 5], [40, 41, 42]))
    committed = way.read()
    assert rounds._most_rows[:3].tolist() == [40, 41, 42]
    assert way.read() is committed


def test_sampled_device_rounds_draw_what_the_engine_draws(tiny_bundle: Bundle) -> None:
    """Every draft verified, uniforms drawn as the engine draws them for each request's seed."""
    count, temperature = len(PROMPTS), np.float32(0.9)
    generators = [np.random.default_rng(seed) for seed in range(count)]

    def uniforms() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        drawn = [
            (g.random(GAMMA, np.float32), g.random(GAMMA + 1, np.float32)) for g in generators
        ]
        return np.stack([d for d, _ in drawn]), np.stack([v for _, v in drawn])

    parts, steps = device_parts("float32", count)
    logits = prefilled(parts, steps)
    first = sample_draft(logits, np.full(count, temperature), uniforms()[1][:, -1]).tolist()
    rounds, outputs = (
        begun(parts, steps, first, float(temperature)),
        [[token] for token in first],
    )
    for _ in range(7):
        draft, verify = uniforms()
        way = rounds.launch(inputs(count, count * GAMMA, draft, verify))
        take(way.read(), outputs)
    engine = Engine.load(
        tiny_bundle, options=EngineOptions(max_batch=count), scheduler=f"fixed:{GAMMA}"
    )
    requests = [
        Request(
            prompt_ids=prompt,
            params=SamplingParams(
                max_new_tokens=8, ignore_eos=True, temperature=float(temperature), seed=seed
            ),
        )
        for seed, prompt in enumerate(PROMPTS)
    ]
    expected = [list(each.token_ids) for each in engine.generate(requests)]
    assert [own[:8] for own in outputs] == expected


def take(committed: Committed, outputs: list[list[int]]) -> None:
    for row, accepted in enumerate(committed.accepted):
        outputs[row] += committed.tokens[row, : accepted + 1].tolist()


def test_bfloat16_rounds_commit_what_single_rows_decide() -> None:
    parts, steps = device_parts("bfloat16", len(PROMPTS))
    rounds, outputs = greedy_rounds(parts, steps)
    for _ in range(6):
        take(rounds.launch(inputs(4, 28)).read(), outputs)
    alone = device_parts("bfloat16", 1)
    target = alone[0].target_model(alone[1])
    assert [list(decoded(target, p, 8)) for p in PROMPTS] == [o[:8] for o in outputs]


def decoded(target: DeviceTargetModel, prompt: tuple[int, ...], count: int) -> Iterator[int]:
    context, tokens = 0, list(prompt)
    for _ in range(count):
        rows = ragged_rows([tokens], np.array([context]), np.zeros(1, np.bool_))
        context += len(tokens)
        tokens = [int(np.asarray(target.step(rows).logits)[0].argmax())]
        yield tokens[0]


def test_calibration_is_written_in_place() -> None:
    """The slope changes who is verified without a new capture: buffers keep their addresses."""
    parts, steps = device_parts("float32", len(PROMPTS))
    rounds, _ = greedy_rounds(parts, steps)
    rounds.launch(inputs(4, 6)).read()
    before = parts.buffers["verify.offsets"].clone()
    place = rounds._slope.data_ptr()
    backwards = -np.ones(GAMMA)  # the least confident request first
    rounds.calibrate(backwards)
    again, _ = greedy_rounds(parts, steps)
    again.calibrate(backwards)
    again.launch(inputs(4, 6)).read()
    assert rounds._slope.data_ptr() == place
    assert not torch.equal(parts.buffers["verify.offsets"], before)


def test_a_negative_budget_is_refused() -> None:
    parts, steps = device_parts("float32", 1)
    with pytest.raises(RequestError, match="must be at least 0, got -1"):
        TorchRounds(parts, steps).launch(inputs(1, -1))
