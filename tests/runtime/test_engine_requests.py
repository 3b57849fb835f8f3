# SPDX-License-Identifier: Apache-2.0
"""Per-request parameters, limits and failures: each against a plain step-by-step reference."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.errors import (
    BackendError,
    CapacityError,
    EngineClosedError,
    QueueFullError,
    RequestError,
)
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.backends.interface import PaysCapacity
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.ragged import RaggedRows, ragged_rows
from dspark_trt.runtime.request import FinishReason, Request, SamplingParams
from dspark_trt.runtime.round_report import RoundReport
from dspark_trt.runtime.text import TextCodec
from dspark_trt.runtime.trace_recorder import TraceRecorder
from dspark_trt.runtime.traces import load_traces, models_of
from tests.conftest import copied
from tests.runtime.golden import golden_json

ITEMS = golden_json("greedy_outputs")["items"]
VOCAB = 2048


def request(prompt_ids: list[int], **given: Any) -> Request:
    own = {k: given.pop(k) for k in list(given) if k in Request.__dataclass_fields__}
    params = SamplingParams(**{"max_new_tokens": 40, "ignore_eos": True, **given})
    return Request(prompt_ids=tuple(prompt_ids), params=params, **own)


@pytest.fixture
def engine(tiny_bundle: Bundle) -> Iterator[Engine]:
    with Engine.load(tiny_bundle, options=EngineOptions(max_batch=4)) as engine:
        yield engine
        engine.check_integrity()
        assert not engine.has_work


class StepByStep:
    """The target alone, one row a step: what every decoding must agree with."""

    def __init__(self, bundle: Bundle) -> None:
        self._model = open_backend("onnxruntime", bundle).target_model(1)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Logits behind every token `[n, V]`."""
        rows = ragged_rows([tokens], np.zeros(1, np.int64), np.array([True]))
        return self._model.step(rows).logits.copy()


@pytest.fixture(scope="module")
def reference(tiny_bundle: Bundle) -> StepByStep:
    return StepByStep(tiny_bundle)


def test_penalties_count_tokens_accepted_in_the_same_block(
    engine: Engine, reference: StepByStep
) -> None:
    """Greedy with penalties equals applying them step by step (sgl-project/sglang#28180)."""
    prompt = ITEMS[2]["prompt_ids"]
    asked = request(
        prompt,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((20, -2.0), (33, 1.5)),
    )
    beside = [request(ITEMS[i]["prompt_ids"]) for i in (0, 1)]  # plain ones in the same batch
    done = engine.generate([beside[0], asked, beside[1]])
    output: list[int] = []
    for _ in range(40):
        logits = reference.logits(prompt + output)[-1].astype(np.float64)
        logits[20] -= 2.0
        logits[33] += 1.5
        seen = list(set(prompt + output))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.2, logits[seen] * 1.2)
        counts = np.bincount(output, minlength=VOCAB) if output else np.zeros(VOCAB)
        logits -= 0.3 * counts + 0.4 * (counts > 0)
        output.append(int(logits.argmax()))
    assert list(done[1].token_ids) == output
    assert (
        done[1].stats.accepted_length or 0
    ) > 1.2  # several drafts of one block were accepted
    for plain, item in ((done[0], ITEMS[0]), (done[2], ITEMS[1])):
        assert list(plain.token_ids) == item["output_ids_ignore_eos"][:40]


def test_logprobs_are_the_targets(engine: Engine, reference: StepByStep) -> None:
    prompt = ITEMS[0]["prompt_ids"]
    done = engine.generate([request(prompt, logprobs=3)])[0]
    logits = reference.logits(prompt + list(done.token_ids))[len(prompt) - 1 : -1]
    logprobs = logits - np.log(
        np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)
    )
    logprobs -= logits.max(-1, keepdims=True)
    assert len(done.logprobs) == len(done.token_ids) == 40
    for row, token, given in zip(logprobs, done.token_ids, done.logprobs, strict=True):
        assert given.logprob == pytest.approx(row[token], abs=1e-4)
        best = np.argsort(-row, kind="stable")[:3]
        assert [i for i, _ in given.top] == best.tolist()
        assert [value for _, value in given.top] == pytest.approx(row[best].tolist(), abs=1e-4)


