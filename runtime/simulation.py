# SPDX-License-Identifier: Apache-2.0
"""A discrete-event simulation of a serving engine: one event is one round of the running batch.

Requests come from a workload, seconds from a cost table, lengths from the schedulers that the engine
itself runs. Closed loop: a finished request is replaced at once. Poisson: requests arrive, wait for a
slot, and leave. Prefill happens elsewhere (disaggregated) and costs nothing here.

Legend: S slots, R running requests, K = γ drafted tokens.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import RequestError
from dspark_trt.runtime.break_even import plain_rounds_spent
from dspark_trt.runtime.bypass import Bypass
from dspark_trt.runtime.cost_model import CostModel
from dspark_trt.runtime.planner import patience
from dspark_trt.runtime.scheduler import (
    Algorithm1,
    Asynchronous,
    ConfidenceHistory,
    Fixed,
    Global,
    Scheduler,
)
from dspark_trt.runtime.scheduling import without_costs
from dspark_trt.runtime.workload import Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_WARM_UP = 0.1  # share of the rounds that is left out of the figures
_DRAWN_REQUESTS = 1 << 16
_MTP_SHARE = (
    0.5  # one layer and the output head, against five layers, output and sequential head
)


@dataclass(frozen=True)
class Policy:
    """A scheduler and how the simulated engine uses it."""

    scheduler: Scheduler
    drafts: bool = True
    draft_share: float = 1.0  # of the table's draft cost
    sees_outcome: bool = False  # the oracle: its confidences are the outcomes
    bypass: Bypass | None = None


NAMES = "fixed:K (0: never draft), threshold:C, algorithm1, async, mtp-1, oracle"


def policies_named(
    names: Iterable[str],
    table: CostModel,
    gamma: int,
    *,
    max_tokens_per_step: int | None = None,
) -> dict[str, Policy]:
    """Policies by the engine's names of schedulers (`choose_scheduling`), and two that only a simulation
    has: ``mtp-1``, and ``oracle``, which bounds them all.

    Raises:
        RequestError: an unknown name, or a length beyond γ.
    """
    return {name: _policy(name, table, gamma, max_tokens_per_step) for name in names}


def standard_policies(
    table: CostModel, gamma: int, *, max_tokens_per_step: int | None = None
) -> dict[str, Policy]:
    """The policies the paper compares, and every fixed length."""
    fixed = [f"fixed:{k}" for k in range(1, gamma + 1)]
    names = ["fixed:0", "mtp-1", *fixed, "threshold:0.5", "algorithm1", "async", "oracle"]
    return policies_named(names, table, gamma, max_tokens_per_step=max_tokens_per_step)


def _policy(name: str, table: CostModel, gamma: int, most: int | None) -> Policy:
    unweighed = without_costs(name, gamma)
    if unweighed is not None:
        drafts = unweighed != Fixed(0)
        return Policy(replace(unweighed, max_tokens_per_step=most), drafts=drafts)
    match name:
        case "algorithm1":
            return Policy(Algorithm1(table, max_tokens_per_step=most), bypass=Bypass())
        case "async":
            return Policy(Asynchronous(table, max_tokens_per_step=most), bypass=Bypass())
        case "mtp-1":
            return Policy(Fixed(1, most), draft_share=_MTP_SHARE)
        case "oracle":
            ideal = Global(
                table, max_tokens_per_step=most, verification="coupled", min_gain=0.0
            )
            return Policy(ideal, sees_outcome=True)
    raise RequestError(f"policy {name!r} is unknown; expected some of {NAMES}")


_MOST_SLOTS = 1_000_000  # of one simulated engine


@dataclass(frozen=True, kw_only=True)
class Load:
    """How requests come: ``slots`` in a closed loop, or ``arrivals_per_second`` into that many."""

    slots: int
    arrivals_per_second: float | None = None
    output_tokens: float = 256.0  # mean of a geometric distribution
    prompt_tokens: float = 512.0  # mean of a geometric distribution

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= _MOST_SLOTS:
            raise RequestError(f"a load needs 1 to {_MOST_SLOTS} slots, got {self.slots}")
        if self.arrivals_per_second is not None and not self.arrivals_per_second > 0:
            raise RequestError(
                f"arrivals_per_second must be positive, got {self.arrivals_per_second}"
            )
        for name in ("output_tokens", "prompt_tokens"):
            if not 1 <= (mean := getattr(self, name)) < np.inf:
                raise RequestError(f"{name} must be at least 1 and finite, got {mean}")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a simulated load came to, warm-up excluded. A round is one request's in one step."""

    steps: int
    rounds: int
    seconds: float
    tokens_per_second: float
    tokens_per_second_per_user: float  # mean over time of running requests
    slow_user_tokens_per_second: float  # the slowest tenth of finished requests is below this
    running: float  # mean requests a step
    drafts_verified_per_round: float
    accepted_length: float  # tokens a round, bonus included
    waiting_seconds: float  # mean time from arrival to slot

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class _Slots:
    """The requests that run, by slot; arrays are [S].

    The n-th request to enter is the same under every policy: policies differ by what they do.
    """

    def __init__(self, workload: Workload, load: Load, rng: np.random.Generator) -> None:
        self.workload, self.load = workload, load
        self.cursor = np.zeros(load.slots, np.int64)
        self.remaining = np.zeros(load.slots, np.int64)
        self.context = np.zeros(load.slots)
        self.total = np.zeros(load.slots, np.int64)
        self.since = np.zeros(load.slots)
        self.id = np.zeros(load.slots, np.int64)
        self.next_id = 0
        drawn = (_DRAWN_REQUESTS,)
        self.first_round = workload.start[rng.integers(workload.start.size, size=drawn)]
        self.length = rng.geometric(1.0 / load.output_tokens, size=drawn)
        self.prompt = rng.geometric(1.0 / load.prompt_tokens, size=drawn)
        self.done = rng.geometric(1.0 / load.output_tokens, size=drawn)

    def enter(self, slots: Ints, now: float, *, midway: bool = False) -> None:
        """New requests take ``slots``; ``midway`` as if they had been running for long.

        A geometric length has no memory: what is left of it midway is distributed as a new one.
        """
        ids = np.arange(self.next_id, self.next_id + slots.size)
        self.next_id += slots.size
        drawn = ids % _DRAWN_REQUESTS
        self.cursor[slots] = self.first_round[drawn]
        self.remaining[slots] = self.total[slots] = self.length[drawn]
        self.context[slots] = self.prompt[drawn] + (self.done[drawn] if midway else 0)
        self.since[slots] = now
        self.id[slots] = ids


