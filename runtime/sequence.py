# SPDX-License-Identifier: Apache-2.0
"""One admitted request: its tokens, randomness and counts. Cache rows and arrays live elsewhere."""

import time
from collections import deque

import numpy as np

from dspark_trt.runtime.request import (
    Completion,
    FinishReason,
    Request,
    RequestStats,
    TokenEvent,
    TokenKind,
)


class Sequence:
    """Tokens commit through `commit` alone, which also decides when the request is finished."""

    def __init__(self, request_id: int, request: Request, stop_token_ids: frozenset[int]) -> None:
        self.id = request_id
        self.request = request
        self.prefilled = 0
        self.output: list[int] = []
        self.kinds: list[TokenKind] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.events: deque[TokenEvent] = deque()
        self.random = np.random.default_rng(request.params.seed)
        self._stop = frozenset() if request.params.ignore_eos else stop_token_ids
        self._accepted_lengths: list[int] = []
        self._verification_lengths: list[int] = []
        self._started = time.perf_counter()
        self._first_token = self._last_token = self._started

    @property
    def is_prefilling(self) -> bool:
        return self.prefilled < len(self.request.prompt_ids)

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.output)

    def record_round(self, accepted: int, verified: int) -> None:
        """Count a round of `verified` = ℓ drafts. Accepted drafts behind a stop token do not count, and
        such a round has no token of the target's own.
        """
        self._accepted_lengths.append(accepted)
        self._verification_lengths.append(verified)

    def commit(self, tokens: list[int], kinds: list[TokenKind]) -> list[int]:
        """Append tokens up to a stop token or `max_new_tokens`; returns those that were kept."""
        room = self.request.params.max_new_tokens - len(self.output)
        kept = tokens[:room]
        stop_at = next((i for i, token in enumerate(kept) if token in self._stop), None)
        if stop_at is not None:
            kept = kept[: stop_at + 1]
            self.finish_reason = FinishReason.STOP
        elif len(kept) == room:
            self.finish_reason = FinishReason.LENGTH
        now = time.perf_counter()
        if not self.output:
            self._first_token = now
        self._last_token = now
        self.output += kept
        self.kinds += kinds[: len(kept)]
        self._emit(tuple(kept), tuple(kinds[: len(kept)]))
        return kept

    def stop_index(self, tokens: list[int]) -> int | None:
        """Where the first stop token is."""
        return next((i for i, token in enumerate(tokens) if token in self._stop), None)

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """End without a further token."""
        self.finish_reason, self.error = reason, error
        self._emit((), ())

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            request_id=self.id,
            prompt_ids=self.request.prompt_ids,
            token_ids=tuple(self.output),
            kinds=tuple(self.kinds),
            finish_reason=self.finish_reason,
            error=self.error,
            stats=RequestStats(
                prompt_tokens=len(self.request.prompt_ids),
                output_tokens=len(self.output),
                accepted_lengths=tuple(self._accepted_lengths),
                verification_lengths=tuple(self._verification_lengths),
                seconds=self._last_token - self._started,
                decode_seconds=self._last_token - self._first_token,
            ),
        )

    def _emit(self, tokens: tuple[int, ...], kinds: tuple[TokenKind, ...]) -> None:
        self.events.append(TokenEvent(self.id, tokens, kinds, self.finish_reason))
