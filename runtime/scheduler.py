# SPDX-License-Identifier: Apache-2.0
"""How many drafted tokens of each request the target verifies this round.

Every scheduler is a frozen description with ``plan(confidence) -> lengths``, and ``decide`` for the
reason besides: pure, deterministic, prefix-closed for any input, no memory. The asynchronous form
needs confidences two rounds old; they come in as an argument, and ``ConfidenceHistory`` is the
explicit value that carries them.

Losslessness under rejection verification (paper, section 3.2.2 and appendix A) asks that whether
x_k is verified depends on x_<k only. A candidate (r, k) here is admitted by its rank among survivals;
those of its own request that rank before it come from c_≤k, which x_<k decides. So a rank below a
budget that this round's confidences did not choose is safe, and so is an early stop that has seen
better-ranked candidates only. ``Global`` looks at all of them, and says so by refusing.

Legend: R requests, K = γ drafted tokens, B = R + Σℓ tokens of one target step, n = Σℓ.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.errors import RequestError
from dspark_trt.runtime.cost_model import CostModel
from dspark_trt.runtime.survival import (
    Candidates,
    Floats,
    Lengths,
    best_lengths,
    candidates,
    expected_tokens,
    ranking,
)

FIXED = "fixed length"
FROM_THE_PAST = "budget from two rounds ago"
STOPPED = "throughput stops improving"
NO_TABLE = "no cost table: every draft is verified"
EVERY_DRAFT = "every draft pays"
MIN_GAIN = 0.01  # predicted gains below this are timing and calibration noise


class Plan(NamedTuple):
    """A round's decision and what led to it."""

    lengths: Lengths  # [R] ℓ_r
    reason: str


class Budget(NamedTuple):
    """What a round may verify, known before it is drafted."""

    drafts: int  # the paper's K
    longest: int | None = None  # longest block, where the longest costs all; None: any


class Scheduler(Protocol):
    """What the engine and the simulation know about a scheduler."""

    def decide(
        self,
        confidence: ArrayLike,  # [R, K] calibrated conditional acceptance probabilities
        *,
        limits: ArrayLike | None = None,  # [R] most drafts to verify (length left, bypassed: 0)
        context_tokens: float | None = None,  # mean context length, for the cost
    ) -> Plan:
        """Lengths and the reason for them."""
        ...

    def plan(
        self,
        confidence: ArrayLike,
        *,
        limits: ArrayLike | None = None,
        context_tokens: float | None = None,
    ) -> Lengths:  # [R]
        """The lengths of ``decide``."""
        return self.decide(confidence, limits=limits, context_tokens=context_tokens).lengths


@dataclass(frozen=True)
class Fixed(Scheduler):
    """ℓ_r = k for every request; the best survivals first where the token budget ends."""

    k: int
    max_tokens_per_step: int | None = None

    def __post_init__(self) -> None:
        if self.k < 0:
            raise RequestError(f"a fixed verification length must be at least 0, got {self.k}")

    def decide(
        self,
        confidence: ArrayLike,
        *,
        limits: ArrayLike | None = None,
        context_tokens: float | None = None,
    ) -> Plan:
        """``context_tokens`` is not used."""
        rows = len(np.asarray(confidence))
        allowed = np.full(rows, self.k) if limits is None else np.minimum(limits, self.k)
        offered = candidates(
            confidence, limits=allowed, max_tokens_per_step=self.max_tokens_per_step
        )
        return Plan(best_lengths(offered, offered.available), FIXED)


@dataclass(frozen=True)
class Threshold(Scheduler):
    """Verify up to the first c_k < c: the official static rule, on conditional confidences.

    c ≤ 0 verifies everything; NaN counts as 0.
    """

    c: float
    max_tokens_per_step: int | None = None

    def decide(
        self,
        confidence: ArrayLike,
        *,
        limits: ArrayLike | None = None,
        context_tokens: float | None = None,
    ) -> Plan:
        """``context_tokens`` is not used."""
        values = np.fmax(np.asarray(confidence, dtype=np.float64), 0.0)
        sure = np.logical_and.accumulate(values >= self.c, axis=-1)
        allowed = np.count_nonzero(sure, axis=-1)
        if limits is not None:
            allowed = np.minimum(allowed, limits)
        offered = candidates(
            confidence, limits=allowed, max_tokens_per_step=self.max_tokens_per_step
        )
        return Plan(best_lengths(offered, offered.available), "confidence threshold")


