# SPDX-License-Identifier: Apache-2.0
"""Stop drafting where it does not pay, and look again at growing intervals.

The paper names drafts that are never accepted as its open limitation: shortening verification saves
the target's time, the draft step is still paid. Here each request keeps the account of what drafting
returned, in plain rounds (``break_even``): accepted drafts minus what they cost. Its estimate is
drawn towards the mean of all requests, so that one unlucky start does not stop a good drafter and a
useless drafter is not tried anew by every request. Decisions use earlier rounds only.

Legend: R requests of a round, S slots.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


class BypassState(NamedTuple):
    """Accounts of every slot's request and of all requests together; updates return a new value."""

    surplus: Floats  # [S] decayed Σ (accepted − spent) over rounds that drafted
    rounds: Floats  # [S] decayed number of such rounds
    wait: Floats  # [S] plain rounds until the next probe
    failures: Floats  # [S] probes in a row that returned nothing; each doubles the next wait
    all_surplus: float
    all_rounds: float


@dataclass(frozen=True)
class Bypass:
    """Who drafts this round.

    A useless drafter costs about ``optimism · optimism_rounds`` plain rounds until it is stopped, and
    then at most ``probe_share`` of the rounds: a probe is followed by a wait that earns its loss
    back at that rate, doubled for every probe in a row that returned nothing.
    """

    probe_share: float = 0.03
    longest_wait: float = 2048.0
    optimism: float = 0.5  # surplus a round that a drafter is trusted with before it is known
    optimism_rounds: float = 6.0  # how many rounds that trust weighs
    shared_rounds: float = 32.0  # how many own rounds the mean of all requests weighs
    memory: float = 0.99  # weight a drafted round keeps after the request's next one
    shared_memory: float = 0.998  # the same, in the mean of all requests

    def start(self, slots: int) -> BypassState:
        """Nothing known about ``slots`` empty slots."""
        surplus, rounds, wait, failures = np.zeros((4, slots))
        return BypassState(surplus, rounds, wait, failures, 0.0, 0.0)

    def joined(self, state: BypassState, slots: ArrayLike) -> BypassState:
        """New requests take ``slots``; where drafting does not pay others, they start with a wait."""
        rows = np.asarray(slots, dtype=np.int64)
        surplus, rounds, wait, failures = (column.copy() for column in state[:4])
        surplus[rows] = rounds[rows] = failures[rows] = 0.0
        wait[rows] = max(0.0, -self._shared(state)) / self.probe_share
        return BypassState(surplus, rounds, wait, failures, *state[4:])

    def drafting(self, state: BypassState, slots: ArrayLike) -> NDArray[np.bool_]:  # [R]
        """Whether each slot's request drafts: it is expected to pay, or a probe is due."""
        rows = np.asarray(slots, dtype=np.int64)
        return np.asarray((self._expected(state)[rows] >= 0) | (state.wait[rows] <= 0))

    def updated(
        self,
        state: BypassState,
        slots: ArrayLike,  # [R]
        drafted: ArrayLike,  # [R] bool, what ``drafting`` said
        accepted: ArrayLike,  # [R] accepted drafts
        spent: ArrayLike,  # [R] plain rounds, break_even.plain_rounds_spent
    ) -> BypassState:
        """The accounts after a round."""
        rows = np.asarray(slots, dtype=np.int64)
        took_part = np.asarray(drafted, dtype=bool)
        gain = np.where(took_part, np.asarray(accepted) - np.asarray(spent), 0.0)
        keep = np.where(took_part, self.memory, 1.0)
        surplus, rounds, wait, failures = (column.copy() for column in state[:4])
        surplus[rows] = keep * surplus[rows] + gain
        rounds[rows] = keep * rounds[rows] + took_part
        keep_all = self.shared_memory ** float(
            took_part.mean()
        )  # a round of everyone is one round
        new = BypassState(
            surplus,
            rounds,
            wait,
            failures,
            keep_all * state.all_surplus + float(gain.sum()),
            keep_all * state.all_rounds + float(took_part.sum()),
        )
        pays = self._expected(new)[rows] >= 0
        empty = took_part & (np.asarray(accepted) == 0)
        pause = np.minimum(-gain / self.probe_share * 2.0 ** failures[rows], self.longest_wait)
        lost = took_part & ~pays & (gain < 0)
        wait[rows] = np.where(lost, pause, np.maximum(wait[rows] - ~took_part, 0.0))
        forgiven = pays | (took_part & ~empty)  # something was accepted: not a useless drafter
        failures[rows] = np.where(forgiven, 0.0, failures[rows] + empty)
        return new

    def _shared(self, state: BypassState) -> float:
        trust = self.optimism * self.optimism_rounds
        return (trust + state.all_surplus) / (self.optimism_rounds + state.all_rounds)

    def _expected(self, state: BypassState) -> Floats:  # [S]
        """Surplus a drafted round is expected to bring each slot's request."""
        prior = self.shared_rounds * self._shared(state)
        return np.asarray((prior + state.surplus) / (self.shared_rounds + state.rounds))
