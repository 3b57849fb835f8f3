# SPDX-License-Identifier: Apache-2.0
"""The engine: requests join and leave between rounds, and each round runs drafter and target once.

    draft x_1..x_γ  ->  scheduler picks ℓ_r  ->  target on Σ(1+ℓ_r) rows  ->  verify  ->  commit

Prompts are prefilled in chunks beside decoding requests, within one budget of target rows a step.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence as Listed
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dspark_trt.bundle import Bundle, load_bundle
from dspark_trt.errors import BundleError, CapacityError, RequestError
from dspark_trt.runtime.backends import Backend, open_backend
from dspark_trt.runtime.backends.interface import (
    BackendOptions,
    DraftInputs,
    DraftOutput,
    TargetOutput,
    Verification,
    VerifyInputs,
)
from dspark_trt.runtime.ragged import RaggedRows, ragged_rows
from dspark_trt.runtime.request import Completion, FinishReason, Request, TokenEvent, TokenKind
from dspark_trt.runtime.rows import RowTable
from dspark_trt.runtime.scheduler import Fixed, Scheduler
from dspark_trt.runtime.sequence import Sequence
from dspark_trt.runtime.session import load_calibration

Ints = NDArray[np.int64]
_log = logging.getLogger(__name__)

DEFAULT_TOKENS_PER_STEP = 512


class _Round(NamedTuple):
    """One target step and what it verified."""

    rows: RaggedRows
    lengths: Ints  # [B] ℓ_r
    target: TargetOutput
    verified: Verification


class Engine:
    """Runs a bundle's drafter and target for up to `max_batch` requests at a time.

    Not thread-safe: one engine, one thread at a time.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        max_batch: int = 8,
        max_tokens_per_step: int = DEFAULT_TOKENS_PER_STEP,
        scheduler: Scheduler | None = None,
    ) -> None:
        bundle = backend.bundle
        if bundle.target is None:
            raise BundleError(
                f"{bundle.path} has no target, so it can only draft (DraftSession). "
                "Export it again with --target to generate."
            )
        if max_batch < 1:
            raise RequestError(f"max_batch must be at least 1, got {max_batch}")
        if max_tokens_per_step < max_batch:
            raise RequestError(
                f"max_tokens_per_step {max_tokens_per_step} must be at least max_batch {max_batch}: "
                "every active request needs one row a step"
            )
        self.bundle = bundle
        self.max_batch = max_batch
        self.max_tokens_per_step = max_tokens_per_step
        self.gamma = bundle.draft.gamma
        self.scheduler = scheduler or Fixed(self.gamma)
        self.calibration = load_calibration(bundle)
        self._vocab = bundle.target.decoder.vocab_size
        self._stop_token_ids = bundle.target.stop_token_ids
        self._drafter = backend.draft_model(max_batch)
        self._target = backend.target_model(max_batch)
        self._verifier = backend.verifier(max_batch)
        self._table = RowTable(rows=max_batch, gamma=self.gamma, tap_size=bundle.draft.tap_size)
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []  # position is cache row
        self._known: dict[int, Sequence] = {}
        self._next_id = 0

    @classmethod
    def load(
        cls,
        bundle: str | Path | Bundle,
        *,
        backend: str = "onnxruntime",
        options: BackendOptions | None = None,
        max_batch: int = 8,
        max_tokens_per_step: int = DEFAULT_TOKENS_PER_STEP,
        scheduler: Scheduler | None = None,
    ) -> Self:
        """Open a bundle for generation.

        Raises:
            BundleError: the bundle does not load, or has no target.
            BackendError: the backend is missing or cannot run it.
        """
        loaded = bundle if isinstance(bundle, Bundle) else load_bundle(bundle)
        return cls(
            open_backend(backend, loaded, options),
            max_batch=max_batch,
            max_tokens_per_step=max_tokens_per_step,
            scheduler=scheduler,
        )

    # Requests ------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Queue a request; returns its id.

        Raises:
            RequestError: a token outside the vocabulary.
            CapacityError: the prompt leaves no room for a token.
        """
        limit = self.bundle.max_context_tokens
        if len(request.prompt_ids) >= limit:
            raise CapacityError(
                f"the prompt has {len(request.prompt_ids)} tokens; this bundle holds {limit} positions, "
                "the answer included"
            )
        for token in request.prompt_ids:
            if not 0 <= token < self._vocab:
                raise RequestError(f"prompt token {token} is outside the vocabulary of {self._vocab}")
        stop = request.params.stop_token_ids
        sequence = Sequence(
            self._next_id, request, frozenset(self._stop_token_ids if stop is None else stop)
        )
        self._next_id += 1
        self._known[sequence.id] = sequence
        self._waiting.append(sequence)
        return sequence.id

    def abort(self, request_id: int) -> None:
        """End a request now, keeping the tokens it has; finished or unknown requests are left alone."""
        sequence = self._known.get(request_id)
        if sequence is None or sequence.finish_reason is not None:
            return
        sequence.finish(FinishReason.ABORTED)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._release(sequence)

    def take(self, request_id: int) -> Completion:
        """The finished request's result; the engine forgets it.

        Raises:
            RequestError: no such request, or it is not finished.
        """
        sequence = self._known.get(request_id)
        if sequence is None or sequence.finish_reason is None:
            state = "unknown" if sequence is None else "not finished"
            raise RequestError(f"request {request_id} is {state}")
        del self._known[request_id]
        return sequence.completion()

    def stream(self, request: Request) -> Iterator[TokenEvent]:
        """Submit a request and run rounds until it ends, yielding its tokens as they are committed.

        Other requests of the engine advance as well. Closing the iterator aborts the request; `take` with
        an event's `request_id` gives the statistics.
        """
        sequence = self._known[self.submit(request)]
        try:
            while True:
                while sequence.events:
                    event = sequence.events.popleft()
                    yield event
                    if event.finish_reason is not None:
                        return
                self.step()
        finally:
            self.abort(sequence.id)

    def generate(self, requests: Listed[Request]) -> list[Completion]:
        """Run requests to their end; results in the order of the requests."""
        ids = [self.submit(request) for request in requests]
        while any(self._known[i].finish_reason is None for i in ids):
            self.step()
        return [self.take(i) for i in ids]

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._active)

    def close(self) -> None:
        """Free the caches. The engine cannot be used afterwards."""
        for model in (self._drafter, self._target):
            model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Rounds --------------------------------------------------------------------------------------

    def step(self) -> None:
        """Admit what fits, then run one round for every active request."""
        while self._waiting and len(self._active) < self.max_batch:
            sequence = self._waiting.popleft()
            self._table.assign(len(self._active), sequence.request.params)
            self._active.append(sequence)
            self._draw_uniforms(len(self._active) - 1)  # for the token behind the prompt
        if not self._active:
            return
        for row, sequence in enumerate(self._active):
            if not sequence.is_prefilling:
                self._draw_uniforms(row)
        drafted = self._draft()
        lengths = self._plan(drafted)
        rows = self._rows(drafted, lengths)
        target = self._target.step(rows)
        verified = self._verify(drafted, lengths, target)
        self._commit(_Round(rows, lengths, target, verified))

    def _draw_uniforms(self, row: int) -> None:
        """One round's randomness, from the request's own generator and always as much: its tokens do not
        depend on its company, nor on how its prompt was chunked.
        """
        table, random = self._table, self._active[row].random
        if table.temperature[row] > 0:
            table.draft_uniforms[row] = random.random(self.gamma, np.float32)
            table.verify_uniforms[row] = random.random(self.gamma + 1, np.float32)

    def _drafts(self, sequence: Sequence) -> bool:
        return sequence.request.speculate and not sequence.is_prefilling

    def _draft(self) -> DraftOutput | None:
        """One draft step for the rows up to the last that drafts; None where nobody does."""
        count = max((row + 1 for row, s in enumerate(self._active) if self._drafts(s)), default=0)
        if not count:
            return None
        table = self._table
        self._drafter.reserve(int((table.draft_len[:count] + table.new_len[:count]).max()))
        output = self._drafter.draft(
            DraftInputs(
                anchor_ids=table.anchor_ids[:count],
                new_taps=table.new_taps[:count],
                new_len=table.new_len[:count],
                context_len=table.draft_len[:count],
                temperature=table.temperature[:count],
                uniforms=table.draft_uniforms[:count],
            )
        )
        table.draft_len[:count] += table.new_len[:count]  # they are cached now
        table.new_len[:count] = 0
        return output

    def _plan(self, drafted: DraftOutput | None) -> Ints:
        """Verification lengths `[B]`: what the scheduler picks, within context room and token budget."""
        batch = len(self._active)
        lengths = np.zeros(batch, np.int64)
        if drafted is None:
            return lengths
        count = len(drafted.tokens)
        is_drafting = np.array([self._drafts(s) for s in self._active[:count]])
        room = self.bundle.max_context_tokens - 1 - self._table.target_len[:count]
        share = (self.max_tokens_per_step - batch) // int(is_drafting.sum())
        limits = np.where(is_drafting, np.clip(np.minimum(room, share), 0, self.gamma), 0)
        scores = drafted.confidence_logits
        confidence = (
            np.ones((count, self.gamma)) if scores is None else self.calibration.confidence(scores)
        )
        lengths[:count] = self.scheduler.plan(confidence, limits=limits)
        return lengths

    def _rows(self, drafted: DraftOutput | None, lengths: Ints) -> RaggedRows:
        """This step's target rows: anchor and drafts of decoding requests, a chunk of each prompt."""
        decoding = sum(not s.is_prefilling for s in self._active)
        spare = self.max_tokens_per_step - decoding - int(lengths.sum())
        prefilling = len(self._active) - decoding
        tokens: list[Listed[int] | Ints] = []
        for row, sequence in enumerate(self._active):
            if sequence.is_prefilling:
                prefilling -= 1
                chunk = sequence.request.prompt_ids[sequence.prefilled :][: spare - prefilling]
                spare -= len(chunk)
                tokens.append(chunk)
            elif lengths[row]:
                assert drafted is not None
                tokens.append(
                    np.concatenate(
                        (self._table.anchor_ids[row : row + 1], drafted.tokens[row, : lengths[row]])
                    )
                )
            else:
                tokens.append(self._table.anchor_ids[row : row + 1])
        wants_all = np.array([not s.is_prefilling for s in self._active])
        return ragged_rows(tokens, self._table.target_len[: len(self._active)], wants_all)

    def _verify(
        self, drafted: DraftOutput | None, lengths: Ints, target: TargetOutput
    ) -> Verification:
        """Every active request verifies its ℓ drafts; a prefilling one has ℓ = 0 on its last row."""
        batch, table = len(self._active), self._table
        offsets = np.zeros(batch + 1, np.int64)
        np.cumsum(1 + lengths, out=offsets[1:])
        tokens = np.zeros((batch, self.gamma), np.int64)
        logits = np.zeros((batch, self.gamma, 0), np.float32)
        if drafted is not None:
            tokens[: len(drafted.tokens)] = drafted.tokens
            logits = drafted.logits
        if len(logits) < batch or not logits.shape[2]:
            # Rows that did not draft have ℓ = 0: their draft logits are never read, but must exist.
            padded = np.zeros((batch, self.gamma, self._vocab), np.float32)
            padded[: len(logits), :, : logits.shape[2]] = logits[:batch]
            logits = padded
        return self._verifier.verify(
            VerifyInputs(
                target_logits=target.logits,
                offsets=offsets,
                draft_tokens=tokens,
                draft_logits=logits,
                temperature=table.temperature[:batch],
                top_k=table.top_k[:batch],
                top_p=table.top_p[:batch],
                min_p=table.min_p[:batch],
                uniforms=table.verify_uniforms[:batch],
            )
        )

    def _commit(self, done: _Round) -> None:
        finished = []
        for row, sequence in enumerate(self._active):
            accepted = int(done.verified.accepted[row])
            taps = done.target.taps[done.rows.offsets[row] : done.rows.offsets[row + 1]]
            if sequence.is_prefilling:
                sequence.prefilled += len(taps)
                self._table.target_len[row] += len(taps)
                self._drafter.append(row, taps, int(self._table.draft_len[row]))
                self._table.draft_len[row] += len(taps)
                if sequence.is_prefilling:
                    continue
            if accepted < 0:
                sequence.finish(
                    FinishReason.ERROR, "the target's logits are not finite or allow no token"
                )
            else:
                self._commit_tokens(row, sequence, done, accepted, taps)
            if sequence.finish_reason is not None:
                finished.append(sequence)
        for sequence in finished:
            self._release(sequence)

    def _commit_tokens(
        self, row: int, sequence: Sequence, done: _Round, accepted: int, taps: NDArray[np.float32]
    ) -> None:
        tokens = done.verified.tokens[row, : accepted + 1].tolist()
        verified = int(done.lengths[row])
        own = TokenKind.BONUS if accepted == verified else TokenKind.CORRECTED
        is_first = not sequence.output
        sequence.commit(tokens, [TokenKind.DRAFTED] * accepted + [own])
        if is_first:  # sampled from the prompt's last row: its taps are appended already
            self._table.anchor_ids[row] = tokens[-1]
            return
        if self._drafts(sequence):
            stop = sequence.stop_index(tokens[:accepted])
            sequence.record_round(accepted + 1 if stop is None else stop + 1, verified)
        self._table.anchor_ids[row] = tokens[-1]
        self._table.target_len[row] += accepted + 1
        self._keep_taps(row, taps[: accepted + 1])
        if sequence.finish_reason is None and sequence.length >= self.bundle.max_context_tokens:
            sequence.finish(FinishReason.CAPACITY)

    def _keep_taps(self, row: int, taps: NDArray[np.float32]) -> None:
        """Taps of committed rows wait for the next draft step; too many of them go through `context`."""
        table = self._table
        held = int(table.new_len[row])
        if held + len(taps) > self.gamma + 1:
            self._drafter.append(row, table.new_taps[row, :held], int(table.draft_len[row]))
            table.draft_len[row] += held
            held = 0
        table.new_taps[row, held : held + len(taps)] = taps
        table.new_len[row] = held + len(taps)

    def _release(self, sequence: Sequence) -> None:
        """Free a row; the last active request moves into it, so that active rows stay a prefix."""
        row, last = self._active.index(sequence), len(self._active) - 1
        if row != last:
            self._drafter.swap_rows(row, last)
            self._target.swap_rows(row, last)
            self._table.swap(row, last)
            self._active[row] = self._active[last]
        self._active.pop()
