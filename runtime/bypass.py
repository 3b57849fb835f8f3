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
code that comes next, and a useless drafter must not be tried anew by every request.

Decisions use earlier rounds only.

Legend: R requests of a round, n rounds, S slots, L levels of load.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.runtime.break_even import Spent

_LEVELS = 20  # up to a million running requests
_LONGEST_BACKOFF = 64.0  # its power of two is far beyond any longest wait

Floats = NDArray[np.float64]
Columns = NDArray[np.int64]


class BypassState(NamedTuple):
    """Accounts of S slots and, behind them, of L levels of load, [S + L]; updates return a new value."""

    rounds: Floats  # decayed number of drafted rounds
    gain: Floats  # decayed Σ (accepted − spent)
    squares: Floats  # decayed Σ (accepted − spent)²
    wait: Floats  # plain rounds until the next probe
    backoff: Floats  # log2 of how much longer the next wait is; a probe adds what it failed to return
    stopped: Floats  # 1 where drafting does not pay


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


TOGETHER = Judgement(certainty=0.5, trust_rounds=6.0, probe_share=0.02)
ONE_OF_MANY = Judgement(certainty=3.0, trust_rounds=16.0, probe_share=0.1)
ONE_BY_ONE = TOGETHER._replace(growth=0.0)
ONLY_ONE = Judgement(certainty=0.5, trust_rounds=4.0, probe_share=0.3)


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
        return _state(np.zeros((6, slots + _LEVELS)))

    def joined(self, state: BypassState, slots: ArrayLike) -> BypassState:
        """New requests take ``slots``: what was known about the old ones goes."""
        columns = np.stack(state)
        columns[:, np.asarray(slots, dtype=np.int64)] = 0.0
        return _state(columns)

    def drafting(self, state: BypassState, slots: ArrayLike) -> NDArray[np.bool_]:  # [R]
        """Whether each slot's request drafts: it may still pay, or a probe is due."""
        rows = np.asarray(slots, dtype=np.int64)
        if rows.size == 1 and state.rounds[rows[0]]:
            stopped = state.stopped[rows] > 0
        else:
            all_stopped = state.stopped[_nearest_known(state, _shared_column(state, rows.size))]
            stopped = (state.stopped[rows] > 0) | (all_stopped > 0)
        return np.asarray(~stopped | (_to_probe(state, rows) <= 0))

    def rest(self, state: BypassState, slots: ArrayLike) -> int:
        """For how many rounds from now nobody in ``slots`` drafts, if they stay alone; 0: somebody may."""
        rows = np.asarray(slots, dtype=np.int64)
        if not rows.size or self.drafting(state, rows).any():
            return 0
        return int(np.ceil(_to_probe(state, rows).min()))

    def knows(self, state: BypassState, requests: int) -> bool:
        """Whether drafting pays at this load, and has for some rounds: one more tells little."""
        shared = _shared_column(state, requests)
        return bool(
            state.rounds[shared] >= 2 * self.together.trust_rounds and not state.stopped[shared]
        )

    def rested(self, state: BypassState, slots: ArrayLike, rounds: int) -> BypassState:
        """The accounts after ``rounds`` in which none of ``slots`` drafted."""
        rows = np.asarray(slots, dtype=np.int64)
        wait = state.wait.copy()
        passed = np.append(rows, _shared_column(state, rows.size))
        wait[passed] = np.maximum(wait[passed] - rounds, 0.0)
        return state._replace(wait=wait)

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
        took_part = np.atleast_2d(np.asarray(drafted, dtype=np.float64))
        cost, own_cost = spent
        kept = np.asarray(accepted) * took_part
        gain, own_gain = kept - cost * took_part, kept - own_cost * took_part
        figures = np.array(
            [
                took_part, own_gain, own_gain * own_gain, own_cost * took_part, kept,
                gain, gain * gain, cost * took_part,
            ]
        )  # fmt: skip
        by_request = np.add.reduce(figures, axis=1)  # [8, R]
        of_all = np.add.reduce(by_request, axis=1)
        rows = np.asarray(slots, dtype=np.int64)
        seen = np.empty((5, rows.size + 1))
        seen[:, :-1], seen[:, -1] = by_request[:5], of_all[[0, 5, 6, 7, 4]]
        mean_cost, mean_kept = seen[3:] / np.maximum(seen[0], 1.0)
        # A level counts every drafted request, and waits by rounds in which anyone drafted.
        drafted_rounds = seen[0].copy()
        seen[:3, -1] /= 1.0 + self.alike * (rows.size - 1)
        drafted_rounds[-1] = np.count_nonzero(np.logical_or.reduce(took_part, axis=1))
        shared = _shared_column(state, rows.size)
        columns = np.array(state)
        self._inherit(columns, shared, _nearest_known(state, shared))
        places = np.empty(rows.size + 1, np.int64)
        places[:-1], places[-1] = rows, shared
        forget = self.memory**drafted_rounds
        forget[-1] = self.shared_memory ** (of_all[0] / max(rows.size, 1))
        known = forget * columns[:3, places] + seen[:3]
        wait, backoff = columns[3:5, places]
        certainty, credit, share, growth, trust = self._judgements(rows.size)
        best = _plausible_gain(known, certainty, credit, trust)
        if rows.size == 1:
            prior = np.minimum(trust, best[-1])
            best[0] = _plausible_gain(known, certainty, credit, prior)[0]
        stopped = best <= 0
        share_lost = np.maximum(1.0 - mean_kept / np.maximum(mean_cost, 1e-9), 0.0)
        failed = stopped * (drafted_rounds > 0) * share_lost
        lost = (mean_cost - mean_kept) / share
        pause = np.minimum(lost * 2.0 ** (growth * backoff), self.longest_wait)
        waited = np.maximum(wait - (len(took_part) - drafted_rounds), 0.0)
        columns[:3, places] = known
        columns[3, places] = waited + np.where(failed > 0, pause, 0.0)
        columns[4, places] = np.minimum(stopped * (backoff + failed), _LONGEST_BACKOFF)
        columns[5, places] = stopped
        return _state(columns)

    def _inherit(self, columns: Floats, column: int, source: int) -> None:
        """A load seen for the first time starts from the nearest one seen, or from what is expected."""
        if columns[0, column]:
            return
        if columns[0, source]:
            weight = min(1.0, self.inherited_rounds / columns[0, source])
            columns[:3, column] = weight * columns[:3, source]
            columns[4:, column] = columns[4:, source]
        elif self.expected:
            level = column - (columns.shape[1] - _LEVELS)
            mean, variance = self.expected[min(level, len(self.expected) - 1)]
            known = np.array([1.0, mean, variance + mean * mean])
            columns[:3, column] = self.inherited_rounds * known

    def _judgements(self, requests: int) -> Floats:  # [5, R + 1]
        """Of each request's account and, last, of all together."""
        own, of_all = self.one_of_many, self.together
        if requests == 1:
            own, of_all = self.only_one, self.one_by_one
        return np.repeat(np.array((own, of_all)), (requests, 1), axis=0).T