@dataclass(frozen=True)
class _CostAware(Scheduler):
    """What the schedulers that weigh tokens against seconds share.

    Without a table nothing is trimmed, and the plan says so.
    """

    table: CostModel | None
    _: KW_ONLY
    max_tokens_per_step: int | None = None
    min_gain: float = MIN_GAIN

    def __post_init__(self) -> None:
        if not 0 <= self.min_gain < 1:
            raise RequestError(f"min_gain must be a fraction in [0, 1), got {self.min_gain}")

    def _seconds(
        self,
        offered: Candidates,
        context_tokens: float | None,
        *,
        smooth: bool = False,
        longest: int | None = None,
    ) -> Floats:  # [available + 1]
        """Of a round that verifies n = 0, 1, .. candidates."""
        assert self.table is not None
        requests = len(offered.survival)
        return self.table.seconds(
            requests,
            requests + offered.available,
            requests=requests,
            drafting=requests,
            context_tokens=context_tokens,
            smooth=smooth,
            longest=longest,
        )

    def _filled(self, admitted: int, available: int, *, requests: int) -> int:
        """Candidates that the padding to the next measured size pays for anyway come too."""
        assert self.table is not None
        paid = self.table.padded_to(requests + admitted) - requests
        return min(max(admitted, paid), available)

    def _most_of_one(self, confidence: Floats, limits: ArrayLike | None) -> int:
        """Candidates of a single request."""
        most = int(confidence.shape[1])
        if limits is not None:
            most = min(max(int(np.asarray(limits)[0]), 0), most)
        if self.max_tokens_per_step is not None:
            most = max(min(most, self.max_tokens_per_step - 1), 0)
        return most

    def _throughput_of_one(
        self,
        confidence: Floats,
        most: int,
        context_tokens: float | None,
        *,
        smooth: bool = False,
    ) -> Iterator[float]:
        """Θ(n) of a single request for n = 0..most, each from the first n confidences.

        Its round may be over in a millisecond: a loop over a handful of numbers costs less than arrays do.
        """
        assert self.table is not None
        seconds = self.table.seconds(
            1, 1 + most, requests=1, drafting=1, context_tokens=context_tokens, smooth=smooth
        )
        first, *others = seconds.tolist()
        survival = tokens = 1.0
        yield tokens / first
        for cost, value in zip(others, confidence[0].tolist(), strict=False):
            survival *= min(1.0, max(0.0, value))  # in this order NaN counts as 0
            tokens += survival
            yield tokens / cost

    def _best_of_one(self, confidence: Floats, most: int, context_tokens: float | None) -> int:
        """As ``_best``: the n with most tokens a second, everything unless trimming gains ``min_gain``."""
        throughput = list(self._throughput_of_one(confidence, most, context_tokens))
        best = max(range(most + 1), key=lambda n: (throughput[n], n))
        enough = throughput[best] >= throughput[most] * (1 + self.min_gain)
        return self._filled(best, most, requests=1) if enough else most

    def _plan_of_one(self, admitted: int, most: int, trimmed: str) -> Plan:
        return Plan(np.array([admitted]), self._reason(admitted, most, trimmed))

    def _reason(self, admitted: int, available: int, trimmed: str) -> str:
        if self.table is None:
            return NO_TABLE
        return trimmed if admitted < available else self.table.flaw or EVERY_DRAFT

    def _best(self, offered: Candidates, context_tokens: float | None) -> Budget:
        """The n, and where the longest block costs all the longest, with most tokens a second.

        Everything, unless trimming gains ``min_gain``.
        """
        if self.table is None:
            return Budget(offered.available)
        requests, drafted = offered.survival.shape
        ranked = ranking(offered)
        throughput = expected_tokens(offered, ranked) / self._seconds(offered, context_tokens)
        if not self.table.pays_longest:
            end = throughput.size - 1
            best = end - int(throughput[::-1].argmax())  # the right edge of a plateau
            enough = throughput[best] >= throughput[end] * (1 + self.min_gain)
            return Budget(self._filled(best, end, requests=requests) if enough else end)
        most, chosen = 0.0, Budget(0, 0)
        position = ranked[: int(offered.limits.sum())] % drafted
        for longest in range(drafted + 1):
            tokens = expected_tokens(offered, ranked[: position.size][position < longest])
            seconds = self._seconds(offered, context_tokens, longest=longest)
            throughput = tokens / seconds[: tokens.size]
            best = int(throughput.argmax())
            if throughput[best] > most:
                most, chosen = float(throughput[best]), Budget(best, longest)
        everything = float(throughput[-1])  # the last of them offered all
        return chosen if most >= everything * (1 + self.min_gain) else Budget(offered.available)

    def _plan(
        self, offered: Candidates, budget: Budget, trimmed: str, ranked: Lengths | None = None
    ) -> Plan:
        within = offered if budget.longest is None else offered.up_to(budget.longest)
        admitted = min(max(budget.drafts, 0), within.available)
        reason = self._reason(admitted, offered.available, trimmed)
        return Plan(best_lengths(within, admitted, ranked), reason)


