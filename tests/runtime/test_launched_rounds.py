# SPDX-License-Identifier: Apache-2.0
"""Rounds launched at once, here on a CPU, against rounds that wait for drafts and for verification: the same
tokens, lengths, confidences and counts, and no wait before the committed tokens.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dspark_trt.bundle import Bundle
from dspark_trt.errors import BackendError
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.backends.interface import BackendOptions, RoundInputs
from dspark_trt.runtime.backends.torch_backend import TorchBackend
from dspark_trt.runtime.backends.torch_rounds import TorchRounds
from dspark_trt.runtime.cost_table import CostTable
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.launched_rounds import PROCESSED, PROMPT, TOO_EARLY, UNDRAFTED
from dspark_trt.runtime.request import Completion, FinishReason, Request, SamplingParams
from dspark_trt.runtime.round_report import RoundReport
from dspark_trt.runtime.scheduler import Algorithm1, Asynchronous, Scheduler
from dspark_trt.runtime.scheduling import choose_scheduling
from dspark_trt.runtime.trace_recorder import TraceRecorder
from dspark_trt.runtime.traces import Traces
from tests.conftest import ExportBundle

GAMMA, VOCAB = 7, 2048
CPU = BackendOptions(device="cpu", threads=1)
# A row costs as much as a fifth of a step: verifying everything never pays.
COSTS = CostTable([1, 64], [1.0, 1 / 13.6], padded=False)


def request(number: int, **params: Any) -> Request:
    random = np.random.default_rng(number)
    wanted = {
        "max_new_tokens": 14 + 7 * (number % 5),
        "temperature": [0.0, 1.0][number % 2],
        "top_k": [0, 0, 40][number % 3],
        "top_p": [1.0, 0.9][number // 2 % 2],
        "seed": number,
        "ignore_eos": number % 4 != 3,
    } | params
    prompt = random.integers(3, VOCAB, 3 + 5 * (number % 4)).tolist()
    return Request(prompt_ids=(1, *prompt), params=SamplingParams(**wanted))


class Played(NamedTuple):
    completions: dict[int, Completion]
    reports: list[dict[str, Any]]
    traces: Traces
    status: dict[str, Any]
    waits: list[dict[str, int]]  # of rounds without a prompt


def play(bundle: Bundle, scheduler: Scheduler | str, launches: bool) -> Played:
    """Nine requests in three rows: they come in turns, two are aborted, all rows are used again and again."""
    options = EngineOptions(max_batch=3, max_tokens_per_step=40, launch_rounds=launches)
    engine = Engine.load(
        bundle, backend="torch", backend_options=CPU, options=options, scheduler=scheduler
    )
    recorder, reports, waits = TraceRecorder(engine.bundle), list[dict[str, Any]](), []

    def observe(report: RoundReport) -> None:
        reports.append(facts(report))
        if report.decoding.all():
            waits.append(report.waits)

    engine.observers += [recorder.observe, observe]
    with engine:
        submitted, step = [engine.submit(request(n)) for n in range(3)], 0
        while engine.has_work or len(submitted) < 9:
            step += 1
            if step % 4 == 0 and len(submitted) < 9:
                submitted.append(engine.submit(request(len(submitted))))
            if step in (6, 13):
                engine.abort(submitted[step // 6])
            engine.step()
            engine.check_integrity()
        completions = {each: engine.take(each) for each in submitted}
        return Played(completions, reports, recorder.traces(), engine.status(), waits)


def facts(report: RoundReport) -> dict[str, Any]:
    planned = report.planned
    return {
        "ids": [sequence.id for sequence in report.sequences],
        "decoding": report.decoding.tolist(),
        "drafted": report.drafted.tolist(),
        "lengths": report.lengths.tolist(),
        "accepted": report.accepted.tolist(),
        "committed": report.committed.tolist(),
        "target_rows": report.target_rows,
        "reason": None if planned is None else planned.reason,
        "confidence": None
        if planned is None or planned.confidence is None
        else planned.confidence.tolist(),
    }


SCHEDULERS: dict[str, Scheduler | str] = {
    "every draft": "auto",
    "fixed": "fixed:3",
    "asynchronous": Asynchronous(COSTS),
    "no table": Asynchronous(None),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_launched_rounds_are_rounds_that_wait(name: str, tiny_bundle: Bundle) -> None:
    scheduler = SCHEDULERS[name]
    launched, waiting = (play(tiny_bundle, scheduler, launches) for launches in (True, False))
    assert launched.status["launched_rounds"]["rounds"] > 15
    assert waiting.status["launched_rounds"] == {
        "rounds": 0,
        "never": "launch_rounds is off",
        "waited": {},
    }
    for number, own in launched.completions.items():
        other = waiting.completions[number]
        assert own.token_ids == other.token_ids
        assert own.kinds == other.kinds
        assert own.finish_reason == other.finish_reason
        for name in ("accepted_lengths", "verification_lengths", "reasons"):
            assert getattr(own.stats, name) == getattr(other.stats, name)
    reasons = [each.finish_reason for each in launched.completions.values()]
    assert reasons.count(FinishReason.ABORTED) == 2
    assert len(launched.reports) == len(waiting.reports)
    for own_round, other_round in zip(launched.reports, waiting.reports, strict=True):
        assert own_round == other_round  # confidences too, bit for bit
    for name in ("conf_logits", "accept_prefix_mask", "lengths", "drafted_prob", "top_prob"):
        np.testing.assert_allclose(
            getattr(launched.traces, name), getattr(waiting.traces, name), atol=1e-5
        )
    seconds = launched.traces.draft_seconds
    assert seconds is not None
    assert (seconds > 0).all()
    for key in ("accepted_length", "position_acceptance", "verification_lengths", "finished"):
        assert launched.status[key] == waiting.status[key]
    if isinstance(scheduler, Asynchronous) and scheduler.table is not None:
        lengths = [n for each in launched.reports for n in each["lengths"]]
        assert 0 < sum(lengths) < 0.8 * GAMMA * len(lengths)
    check_waits(launched, waiting)


def check_waits(launched: Played, waiting: Played) -> None:
    """The engine's own trace: a launched round waits once, for its committed tokens, and never before."""
    once = {"draft": 0, "schedule": 0, "target": 0, "verify": 0, "commit": 1}
    assert launched.waits.count(once) == launched.status["launched_rounds"]["rounds"]
    others = [each for each in launched.waits if each != once]
    assert all(each["draft"] == each["verify"] == 1 for each in [*others, *waiting.waits])


