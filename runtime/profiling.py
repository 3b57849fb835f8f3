# SPDX-License-Identifier: Apache-2.0
"""Measure what rounds cost on this machine: draft, verify and commit through the engine itself.

Rounds of every verification length run in turn, so that what else the machine does hits all of them alike,
and every number of requests has several turns; medians are kept, and made monotone. The target's output rows
are counted, and in the first rounds poisoned before the step: a step that computed less than it should is
refused.

Legend: R requests, k verified drafts of each, m request counts, n lengths, c contexts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.errors import BackendError, RequestError
from dspark_trt.runtime.backends import Backend
from dspark_trt.runtime.backends.interface import (
    CacheRows,
    PaysCapacity,
    TargetModel,
    TargetOutput,
)
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.machine import cost_origin
from dspark_trt.runtime.ragged import RaggedRows
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.round_costs import RoundCosts
from dspark_trt.runtime.round_report import RoundReport
from dspark_trt.runtime.scheduler import Fixed, Plan, Scheduler
from dspark_trt.runtime.targets.host import HostTargetModel

Progress = Callable[[int, int], None]  # done, of how many
Ints = NDArray[np.int64]

_TURNS = 3  # of every number of requests at one context
_CHECKS = 4  # loads between the cells at every context, that the finished grid is compared with


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """What to measure."""

    requests: tuple[int, ...]
    lengths: tuple[int, ...]  # 0, .., γ
    context_tokens: tuple[int, ...]
    seconds: float = 1.5  # for each number of requests at each context, if that is enough for:
    rounds: int = 9  # of each cell at least
    temperature: float = 0.0

    def __post_init__(self) -> None:
        for name in ("requests", "lengths", "context_tokens"):
            values = getattr(self, name)
            if (
                not values
                or list(values) != sorted(set(values))
                or values[0] < (name != "lengths")
            ):
                raise RequestError(
                    f"{name} must be increasing and positive, got {list(values)}"
                )
        if self.rounds < _TURNS:
            raise RequestError(f"rounds must be at least {_TURNS}, got {self.rounds}")


class Profile(NamedTuple):
    costs: RoundCosts
    errors: NDArray[
        np.float64
    ]  # predicted / measured − 1 of uneven rounds that the grid has not seen


def default_plan(backend: Backend, *, max_requests: int = 32) -> ProfilePlan:
    """Powers of two of requests, lengths up to 8 and every other beyond, three contexts."""
    gamma = backend.bundle.draft.gamma
    longest = backend.bundle.max_context_tokens - 4 * (gamma + 1)
    powers = {1 << i for i in range(max_requests.bit_length())}
    return ProfilePlan(
        requests=tuple(sorted({*powers, max_requests})),
        lengths=tuple(sorted({*range(min(gamma, 8) + 1), *range(8, gamma, 2), gamma})),
        context_tokens=tuple(c for c in (64, 256, 768) if c < longest) or (max(longest, 1),),
    )


def profile(
    backend: Backend,
    plan: ProfilePlan,
    *,
    target: TargetModel | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure the grid of ``plan``, and uneven rounds between its cells to compare with.

    Raises:
        BackendError: a step returned fewer rows than it was given.
        CapacityError: a context beyond the bundle's positions.
        TableError: what was measured is no usable table.
    """
    most = plan.requests[-1]
    counted = _CountedTarget(target or backend.target_model(most))
    options = EngineOptions(
        max_batch=most,
        max_tokens_per_step=most * (2 + plan.lengths[-1]),
        # One prompt, which all requests share; a host's target keeps its own caches.
        prefix_cache_bytes=0 if isinstance(target, HostTargetModel) else 1 << 30,
    )
    samples: list[_Samples] = []
    checks: list[_Check] = []
    paid: list[int] = []  # context rows, by context
    done, total = 0, len(plan.context_tokens) * (_TURNS * len(plan.requests) + 1)
    with Engine(backend, options, scheduler=Fixed(0), target=counted) as engine:
        bench = _Bench(engine, counted, plan, _clock(backend))
        for (
            context
        ) in plan.context_tokens:  # attention may pay for what caches hold: it follows
            paid.append(bench.open(context))
            own = [_Samples(plan, requests) for requests in plan.requests]
            for turn in range(_TURNS):
                for load in own:
                    bench.measure(load, is_first=turn == 0)
                    done += 1
                    if progress is not None:
                        progress(done, total)
            checks += [bench.check(paid[-1]) for _ in range(_CHECKS)]
            samples += own
            done += 1
            if progress is not None:
                progress(done, total)
    costs = _grid(plan, paid, samples, cost_origin(backend, target))
    errors = np.array([check.predicted(costs) / check.seconds - 1 for check in checks])
    return Profile(costs.require_informative(), errors)