@dataclass(frozen=True)
class Algorithm1(_CostAware):
    """The paper's Algorithm 1: admit by survival until throughput stops improving.

    The early stop keeps it non-anticipating, so it is safe with rejection verification. It stops
    before the first candidate that would leave Θ more than ``min_gain`` below the best Θ on the way
    there; 0 is the paper's rule. The stop sees the cost as lines between measured sizes: at every
    edge of a staircase one more candidate looks dear, and looking past it would anticipate. Where the
    longest block costs all requests, candidates that make it no longer are then admitted while their rows pay.
    """

    def decide(
        self,
        confidence: ArrayLike,
        *,
        limits: ArrayLike | None = None,
        context_tokens: float | None = None,
    ) -> Plan:
        """Lengths and the reason for them."""
        values = np.asarray(confidence, dtype=np.float64)
        if self.table is not None and len(values) == 1:
            most = self._most_of_one(values, limits)
            along = self._throughput_of_one(values, most, context_tokens, smooth=True)
            admitted = self._filled(self._first_descent_of_one(along, most), most, requests=1)
            return self._plan_of_one(admitted, most, STOPPED)
        offered = candidates(
            values, limits=limits, max_tokens_per_step=self.max_tokens_per_step
        )
        if self.table is None:
            return self._plan(offered, Budget(offered.available), "")
        seconds = self._seconds(offered, context_tokens, smooth=True)
        ranked = ranking(offered)
        tokens = expected_tokens(offered, ranked)
        admitted = _first_descent(tokens / seconds, self.min_gain)
        if self.table.pays_longest and 0 < admitted < offered.available:
            admitted = self._within_blocks(offered, ranked, tokens, admitted, context_tokens)
        filled = self._filled(admitted, offered.available, requests=len(values))
        return self._plan(offered, Budget(filled), STOPPED, ranked)

    def _within_blocks(
        self,
        offered: Candidates,
        ranked: Lengths,
        tokens: Floats,
        admitted: int,
        context_tokens: float | None,
    ) -> int:
        """Goes on while the next candidate makes no block longer than the longest, and its row alone pays.

        Lines between even lengths charge it for blocks that all grow; the longest is paid for by now.
        """
        assert self.table is not None
        place = ranked[: offered.available] % offered.survival.shape[1]
        longest = int(place[:admitted].max()) + 1
        longer = place[admitted:] >= longest
        last = admitted + (int(longer.argmax()) if longer.any() else longer.size)
        seconds = self._seconds(offered, context_tokens, longest=longest)
        reached = slice(admitted, last + 1)
        return admitted + _first_descent(tokens[reached] / seconds[reached], min_gain=0.0)

    def _first_descent_of_one(self, throughput: Iterator[float], most: int) -> int:
        best = next(throughput)
        for admitted, value in enumerate(throughput):
            if value < best * (1 - self.min_gain):
                return admitted
            best = max(best, value)
        return most


def _first_descent(throughput: Floats, min_gain: float) -> int:
    """The last place before throughput falls more than ``min_gain`` below the best so far."""
    best_before = np.maximum.accumulate(throughput)[:-1]
    worse = throughput[1:] < best_before * (1 - min_gain)
    return int(worse.argmax()) if worse.any() else worse.size


@dataclass(frozen=True)
class Global(_CostAware):
    """The best n over the whole cost staircase, from this round's confidences.

    It looks at confidences that x_k itself decides before it decides about x_k, so it biases the
    output of rejection verification (appendix A: 0.70/0.30 becomes 0.85/0.15). Coupled verification
    gives the target's own tokens whatever is verified: there, and only there, it is allowed.
    """

    _: KW_ONLY
    verification: str

    def __post_init__(self) -> None:
        _CostAware.__post_init__(self)
        if self.verification != "coupled":
            raise RequestError(
                f"the global scheduler biases {self.verification!r} verification (paper, appendix "
                "A); expected 'coupled'. Use Asynchronous or Algorithm1 with rejection"
            )

    def decide(
        self,
        confidence: ArrayLike,
        *,
        limits: ArrayLike | None = None,
        context_tokens: float | None = None,
    ) -> Plan:
        """Lengths and the reason for them."""
        offered = candidates(
            confidence, limits=limits, max_tokens_per_step=self.max_tokens_per_step
        )
        budget = self._best(offered, context_tokens)
        return self._plan(offered, budget, "best of the cost curve")