@pytest.mark.parametrize(
    ("room", "tokens_per_step", "reason"),
    [(12, 64, FinishReason.CAPACITY), (900, 11, FinishReason.LENGTH)],
)
def test_limits_of_context_and_of_a_step(
    room: int, tokens_per_step: int, reason: FinishReason, tiny_bundle: Bundle
) -> None:
    """A request ends with its context, or a step has room for few drafts: limits below γ."""
    most = tiny_bundle.max_context_tokens
    prompt = np.random.default_rng(0).integers(3, VOCAB, most - room).tolist()
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=1.0, seed=5)
    long = Request(prompt_ids=(1, *prompt), params=params)
    found = []
    for launches in (True, False):
        options = EngineOptions(
            max_batch=3, max_tokens_per_step=tokens_per_step, launch_rounds=launches
        )
        with Engine.load(
            tiny_bundle, backend="torch", backend_options=CPU, options=options
        ) as engine:
            done = engine.generate([long, request(1), request(2)])
            assert (engine.status()["launched_rounds"]["rounds"] > 3) == launches
        assert done[0].finish_reason is reason
        found.append([(each.token_ids, each.stats.verification_lengths) for each in done])
    assert found[0] == found[1]
    assert any(0 < length < GAMMA for _, lengths in found[0] for length in lengths)


