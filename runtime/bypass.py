# SPDX-License-Identifier: Apache-2.0
"""Stop drafting where it does not pay, and look again at growing intervals.

The paper names drafts that are never accepted as its open limitation: shortening verification saves
the target's time, the draft step is still paid. Here each request keeps an account of what its drafted
rounds gained, in plain rounds (``break_even``): accepted drafts minus what they cost. It stops when
the mean gain, some credit included, is below zero by more than a share of its standard error: drafts that are
all rejected do not vary and are found out at once, a good drafter's unlucky rounds do.

There are accounts of all requests together, one for each power of two of running requests, since what
drafting costs depends on the load. Where one says that drafting does not pay, all stop, and probe
together: a draft step for one costs nearly what it costs for all. That is decided with care, for it holds
for requests to come as well; and so is a stop of one request among others, which saves little and makes the
draft step dearer for them.

The only request that runs is judged by itself, quickly, and probed soon again: it may be over before
anything is certain. What those before it gained is where its own account starts, and the probes of all of them
together may lose a small share of the rounds: one chat that a drafter does not know must not stop it for the
code that comes next, and a useless drafter must not be tried anew by every request. Its drafts have to return a
margin above what the cost table says: short steps wait for memory, drafter and target push each other out of
caches, and both take longer than on the quiet machine of the measurement when neighbours use them as well.

Decisions use earlier rounds only. Accounts are a handful of numbers each, so they are kept as such: a round of one
request may be over in a millisecond, and arrays of one number are slow.

Legend: R requests of a round, n rounds, S slots, L levels of load.
"""

from dataclasses import dataclass
from math import ceil, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.runtime.break_even import Spent

_LEVELS = 20  # up to a million running requests
_LONGEST_BACKOFF = 64.0  # its power of two is far beyond any longest wait


class Account(NamedTuple):
    """What drafted rounds gained."""

    rounds: float = 0.0  # decayed number of them
    gain: float = 0.0  # decayed Σ (accepted − spent)
    squares: float = 0.0  # decayed Σ (accepted − spent)²
    wait: float = 0.0  # plain rounds until the next probe
    backoff: float = (
        0.0  # log2 of how much longer the next wait is; a probe adds what it failed to return
    )
    is_stopped: bool = False  # drafting does not pay


class BypassState(NamedTuple):
    """The accounts of each slot's request and of each level of load; updates return a new value."""

    requests: tuple[Account, ...]  # [S]
    loads: tuple[Account, ...]  # [L]


class Judgement(NamedTuple):
    """When an account says stop, and how soon it looks again.

    A useless drafter costs about ``trust · trust_rounds`` plain rounds until it is stopped, and then at
    most ``probe_share`` of the rounds: a failed probe is followed by a wait that earns its loss back at
    that rate. If nothing at all was accepted, the next wait is 2^``growth`` times as long.
    """

    certainty: float  # standard errors
    trust_rounds: float  # how many rounds the credit of an unknown drafter weighs
    probe_share: float
    growth: float = 1.0
    trust: float = 0.5  # gain a round that it is credited with
    margin: float = 0.0  # share of what the cost table says that drafts have to return besides


TOGETHER = Judgement(certainty=0.5, trust_rounds=6.0, probe_share=0.02)
ONE_OF_MANY = Judgement(certainty=3.0, trust_rounds=16.0, probe_share=0.1)
ONE_BY_ONE = TOGETHER._replace(probe_share=0.015, growth=0.1, margin=0.2)
ONLY_ONE = Judgement(certainty=0.5, trust_rounds=4.0, probe_share=0.1, trust=0.25, margin=0.2)