def test_masks_hold_at_every_place(engine: Engine) -> None:
    """Tokens must alternate between even and odd ids; drafts that break the rule are rejected."""

    def alternate(output: Any) -> np.ndarray:
        return np.arange(VOCAB) % 2 == len(output) % 2

    for temperature in (0.0, 1.0):
        asked = request(
            ITEMS[0]["prompt_ids"], allowed_tokens=alternate, temperature=temperature, seed=4
        )
        done = engine.generate([asked])[0]
        assert [token % 2 for token in done.token_ids] == [0, 1] * 20


def test_a_failing_mask_ends_its_request_only(engine: Engine) -> None:
    def fails_late(output: Any) -> np.ndarray:
        if len(output) > 6:
            raise ValueError("no such state")
        return np.ones(VOCAB, np.bool_)

    def forbids_all(output: Any) -> np.ndarray:
        return np.full(VOCAB, len(output) < 3)

    def wrong_shape(_: Any) -> np.ndarray:
        return np.ones(7, np.bool_)

    prompts = [item["prompt_ids"] for item in ITEMS[:4]]
    masks = (fails_late, forbids_all, wrong_shape)
    asked = [request(p, allowed_tokens=m) for p, m in zip(prompts, masks, strict=False)]
    done = engine.generate([*asked, request(prompts[3])])
    assert [d.finish_reason for d in done] == ["error", "error", "error", "length"]
    assert "allowed_tokens failed: no such state" in (done[0].error or "")
    assert "allow no token" in (done[1].error or "")
    assert "the mask has shape (7,), expected (2048,)" in (done[2].error or "")
    assert len(done[1].token_ids) <= 3
    assert list(done[3].token_ids) == ITEMS[3]["output_ids_ignore_eos"][:40]