class NoRead(TorchDispatchMode):
    """Operators that bring a value to the host, or have a shape that only values decide."""

    FORBIDDEN = (
        "_local_scalar_dense",
        "nonzero",
        "is_nonzero",
        "equal",
        "masked_select",
        "item",
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert func.overloadpacket.__name__ not in self.FORBIDDEN, func
        return func(*args, **(kwargs or {}))


def test_launching_reads_no_value(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = TorchRounds.launch

    def watched(self: TorchRounds, inputs: RoundInputs) -> Any:
        with NoRead():
            return launch(self, inputs)

    monkeypatch.setattr(TorchRounds, "launch", watched)
    played = play(tiny_bundle, "auto", True)
    assert played.status["launched_rounds"]["rounds"] > 15


@pytest.mark.parametrize(
    ("scheduler", "params", "speculate", "reason"),
    [
        ("auto", {"logprobs": 2}, True, PROCESSED),
        ("auto", {}, False, UNDRAFTED),
        (Asynchronous(COSTS), {}, True, TOO_EARLY),
        (Algorithm1(COSTS), {}, True, "scheduler Algorithm1 asks this round's confidences"),
    ],
)
def test_rounds_that_have_to_wait_say_why(
    scheduler: Scheduler | str,
    params: dict[str, Any],
    speculate: bool,
    reason: str,
    tiny_bundle: Bundle,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = request(1, **params)
    asked = Request(prompt_ids=made.prompt_ids, params=made.params, speculate=speculate)
    plain = request(2, max_new_tokens=70)
    outputs = []
    for launches in (True, False):
        options = EngineOptions(max_batch=2, launch_rounds=launches)
        with (
            caplog.at_level(logging.INFO),
            Engine.load(
                tiny_bundle,
                backend="torch",
                backend_options=CPU,
                options=options,
                scheduler=scheduler,
            ) as engine,
        ):
            outputs.append([each.token_ids for each in engine.generate([asked, plain])])
            status = engine.status()["launched_rounds"]
        if launches:
            assert status["waited"][reason] > 1
            assert status["waited"][PROMPT] == 1
            assert (status["rounds"] == 0) == isinstance(scheduler, Algorithm1)
    assert outputs[0] == outputs[1]
    assert f"rounds wait for the device in between: {reason}" in caplog.text
    assert "no round is launched at once: launch_rounds is off" in caplog.text


@pytest.mark.parametrize(
    ("drafter", "options", "reason"),
    [
        ("eagle3", {}, "Eagle3"),
        ("dspark-vanilla", {"strict_margin": 0.1}, "strict_margin"),
        ("dspark-vanilla", {"drafter_rebase_tokens": 64}, "drafter_rebase_tokens"),
    ],
)
def test_engines_that_launch_nothing_say_why(
    drafter: str, options: dict[str, Any], reason: str, fixture_bundle: ExportBundle
) -> None:
    engine = Engine.load(
        fixture_bundle(drafter),
        backend="torch",
        backend_options=CPU,
        options=EngineOptions(max_batch=1, **options),
    )
    with engine:
        assert reason in engine.status()["launched_rounds"]["never"]


def test_costs_are_weighed_ahead_where_that_saves_waits_for_a_gpu(tiny_bundle: Bundle) -> None:
    backend = TorchBackend(tiny_bundle, CPU)
    assert isinstance(choose_scheduling("auto", backend, costs=COSTS).scheduler, Algorithm1)
    backend.options = replace(backend.options, device="cuda:0")  # nothing is opened on it
    assert isinstance(choose_scheduling("auto", backend, costs=COSTS).scheduler, Asynchronous)
    named = choose_scheduling("algorithm1", backend, costs=COSTS)
    assert isinstance(named.scheduler, Algorithm1)


def test_a_round_that_fails_is_run_again_with_nothing_lost(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step behind the drafts fails once: requests run alone, and go on with the same tokens."""
    requests = [request(n, max_new_tokens=30) for n in range(3)]
    backend = open_backend("torch", tiny_bundle, CPU)
    with Engine(backend, EngineOptions(max_batch=3)) as engine:
        expected = [each.token_ids for each in engine.generate(requests)]
    after_draft: Callable[..., None] = TorchRounds._after_draft
    runs = []

    def fails_once(self: TorchRounds, key: Any) -> None:
        runs.append(key)
        if len(runs) == 4:
            raise BackendError("the device is busy")
        after_draft(self, key)

    monkeypatch.setattr(TorchRounds, "_after_draft", fails_once)
    with Engine(backend, EngineOptions(max_batch=3)) as engine:
        assert [each.token_ids for each in engine.generate(requests)] == expected
    assert len(runs) > 5


def test_a_request_whose_logits_are_not_finite_ends_alone(tiny_bundle: Bundle) -> None:
    backend = open_backend("torch", tiny_bundle, CPU)
    with Engine(backend, EngineOptions(max_batch=2)) as engine:
        ids = [engine.submit(request(n, max_new_tokens=30)) for n in range(2)]
        for _ in range(3):
            engine.step()
        for tensor in engine._rounds.target.caches.tensors:  # type: ignore[attr-defined]
            tensor[0] = torch.nan
        while engine.has_work:
            engine.step()
        broken, whole = (engine.take(each) for each in ids)
        assert engine.status()["launched_rounds"]["rounds"] > 3
    assert broken.finish_reason is FinishReason.ERROR
    assert "not finite" in str(broken.error)
    with Engine(backend, EngineOptions(max_batch=1)) as engine:
        alone = engine.generate([request(1, max_new_tokens=30)])[0]
    assert whole.token_ids == alone.token_ids