@dataclass(frozen=True)
class Asynchronous(_CostAware):
    """The paper's asynchronous form (section 5.2): an old budget, a fresh ranking.

    ``budget`` searches the whole cost staircase with confidences two rounds old, so it is known
    before this round's draft step ends; ``plan`` verifies that many of this round's best survivals.
    The budget does not depend on this round's tokens, so rejection verification stays exact.
    """

    def budget(
        self,
        stale: ArrayLike,  # [R, K] confidences two rounds old, see ConfidenceHistory.stale
        *,
        limits: ArrayLike | None = None,  # [R]
        context_tokens: float | None = None,
    ) -> Budget:
        """What to verify this round over all requests."""
        values = np.asarray(stale, dtype=np.float64)
        if self.table is not None and len(values) == 1:
            most = self._most_of_one(values, limits)
            return Budget(self._best_of_one(values, most, context_tokens))
        offered = candidates(
            values, limits=limits, max_tokens_per_step=self.max_tokens_per_step
        )
        return self._best(offered, context_tokens)

    def decide(
        self,
        confidence: ArrayLike,
        *,
        stale: ArrayLike | None = None,
        budget: Budget | None = None,
        limits: ArrayLike | None = None,
        context_tokens: float | None = None,
    ) -> Plan:
        """Lengths from a ``budget`` computed before, or from ``stale`` confidences, and the reason.

        With neither (the first two rounds) it is ``Algorithm1``, which needs no past.
        """
        if budget is None and stale is not None:
            budget = self.budget(stale, limits=limits, context_tokens=context_tokens)
        if budget is None:
            first = Algorithm1(
                self.table, max_tokens_per_step=self.max_tokens_per_step, min_gain=self.min_gain
            )
            return first.decide(confidence, limits=limits, context_tokens=context_tokens)
        values = np.asarray(confidence, dtype=np.float64)
        if self.table is not None and len(values) == 1:
            most = self._most_of_one(values, limits)
            longest = most if budget.longest is None else budget.longest
            return self._plan_of_one(
                min(max(budget.drafts, 0), longest, most), most, FROM_THE_PAST
            )
        offered = candidates(
            values, limits=limits, max_tokens_per_step=self.max_tokens_per_step
        )
        return self._plan(offered, budget, FROM_THE_PAST)

    def plan(
        self,
        confidence: ArrayLike,
        *,
        stale: ArrayLike | None = None,
        budget: Budget | None = None,
        limits: ArrayLike | None = None,
        context_tokens: float | None = None,
    ) -> Lengths:
        """The lengths of ``decide``."""
        return self.decide(
            confidence, stale=stale, budget=budget, limits=limits, context_tokens=context_tokens
        ).lengths

    def shared_out(self, lengths: Lengths, limits: Lengths) -> Plan:  # [R] each
        """The plan of a budget that was shared out elsewhere, on the device that drafts."""
        available = int(limits.sum())
        if self.max_tokens_per_step is not None:
            available = min(available, self.max_tokens_per_step - limits.size)
        return Plan(lengths, self._reason(int(lengths.sum()), available, FROM_THE_PAST))


class ConfidenceHistory(NamedTuple):
    """Confidences of the last two rounds by request id; ``push`` returns the next value.

    A request that did not draft two rounds ago (new, preempted, bypassed) counts with the mean
    conditional confidence of those that did.
    """

    ids: tuple[NDArray[np.int64], ...] = ()  # newest first, each [R_t]
    confidence: tuple[Floats, ...] = ()  # each [R_t, K]

    def push(self, ids: ArrayLike, confidence: ArrayLike) -> "ConfidenceHistory":
        """The history after a round in which ``ids`` [R] drafted with ``confidence`` [R, K].

        Both are kept, not copied.
        """
        newest = np.asarray(ids, dtype=np.int64)
        values = np.asarray(confidence, dtype=np.float64)
        return ConfidenceHistory((newest, *self.ids[:1]), (values, *self.confidence[:1]))

    def stale(self, ids: ArrayLike) -> Floats | None:
        """Confidences two rounds old for the coming round's requests, [R, K]; None without any."""
        if len(self.ids) < 2 or not self.ids[1].size:
            return None
        known, confidence = self.ids[1], self.confidence[1]
        wanted = np.asarray(ids, dtype=np.int64)
        if known.size == wanted.size and (known == wanted).all():
            return confidence
        order = np.argsort(known)
        known, confidence = known[order], np.fmax(confidence[order], 0.0)
        row = np.minimum(np.searchsorted(known, wanted), known.size - 1)
        found = known[row] == wanted
        return np.where(found[:, None], confidence[row], confidence.mean(axis=0))