def simulate(
    workload: Workload,
    policy: Policy,
    table: CostModel,
    load: Load,
    *,
    rounds: int = 100_000,
    seed: int = 0,
) -> Outcome:
    """Run until ``rounds`` request rounds have passed. Deterministic for a seed.

    Raises:
        RequestError: no rounds.
    """
    if rounds < 1:
        raise RequestError(f"rounds must be at least 1, got {rounds}")
    rng = np.random.default_rng(seed)
    slots = _Slots(workload, load, rng)
    engine = _Engine(workload, policy, table, slots)
    tally = _Tally(warm_up=int(_WARM_UP * rounds))
    running = np.arange(load.slots)
    free: list[int] = []
    waiting: deque[float] = deque()
    arrival = np.inf
    now = 0.0
    if load.arrivals_per_second is None:
        slots.enter(running, now, midway=True)
    else:
        running, free = np.zeros(0, np.int64), list(range(load.slots))
        arrival = rng.exponential(1.0 / load.arrivals_per_second)
    engine.join(running)
    while tally.rounds < rounds:
        if load.arrivals_per_second is not None:
            if not running.size and not waiting:
                now = max(now, arrival)
            while arrival <= now:
                waiting.append(arrival)
                arrival += rng.exponential(1.0 / load.arrivals_per_second)
            if waiting and free:
                entering = np.array([free.pop() for _ in range(min(len(waiting), len(free)))])
                tally.waited += [now - waiting.popleft() for _ in range(entering.size)]
                slots.enter(entering, now)
                engine.join(entering)
                running = np.sort(np.r_[running, entering])
        committed, verified, seconds = engine.step(running)
        now += seconds
        slots.remaining[running] -= committed
        slots.context[running] += committed
        tally.add(committed, verified, seconds)
        finished = running[slots.remaining[running] <= 0]
        if finished.size:
            tally.finish(slots.total[finished], now - slots.since[finished])
            if load.arrivals_per_second is None:
                slots.enter(finished, now)
                engine.join(finished)
            else:
                running = np.setdiff1d(running, finished, assume_unique=True)
                free += finished.tolist()
    return tally.outcome()


