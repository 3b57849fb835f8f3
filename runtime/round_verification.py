# SPDX-License-Identifier: Apache-2.0
"""Verification of one round: what the verifier is given, and what near ties take back.

Legend: B requests of the round, K = γ drafted tokens, V vocabulary, T target rows.
"""

from collections.abc import Sequence as Listed

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import RequestError
from dspark_trt.runtime.backends.interface import (
    DraftOutput,
    Processors,
    Verification,
    Verifier,
    VerifyInputs,
)
from dspark_trt.runtime.request import FinishReason
from dspark_trt.runtime.rows import ProcessorTable, RowTable
from dspark_trt.runtime.sequence import Sequence

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]


class RoundVerification:
    """The verifier of an engine, and what it needs of requests beside the rows of their `RowTable`.

    Args:
        verifier: of the backend.
        table: rows of the active requests.
        strict_margin: logits closer than this are near ties; 0: there are none.
    """

    def __init__(
        self,
        verifier: Verifier,
        table: RowTable,
        *,
        gamma: int,
        vocab: int,
        strict_margin: float,
    ) -> None:
        self.is_strict = strict_margin > 0
        self.verifier, self._table = verifier, table
        self._gamma, self._vocab, self._margin = gamma, vocab, strict_margin
        self._processors: ProcessorTable | None = None  # with the first request that needs any
        # Of rounds in which nobody drafts: the same arrays every time, and nobody writes to them.
        self._no_drafts = np.zeros((0, 0), np.int64), np.zeros((0, 0, 0), np.float32)

    def joined(self, active: Listed[Sequence]) -> None:
        """The last of the active requests is new in its row."""
        newest = active[-1]
        if self._processors is None and newest.request.uses_processors:
            self._processors = ProcessorTable(
                rows=len(self._table.anchor_ids), vocab=self._vocab
            )
            for row, sequence in enumerate(active[:-1]):
                self._processors.assign(row, sequence.request, sequence.output)
        if self._processors is not None:
            self._processors.assign(len(active) - 1, newest.request, newest.output)

    def swap(self, first: int, second: int) -> None:
        if self._processors is not None:
            self._processors.swap(first, second)

    def count(self, row: int, tokens: list[int]) -> None:
        """Tokens that penalties know from now on."""
        if self._processors is not None:
            self._processors.count(row, tokens)

    def verify(
        self,
        sequences: Listed[Sequence],  # B
        draft: DraftOutput | None,
        lengths: Ints,  # [B] ℓ
        offsets: Ints,  # [B + 1] rows of each request among the logits
        logits: Floats,  # [T, V]
        *,
        uses_processors: bool,
    ) -> Verification:
        """Every request verifies its ℓ drafts."""
        first = self._table.first(len(lengths))
        tokens, draft_logits = self._drafts(len(lengths), draft)
        processors = None
        if uses_processors:
            processors = self._processed(sequences, offsets, tokens, lengths)
        return self.verifier.verify(
            VerifyInputs(
                target_logits=logits,
                offsets=offsets,
                draft_tokens=tokens,
                draft_logits=draft_logits,
                temperature=first.temperature,
                top_k=first.top_k,
                top_p=first.top_p,
                min_p=first.min_p,
                uniforms=first.verify_uniforms,
                processors=processors,
            )
        )

    def _drafts(self, count: int, draft: DraftOutput | None) -> tuple[Ints, Floats]:
        """Tokens and logits of so many rows: the drafter's own buffers, or larger ones where the last rows did not
        draft. They have ℓ = 0, so what stands there is never read.
        """
        if draft is not None and len(draft.tokens) == count:
            return draft.tokens, draft.logits
        # Greedy verification reads no logits.
        is_read = self._processors is not None or self._table.temperature[:count].any()
        shape = (count, self._gamma, self._vocab if is_read else 0)
        if draft is None:
            if self._no_drafts[1].shape != shape:
                self._no_drafts = np.zeros(shape[:2], np.int64), np.zeros(shape, np.float32)
            return self._no_drafts
        tokens, logits = np.zeros(shape[:2], np.int64), np.zeros(shape, np.float32)
        tokens[: len(draft.tokens)] = draft.tokens
        if is_read:
            logits[: len(draft.logits)] = draft.logits
        return tokens, logits

    def _processed(
        self, sequences: Listed[Sequence], offsets: Ints, tokens: Ints, lengths: Ints
    ) -> Processors:
        """Inputs of the processed graph."""
        table, count = self._processors, len(lengths)
        assert table is not None
        allowed = np.ones((int(offsets[-1]), self._vocab), np.bool_)
        for row, sequence in enumerate(sequences):
            if sequence.request.allowed_tokens is not None:
                drafts = tokens[row, : lengths[row]].tolist()
                self._fill_mask(sequence, drafts, allowed[offsets[row] : offsets[row + 1]])
        return Processors(
            logit_bias=table.logit_bias[:count],
            repetition_penalty=table.repetition_penalty[:count],
            presence_penalty=table.presence_penalty[:count],
            frequency_penalty=table.frequency_penalty[:count],
            prompt_mask=table.prompt_mask[:count],
            output_counts=table.output_counts[:count],
            allowed=allowed,
        )

    def _fill_mask(self, sequence: Sequence, drafts: list[int], allowed: Bools) -> None:
        """A request's masks, place by place; behind a forbidden draft nothing is looked at. The caller's
        code runs here: what it raises ends its own request only.
        """
        mask = sequence.request.allowed_tokens
        assert mask is not None
        for place in range(len(allowed)):
            try:
                row = np.asarray(mask([*sequence.output, *drafts[:place]]), np.bool_)
                if row.shape != (self._vocab,):
                    raise RequestError(
                        f"the mask has shape {row.shape}, expected ({self._vocab},)"
                    )
            except Exception as error:
                sequence.finish(FinishReason.ERROR, f"allowed_tokens failed: {error}")
                return
            allowed[place] = row
            if place < len(drafts) and not row[drafts[place]]:
                return

    def before_near_ties(
        self,
        sequences: Listed[Sequence],
        verified: Verification,
        lengths: Ints,
        logits: Floats,
    ) -> tuple[Verification, Ints]:
        """Cut greedy requests off before the first token whose two best logits are within the margin; the
        next round decides that token with one row, as plain decoding would.

        Returns the verification, whose last token is then a draft (`accepted` -1: none is left), and the
        number of accepted drafts.
        """
        cut, accepted = verified.accepted.copy(), np.maximum(verified.accepted, 0)
        starts = np.cumsum(1 + lengths) - (1 + lengths)
        for row, sequence in enumerate(sequences):
            if cut[row] < 0 or not lengths[row] or self._table.temperature[row] > 0:
                continue
            own = logits[starts[row] : starts[row] + accepted[row] + 1]
            best = np.partition(own, -2, axis=1)[:, -2:]
            near = np.flatnonzero(best[:, 1] - best[:, 0] < self._margin)
            if len(near):
                cut[row], accepted[row] = near[0] - 1, near[0]
                sequence.is_doubtful = True
        return verified._replace(accepted=cut), accepted