@dataclass(frozen=True)
class Bypass:
    """Who drafts this round."""

    together: Judgement = TOGETHER
    one_of_many: Judgement = ONE_OF_MANY
    one_by_one: Judgement = ONE_BY_ONE  # all requests, where each runs alone
    only_one: Judgement = ONLY_ONE
    # Correlation of gains in one round: requests that begin together meet the same hard place.
    alike: float = 0.5
    longest_wait: float = 512.0
    memory: float = 0.99  # weight a drafted round keeps after the request's next one
    shared_memory: float = 0.998  # the same, in the accounts of all requests
    inherited_rounds: float = 16.0  # what another load taught counts for so many rounds at most
    # Mean and variance of the gain at 1, 2, 4, .. running requests, where known beforehand; weighs as much.
    expected: tuple[tuple[float, float], ...] = ()

    def start(self, slots: int) -> BypassState:
        """Nothing known about ``slots`` empty slots."""
        return BypassState((Account(),) * slots, (Account(),) * _LEVELS)

    def joined(self, state: BypassState, slots: ArrayLike) -> BypassState:
        """New requests take ``slots``: what was known about the old ones goes."""
        requests = list(state.requests)
        for slot in _listed(slots):
            requests[slot] = Account()
        return state._replace(requests=tuple(requests))

    def drafting(self, state: BypassState, slots: ArrayLike) -> NDArray[np.bool_]:  # [R]
        """Whether each slot's request drafts: it may still pay, or a probe is due."""
        own = [state.requests[slot] for slot in _listed(slots)]
        level = _level(len(own))
        if len(own) == 1 and own[0].rounds:
            all_stopped = False  # the only request is judged by itself
        else:
            all_stopped = state.loads[_nearest_known(state, level)].is_stopped
        return np.array(
            [
                not (each.is_stopped or all_stopped) or wait <= 0
                for each, wait in zip(own, _to_probe(state, own, level), strict=True)
            ],
            np.bool_,
        )

    def rest(self, state: BypassState, slots: ArrayLike) -> int:
        """For how many rounds from now nobody in ``slots`` drafts, if they stay alone; 0: somebody may."""
        own = [state.requests[slot] for slot in _listed(slots)]
        if not own or self.drafting(state, slots).any():
            return 0
        return ceil(min(_to_probe(state, own, _level(len(own)))))

    def knows(self, state: BypassState, requests: int) -> bool:
        """Whether drafting pays at this load, and has for some rounds: one more tells little."""
        shared = state.loads[_level(requests)]
        return shared.rounds >= 2 * self.together.trust_rounds and not shared.is_stopped

    def stopped(self, state: BypassState, slots: ArrayLike) -> NDArray[np.bool_]:  # [R]
        """Whose own account says that drafting does not pay."""
        return np.array([state.requests[slot].is_stopped for slot in _listed(slots)], np.bool_)

    def rested(self, state: BypassState, slots: ArrayLike, rounds: int) -> BypassState:
        """The accounts after ``rounds`` in which none of ``slots`` drafted."""
        requests, loads, rows = list(state.requests), list(state.loads), _listed(slots)
        for accounts, places in ((requests, rows), (loads, [_level(len(rows))])):
            for place in places:
                account = accounts[place]
                accounts[place] = account._replace(wait=max(account.wait - rounds, 0.0))
        return BypassState(tuple(requests), tuple(loads))

    def updated(
        self,
        state: BypassState,
        slots: ArrayLike,  # [R]
        *,
        drafted: ArrayLike,  # [R] or [n, R] bool, what ``drafting`` said
        spent: Spent,  # of the same shape
        accepted: ArrayLike,  # the same shape; accepted drafts
    ) -> BypassState:
        """The accounts after a round, or after n rounds of the same requests."""
        rows = _listed(slots)
        took_part = np.atleast_2d(np.asarray(drafted, dtype=np.float64))
        kept = np.asarray(accepted) * took_part
        is_alone = len(rows) == 1
        own_judgement = self.only_one if is_alone else self.one_of_many
        judgement = self.one_by_one if is_alone else self.together
        by_request, of_all = _seen(
            took_part,
            kept,
            (1.0 + judgement.margin) * spent.together,
            (1.0 + own_judgement.margin) * spent.alone,
        )
        rounds = float(len(took_part))
        drafted_rounds = float(np.count_nonzero(took_part.any(axis=1)))

        level = _level(len(rows))
        # Requests of a round are alike, so they count as fewer; time passes by the round.
        alike = 1.0 + self.alike * (len(rows) - 1)
        forget = self.shared_memory ** (of_all.rounds / max(len(rows), 1))
        shared = self._inherited(state, level)
        known = _remembered(shared, of_all, forget, alike)
        variance = _variance(known)
        best_of_all = _plausible_gain(known, variance, judgement, judgement.trust)
        undrafted = rounds - drafted_rounds
        loads = list(state.loads)
        loads[level] = self._judged(shared, known, of_all, best_of_all, judgement, undrafted)

        requests = list(state.requests)
        trust = min(own_judgement.trust, best_of_all) if is_alone else own_judgement.trust
        for slot, seen in zip(rows, by_request, strict=True):
            account = requests[slot]
            own = _remembered(account, seen, self.memory**seen.rounds)
            best = _plausible_gain(own, variance, own_judgement, trust)
            requests[slot] = self._judged(
                account, own, seen, best, own_judgement, rounds - seen.rounds
            )
        return BypassState(tuple(requests), tuple(loads))

    def _judged(
        self,
        before: Account,
        known: "_Known",
        seen: "_Seen",
        plausible_gain: float,
        judgement: Judgement,
        undrafted: float,  # rounds of those just seen that it did not draft in
    ) -> Account:
        """The account after its rounds: whether it is stopped, and when it looks again."""
        wait = before.wait - undrafted if before.wait > undrafted else 0.0
        if plausible_gain > 0:
            return Account(*known, wait, 0.0, False)
        failed = 0.0
        if seen.rounds and seen.kept < seen.cost:
            failed = 1.0 - seen.kept / seen.cost
            lost = (seen.cost - seen.kept) / seen.rounds / judgement.probe_share
            longer = 2.0 ** (judgement.growth * before.backoff)
            wait += min(lost * longer, self.longest_wait)
        return Account(*known, wait, min(before.backoff + failed, _LONGEST_BACKOFF), True)

    def _inherited(self, state: BypassState, level: int) -> Account:
        """A load seen for the first time starts from the nearest one seen, or from what is expected."""
        account = state.loads[level]
        source = state.loads[_nearest_known(state, level)]
        if account.rounds:
            return account
        if source.rounds:
            weight = min(1.0, self.inherited_rounds / source.rounds)
            return source._replace(
                rounds=weight * source.rounds,
                gain=weight * source.gain,
                squares=weight * source.squares,
                wait=account.wait,
            )
        if self.expected:
            mean, variance = self.expected[min(level, len(self.expected) - 1)]
            rounds = self.inherited_rounds
            return account._replace(
                rounds=rounds, gain=rounds * mean, squares=rounds * (variance + mean * mean)
            )
        return account