def test_contexts_end_where_they_would_without_drafts(engine: Engine) -> None:
    """Accepted drafts and the target's own token used to reach one position beyond the last."""
    prompt = [token * 37 % 2000 + 4 for token in range(1020)]
    asked = [request(prompt[:length], max_new_tokens=100) for length in range(1012, 1020)]
    drafted, plain = (
        engine.generate([replace(each, speculate=speculate) for each in asked])
        for speculate in (True, False)
    )
    for one, other in zip(drafted, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason == FinishReason.CAPACITY
        assert len(one.prompt_ids) + len(one.token_ids) == 1024


def test_more_requests_than_may_wait_are_generated(tiny_bundle: Bundle) -> None:
    options = EngineOptions(max_batch=2, max_waiting=2)
    asked = [request(ITEMS[n % 8]["prompt_ids"], max_new_tokens=3) for n in range(9)]
    with Engine.load(tiny_bundle, options=options) as engine:
        done = engine.generate(asked)
        assert [each.prompt_ids for each in done] == [each.prompt_ids for each in asked]
        with pytest.raises(RequestError, match="outside the vocabulary"):
            engine.generate([*asked, request([VOCAB])])
        assert not engine.has_work
        assert engine._known == {}


def test_weights_behind_a_link_are_named(tiny_bundle: Bundle, tmp_path: Path) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    weights = bundle.path / "weights.bin"
    weights.unlink()
    weights.symlink_to(tiny_bundle.path / "weights.bin")
    with pytest.raises(BackendError, match=r"weights.bin is a link out of .*bundle.*cp -rL"):
        Engine.load(bundle)


def test_a_mask_may_abort_requests(engine: Engine) -> None:
    """Its own and others, those already seen to in this round as well: rows stay until it ends."""
    ids: list[int] = []

    def mask(output: Any) -> Any:
        if len(output) > 4:
            for each in ids[:3]:
                engine.abort(each)
            raise RuntimeError("aborted already")
        return np.ones(VOCAB, np.bool_)

    asked = [request(item["prompt_ids"], max_new_tokens=12) for item in ITEMS[:4]]
    asked[1] = replace(asked[1], allowed_tokens=mask)
    alone = engine.generate([asked[3]])[0]
    ids += [engine.submit(each) for each in asked]
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    ends = [engine.events(each)[-1].finish_reason for each in ids]
    assert ends == [FinishReason.ABORTED] * 3 + [FinishReason.LENGTH]
    done = [engine.take(each) for each in ids]
    assert done[3].token_ids == alone.token_ids


def test_a_closed_engine_ends_what_runs_and_says_so(tiny_bundle: Bundle) -> None:
    engine = Engine.load(tiny_bundle, options=EngineOptions(max_batch=1))
    answer = engine.stream(request(ITEMS[0]["prompt_ids"], max_new_tokens=100))
    next(answer)
    waiting = engine.submit(request(ITEMS[1]["prompt_ids"]))
    engine.close()
    assert [event.finish_reason for event in answer] == [FinishReason.ABORTED]
    assert engine.take(waiting).finish_reason == FinishReason.ABORTED
    assert not engine.has_work
    engine.step()
    engine.close()
    with pytest.raises(EngineClosedError, match="the engine is closed and takes no more"):
        engine.generate([request(ITEMS[0]["prompt_ids"])])


def test_stop_strings_across_token_boundaries(engine: Engine, tiny_bundle: Bundle) -> None:
    codec = TextCodec(tiny_bundle)
    prompt = ITEMS[1]["prompt_ids"]
    free = engine.generate([request(prompt, detokenize=True)])[0]
    assert free.text == codec.decode(free.token_ids)
    for at in range(5, len(free.text) - 8, 7):
        stop = free.text[at : at + 4]
        cut = free.text.index(stop)
        events = list(engine.stream(request(prompt, stop=(stop, "never there"))))
        assert "".join(event.text for event in events) == free.text[:cut]
        assert events[-1].finish_reason is FinishReason.STOP
        done = engine.take(events[0].request_id)
        assert free.token_ids[: len(done.token_ids)] == done.token_ids
        assert stop in codec.decode(done.token_ids)
        assert stop not in codec.decode(done.token_ids[:-1])


def test_text_never_shows_half_a_character(engine: Engine, tiny_bundle: Bundle) -> None:
    """A piece never ends inside a character, and the pieces are the whole text."""
    codec = TextCodec(tiny_bundle)
    held = 0
    for seed in range(6):
        asked = request([5, 9], temperature=2.5, seed=seed, detokenize=True, max_new_tokens=60)
        events = list(engine.stream(asked))
        assert not any(event.text.endswith("\ufffd") for event in events[:-1])
        whole = engine.take(events[0].request_id)
        assert (
            "".join(event.text for event in events)
            == whole.text
            == codec.decode(whole.token_ids)
        )
        held += sum(codec.decode(event.token_ids).endswith("\ufffd") for event in events)
    assert held > 3  # such tokens did occur


def test_priorities_and_queue_limit(tiny_bundle: Bundle) -> None:
    engine = Engine.load(tiny_bundle, options=EngineOptions(max_batch=1, max_waiting=3))
    order: list[int] = []
    running = engine.submit(request([5, 6], max_new_tokens=4))
    engine.step()
    ids = [engine.submit(request([5, 6], max_new_tokens=4, priority=p)) for p in (0, 2, 2)]
    with pytest.raises(
        QueueFullError, match="3 requests are waiting, the most this engine queues"
    ):
        engine.submit(request([5, 6]))
    while engine.has_work:
        engine.step()
        for request_id in (running, *ids):
            if request_id not in order and any(
                e.finish_reason for e in engine.events(request_id)
            ):
                order.append(request_id)
    assert order == [running, ids[1], ids[2], ids[0]]


def test_admission_waits_for_memory(tiny_bundle: Bundle) -> None:
    options = EngineOptions(max_batch=4, max_cached_tokens=100)
    engine = Engine.load(tiny_bundle, options=options)
    with pytest.raises(CapacityError, match="may hold 132 tokens, the engine caches 100"):
        engine.submit(request([5] * 12, max_new_tokens=120))
    for _ in range(5):
        engine.submit(request([5] * 8, max_new_tokens=40))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.status()["active"])
    assert most == 2
    assert engine.status()["finished"] == {"length": 5}


def test_deadlines_end_waiting_and_running_requests(tiny_bundle: Bundle) -> None:
    engine = Engine.load(tiny_bundle, options=EngineOptions(max_batch=1))
    late = [
        engine.submit(request([5, 6], max_new_tokens=900, timeout_s=seconds))
        for seconds in (0.1, 0.02)  # the second never comes in before it is too late
    ]
    while engine.has_work:
        engine.step()
    running, waiting = (engine.take(i) for i in late)
    assert running.finish_reason is waiting.finish_reason is FinishReason.TIMEOUT
    assert len(running.token_ids) > 0
    assert len(waiting.token_ids) == 0


def test_deadlines_of_requests_that_ended_are_forgotten(tiny_bundle: Bundle) -> None:
    """A day's deadline of a short answer is not held for a day."""
    engine = Engine.load(tiny_bundle, options=EngineOptions(max_batch=2))
    longest = engine.submit(request([5, 6], max_new_tokens=900, timeout_s=86_400.0))
    for _ in range(40):
        engine.generate([request([5, 6], max_new_tokens=1, timeout_s=86_400.0)] * 10)
    assert len(engine._deadlines) < 150
    assert longest in [request_id for _, request_id in engine._deadlines]


