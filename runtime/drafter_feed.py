# SPDX-License-Identifier: Apache-2.0
"""How committed taps reach the drafter: with its next step, or at once where they are many.

A block drafter's new rows all go through the draft step. A chain drafter's rows name the token behind them, and the last one
is sent again with every step: what it puts out starts the chain.
"""

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.backends.interface import DraftModel
from dspark_trt.runtime.drafter_window import DrafterWindow
from dspark_trt.runtime.rows import RowTable
from dspark_trt.runtime.sequence import Sequence

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class DrafterFeed:
    """Taps between the target's step and the drafter's cache, in the rows of a `RowTable`.

    Args:
        drafter: whose cache is fed.
        table: rows of the active requests.
        window: where contexts grow too long for the drafter.
        is_chain: whether rows name the token behind them.
        feeds_every_request: also those that never draft, where prefixes are shared.
    """

    def __init__(
        self,
        drafter: DraftModel,
        table: RowTable,
        window: DrafterWindow,
        *,
        is_chain: bool,
        feeds_every_request: bool,
    ) -> None:
        self.is_chain = is_chain
        self._drafter, self._table, self._window = drafter, table, window
        self._most_new = table.new_taps.shape[1]  # γ + 1
        self._feeds_every_request = feeds_every_request

    def joined(self, slot: int) -> None:
        self._window.joined(slot)

    def takes(self, sequence: Sequence) -> bool:
        """Whether the drafter gets this request's taps."""
        return sequence.request.speculate or self._feeds_every_request

    def with_next_tokens(
        self, sequence: Sequence, verified: Ints, taps: Floats
    ) -> Floats:  # [n, m*H] -> [n, m*H + 1]
        """Taps and the token behind each: of the prompt, then of what was just verified."""
        tokens = verified[: len(taps)]
        if sequence.is_prefilling:
            prompt = sequence.request.prompt_ids
            known = prompt[sequence.prefilled + 1 : sequence.prefilled + 1 + len(taps)]
            tokens = np.concatenate((known, verified))[: len(taps)].astype(np.int64)
        return np.concatenate((taps, tokens[:, None].astype(np.float32)), axis=1)

    def prefill(self, row: int, slot: int, taps: Floats) -> None:
        """Taps of a chunk of the prompt."""
        if self.is_chain:
            self._keep(row, taps)
        else:
            self._append(row, taps)
        self._rebase(row, slot, taps)

    def commit(self, row: int, slot: int, taps: Floats) -> None:
        """Taps of committed rows wait for the next draft step."""
        self._keep(row, taps)
        self._rebase(row, slot, taps)

    def drafted(self, batch: int) -> None:
        """Behind a draft step of so many rows: what it took is cached, a chain's last row but one at most, so
        that the chain can always start.
        """
        table = self._table
        if not self.is_chain:
            table.taps_are_cached(batch)
            return
        rows = np.flatnonzero(table.new_len[:batch])
        last = table.new_len[rows] - 1
        table.new_taps[rows, 0] = table.new_taps[rows, last]
        table.draft_len[rows] += last
        table.new_len[rows] = 1

    def settle(self, row: int) -> None:
        """Bring all rows but a chain's last into the drafter's cache, before they are copied from there."""
        held = int(self._table.new_len[row])
        if self.is_chain and held > 1:
            rows = self._table.new_taps[row, :held].copy()
            self._append(row, rows[:-1])
            self._table.new_taps[row, 0], self._table.new_len[row] = rows[-1], 1

    def _keep(self, row: int, taps: Floats) -> None:
        """Too many to wait go through `context`."""
        table = self._table
        held = int(table.new_len[row])
        if self.is_chain:
            rows = np.concatenate((table.new_taps[row, :held], taps))
            done = max(len(rows) - self._most_new, 0)
            if done:
                self._append(row, rows[:done])
            taps, held = rows[done:], 0
        elif held + len(taps) > self._most_new:
            self._append(row, table.new_taps[row, :held])
            held = 0
        table.new_taps[row, held : held + len(taps)] = taps
        table.new_len[row] = held + len(taps)

    def _append(self, row: int, taps: Floats) -> None:
        self._drafter.append(row, taps, int(self._table.draft_len[row]))
        self._table.draft_len[row] += len(taps)
        self._table.new_len[row] = 0

    def _rebase(self, row: int, slot: int, new_taps: Floats) -> None:
        """Start the drafter's context again from its latest rows where it outgrew its window."""
        if not self._window.is_watching:
            return
        table = self._table
        self._window.remember(slot, new_taps)
        latest = self._window.rebased(slot, int(table.draft_len[row] + table.new_len[row]))
        if latest is not None and self.is_chain:
            table.draft_len[row] = table.new_len[row] = 0
            self._keep(row, latest)
        elif latest is not None:
            self._drafter.append(row, latest, 0)
            table.draft_len[row], table.new_len[row] = len(latest), 0
