# SPDX-License-Identifier: Apache-2.0
"""One request inside the engine: its tokens, text, randomness and counts. Cache rows live elsewhere."""

import time
from collections import Counter, deque

import numpy as np

from dspark_trt.runtime.request import (
    Completion,
    FinishReason,
    Request,
    RequestStats,
    TokenEvent,
    TokenKind,
    TokenLogprobs,
)
from dspark_trt.runtime.text import StopScanner, TextCodec, TextStream


class Sequence:
    """Tokens commit through `commit` alone, which also decides when the request is finished."""

    def __init__(
        self,
        request_id: int,
        request: Request,
        stop_token_ids: frozenset[int],
        codec: TextCodec | None,
    ) -> None:
        self.id = request_id
        self.request = request
        self.slot = -1  # while active: names the request for as long as it runs; rows move
        self.is_doubtful = False  # its next token was a near tie: one row alone decides it
        self.reasons: Counter[str] = Counter()  # rounds by why so many drafts were verified
        self.prefilled = 0
        self.cached = 0  # prompt tokens that came from the prefix cache
        self.output: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.events: deque[TokenEvent] = deque()
        self.random = np.random.default_rng(request.params.seed)
        self._stop = frozenset() if request.params.ignore_eos else stop_token_ids
        self._stream = TextStream(codec) if codec is not None and request.wants_text else None
        self._scanner = StopScanner(request.params.stop)
        self._is_cut = False  # by a stop string: the text ends before it
        self._text: list[str] = []
        self._kinds: list[TokenKind] = []
        self._logprobs: list[TokenLogprobs] = []
        self._accepted_lengths: list[int] = []
        self._verification_lengths: list[int] = []
        self._submitted = time.perf_counter()
        self._first_token = self._last_token = self._submitted

    @property
    def is_prefilling(self) -> bool:
        return self.prefilled < len(self.request.prompt_ids)

    @property
    def deadline(self) -> float | None:
        """By `time.perf_counter`; None: it may take as long as it takes."""
        limit = self.request.timeout_s
        return None if limit is None else self._submitted + limit

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.output)

    @property
    def most_tokens(self) -> int:
        """Positions it may come to hold."""
        return len(self.request.prompt_ids) + self.request.params.max_new_tokens

    def record_round(self, tokens: list[int], accepted: int, verified: int) -> None:
        """Count a round of `verified` = ℓ drafts before its `tokens` are committed. Drafts accepted behind
        a stop token do not count, and such a round has no token of the target's own.
        """
        counted, drafts = accepted + 1, tokens[:accepted]
        if not self._stop.isdisjoint(drafts):
            counted = 1 + next(i for i, token in enumerate(drafts) if token in self._stop)
        self._accepted_lengths.append(counted)
        self._verification_lengths.append(verified)

    def commit(
        self,
        tokens: list[int],
        kinds: list[TokenKind],
        logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """Append tokens up to a stop token, a stop string or `max_new_tokens`."""
        room = self.request.params.max_new_tokens - len(self.output)
        text, kept = [], 0
        for token in tokens[:room]:
            kept += 1
            shown, is_stopped = self._decode(token)
            text.append(shown)
            if is_stopped or token in self._stop:
                self.finish_reason = FinishReason.STOP
                break
        if self.finish_reason is None and kept == room:
            self.finish_reason = FinishReason.LENGTH
        self._last_token = time.perf_counter()
        if not self.output:
            self._first_token = self._last_token
        self.output += tokens[:kept]
        self._emit(tokens[:kept], kinds[:kept], "".join(text), (logprobs or [])[:kept])

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """End without a further token; what has ended stays as it is."""
        if self.finish_reason is not None:
            return
        self.finish_reason, self.error = reason, error
        self._emit([], [], "", [])

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            request_id=self.id,
            prompt_ids=self.request.prompt_ids,
            token_ids=tuple(self.output),
            kinds=tuple(self._kinds),
            text="".join(self._text),
            logprobs=tuple(self._logprobs),
            finish_reason=self.finish_reason,
            error=self.error,
            stats=RequestStats(
                prompt_tokens=len(self.request.prompt_ids),
                cached_tokens=self.cached,
                output_tokens=len(self.output),
                accepted_lengths=tuple(self._accepted_lengths),
                verification_lengths=tuple(self._verification_lengths),
                reasons=dict(self.reasons),
                seconds=self._last_token - self._submitted,
                first_token_seconds=self._first_token - self._submitted,
                decode_seconds=self._last_token - self._first_token,
            ),
        )

    def _decode(self, token: int) -> tuple[str, bool]:
        if self._stream is None:
            return "", False
        shown, self._is_cut = self._scanner.push(self._stream.push([token]))
        return shown, self._is_cut

    def _emit(
        self,
        tokens: list[int],
        kinds: list[TokenKind],
        text: str,
        logprobs: list[TokenLogprobs],
    ) -> None:
        if self.finish_reason is not None and self._stream is not None and not self._is_cut:
            text += self._scanner.push(self._stream.flush())[0] + self._scanner.flush()
        self._text.append(text)
        self._kinds += kinds
        self._logprobs += logprobs
        self.events.append(
            TokenEvent(
                self.id,
                tuple(tokens),
                tuple(kinds),
                text,
                tuple(logprobs),
                self.finish_reason,
                self.error,
            )
        )