@pytest.mark.parametrize("budget", [4, 9, 33])
def test_the_token_budget_is_never_exceeded(tiny_bundle: Bundle, budget: int) -> None:
    """Rows are counted where the backend gets them, and they are exactly Σ(1+ℓ) plus prompt chunks."""
    counting = CountingTarget(tiny_bundle)
    options = EngineOptions(max_batch=4, max_tokens_per_step=budget)
    engine = Engine.load(tiny_bundle, options=options, target=counting)
    reports: list[RoundReport] = []
    engine.observers.append(reports.append)
    done = engine.generate(
        [request(item["prompt_ids"], max_new_tokens=20) for item in ITEMS[:6]]
    )
    assert [list(d.token_ids) for d in done] == [
        i["output_ids_ignore_eos"][:20] for i in ITEMS[:6]
    ]
    assert max(counting.rows) <= budget
    assert counting.rows == [r.target_rows for r in reports]
    for report in reports:
        if report.decoding.all():
            assert report.target_rows == int((1 + report.lengths).sum())
    prompts = sum(len(item["prompt_ids"]) for item in ITEMS[:6])
    assert engine.metrics.prompt_tokens == prompts


class CountingTarget:
    """The bundle's target, watched; it can be told to fail."""

    def __init__(self, bundle: Bundle, requests: int = 4) -> None:
        self._model = open_backend("onnxruntime", bundle).target_model(requests)
        self.rows: list[int] = []
        self.poison: int | None = None
        self.corrupt: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def step(self, rows: RaggedRows) -> Any:
        is_poison = rows.token_ids == self.poison
        if (
            is_poison[1:] & is_poison[:-1]
        ).any():  # twice in a row: nobody samples that by accident
            raise BackendError("injected failure")
        self.rows.append(len(rows.token_ids))
        output = self._model.step(rows)
        if self.corrupt is not None:
            bad = np.isin(rows.token_ids[rows.logit_rows], self.corrupt)
            output.logits[bad] = math.nan
        return output


@pytest.mark.parametrize("kind", ["backend", "nan"])
def test_a_failing_request_ends_alone(tiny_bundle: Bundle, kind: str) -> None:
    """A backend call that fails with one request's token in it, or its NaN logits."""
    victim = 1777
    assert all(victim not in item["prompt_ids"] + item["output_ids"] for item in ITEMS[:5])
    target = CountingTarget(tiny_bundle)
    setattr(target, "poison" if kind == "backend" else "corrupt", victim)
    engine = Engine.load(tiny_bundle, options=EngineOptions(max_batch=4), target=target)
    asked = [request(item["prompt_ids"]) for item in ITEMS[:5]]
    asked.insert(2, request([*ITEMS[0]["prompt_ids"], victim, victim]))
    done = engine.generate(asked)
    assert done[2].finish_reason is FinishReason.ERROR
    expected = "injected failure" if kind == "backend" else "not finite"
    assert expected in (done[2].error or "")
    for completion, item in zip(done[:2] + done[3:], ITEMS[:5], strict=True):
        assert list(completion.token_ids) == item["output_ids_ignore_eos"][:40]
    engine.check_integrity()


