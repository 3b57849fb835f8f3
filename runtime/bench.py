# SPDX-License-Identifier: Apache-2.0
"""Speed of a bundle on this machine: schedulers side by side, for each load, temperature and domain.

Every arm is an engine; all of them share one drafter and one target, so nothing but the scheduler differs, and
they take turns in another order every time. A fixed number of requests decodes at any moment: where one ends the
next prompt comes in. Rounds that read prompts are left out of the times.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from dspark_trt.block_weights import block_size
from dspark_trt.bundle import Bundle
from dspark_trt.config import WEIGHT_BITS
from dspark_trt.errors import RequestError
from dspark_trt.runtime.backends import Backend
from dspark_trt.runtime.bench_limits import MachineLimits
from dspark_trt.runtime.bench_models import CallTimes, SharedModels
from dspark_trt.runtime.bench_turns import clock_for
from dspark_trt.runtime.bench_work import Work, draft_work, target_work, verify_work
from dspark_trt.runtime.bootstrap import interval_of_ratio
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.round_report import RoundReport
from dspark_trt.runtime.trace_collection import Prompt

PLAIN = "fixed:0"
PARTS = ("draft", "schedule", "target", "verify", "commit", "host")
ALL = "all"
_LEAST_TOKENS = 96  # of a turn
_STRIDE = 4  # prompts: other turns begin with others
_PREFIX_CACHE_BYTES = 1 << 26  # prompts come again and again: only their first reading costs
Progress = Callable[[int, int], None]  # done, of how many
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What is compared. The first scheduler is what others are divided by."""

    schedulers: tuple[str, ...]
    requests: tuple[int, ...] = (1, 8, 32)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    new_tokens: int = 12  # a request, on average, counted in each turn
    repeats: int = 3
    max_new_tokens: int = 96
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("schedulers", "requests", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise RequestError(f"{name} must be distinct and not empty, got {list(values)}")
        for name in ("new_tokens", "repeats", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, got {getattr(self, name)}")
        if min(self.requests) < 1:
            raise RequestError(f"requests must be at least 1, got {list(self.requests)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One scheduler under one load. Domain `all` is the domains together."""

    scheduler: str
    requests: int
    temperature: float
    domain: str


@dataclass(slots=True)
class Tally:
    """What turns of one cell added up to."""

    reached: Ints  # [K]: verified at a position, all before it accepted
    kept: Ints  # [K]: accepted there
    seconds: list[float] = field(default_factory=list)  # of each turn
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0
    decoding: int = 0  # requests, over rounds
    context: int = 0  # their contexts added up
    rows: int = 0  # of the target
    verified: int = 0
    drafted: int = 0  # requests that drafted, over rounds
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    accepted: dict[int, list[int]] = field(default_factory=dict)  # request -> of its rounds

    @classmethod
    def empty(cls, gamma: int) -> "Tally":
        return cls(np.zeros(gamma, np.int64), np.zeros(gamma, np.int64))

    @property
    def tokens_per_second(self) -> list[float]:
        """Of each turn."""
        return [n / s for n, s in zip(self.tokens, self.seconds, strict=True)]

    def joined(self, other: "Tally") -> "Tally":
        """Both together, turn by turn."""
        return Tally(
            reached=self.reached + other.reached,
            kept=self.kept + other.kept,
            seconds=[a + b for a, b in zip(self.seconds, other.seconds, strict=True)],
            tokens=[a + b for a, b in zip(self.tokens, other.tokens, strict=True)],
            rounds=self.rounds + other.rounds,
            decoding=self.decoding + other.decoding,
            context=self.context + other.context,
            rows=self.rows + other.rows,
            verified=self.verified + other.verified,
            drafted=self.drafted + other.drafted,
            parts={part: self.parts[part] + other.parts[part] for part in PARTS},
            accepted=self.accepted | other.accepted,
        )


@dataclass(frozen=True, slots=True)
class BenchResult:
    tallies: Mapping[Cell, Tally]
    notes: Mapping[str, Sequence[str]]  # of a scheduler: what its engine misses
    threads: int | None
    clock: str


def run_bench(
    backend: Backend,
    prompts: Sequence[Prompt],
    plan: BenchPlan,
    *,
    progress: Progress | None = None,
) -> BenchResult:
    """Measure every cell of a plan.

    Raises:
        RequestError: no prompts, an unknown scheduler, or a prompt that the bundle cannot take.
    """
    if not prompts:
        raise RequestError("no prompts to measure with")
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    clock = clock_for(backend.options.threads if _is_cpu(backend) else None)
    times = CallTimes(clock)
    shared = SharedModels(backend, max(plan.requests), times)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    shared.reserve(longest + plan.max_new_tokens)  # attention may pay for what caches hold
    arms = {
        (name, requests): _Arm(shared, times, plan, name, requests)
        for requests in plan.requests
        for name in plan.schedulers
    }
    for arm in arms.values():  # of the same models
        arm.engine.open_graphs()
    loads = [
        (requests, temperature, domain)
        for requests in plan.requests
        for temperature in plan.temperatures
        for domain in by_domain
    ]
    gamma, order = backend.bundle.draft.gamma, np.random.default_rng(plan.seed)
    tallies: dict[Cell, Tally] = {}
    done, total = 0, len(loads) * (plan.repeats + 1)
    for requests, temperature, domain in loads:
        own = [
            Cell(scheduler=name, requests=requests, temperature=temperature, domain=domain)
            for name in plan.schedulers
        ]
        for turn in range(-1, plan.repeats):
            if turn <= 0:  # the first turn warms up, and is not kept
                tallies |= {cell: Tally.empty(gamma) for cell in own}
            for index in order.permutation(len(own)).tolist():
                arm = arms[own[index].scheduler, requests]
                arm.run(by_domain[domain], temperature, max(turn, 0), tallies[own[index]])
            done += 1
            if progress is not None:
                progress(done, total)
    shared.close()
    together = _over_domains(tallies) if len(by_domain) > 1 else {}
    notes = {name: arm.engine.status()["notes"] for (name, _), arm in arms.items()}
    return BenchResult(
        together | tallies,
        notes,
        backend.options.threads,
        "wall clock" if clock is clock_for(None) else "CPU time of the engine's thread",
    )


def _is_cpu(backend: Backend) -> bool:
    return backend.options.providers == ("CPUExecutionProvider",)


def _over_domains(tallies: Mapping[Cell, Tally]) -> dict[Cell, Tally]:
    found: dict[Cell, Tally] = {}
    for cell, tally in tallies.items():
        whole = replace(cell, domain=ALL)
        found[whole] = found[whole].joined(tally) if whole in found else tally
    return found


class _Arm:
    """An engine that decodes so many requests at any moment."""

    def __init__(
        self,
        shared: SharedModels,
        times: CallTimes,
        plan: BenchPlan,
        scheduler: str,
        requests: int,
    ) -> None:
        options = EngineOptions(
            max_batch=requests,
            max_tokens_per_step=max(512, requests * (2 + shared.bundle.draft.gamma)),
            prefix_cache_bytes=_PREFIX_CACHE_BYTES,
        )
        self.engine = Engine(shared, options, scheduler=scheduler)
        for method, part in (
            ("drafting", "schedule"),
            ("plan", "schedule"),
            ("learn", "learn"),
        ):
            times.watch(self.engine.planner, method, part)
        self._times, self._plan = times, plan
        self._report: RoundReport | None = None
        self._observed = 0.0
        self.engine.observers.append(self._observe)

    def _observe(self, report: RoundReport) -> None:
        self._report, self._observed = report, self._times.clock()

    def run(
        self, prompts: Sequence[Prompt], temperature: float, turn: int, tally: Tally
    ) -> None:
        """Decode until requests have `new_tokens` on average; the same prompts for every arm of a turn."""
        engine, plan = self.engine, self._plan
        most = engine.options.max_batch
        coming = self._requests(prompts, temperature, turn * (most + _STRIDE))
        running = [engine.submit(next(coming)) for _ in range(most)]
        times, seconds, tokens = self._times, 0.0, 0
        while tokens < max(plan.new_tokens * most, _LEAST_TOKENS):
            times.forget()
            started = times.clock()
            engine.step()
            taken = times.clock() - started
            report = self._report
            assert report is not None
            if report.decoding.all() and len(report.decoding) == most:
                seconds += taken
                tokens += int(report.committed.sum())
                self._count(report, taken, tally)
            for sequence in report.sequences:
                if sequence.finish_reason is not None:
                    running.remove(sequence.id)
                    engine.discard(sequence.id)
                    running.append(engine.submit(next(coming)))
        for request_id in running:
            engine.abort(request_id)
            engine.discard(request_id)
        tally.seconds.append(seconds)
        tally.tokens.append(tokens)

    def _requests(
        self, prompts: Sequence[Prompt], temperature: float, first: int
    ) -> Iterator[Request]:
        for index in count(first):
            params = SamplingParams(
                temperature=temperature,
                max_new_tokens=self._plan.max_new_tokens,
                seed=self._plan.seed + index,
            )
            yield Request(prompt_ids=prompts[index % len(prompts)].token_ids, params=params)

    def _count(self, report: RoundReport, taken: float, tally: Tally) -> None:
        parts = dict(self._times.spent)
        appended, learned = parts.pop("append"), parts.pop("learn")  # while committing
        parts["draft"] += appended
        parts["schedule"] += learned
        committing = self._observed - self._times.ended["verify"] - appended - learned
        parts["commit"] = max(committing, 0.0)
        parts["host"] = max(taken - sum(parts.values()), 0.0)
        for part, spent in parts.items():
            tally.parts[part] += spent
        tally.rounds += 1
        tally.decoding += len(report.decoding)
        tally.context += sum(sequence.length for sequence in report.sequences)
        tally.rows += report.target_rows
        drafted = report.drafted
        if not drafted.any():
            return
        lengths, accepted = report.lengths[drafted], report.accepted[drafted]
        tally.drafted += len(lengths)
        tally.verified += int(lengths.sum())
        positions = np.arange(self.engine.gamma)
        tally.kept += (positions < accepted[:, None]).sum(axis=0)
        tally.reached += (positions < np.minimum(accepted + 1, lengths)[:, None]).sum(axis=0)
        owners = (s for s, did in zip(report.sequences, drafted, strict=True) if did)
        for sequence, own in zip(owners, accepted.tolist(), strict=True):
            tally.accepted.setdefault(sequence.id, []).append(own)


def interval_of_mean(
    accepted: Mapping[int, Sequence[int]], *, seed: int = 0
) -> tuple[float, float, float] | None:
    """Accepted length τ over all rounds, and its 95 % interval from a bootstrap over requests: rounds of one
    request are not independent. None without rounds.
    """
    if not accepted:
        return None
    tokens = np.array([sum(counts) + len(counts) for counts in accepted.values()])
    rounds = np.array([len(counts) for counts in accepted.values()])
    interval = interval_of_ratio(tokens, rounds, seed=seed)
    return float(tokens.sum() / rounds.sum()), *interval


def least_seconds(
    backend: Backend, cell: Cell, tally: Tally, limits: MachineLimits
) -> dict[str, float]:
    """The roofline of each part of a mean round of a cell, in seconds a round. A draft step that is no block of
    plain decoder layers (chains, DeepSeek) is not counted.
    """
    bundle = backend.bundle
    assert bundle.target is not None
    rounds, batch = tally.rounds, cell.requests
    context, rows = tally.context / tally.decoding, tally.rows / rounds
    draft_weights, caches = element_bytes(bundle, bundle.draft_weights)
    weights, _ = element_bytes(bundle, bundle.weights)
    share = tally.drafted / tally.decoding  # of requests and rounds that draft
    work: dict[str, Work] = {}
    if bundle.draft.chain is None and bundle.draft.decoder.deepseek is None:
        draft = draft_work(
            bundle.draft,
            batch=batch,
            context=context,
            weight_bytes=draft_weights,
            cache_bytes=caches,
        )
        work["draft"] = Work(share * draft.nbytes, share * draft.flops)
    work |= {
        "target": target_work(
            bundle.target, batch=batch, rows=rows, logit_rows=rows, context=context,
            weight_bytes=weights, cache_bytes=caches,
        ),
        "verify": verify_work(
            bundle.draft.decoder.vocab_size,
            target_rows=rows,
            draft_rows=tally.verified / rounds,
            is_greedy=cell.temperature == 0,
        ),
    }  # fmt: skip
    return {part: own.seconds(limits) for part, own in work.items()}


def element_bytes(bundle: Bundle, weights: str | None) -> tuple[float, float]:
    """Bytes of one element of a matrix and of a cache, as a bundle with such weights stores them."""
    caches = 4.0 if bundle.dtype == "float32" else 2.0
    if weights is None:
        return caches, caches
    bits = WEIGHT_BITS[weights]
    return bits / 8 + 4 / block_size(bundle.draft.decoder.hidden_size, bits), caches
