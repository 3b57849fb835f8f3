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
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


class Account(NamedTuple):
    """Drafted rounds; arrays over slots, or of shape [] for all requests. Sums are decayed."""

    rounds: Floats
    gain: Floats  # Σ (accepted − spent)
    squares: Floats  # Σ (accepted − spent)²
    wait: Floats  # plain rounds until the next probe
    backoff: Floats  # log2 of how much longer the next wait is; a probe adds what it failed to return

    @classmethod
    def unpacked(cls, columns: Floats) -> Self:  # [5, ...]
        rounds, gain, squares, wait, backoff = columns
        return cls(rounds, gain, squares, wait, backoff)


class BypassState(NamedTuple):
    """Accounts of every slot's request and of all requests; updates return a new value."""

    own: Account  # [S]
    shared: Account  # []


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
        return BypassState(
            Account.unpacked(np.zeros((5, slots))), Account.unpacked(np.zeros(5))
        )

    def joined(self, state: BypassState, slots: ArrayLike) -> BypassState:
        """New requests take ``slots``: what was known about the old ones goes."""
        columns = np.stack(state.own)
        columns[:, np.asarray(slots, dtype=np.int64)] = 0.0
        return state._replace(own=Account.unpacked(columns))

    def drafting(self, state: BypassState, slots: ArrayLike) -> NDArray[np.bool_]:  # [R]
        """Whether each slot's request drafts: it may still pay, or a probe is due."""
        rows = np.asarray(slots, dtype=np.int64)
        if not self._pays(state.shared, self.trust_rounds):
            return np.full(rows.size, bool(state.shared.wait <= 0))
        own = Account.unpacked(np.stack(state.own)[:, rows])
        return np.asarray(self._pays(own, self.own_trust_rounds) | (own.wait <= 0))

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
        rows = np.asarray(slots, dtype=np.int64)
        took_part = np.asarray(drafted, dtype=bool)
        cost, kept = np.asarray(spent) * took_part, np.asarray(accepted) * took_part
        count = int(took_part.sum())
        # Everyone drafting once is one round to forget by, and as many observations as requests.
        forget = self.shared_memory ** (count / max(rows.size, 1))
        gain = kept - cost
        shared = state.shared._replace(
            rounds=forget * state.shared.rounds + count,
            gain=forget * state.shared.gain + gain.sum(),
            squares=forget * state.shared.squares + (gain * gain).sum(),
        )
        mean = 1.0 / max(count, 1)
        shared = self._paused(
            shared,
            np.asarray(count > 0),
            mean * cost.sum(),
            mean * kept.sum(),
            self._pays(shared, self.trust_rounds),
        )
        columns = np.stack(state.own)
        own = Account.unpacked(columns[:, rows])
        forgets = np.where(took_part, self.memory, 1.0)
        own = own._replace(
            rounds=forgets * own.rounds + took_part,
            gain=forgets * own.gain + gain,
            squares=forgets * own.squares + gain * gain,
        )
        columns[:, rows] = self._paused(
            own, took_part, cost, kept, self._pays(own, self.own_trust_rounds)
        )
        return BypassState(Account.unpacked(columns), shared)

    def _paused(
        self,
        account: Account,
        drafted: NDArray[np.bool_],
        spent: Floats,
        accepted: Floats,
        pays: NDArray[np.bool_],
    ) -> Account:
        """Waits and back-off after a round, elementwise."""
        lost = drafted & ~pays & (accepted < spent)
        pause = (spent - accepted) / self.probe_share * 2.0**account.backoff
        failed = np.where(lost, 1.0 - accepted / np.maximum(spent, 1e-9), 0.0)
        return account._replace(
            wait=np.where(
                lost,
                np.minimum(pause, self.longest_wait),
                np.maximum(account.wait - ~drafted, 0.0),
            ),
            backoff=np.where(pays, 0.0, account.backoff + failed),
        )

    def _pays(self, account: Account, trust_rounds: float) -> NDArray[np.bool_]:
        """Whether the mean gain may be positive."""
        seen = np.maximum(account.rounds, 1.0)
        variance = np.maximum(account.squares / seen - (account.gain / seen) ** 2, 0.0)
        rounds = trust_rounds + account.rounds
        mean = (trust_rounds * self.trust + account.gain) / rounds
        return np.asarray(mean + self.certainty * np.sqrt(variance / rounds) > 0)
