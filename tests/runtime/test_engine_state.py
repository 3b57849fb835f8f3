# SPDX-License-Identifier: Apache-2.0
"""Any order of submissions, aborts and rounds: every request gets its own tokens, nothing leaks."""

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dspark_trt.bundle import Bundle
from dspark_trt.errors import BackendError, CheckpointError, EngineClosedError, RequestError
from dspark_trt.runtime.async_engine import AsyncEngine
from dspark_trt.runtime.backends import ort
from dspark_trt.runtime.backends.interface import BackendOptions, Committed
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Completion, FinishReason, Request, SamplingParams
from dspark_trt.runtime.targets.host import HostOutput, HostTargetModel
from tests.conftest import TINY_TARGET, ExportBundle
from tests.runtime.golden import golden_json
from tests.runtime.test_engine_requests import CountingTarget

ITEMS = golden_json("greedy_outputs")["items"]


def variant(number: int) -> Request:
    """Request `number`: greedy or seeded, of its own prompt and length."""
    return Request(
        prompt_ids=tuple(ITEMS[number % len(ITEMS)]["prompt_ids"]),
        params=SamplingParams(
            temperature=[0.0, 1.0, 0.7][number % 3],
            seed=number,
            top_k=[0, 50][number % 2],
            repetition_penalty=[1.0, 1.0, 1.0, 1.3][number % 4],
            max_new_tokens=5 + number % 17,
            ignore_eos=number % 5 == 0,
        ),
        speculate=number % 7 != 6,
    )


VARIANTS = 28


@pytest.fixture(scope="module")
def alone(tiny_bundle: Bundle) -> list[tuple[int, ...]]:
    """Every variant's tokens when it is the only request."""
    engine = Engine.load(tiny_bundle, options=EngineOptions(max_batch=1))
    return [engine.generate([variant(n)])[0].token_ids for n in range(VARIANTS)]