class _Engine:
    """One round: who drafts, what is verified, what it costs, what is committed."""

    def __init__(
        self, workload: Workload, policy: Policy, table: CostModel, slots: _Slots
    ) -> None:
        self.workload, self.policy, self.table, self.slots = workload, policy, table, slots
        self.history = ConfidenceHistory()
        self.accounts = (
            None if policy.bypass is None else _Accounts(policy.bypass, table, slots.load.slots)
        )

    def join(self, slots: Ints) -> None:
        if self.accounts is not None and slots.size:
            self.accounts.join(slots)

    def step(self, running: Ints) -> tuple[Ints, int, float]:  # [R]
        """Committed tokens of each request, drafts verified, seconds."""
        slots, workload = self.slots, self.workload
        row = slots.cursor[running]
        slots.cursor[running] = workload.following[row]
        accepted = workload.accepted[row]
        context = float(slots.context[running].mean()) if self.table.sees_context else None
        requests = running.size
        if not self.policy.drafts:
            seconds = self.table.seconds(
                requests, requests, requests=requests, context_tokens=context
            )
            return np.ones(requests, np.int64), 0, float(seconds[0])
        limits = np.minimum(slots.remaining[running] - 1, workload.gamma)
        drafted = None
        if self.accounts is not None:
            drafted = self.accounts.drafting(running)
            if drafted is not None:
                limits = limits * drafted
        lengths = self._lengths(running, row, limits, context)
        tokens = int(lengths.sum())
        drafting = requests if drafted is None else int(drafted.sum())
        seconds = self.table.seconds(
            requests + tokens,
            requests + tokens,
            requests=requests,
            context_tokens=context,
            longest=int(lengths.max()),
        )
        seconds = seconds + self.policy.draft_share * self.table.draft_cost(drafting, context)
        kept = np.minimum(accepted, lengths)
        if self.accounts is not None:
            self.accounts.learn(drafted, lengths, kept, context)
        return kept + 1, tokens, float(seconds[0])

    def _lengths(self, running: Ints, row: Ints, limits: Ints, context: float | None) -> Ints:
        scheduler = self.policy.scheduler
        if self.policy.sees_outcome:
            gamma = self.workload.gamma
            outcome = np.arange(gamma) < self.workload.accepted[row][:, None]
            return scheduler.plan(outcome, limits=limits, context_tokens=context)
        confidence = self.workload.confidence[row]
        if not isinstance(scheduler, Asynchronous):
            return scheduler.plan(confidence, limits=limits, context_tokens=context)
        ids = self.slots.id[running]
        stale = self.history.stale(ids)
        self.history = self.history.push(ids, confidence)
        return scheduler.plan(confidence, stale=stale, limits=limits, context_tokens=context)


