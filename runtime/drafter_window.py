# SPDX-License-Identifier: Apache-2.0
"""Contexts longer than the drafter was trained on.

A drafter's rotary positions extrapolate badly beyond its training length (acceptance 73 % at 3.4 k tokens, 13 %
at 11 k in one report, spiritbuun/buun-llama-cpp#32). The target sees the whole context in any case; the
drafter may be given only the latest rows, moved back to position 0.
"""

import logging

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_log = logging.getLogger(__name__)


class DrafterWindow:
    """Remembers the latest taps of each slot where `rebase_tokens` asks for it.

    Args:
        slots: requests at a time.
        trained_tokens: longest context in the drafter's training; beyond it a warning is logged. None: unknown.
        rebase_tokens: when the drafter's context reaches so many rows, keep the latest half of them, from
            position 0. None: never.
    """

    def __init__(
        self, *, slots: int, trained_tokens: int | None = None, rebase_tokens: int | None = None
    ) -> None:
        self.trained_tokens = trained_tokens
        self.rebase_tokens = rebase_tokens
        self.has_warned = False
        self.is_watching = trained_tokens is not None or rebase_tokens is not None
        self._latest: list[list[Floats]] = [[] for _ in range(slots)]

    def joined(self, slot: int) -> None:
        self._latest[slot].clear()

    def remember(self, slot: int, taps: Floats) -> None:
        if self.rebase_tokens is None:
            return
        kept = self._latest[slot]
        kept.append(taps.copy())
        while sum(map(len, kept[1:])) >= self.rebase_tokens // 2:
            kept.pop(0)

    def rebased(self, slot: int, context_tokens: int) -> Floats | None:
        """Taps to start the drafter's context again from, if it has grown past the window."""
        if self.rebase_tokens is not None and context_tokens >= self.rebase_tokens:
            taps = np.concatenate(self._latest[slot])[-(self.rebase_tokens // 2) :]
            self._latest[slot] = [taps]
            return taps
        self._warn(context_tokens)
        return None

    def _warn(self, context_tokens: int) -> None:
        limit = self.trained_tokens
        if limit is not None and context_tokens > limit and not self.has_warned:
            self.has_warned = True
            _log.warning(
                "a context of %d tokens is beyond the %d the drafter was trained on: expect fewer accepted "
                "drafts, or set drafter_rebase_tokens",
                context_tokens,
                limit,
            )