def test_any_interleaving_gives_every_request_its_own_tokens(
    tiny_bundle: Bundle, alone: list[tuple[int, ...]]
) -> None:
    class Traffic(RuleBasedStateMachine):
        @initialize(
            batch=st.sampled_from([1, 2, 3, 5, 16]),
            budget=st.integers(0, 130),
            prefix=st.sampled_from([0, 3_000_000]),
        )
        def start(self, batch: int, budget: int, prefix: int) -> None:
            options = EngineOptions(
                max_batch=batch, max_tokens_per_step=batch + budget, prefix_cache_bytes=prefix
            )
            self.engine = Engine.load(tiny_bundle, options=options)
            # A full block per request must fit: trimming by the budget changes sampled tokens.
            self.is_roomy = budget >= 7 * batch
            self.open: dict[int, int] = {}

        @rule(number=st.integers(0, VARIANTS - 1))
        def submit(self, number: int) -> None:
            self.open[self.engine.submit(variant(number))] = number

        @precondition(lambda self: self.open)
        @rule(data=st.data())
        def abort(self, data: st.DataObject) -> None:
            self.engine.abort(data.draw(st.sampled_from(sorted(self.open))))

        @rule(rounds=st.integers(1, 6))
        def advance(self, rounds: int) -> None:
            for _ in range(rounds):
                self.engine.step()

        @invariant()
        def nothing_is_lost(self) -> None:
            if hasattr(self, "engine"):
                self.engine.check_integrity()
                self.collect()

        def collect(self) -> None:
            for request_id, number in list(self.open.items()):
                try:
                    done = self.engine.take(request_id)
                except RequestError:
                    continue  # not finished
                del self.open[request_id]
                expected = alone[number]
                is_exact = self.is_roomy or variant(number).params.temperature == 0
                if done.finish_reason is FinishReason.ABORTED:
                    expected = expected[: len(done.token_ids)]
                if is_exact:
                    assert done.token_ids == expected

        def teardown(self) -> None:
            if hasattr(self, "engine"):
                while self.engine.has_work:
                    self.engine.step()
                self.collect()
                assert not self.open

    Traffic.TestCase.settings = settings(
        max_examples=25,
        stateful_step_count=25,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    Traffic.TestCase().runTest()


@pytest.mark.slow
def test_soak(tiny_bundle: Bundle) -> None:
    """2,000 requests with aborts and injected faults: memory stays flat, acceptance does not drift."""
    target = CountingTarget(tiny_bundle, requests=8)
    poison = 1777
    options = EngineOptions(max_batch=8, max_waiting=4000, prefix_cache_bytes=2_000_000)
    engine = Engine.load(tiny_bundle, options=options, target=target)
    random = np.random.default_rng(0)
    outcomes: dict[str, int] = {}
    accepted: list[float] = []
    memory: list[int] = []
    target.poison = poison
    total = 2000
    pending: dict[int, bool] = {}
    submitted = 0
    while submitted < total or pending:
        while submitted < total and len(pending) < 24:
            prompt = list(
                ITEMS[int(random.integers(len(ITEMS)))]["prompt_ids"][
                    : int(random.integers(3, 60))
                ]
            )
            is_faulty = submitted % 50 == 7
            if is_faulty:
                prompt += [poison, poison]
            params = SamplingParams(
                max_new_tokens=int(random.integers(1, 24)),
                temperature=float(random.choice([0.0, 1.0])),
                seed=submitted,
            )
            pending[engine.submit(Request(prompt_ids=tuple(prompt), params=params))] = is_faulty
            submitted += 1
            if random.random() < 0.1:
                engine.abort(int(random.choice(list(pending))))
        engine.step()
        for request_id, is_faulty in list(pending.items()):
            try:
                done = engine.take(request_id)
            except RequestError:
                continue
            del pending[request_id]
            outcomes[done.finish_reason] = outcomes.get(done.finish_reason, 0) + 1
            assert (done.finish_reason is FinishReason.ERROR) <= is_faulty
            if done.stats.rounds:
                accepted.append(sum(done.stats.accepted_lengths) - done.stats.rounds)
                accepted[-1] /= done.stats.rounds * engine.gamma
            if sum(outcomes.values()) % 200 == 0:
                gc.collect()
                memory.append(_resident_bytes())
        engine.check_integrity()
    assert sum(outcomes.values()) == total
    assert outcomes["aborted"] > 100
    assert outcomes["error"] > 20
    assert engine._known == {}
    assert max(memory[3:]) <= 1.05 * memory[2]
    tenth = len(accepted) // 10
    drift = abs(np.mean(accepted[:tenth]) - np.mean(accepted[-tenth:]))
    spread = np.std(accepted) * (2 / tenth) ** 0.5
    assert drift < max(0.02, 3 * spread)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.fixture
def service(tiny_bundle: Bundle) -> Iterator[AsyncEngine]:
    with AsyncEngine(Engine.load(tiny_bundle, options=EngineOptions(max_batch=4))) as service:
        yield service


def test_concurrent_streams(service: AsyncEngine, alone: list[tuple[int, ...]]) -> None:
    async def read(number: int) -> tuple[int, ...]:
        tokens: list[int] = []
        async for event in service.stream(variant(number)):
            tokens += event.token_ids
            if number % 4 == 0:
                await asyncio.sleep(0.01)  # a slow consumer
        return tuple(tokens)

    async def all_of_them() -> list[tuple[int, ...]]:
        return await asyncio.gather(*(read(n) for n in range(12)))

    assert asyncio.run(all_of_them()) == alone[:12]


def test_a_consumer_that_leaves_aborts_its_request_only(
    service: AsyncEngine, alone: list[tuple[int, ...]]
) -> None:
    async def run() -> tuple[int, ...]:
        async def leave_early() -> None:
            long = Request(
                prompt_ids=(5, 6), params=SamplingParams(max_new_tokens=900, ignore_eos=True)
            )
            async for _ in service.stream(long):
                return

        cancelled = asyncio.create_task(service.complete(variant(5)))
        await asyncio.sleep(0.005)
        cancelled.cancel()
        await asyncio.gather(leave_early(), cancelled, return_exceptions=True)
        return (await service.complete(variant(3))).token_ids

    assert asyncio.run(run()) == alone[3]
    for _ in range(200):
        status = service.status()
        if status["active"] == 0 and status["finished"].get("aborted", 0) >= 1:
            break
    assert service.status()["active"] == 0
    assert service.engine._known == {}


def test_threads_share_an_engine(service: AsyncEngine, alone: list[tuple[int, ...]]) -> None:
    results: dict[int, tuple[int, ...]] = {}

    def work(number: int) -> None:
        results[number] = service.generate(variant(number), timeout_s=60).token_ids

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[n] for n in range(8)] == alone[:8]