def test_a_device_that_gives_or_takes_no_prefix_rows_harms_one_request_at_most(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise BackendError("injected failure")

    target = CountingTarget(tiny_bundle)
    options = EngineOptions(max_batch=2, prefix_cache_bytes=4_000_000)
    engine = Engine.load(tiny_bundle, options=options, target=target)
    item = ITEMS[0]
    expected = item["output_ids_ignore_eos"][:40]
    monkeypatch.setattr(target, "read_rows", refuse, raising=False)
    done = engine.generate([request(item["prompt_ids"])])[0]
    assert list(done.token_ids) == expected
    assert engine.metrics.tokens == 40  # no round was left out and run again
    assert "is not kept for others: injected failure" in caplog.text
    monkeypatch.undo()
    engine.generate([request(item["prompt_ids"])])
    monkeypatch.setattr(target, "write_rows", refuse, raising=False)
    shared, other = engine.generate(
        [request(item["prompt_ids"]), request(ITEMS[1]["prompt_ids"])]
    )
    assert (shared.finish_reason, shared.error) == (FinishReason.ERROR, "injected failure")
    assert list(other.token_ids) == ITEMS[1]["output_ids_ignore_eos"][:40]
    engine.check_integrity()


def test_prefixes_are_computed_once(tiny_bundle: Bundle) -> None:
    """restore(prefix) + suffix == full run, and the bytes stay within the bound."""
    shared = ITEMS[0]["prompt_ids"]
    prompts = [
        shared + ITEMS[i]["prompt_ids"][:n] for i, n in ((1, 5), (2, 20), (3, 3), (4, 30))
    ]
    plain = Engine.load(tiny_bundle, options=EngineOptions(max_batch=2))
    expected = plain.generate([request(p) for p in prompts])
    options = EngineOptions(max_batch=2, prefix_cache_bytes=4_000_000)
    cached = Engine.load(tiny_bundle, options=options)
    empty = {"hits": 0, "misses": 0, "hit_tokens": 0, "bytes": 0}
    assert cached.status()["prefix_cache"] == empty
    for prompt, alone in zip(prompts, expected, strict=True):
        done = cached.generate([request(prompt)])[0]
        assert done.token_ids == alone.token_ids
        assert done.stats.accepted_lengths == alone.stats.accepted_lengths
    again = cached.generate([request(prompts[0])])[0]
    assert again.token_ids == expected[0].token_ids
    assert again.stats.cached_tokens == (len(prompts[0]) - 1) // 16 * 16
    assert cached.status()["prefix_cache"]["hit_tokens"] >= 4 * (len(shared) // 16 * 16)
    assert cached.status()["prefix_cache"]["bytes"] <= 4_000_000
    assert cached.status()["prefix_cache"]["misses"] == 1  # the very first
    cached.check_integrity()


def test_a_small_prefix_cache_forgets_the_oldest(tiny_bundle: Bundle) -> None:
    options = EngineOptions(max_batch=1, prefix_cache_bytes=600_000)
    engine = Engine.load(tiny_bundle, options=options)
    for item in ITEMS[:8]:
        done = engine.generate([request(item["prompt_ids"], max_new_tokens=8)])[0]
        assert list(done.token_ids) == item["output_ids_ignore_eos"][:8]
        engine.check_integrity()
    assert 0 < engine.status()["prefix_cache"]["bytes"] <= 600_000


def test_room_of_a_long_context_is_given_back_when_it_ends(tiny_bundle: Bundle) -> None:
    """Attention of onnxruntime pays for what caches hold: others would pay for ever."""
    engine = Engine.load(tiny_bundle, options=EngineOptions(max_batch=2))
    target = engine._rounds.target
    assert isinstance(target, PaysCapacity)
    capacities: list[int] = []
    engine.observers.append(lambda _: capacities.append(target.capacity_rows))
    short = engine.submit(request(ITEMS[0]["prompt_ids"]))
    engine.submit(request((ITEMS[3]["prompt_ids"] * 30)[:800], max_new_tokens=4))
    while engine.has_work:
        engine.step()
    assert list(engine.take(short).token_ids) == ITEMS[0]["output_ids_ignore_eos"][:40]
    assert max(capacities) >= 800
    assert capacities[-1] < 300
    engine.generate([request((ITEMS[3]["prompt_ids"] * 30)[:800], max_new_tokens=2)])
    assert capacities[-1] >= 800
    again = engine.generate([request(ITEMS[0]["prompt_ids"])])[0]
    assert list(again.token_ids) == ITEMS[0]["output_ids_ignore_eos"][:40]
    assert capacities[-1] < 300


def test_long_contexts_rebase_the_drafters_window(
    tiny_bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = (ITEMS[3]["prompt_ids"] * 9)[:300]
    plain = Engine.load(tiny_bundle, options=EngineOptions(drafter_trained_tokens=64))
    expected = plain.generate([request(prompt)])[0]
    assert "beyond the 64 the drafter was trained on" in caplog.text
    options = EngineOptions(drafter_trained_tokens=64, drafter_rebase_tokens=64)
    rebased = Engine.load(tiny_bundle, options=options)
    lengths = []
    rebased.observers.append(lambda _: lengths.append(int(rebased._rounds.table.draft_len[0])))
    done = rebased.generate([request(prompt)])[0]
    assert done.token_ids == expected.token_ids  # the target sees everything in any case
    assert max(lengths) < 64
    with pytest.raises(RequestError, match="cannot be used with drafter_rebase_tokens"):
        EngineOptions(drafter_rebase_tokens=64, prefix_cache_bytes=1000)


def test_a_rebased_window_equals_the_same_rows_at_position_zero(tiny_bundle: Bundle) -> None:
    from dspark_trt.runtime.drafter_window import DrafterWindow

    taps = np.random.default_rng(0).standard_normal((300, 384)).astype(np.float32)
    window = DrafterWindow(slots=1, rebase_tokens=64)
    window.joined(0)
    kept = None
    for start in range(0, 300, 7):
        window.remember(0, taps[start : start + 7])
        kept = window.rebased(0, start + 7)
    assert kept is not None
    assert (kept == taps[-32:]).all()


def test_traces_hold_what_happened(engine: Engine, tmp_path: Any) -> None:
    recorder = TraceRecorder(engine.bundle)
    engine.observers.append(recorder.observe)
    asked = [request(i["prompt_ids"], temperature=1.0, seed=n) for n, i in enumerate(ITEMS[:6])]
    done = engine.generate(asked)
    assert recorder.save(tmp_path / "trace.npz") == sum(d.stats.rounds for d in done)
    traces = load_traces(tmp_path / "trace.npz")
    assert traces.models == models_of(engine.bundle)
    for completion in done:
        own = traces.where(traces.request_id == completion.request_id)
        assert (own.accepted + 1).tolist() == list(completion.stats.accepted_lengths)
        assert own.lengths.tolist() == list(completion.stats.verification_lengths)
    assert traces.drafted_prob is not None
    assert traces.top_prob is not None
    assert ((traces.drafted_prob > 0) & (traces.drafted_prob <= traces.top_prob + 1e-9)).all()
    assert traces.step_seconds is not None
    assert (traces.step_seconds > 0).all()


def test_status_and_metrics_agree_with_the_completions(engine: Engine) -> None:
    from prometheus_client import generate_latest

    done = engine.generate([request(item["prompt_ids"]) for item in ITEMS[:4]])
    status = engine.status()
    rounds = [n for d in done for n in d.stats.accepted_lengths]
    assert status["accepted_length"] == pytest.approx(np.mean(rounds))
    assert status["output_tokens"] == 160
    assert status["finished"] == {"length": 4}
    assert any("no cost table" in note for note in status["notes"])
    text = generate_latest(engine.metrics.registry).decode()
    assert "dspark_output_tokens_total 160.0" in text
    assert f"dspark_accepted_length_count {float(len(rounds))}" in text
    assert 'dspark_finished_requests_total{reason="length"} 4.0' in text


def test_strict_engines_decide_near_ties_on_one_row(tiny_bundle: Bundle) -> None:
    """A target whose many-row logits are off by up to 0.05: strict output is still the one-row output."""
    margin = 0.2

    class Rounding(CountingTarget):
        def step(self, rows: RaggedRows) -> Any:
            output = super().step(rows)
            if len(rows.token_ids) > 1:  # noise that depends on the input only
                noise = np.sin(1000 * output.logits.astype(np.float64)) * 0.05
                output.logits[...] += noise.astype(np.float32)
            return output

    def run(speculate: bool, strict_margin: float) -> list[tuple[int, ...]]:
        options = EngineOptions(max_batch=3, strict_margin=strict_margin)
        engine = Engine.load(tiny_bundle, target=Rounding(tiny_bundle), options=options)
        return [
            done.token_ids
            for item in ITEMS[:12]
            for done in engine.generate([request(item["prompt_ids"], speculate=speculate)])
        ]

    plain = run(speculate=False, strict_margin=0.0)  # one request at a time: one row
    assert run(speculate=True, strict_margin=0.0) != plain
    assert run(speculate=True, strict_margin=margin) == plain
    options = EngineOptions(max_batch=3, strict_margin=margin)
    engine = Engine.load(tiny_bundle, target=Rounding(tiny_bundle), options=options)
    together = engine.generate([request(item["prompt_ids"]) for item in ITEMS[:12]])
    assert [(done.stats.accepted_length or 0) > 1.5 for done in together].count(True) > 6


def test_finished_requests_are_logged_without_their_text(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="dspark_trt"):
        engine.generate([request(ITEMS[0]["prompt_ids"], detokenize=True)])
    record = next(r for r in caplog.records if hasattr(r, "finish_reason"))
    assert record.finish_reason == "length"
    assert record.output_tokens == 40  # type: ignore[attr-defined]