class _Samples:
    """Seconds of the rounds of one load."""

    def __init__(self, plan: ProfilePlan, requests: int) -> None:
        self.requests = requests
        self.blocks = [np.full(requests, length) for length in plan.lengths]
        self.blocks.append(_uneven(requests, plan.lengths[-1]))
        self.drafted: list[list[float]] = [[] for _ in self.blocks]
        self.plain: list[float] = []


class _Check(NamedTuple):
    """A load between the cells."""

    context: int
    lengths: Ints  # [R]
    seconds: float

    def predicted(self, costs: RoundCosts) -> float:
        requests, drafts = len(self.lengths), int(self.lengths.sum())
        return float(
            costs.seconds(
                requests + drafts,
                requests + drafts,
                requests=requests,
                drafting=requests,
                context_tokens=self.context,
                longest=int(self.lengths.max()),
            )[0]
        )


def _grid(
    plan: ProfilePlan, paid: list[int], samples: list[_Samples], origin: dict[str, str]
) -> RoundCosts:
    shape = (len(plan.context_tokens), len(plan.requests))
    medians = [[median(seconds) for seconds in each.drafted] for each in samples]
    rounds = np.reshape(medians, (*shape, -1))  # [c, m, n + 1]
    plain = np.reshape([median(each.plain) for each in samples], shape)
    drafted = np.apply_along_axis(monotone, 2, rounds[..., :-1])
    draft = np.maximum(drafted[..., 0] - plain, 0.0)
    longest = plan.lengths[-1]
    left_out = np.array([r * longest - _uneven(r, longest).sum() for r in plan.requests])
    saved = np.maximum(drafted[..., -1] - rounds[..., -1], 0.0) * (left_out > 0)
    return RoundCosts(
        plan.requests,
        plan.lengths,
        drafted - draft[..., None],
        draft,
        context_tokens=paid,
        row_seconds=saved / np.maximum(left_out, 1),
        origin=origin,
    )


def monotone(values: NDArray[np.float64]) -> NDArray[np.float64]:  # [n]
    """The nearest sequence that never falls, in least squares: neighbours that do are averaged."""
    means, weights = list[float](), list[int]()
    for value in values.tolist():
        means.append(value)
        weights.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            weight = weights[-2] + weights[-1]
            mean = (means[-2] * weights[-2] + means[-1] * weights[-1]) / weight
            means[-2:], weights[-2:] = [mean], [weight]
    return np.repeat(means, weights)


def _uneven(requests: int, longest: int) -> Ints:
    """Every other request verifies ``longest`` drafts, the others none."""
    lengths = np.zeros(requests, np.int64)
    lengths[::2] = longest
    return lengths


def _clock(backend: Backend) -> Callable[[], float]:
    """With one thread on a CPU its own time: what other processes take does not count."""
    if backend.options.threads == 1 and backend.options.providers == ("CPUExecutionProvider",):
        return time.thread_time
    return time.perf_counter


@dataclass(frozen=True)
class _Exactly(Scheduler):
    """Given lengths, whatever the drafter thinks of its drafts."""

    lengths: Ints  # [R]

    def decide(
        self,
        confidence: ArrayLike,
        *,
        limits: ArrayLike | None = None,
        context_tokens: float | None = None,
    ) -> Plan:
        """``confidence`` and ``context_tokens`` are not used."""
        return Plan(np.minimum(self.lengths, np.asarray(limits)), "profiling")


