# SPDX-License-Identifier: Apache-2.0
"""Stop drafting where it does not pay, and look again at growing intervals.

The paper names drafts that are never accepted as its open limitation: shortening verification saves
the target's time, the draft step is still paid. Here each request keeps an account of what its drafted
rounds gained, in plain rounds (``break_even``): accepted drafts minus what they cost. It stops when
the mean gain is below zero by more than its standard error explains: drafts that are all rejected do not
vary and are found out at once, a good drafter's unlucky rounds do and are waited out. There is one
more account of all requests together. Where it says that drafting does not pay, all stop, and probe
together: a draft step for one costs nearly what it costs for all. Decisions use earlier rounds only.

Legend: R requests of a round, S slots.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


class BypassState(NamedTuple):
    """Accounts of S slots and, last, of all requests, [S + 1]; updates return a new value."""

    rounds: Floats  # decayed number of drafted rounds
    gain: Floats  # decayed Σ (accepted − spent)
    squares: Floats  # decayed Σ (accepted − spent)²
    wait: Floats  # plain rounds until the next probe
    backoff: Floats  # log2 of how much longer the next wait is; a probe adds what it failed to return
    stopped: Floats  # 1 where drafting does not pay


@dataclass(frozen=True)
class Bypass:
    """Who drafts this round.

    A useless drafter costs about ``trust · trust_rounds`` plain rounds until it is stopped, and
    then at most ``probe_share`` of the rounds: a failed probe is followed by a wait that earns its
    loss back at that rate, and by twice that after the next one if nothing at all was accepted.
    """

    certainty: float = 1.5  # standard errors
    probe_share: float = 0.02
    longest_wait: float = 512.0
    trust: float = 0.5  # gain a round that a drafter is credited with before it is known
    trust_rounds: float = 6.0  # how many rounds that credit weighs
    own_trust_rounds: float = 16.0  # and for one request, where drafting pays all in all
    memory: float = 0.99  # weight a drafted round keeps after the request's next one
    shared_memory: float = 0.998  # the same, in the account of all requests

    def start(self, slots: int) -> BypassState:
        """Nothing known about ``slots`` empty slots."""
        return _state(np.zeros((6, slots + 1)))

    def joined(self, state: BypassState, slots: ArrayLike) -> BypassState:
        """New requests take ``slots``: what was known about the old ones goes."""
        columns = np.stack(state)
        columns[:, np.asarray(slots, dtype=np.int64)] = 0.0
        return _state(columns)

    def drafting(self, state: BypassState, slots: ArrayLike) -> NDArray[np.bool_]:  # [R]
        """Whether each slot's request drafts: it may still pay, or a probe is due."""
        rows = np.asarray(slots, dtype=np.int64)
        if state.stopped[-1]:
            return np.full(rows.size, bool(state.wait[-1] <= 0))
        return np.asarray((state.stopped[rows] == 0) | (state.wait[rows] <= 0))

    def updated(
        self,
        state: BypassState,
        slots: ArrayLike,  # [R]
        *,
        drafted: ArrayLike,  # [R] bool, what ``drafting`` said
        spent: ArrayLike,  # [R] plain rounds, break_even.plain_rounds_spent
        accepted: ArrayLike,  # [R] accepted drafts
    ) -> BypassState:
        """The accounts after a round."""
        took_part = np.asarray(drafted, dtype=np.float64)
        count, requests = float(took_part.sum()), took_part.size
        cost, kept = np.asarray(spent) * took_part, np.asarray(accepted) * took_part
        gain = kept - cost
        # The account of all requests counts every drafted round, waits and backs off by their mean,
        # and forgets at the pace of rounds of everyone.
        mean = 1.0 / max(count, 1.0)
        took_part_all = np.append(took_part, count > 0)
        cost_all = np.append(cost, mean * cost.sum())
        kept_all = np.append(kept, mean * kept.sum())
        added = np.stack(
            [
                np.append(took_part, count),
                np.append(gain, gain.sum()),
                np.append(gain * gain, gain @ gain),
            ]
        )
        forget = np.where(took_part_all > 0, self.memory, 1.0)
        forget[-1] = self.shared_memory ** (count / max(requests, 1))
        rows = np.append(np.asarray(slots, dtype=np.int64), state.wait.size - 1)
        columns = np.stack(state)
        rounds, total, squares = sums = forget * columns[:3, rows] + added
        wait, backoff = columns[3:5, rows]
        stopped = self._loses(rounds, total, squares)
        failed = (
            stopped * took_part_all * np.maximum(1.0 - kept_all / np.maximum(cost_all, 1e-9), 0)
        )
        pause = np.minimum(
            (cost_all - kept_all) / self.probe_share * 2.0**backoff, self.longest_wait
        )
        columns[:3, rows] = sums
        columns[3, rows] = np.where(
            failed > 0, pause, np.maximum(wait - (took_part_all == 0), 0.0)
        )
        columns[4, rows] = stopped * (backoff + failed)
        columns[5, rows] = stopped
        return _state(columns)

    def _loses(self, rounds: Floats, gain: Floats, squares: Floats) -> NDArray[np.bool_]:
        """Whether the mean gain, credit included, is surely not positive; [R + 1]."""
        seen = np.maximum(rounds, 1.0)
        variance = np.maximum(squares / seen - (gain / seen) ** 2, 0.0)
        credit = np.full(rounds.size, self.own_trust_rounds)
        credit[-1] = self.trust_rounds
        weight = credit + rounds
        mean = (credit * self.trust + gain) / weight
        return np.asarray(mean + self.certainty * np.sqrt(variance / weight) <= 0)


def _state(columns: Floats) -> BypassState:  # [6, S + 1]
    return BypassState(*columns)