def test_closing_drains_then_aborts_and_refuses(tiny_bundle: Bundle) -> None:
    service = AsyncEngine(Engine.load(tiny_bundle, options=EngineOptions(max_batch=2)))
    finished: list[Any] = []
    long = Request(
        prompt_ids=(5, 6), params=SamplingParams(max_new_tokens=1000, ignore_eos=True)
    )
    worker = threading.Thread(target=lambda: finished.append(service.generate(long)))
    worker.start()
    while service.status()["rounds"] == 0:
        pass
    service.close(drain_s=0.01)
    worker.join(timeout=10)
    assert not worker.is_alive()
    assert finished[0].finish_reason is FinishReason.ABORTED
    with pytest.raises(EngineClosedError, match="takes no more requests"):
        service.generate(long)


def test_the_engines_own_thread_does_not_wait_for_itself(service: AsyncEngine) -> None:
    for wait in (service.close, service.status, lambda: service.generate(variant(0))):

        def ask(_: Engine, wait: Callable[[], Any] = wait) -> Any:
            return wait()

        with pytest.raises(RequestError, match="was made by that thread itself"):
            service.call(ask).result(20)
    assert service.generate(variant(0), timeout_s=20).finish_reason is not None


def test_a_fork_is_told_to_open_its_own_engine(service: AsyncEngine) -> None:
    """Its threads stayed behind: a request would wait for ever."""
    service.generate(variant(0), timeout_s=20)
    child = os.fork()
    if not child:
        told = 0
        for ask in (service.generate, service.engine.submit):
            try:
                ask(variant(0))
            except EngineClosedError as error:
                told += "Open an engine in each process" in str(error)
        os._exit(told)
    for _ in range(200):
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the fork waits")
    assert os.waitstatus_to_exitcode(code) == 2


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), SystemExit("a bug")])
def test_a_defect_ends_every_request_instead_of_hanging(
    tiny_bundle: Bundle, error: BaseException
) -> None:
    target = CountingTarget(tiny_bundle)
    service = AsyncEngine(Engine.load(tiny_bundle, target=target))

    def broken(_: Any) -> Any:
        raise error

    target.step = broken  # type: ignore[method-assign, assignment]
    done = service.generate(variant(0), timeout_s=20)
    assert done.finish_reason is FinishReason.ERROR
    assert "a bug" in (done.error or "")
    with pytest.raises(EngineClosedError, match="a bug"):
        service.generate(variant(0))
    service.close()


def test_a_device_that_moves_no_rows_ends_every_request_too(tiny_bundle: Bundle) -> None:
    """Behind an illegal access every call fails, those that free rows included."""
    target = CountingTarget(tiny_bundle, requests=3)
    service = AsyncEngine(
        Engine.load(tiny_bundle, options=EngineOptions(max_batch=3), target=target)
    )

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("no device")

    for name in ("step", "swap_rows"):
        setattr(target, name, broken)

    async def run() -> list[Completion]:
        with await service.submit([variant(n) for n in range(5)]) as group:
            async with asyncio.timeout(20):
                async for _ in group:
                    pass
            return list(group.completions.values())

    done = asyncio.run(run())
    assert [each.finish_reason for each in done] == [FinishReason.ERROR] * 5
    assert all("no device" in str(each.error) for each in done)
    service.close()