class _Known(NamedTuple):
    """The decayed sums of an account."""

    rounds: float
    gain: float
    squares: float


class _Seen(NamedTuple):
    """Sums over the drafted rounds of one account."""

    rounds: float
    gain: float
    squares: float
    cost: float
    kept: float


def _seen(
    took_part: NDArray[np.float64],  # [n, R]
    kept: NDArray[np.float64],
    cost: NDArray[np.float64],
    own_cost: NDArray[np.float64],
) -> tuple[list[_Seen], _Seen]:
    """Of each request, which saves its own cost where it stops, and of all together."""
    cost, own_cost = cost * took_part, own_cost * took_part
    gain, own_gain = kept - cost, kept - own_cost
    own = np.array([took_part, own_gain, own_gain * own_gain, own_cost, kept]).sum(axis=1)
    of_all = np.array([took_part, gain, gain * gain, cost, kept]).sum(axis=(1, 2))
    return [_Seen(*each) for each in own.T.tolist()], _Seen(*of_all.tolist())


def _remembered(account: Account, seen: _Seen, forget: float, alike: float = 1.0) -> _Known:
    """Sums with new rounds among them, which count as so many fewer as they are ``alike``."""
    return _Known(
        forget * account.rounds + seen.rounds / alike,
        forget * account.gain + seen.gain / alike,
        forget * account.squares + seen.squares / alike,
    )


def _variance(known: _Known) -> float:
    rounds = known.rounds if known.rounds > 1.0 else 1.0
    variance = known.squares / rounds - (known.gain / rounds) ** 2
    return variance if variance > 0.0 else 0.0


def _plausible_gain(
    known: _Known, variance_of_all: float, judgement: Judgement, trust: float
) -> float:
    """The most that the mean gain may be, credit included.

    A few rounds say little about how much they vary: what all together say has the credit's weight.
    """
    credit = judgement.trust_rounds
    weight = credit + known.rounds
    variance = (known.rounds * _variance(known) + credit * variance_of_all) / weight
    mean = (credit * trust + known.gain) / weight
    return mean + judgement.certainty * sqrt(variance / weight)


def _to_probe(state: BypassState, own: list[Account], level: int) -> list[float]:  # [R]
    """Rounds until each request may probe: with all where all have stopped, alone when both accounts allow it."""
    shared = state.loads[level].wait
    if len(own) == 1:
        return [max(own[0].wait, shared)]
    if state.loads[_nearest_known(state, level)].is_stopped:
        return [shared] * len(own)
    return [each.wait for each in own]


def _listed(slots: ArrayLike) -> list[int]:
    listed: list[int] = np.asarray(slots, dtype=np.int64).tolist()
    return listed


def _level(requests: int) -> int:
    return min(max(requests, 1).bit_length() - 1, _LEVELS - 1)


def _nearest_known(state: BypassState, level: int) -> int:
    """The level itself, or the nearest that has an account; itself where none has."""
    if state.loads[level].rounds:
        return level
    known = [place for place, each in enumerate(state.loads) if each.rounds]
    return min(known, key=lambda place: abs(place - level), default=level)