def _plausible_gain(
    known: Floats,  # [3, R + 1] rounds, gain and squares
    certainty: Floats,  # [R + 1], as those behind it
    credit: Floats,
    trust: Floats,
) -> Floats:  # [R + 1]
    """The most that the mean gain may be, credit included.

    A few rounds say little about how much they vary: what all together say has the credit's weight.
    """
    rounds, gain, squares = known
    seen = np.maximum(rounds, 1.0)
    variance = np.maximum(squares / seen - (gain / seen) ** 2, 0.0)
    weight = credit + rounds
    variance = (rounds * variance + credit * variance[-1]) / weight
    mean = (credit * trust + gain) / weight
    return np.asarray(mean + certainty * np.sqrt(variance / weight))


def _to_probe(state: BypassState, rows: NDArray[np.int64]) -> Floats:  # [R]
    """Rounds until each request may probe: with all where all have stopped, alone when both accounts allow it."""
    shared = _shared_column(state, rows.size)
    if rows.size == 1:
        return np.asarray(np.maximum(state.wait[rows], state.wait[shared]))
    stopped = state.stopped[_nearest_known(state, shared)] > 0
    return np.where(stopped, state.wait[shared], state.wait[rows])


def _state(columns: Floats) -> BypassState:  # [6, S + L]
    return BypassState(*columns)


def _shared_column(state: BypassState, requests: int) -> int:
    level = min(max(requests, 1).bit_length() - 1, _LEVELS - 1)
    return state.wait.size - _LEVELS + level


def _nearest_known(state: BypassState, column: int) -> int:
    """The level itself, or the nearest that has an account; itself where none has."""
    first = state.wait.size - _LEVELS
    known = np.flatnonzero(state.rounds[first:]) + first
    return int(known[np.abs(known - column).argmin()]) if known.size else column