def test_a_launched_round_that_never_came_loses_no_token(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device committed it and went on, the host never saw it: its tokens come again."""
    pytest.importorskip("torch")
    from dspark_trt.runtime.backends.torch_rounds import TorchRound

    read, reads = TorchRound.read, list[TorchRound]()

    def fails_at_times(self: TorchRound) -> Committed:
        reads.append(self)
        if len(reads) % 4 == 0:
            raise BackendError("the round did not come")
        return read(self)

    monkeypatch.setattr(TorchRound, "read", fails_at_times)
    items, params = ITEMS[:2], SamplingParams(max_new_tokens=24)
    options = EngineOptions(max_batch=2)
    with Engine.load(
        tiny_bundle,
        backend="torch",
        backend_options=BackendOptions(device="cpu", threads=1),
        options=options,
    ) as engine:
        done = engine.generate(
            [Request(prompt_ids=tuple(each["prompt_ids"]), params=params) for each in items]
        )
    assert len(reads) > 8
    assert [list(each.token_ids) for each in done] == [
        each["output_ids"][:24] for each in items
    ]


def test_a_transformers_target_gives_the_same_tokens(tiny_bundle: Bundle) -> None:
    """The example's host: prefill, verify and rollback through one method."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from dspark_trt.runtime.targets.transformers_model import TransformersTarget

    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_TARGET, dtype=torch.float32)
    host = TransformersTarget(model.eval(), tiny_bundle.draft.target_layer_ids)
    options = EngineOptions(max_batch=3)
    target = HostTargetModel(host, max_batch=3)
    sharing = replace(options, prefix_cache_bytes=1 << 20)
    engine = Engine.load(tiny_bundle, target=target, options=sharing)
    assert "no prefix cache: a host's target keeps its own caches" in engine.status()["notes"]
    requests = [
        Request(
            prompt_ids=tuple(item["prompt_ids"]),
            params=SamplingParams(max_new_tokens=20, temperature=[0.0, 1.0][n % 2], seed=n),
        )
        for n, item in enumerate(ITEMS[:5])
    ]
    expected = Engine.load(tiny_bundle, options=options).generate(requests)
    for ours, theirs in zip(engine.generate(requests), expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.stats.accepted_lengths == theirs.stats.accepted_lengths
    host.close()


@pytest.mark.parametrize("width", [0, 1, 2])
def test_a_host_without_the_taps_is_told_which(tiny_bundle: Bundle, width: int) -> None:
    """Of three tapped layers it returns fewer, or none at all."""
    vocab, hidden = tiny_bundle.draft.decoder.vocab_size, tiny_bundle.draft.target_hidden_size

    class Host:
        def forward(self, sequence: int, token_ids: Any, start: int) -> HostOutput:
            count = len(token_ids)
            taps: Any = np.zeros((count, width * hidden), np.float32) if width else None
            return HostOutput(np.zeros((count, vocab), np.float32), taps)

        def release(self, sequence: int) -> None:
            pass

    engine = Engine.load(tiny_bundle, target=HostTargetModel(Host(), max_batch=8))
    done = engine.generate([Request(prompt_ids=(5, 6), params=SamplingParams())])[0]
    assert done.finish_reason is FinishReason.ERROR
    found = f"taps {(2, width * hidden)}" if width else "taps None"
    expected = f"logits (2, {vocab}) and {found}, expected taps (2, {3 * hidden})"
    assert expected in (done.error or "")
    assert "the outputs of layers [1, 3, 4]" in (done.error or "")


def test_a_transformers_target_too_shallow_is_refused(tiny_bundle: Bundle) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from dspark_trt.runtime.targets.transformers_model import TransformersTarget

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, layers: int | None) -> None:
            super().__init__()
            if layers is not None:
                self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(layers))

        def get_decoder(self) -> "Model":
            return self

    ids = tiny_bundle.draft.target_layer_ids
    with pytest.raises(CheckpointError, match=r"4 decoder layers; .* of which it lacks \[4\]"):
        TransformersTarget(Model(4), ids)
    with pytest.raises(CheckpointError, match=r"no decoder layers .* implement HostTarget"):
        TransformersTarget(Model(None), ids)


@pytest.mark.parametrize("drafter", ["dspark-vanilla", "eagle3"])
def test_the_host_owned_example_runs(fixture_bundle: ExportBundle, drafter: str) -> None:
    import subprocess
    import sys

    pytest.importorskip("transformers")
    example = TINY_TARGET.parents[1] / "host_owned_target" / "main.py"
    bundle = fixture_bundle(drafter)
    command = [sys.executable, str(example), str(bundle.path), str(TINY_TARGET)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "same tokens: yes" in done.stdout


def test_a_service_opens_every_graph_before_the_first_request(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first request with a temperature or log-probabilities waited a fifth of a second for its graphs."""
    opened: list[str] = []
    open_session = ort.open_session

    def opens(path: Path, options: BackendOptions) -> Any:
        opened.append(path.stem)
        return open_session(path, options)

    monkeypatch.setattr(ort, "open_session", opens)
    with AsyncEngine(Engine.load(tiny_bundle, options=EngineOptions(max_batch=2))) as service:
        before = list(opened)
        for params in (
            SamplingParams(max_new_tokens=9),
            SamplingParams(max_new_tokens=9, temperature=1.0),
            SamplingParams(max_new_tokens=9, logprobs=2),
        ):
            service.generate(Request(prompt_ids=(5, 6, 7), params=params))
        assert opened == before
    assert sorted(before) == sorted(
        [
            "context",
            "draft",
            "draft_greedy",
            "target",
            "verify",
            "verify_greedy",
            "verify_processed",
        ]
    )