class _Bench:
    """Runs single rounds of an engine under given lengths and takes their time."""

    def __init__(
        self,
        engine: Engine,
        target: "_CountedTarget",
        plan: ProfilePlan,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._target, self._plan, self._clock = engine, target, plan, clock
        self._reports: list[RoundReport] = []
        engine.observers.append(self._reports.append)
        self._running: list[int] = []
        self._place = self._longest = (
            0  # context asked of the running requests, and the longest
        )
        self._random = np.random.default_rng(0)

    def open(self, context: int) -> int:
        """Make room for a context; returns the rows that attention pays for from now on."""
        self._context, self._running = context, self._stopped()
        self._target.reserve(context + 4 * (self._engine.gamma + 1))
        inner = self._target.inner
        return inner.capacity_rows if isinstance(inner, PaysCapacity) else context

    def measure(self, samples: _Samples, *, is_first: bool) -> None:
        """A turn of one load."""
        least, spent = -(-self._plan.rounds // _TURNS), 0.0
        repeat = -1  # the first warms up, and checks
        while repeat < least or spent < self._plan.seconds / _TURNS:
            for index in self._random.permutation(len(samples.blocks)):
                self._keep_running(samples.requests)
                self._target.is_checking = is_first and repeat < 0
                seconds = self._round(samples.blocks[index])
                if repeat >= 0:
                    samples.drafted[index].append(seconds)
                    spent += seconds
            self._keep_running(samples.requests)
            seconds = self._plain_round()
            if repeat >= 0:
                samples.plain.append(seconds)
            repeat += 1

    def check(self, paid: int) -> _Check:
        """Rounds of a number of requests and of lengths drawn at random."""
        requests = int(self._random.integers(1, self._plan.requests[-1], endpoint=True))
        draws = self._random.geometric(self._random.uniform(0.2, 0.8), requests) - 1
        lengths = np.minimum(draws, self._plan.lengths[-1])
        seconds = []
        for _ in range(self._plan.rounds + 1):
            self._keep_running(requests)
            seconds.append(self._round(lengths))
        return _Check(paid, lengths, median(seconds[1:]))

    def _round(self, lengths: Ints) -> float:
        self._engine.planner.scheduler = _Exactly(lengths)
        seconds = self._timed_step()
        wanted, rows = len(lengths) + int(lengths.sum()), self._target.rows
        if rows != wanted or self._reports[-1].target_rows != wanted:
            raise BackendError(
                f"a step of {wanted} rows returned {rows}: its time says nothing about {wanted} rows"
            )
        return seconds

    def _plain_round(self) -> float:
        """Mean of γ + 1 rounds: so often do waiting taps fill up and go to the drafter.

        As many go before them. A round that follows drafting finds the processor's caches full of the drafter, and
        takes up to half as long again as one of a request that never drafts.
        """
        self._engine.planner.scheduler = Fixed(0)
        rounds = self._engine.gamma + 1
        for _ in range(rounds):
            self._timed_step()
        return sum(self._timed_step() for _ in range(rounds)) / rounds

    def _timed_step(self) -> float:
        self._reports.clear()
        started = self._clock()
        self._engine.step()
        seconds = self._clock() - started
        self._longest += int(self._reports[-1].committed.max())
        return seconds

    def _stopped(self) -> list[int]:
        for request_id in self._running:
            self._engine.abort(request_id)
            self._engine.discard(request_id)
        return []

    def _keep_running(self, requests: int) -> None:
        """``requests`` decoding near the context: new ones where they have gone past it."""
        room = 2 * (self._engine.gamma + 1)
        if len(self._running) == requests and self._longest < self._context + room:
            return
        self._running, self._longest = self._stopped(), max(self._context - room, 1)
        vocab = self._engine.bundle.draft.decoder.vocab_size
        request = Request(
            prompt_ids=tuple((np.arange(self._longest) % vocab).tolist()),
            params=SamplingParams(
                temperature=self._plan.temperature,
                max_new_tokens=self._engine.bundle.max_context_tokens,
                ignore_eos=True,
            ),
        )
        self._engine.planner.scheduler = Fixed(0)
        self._running = [self._engine.submit(request)]
        self._until_decoding()  # its prompt is in the prefix cache now
        self._running += [self._engine.submit(request) for _ in range(requests - 1)]
        self._until_decoding()

    def _until_decoding(self) -> None:
        while True:
            self._engine.step()
            decoding = self._reports[-1].decoding
            if len(decoding) == len(self._running) and decoding.all():
                return


class _CountedTarget:
    """The target, its output rows counted; while ``is_checking``, what it leaves unwritten is refused."""

    def __init__(self, target: TargetModel) -> None:
        self.inner = target
        self._last: TargetOutput | None = None
        self.rows = 0
        self.is_checking = False

    def step(self, rows: RaggedRows) -> TargetOutput:
        if self.is_checking and self._last is not None:
            self._last.logits[...] = (
                np.nan
            )  # the next step writes into the same buffer, if into any
        output = self.inner.step(rows)
        self._last, self.rows = output, len(output.logits)
        if self.is_checking and not np.isfinite(output.logits).all():
            raise BackendError(
                f"a target step of {len(output.logits)} rows left some of them unwritten"
            )
        return output

    def reserve(self, context_tokens: int) -> None:
        self.inner.reserve(context_tokens)

    def swap_rows(self, first: int, second: int) -> None:
        self.inner.swap_rows(first, second)

    def read_rows(self, row: int, count: int) -> CacheRows:
        return self.inner.read_rows(row, count)

    def write_rows(self, row: int, saved: CacheRows) -> None:
        self.inner.write_rows(row, saved)

    def close(self) -> None:
        self.inner.close()