class _Accounts:
    """The bypass; as in the engine, some rounds are learned from together once drafting is known to pay."""

    def __init__(self, bypass: Bypass, table: CostModel, slots: int) -> None:
        self.bypass, self.table = bypass, table
        self.state = bypass.start(slots)
        self.running = np.zeros(0, np.int64)
        self.everyone = np.zeros(0, np.bool_)
        self.all_draft = False
        self.watched = 0  # rounds since these came together
        self.unlearned: list[tuple[Ints, Ints]] = []  # lengths and accepted drafts of a round
        self.context: float | None = None

    def join(self, slots: Ints) -> None:
        self._learn_together()
        self.watched = 0
        self.state = self.bypass.joined(self.state, slots)

    def drafting(self, running: Ints) -> NDArray[np.bool_] | None:  # [R]; None: all do
        if running is not self.running:
            self._learn_together()
            self.running, self.everyone = running, np.ones(running.size, np.bool_)
            self.watched = 0
            self._look_up()
        return None if self.all_draft else self.bypass.drafting(self.state, running)

    def learn(
        self,
        drafted: NDArray[np.bool_] | None,
        lengths: Ints,
        accepted: Ints,
        context: float | None,
    ) -> None:
        self.watched += 1
        if drafted is not None:
            self._learn(drafted, lengths, accepted, context)
            return
        self.unlearned.append((lengths, accepted))
        self.context = context
        if len(self.unlearned) >= patience(self.watched):
            self._learn_together()

    def _learn_together(self) -> None:
        if self.unlearned:
            lengths, accepted = map(np.stack, zip(*self.unlearned, strict=True))
            self.unlearned = []
            everyone = np.broadcast_to(self.everyone, lengths.shape)
            self._learn(everyone, lengths, accepted, self.context)

    def _learn(
        self, drafted: NDArray[np.bool_], lengths: Ints, accepted: Ints, context: float | None
    ) -> None:
        spent = plain_rounds_spent(self.table, lengths, drafted, context_tokens=context)
        self.state = self.bypass.updated(
            self.state, self.running, drafted=drafted, spent=spent, accepted=accepted
        )
        self._look_up()

    def _look_up(self) -> None:
        self.all_draft = (
            self.bypass.knows(self.state, self.running.size)
            and not self.bypass.stopped(self.state, self.running).any()
        )


class _Tally:
    """Sums over the rounds after the warm-up."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.rounds = self.counted = self.steps = self.tokens = self.verified = 0
        self.seconds = self.user_seconds = 0.0
        self.speeds: list[float] = []
        self.waited: list[float] = []

    def add(self, committed: Ints, verified: int, seconds: float) -> None:
        self.rounds += committed.size
        if self.rounds <= self.warm_up:
            return
        self.counted += committed.size
        self.steps += 1
        self.tokens += int(committed.sum())
        self.verified += verified
        self.seconds += seconds
        self.user_seconds += seconds * committed.size

    def finish(self, tokens: Ints, seconds: Floats) -> None:
        if self.rounds > self.warm_up:
            self.speeds += (tokens / seconds).tolist()

    def outcome(self) -> Outcome:
        return Outcome(
            steps=self.steps,
            rounds=self.counted,
            seconds=self.seconds,
            tokens_per_second=self.tokens / self.seconds,
            tokens_per_second_per_user=self.tokens / self.user_seconds,
            slow_user_tokens_per_second=float(np.quantile(self.speeds, 0.1))
            if self.speeds
            else 0.0,
            running=self.counted / self.steps,
            drafts_verified_per_round=self.verified / self.counted,
            accepted_length=self.tokens / self.counted,
            waiting_seconds=float(np.mean(self.waited)) if self.waited else 0.0,
        )


def compare(
    workload: Workload,
    table: CostModel,
    policies: Mapping[str, Policy],
    loads: Mapping[str, Load],
    *,
    rounds: int = 100_000,
    seed: int = 0,
) -> dict[str, dict[str, Outcome]]:
    """Every policy under every load, by policy and load name."""
    return {
        name: {
            label: simulate(workload, policy, table, load, rounds=rounds, seed=seed)
            for label, load in loads.items()
        }
        for name, policy in policies.items()
    }
