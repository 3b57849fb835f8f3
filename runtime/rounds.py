# SPDX-License-Identifier: Apache-2.0
"""One decoding round for the active requests.

    draft x_1..x_γ  ->  plan ℓ_r  ->  target on Σ(1+ℓ_r) rows  ->  verify  ->  commit

Active requests are the first rows of every cache, so bindings never move. A round works on the first
`count` of them: all, as a rule, and one alone when a failure has to be pinned on a request.
"""

from collections.abc import Sequence as Listed
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import BackendError, RequestError
from dspark_trt.runtime.backends.interface import (
    CountsWaits,
    DraftInputs,
    DraftModel,
    DraftOutput,
    PaysCapacity,
    Processors,
    Shrinks,
    TargetModel,
    TargetOutput,
    Verification,
    Verifier,
    VerifyInputs,
)
from dspark_trt.runtime.drafter_feed import DrafterFeed
from dspark_trt.runtime.drafter_window import DrafterWindow
from dspark_trt.runtime.launched_rounds import LaunchedRounds
from dspark_trt.runtime.planner import DraftedRequests, PlannedRound, Planner
from dspark_trt.runtime.ragged import RaggedRows, ragged_rows
from dspark_trt.runtime.request import FinishReason, TokenKind, TokenLogprobs
from dspark_trt.runtime.round_report import RoundReport, Stages
from dspark_trt.runtime.rows import ProcessorTable, RowTable
from dspark_trt.runtime.scheduler import Budget
from dspark_trt.runtime.sequence import Sequence

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]


_USUAL_ANSWER = 256  # tokens; growing again for a longer one costs copies


class _Draft(NamedTuple):
    """A draft step over the first rows, up to the last that drafts."""

    output: DraftOutput
    drafted: Bools  # [count]: rows whose drafts are meant


class _Done(NamedTuple):
    """A round that only has to be committed. B requests."""

    decoding: Bools  # [B]
    drafted: Bools  # [B]
    lengths: Ints  # [B]
    verified: Verification
    accepted: Ints  # [B] drafts
    taps: Listed[Floats] | None  # of each request's rows; None: they stay on the device
    target_rows: int
    draft: DraftOutput | None
    planned: PlannedRound | None


class Rounds:
    """The models of one engine, their caches, and who sits in which row."""

    def __init__(
        self,
        *,
        drafter: DraftModel,
        target: TargetModel,
        verifier: Verifier,
        planner: Planner,
        window: DrafterWindow,
        max_batch: int,
        max_tokens_per_step: int,
        max_context_tokens: int,
        vocab: int,
        tap_size: int,
        is_chain: bool = False,
        strict_margin: float = 0.0,
        feeds_every_request: bool = False,
    ) -> None:
        self.launched: LaunchedRounds | None = None  # for backends that run whole rounds
        self.active: list[Sequence] = []  # position is cache row
        self.planner = planner
        self.drafter, self.target = drafter, target
        self._shrinking = [m for m in (drafter, target) if isinstance(m, Shrinks)]
        self._capacity_of = target if isinstance(target, PaysCapacity) else None
        self.table = RowTable(rows=max_batch, gamma=planner.gamma, tap_size=tap_size + is_chain)
        self.feed = DrafterFeed(
            drafter,
            self.table,
            window,
            is_chain=is_chain,
            feeds_every_request=feeds_every_request,
        )
        self._verifier = verifier
        self._counter = drafter if isinstance(drafter, CountsWaits) else None
        self._gamma = planner.gamma
        self._vocab = vocab
        self._max_tokens_per_step = max_tokens_per_step
        self._max_context_tokens = max_context_tokens
        self._processors: ProcessorTable | None = None
        self._strict_margin = strict_margin
        self._no_draft_logits = np.zeros((max_batch, self._gamma, 0), np.float32)
        self._free_slots = list(range(max_batch))

    # Rows ----------------------------------------------------------------------------------------

    def join(self, sequence: Sequence) -> int:
        """Give a request the next row."""
        row = len(self.active)
        self.active.append(sequence)
        sequence.slot = self._free_slots.pop()
        self.planner.joined(sequence.slot, greedy=sequence.request.params.temperature == 0)
        self.feed.joined(sequence.slot)
        self.table.assign(row, sequence.id, sequence.slot, sequence.request.params)
        if self._processors is None and sequence.request.uses_processors:
            rows = len(self.table.anchor_ids)
            self._processors = ProcessorTable(rows=rows, vocab=self._vocab)
            for other, owner in enumerate(self.active[:-1]):
                self._processors.assign(other, owner.request, owner.output)
        if self._processors is not None:
            self._processors.assign(row, sequence.request, sequence.output)
        self._draw_uniforms(row)  # for the token behind the prompt
        if row == 0:
            usual = len(sequence.request.prompt_ids) + _USUAL_ANSWER
            self._shrink(min(sequence.most_tokens, usual))
        return row

    def leave(self, sequence: Sequence) -> None:
        """Free a row; the last active request moves into it, so that active rows stay a prefix."""
        self._swap(self.active.index(sequence), len(self.active) - 1)
        self.active.pop()
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        if self.active:
            self._shrink(int(self.table.target_len[: len(self.active)].max()))

    def _shrink(self, context_tokens: int) -> None:
        """One long context does not make all later steps slow where attention pays for capacity."""
        for model in self._shrinking:
            model.shrink(context_tokens)

    def check_integrity(self) -> None:
        """Raise AssertionError if slots were lost or handed out twice."""
        taken = [sequence.slot for sequence in self.active]
        assert sorted(taken + self._free_slots) == list(range(len(self.table.anchor_ids)))

    def _swap(self, first: int, second: int) -> None:
        if first == second:
            return
        self._bring_home()
        self.drafter.swap_rows(first, second)
        self.target.swap_rows(first, second)
        self.table.swap(first, second)
        if self._processors is not None:
            self._processors.swap(first, second)
        self.active[first], self.active[second] = self.active[second], self.active[first]

    def _bring_home(self) -> None:
        if self.launched is not None:
            self.launched.bring_home()

    def bring_to_front(self, sequence: Sequence) -> None:
        self._swap(0, self.active.index(sequence))

    # Randomness ----------------------------------------------------------------------------------

    def draw_uniforms(self) -> None:
        """Randomness of one round for every decoding request, once a round even if it is run again."""
        for row, sequence in enumerate(self.active):
            if not sequence.is_prefilling:
                self._draw_uniforms(row)

    def _draw_uniforms(self, row: int) -> None:
        """From the request's own generator and always as much: its tokens do not depend on its company,
        nor on how its prompt was chunked.
        """
        table, random = self.table, self.active[row].random
        if table.temperature[row] > 0:
            table.draft_uniforms[row] = random.random(self._gamma, np.float32)
            table.verify_uniforms[row] = random.random(self._gamma + 1, np.float32)

    # A round -------------------------------------------------------------------------------------

    def run(self, count: int, *, is_plain: bool = False) -> RoundReport:
        """One round of the first `count` requests; finished ones are still in their rows afterwards.

        `is_plain`: nobody drafts, and every token counts as it comes out.

        Raises:
            BackendError: a model failed. Nothing was committed and the round can be run again.
        """
        stages = Stages(self._counter)
        if is_plain:
            for sequence in self.active[:count]:
                sequence.is_doubtful = False
        decoding, drafted = self._decoding(count), np.zeros(count, np.bool_)
        if not is_plain:
            decoding, drafted = self._drafting_in_front(decoding)
        if self.launched is not None and not is_plain:
            requests = self._drafted_requests(np.arange(count), drafted)
            budget = self.launched.budget(self.active[:count], requests)
            if budget is not None:
                return self._run_launched(self.launched, requests, budget, stages)
            self.launched.bring_home()
        draft = self._draft(drafted)
        stages.end("draft")
        planned, lengths = self._plan(decoding, draft)
        stages.end("schedule")
        tokens = self._tokens(count, draft, lengths)
        rows = ragged_rows(tokens, self.table.target_len[:count], decoding)
        target = self.target.step(rows)
        stages.end("target")
        verified = self._verify(count, draft, lengths, rows, target)
        stages.end("verify")
        accepted = np.maximum(verified.accepted, 0) * decoding
        if draft is not None and self._strict_margin:
            verified, accepted = self._before_near_ties(verified, lengths, target.logits)
        done = _Done(
            decoding=decoding,
            drafted=drafted,
            lengths=lengths,
            verified=verified,
            accepted=accepted,
            taps=[target.taps[a:b] for a, b in pairwise(rows.offsets.tolist())],
            target_rows=len(rows.token_ids),
            draft=None if draft is None else draft.output,
            planned=planned,
        )
        return self._finish(done, stages)

    def _run_launched(
        self,
        launched: LaunchedRounds,
        requests: DraftedRequests,
        budget: Budget,
        stages: Stages,
    ) -> RoundReport:
        """A round in which everybody drafts, and nobody waits before its tokens are committed."""
        count = len(requests.rows)
        stages.end("schedule")
        way = launched.launch(requests, budget)
        stages.end("target")
        seen = launched.read(way, count)
        stages.end("commit")
        stages.on_device(seen.draft_seconds, seen.step_seconds)
        scores = seen.confidence_logits
        done = _Done(
            decoding=np.ones(count, np.bool_),
            drafted=requests.drafted,
            lengths=seen.lengths,
            verified=Verification(seen.accepted, seen.tokens),
            accepted=np.maximum(seen.accepted, 0),
            taps=None,
            target_rows=count + int(seen.lengths.sum()),
            draft=launched.drafted(count),
            planned=self.planner.planned(requests, seen.lengths, scores),
        )
        return self._finish(done, stages)

    def _finish(self, done: _Done, stages: Stages) -> RoundReport:
        """Commit what was verified, learn from it, and report."""
        decoding, lengths, accepted = done.decoding, done.lengths, done.accepted
        active = self.active[: len(decoding)]
        before = [len(s.output) for s in active]
        for row, sequence in enumerate(active):
            taps = None if done.taps is None else done.taps[row]
            try:
                self._commit(
                    row, done.verified, int(lengths[row]), bool(done.drafted[row]), taps
                )
            except (
                BackendError
            ) as error:  # its taps were refused: others have committed already
                sequence.finish(FinishReason.ERROR, str(error))
        if done.planned is not None:
            own = np.flatnonzero(decoding)
            context = self._paid_context(own)
            self.planner.learn(
                done.planned, done.drafted[own], lengths[own], accepted[own], context
            )
        self._count_reasons(decoding, done.drafted, done.planned)
        stages.end("commit")
        committed = [len(s.output) for s in active]
        return RoundReport(
            sequences=tuple(active),
            decoding=decoding,
            drafted=done.drafted,
            lengths=lengths,
            accepted=accepted,
            committed=np.array(committed, np.int64) - np.array(before, np.int64),
            target_rows=done.target_rows,
            draft=done.draft,
            temperature=self.table.temperature[: len(active)],
            planned=done.planned,
            undrafted_reason=self.planner.undrafted_reason,
            seconds=stages.seconds,
            waits=stages.waits,
        )

    def _paid_context(self, rows: Ints) -> Ints:
        """Context rows that a step's attention costs for each request."""
        if self._capacity_of is None:
            return self.table.target_len[rows]
        return np.full(len(rows), self._capacity_of.capacity_rows)

    def _count_reasons(
        self, decoding: Bools, drafted: Bools, planned: PlannedRound | None
    ) -> None:
        undrafted = self.planner.undrafted_reason
        reason = undrafted if planned is None else planned.reason
        for sequence, decodes, drafts in zip(self.active, decoding, drafted, strict=False):
            if decodes and sequence.request.speculate:
                sequence.reasons[reason if drafts else undrafted] += 1

    def _may_draft(self, sequence: Sequence) -> bool:
        """Near ties are looked for in raw logits: strict engines do not draft where others count."""
        is_strict = self._strict_margin > 0 and sequence.request.uses_processors
        return sequence.request.speculate and not sequence.is_prefilling and not is_strict

    def _decoding(self, count: int) -> Bools:
        return np.array([not sequence.is_prefilling for sequence in self.active[:count]])

    def _drafting(self, decoding: Bools) -> Bools:  # [count]
        drafted = np.array([self._may_draft(s) for s in self.active[: len(decoding)]])
        if drafted.any():
            drafted[decoding] &= self.planner.drafting(
                self.table.slots[: len(decoding)][decoding]
            )
        return drafted

    def _drafting_in_front(self, decoding: Bools) -> tuple[Bools, Bools]:
        """Who decodes and who drafts, [count]; rows change places if somebody drafts behind one who does not,
        for whom the draft step would run in vain.
        """
        drafted = self._drafting(decoding)
        drafting = int(np.count_nonzero(drafted))
        if drafted[:drafting].all():
            return decoding, drafted
        idle, misplaced = (
            np.flatnonzero(~drafted[:drafting]),
            np.flatnonzero(drafted[drafting:]),
        )
        for front, back in zip(idle.tolist(), misplaced.tolist(), strict=True):
            self._swap(front, drafting + back)
        decoding = self._decoding(len(decoding))
        return decoding, self._drafting(decoding)

    def _draft(self, drafted: Bools) -> _Draft | None:
        """One draft step over the rows up to the last that drafts; None where nobody does."""
        if not drafted.any():
            return None
        batch = int(drafted.nonzero()[0][-1]) + 1
        table = self.table
        output = self.drafter.draft(
            DraftInputs(
                anchor_ids=table.anchor_ids[:batch],
                new_taps=table.new_taps[:batch],
                new_len=table.new_len[:batch],
                context_len=table.draft_len[:batch],
                temperature=table.temperature[:batch],
                uniforms=table.draft_uniforms[:batch],
            )
        )
        self.feed.drafted(batch)
        return _Draft(output, drafted[:batch])

    def _plan(self, decoding: Bools, draft: _Draft | None) -> tuple[PlannedRound | None, Ints]:
        """Verification lengths `[B]`: the scheduler's, within context room and token budget."""
        lengths = np.zeros(len(decoding), np.int64)
        if draft is None:
            return None, lengths
        rows = np.flatnonzero(decoding)
        drafted = np.zeros(len(decoding), np.bool_)
        drafted[: len(draft.drafted)] = draft.drafted
        planned = self.planner.plan(self._drafted_requests(rows, drafted[rows]), draft.output)
        lengths[rows] = planned.lengths
        return planned, lengths

    def _drafted_requests(self, rows: Ints, drafted: Bools) -> DraftedRequests:  # [R] each
        """What planning knows of requests that decode."""
        room = self._max_context_tokens - 1 - self.table.target_len[rows]
        share = (self._max_tokens_per_step - len(self.active)) // max(int(drafted.sum()), 1)
        most = np.minimum(np.maximum(np.minimum(room, share), 0), self._gamma)
        return DraftedRequests(
            rows=rows,
            ids=self.table.request_ids[rows],
            slots=self.table.slots[rows],
            drafted=drafted,
            limits=most * drafted,
            temperature=self.table.temperature[rows],
            context_tokens=self._paid_context(rows),
        )

    def _tokens(
        self, count: int, draft: _Draft | None, lengths: Ints
    ) -> list[Listed[int] | Ints]:
        """Target rows of each request: anchor and drafts, or a chunk of the prompt."""
        spare = self._max_tokens_per_step - int(lengths.sum())
        spare -= sum(not s.is_prefilling for s in self.active)
        waiting = sum(s.is_prefilling for s in self.active)  # each needs a row at least
        tokens: list[Listed[int] | Ints] = []
        for row, sequence in enumerate(self.active[:count]):
            if sequence.is_prefilling:
                waiting -= 1
                chunk = sequence.request.prompt_ids[sequence.prefilled :][: spare - waiting]
                spare -= len(chunk)
                tokens.append(chunk)
                continue
            anchor = self.table.anchor_ids[row : row + 1]
            if draft is not None and lengths[row]:
                drafts = draft.output.tokens[row, : lengths[row]]
                tokens.append(np.concatenate((anchor, drafts)))
            else:
                tokens.append(anchor)
        return tokens

    def _verify(
        self,
        count: int,
        draft: _Draft | None,
        lengths: Ints,
        rows: RaggedRows,
        target: TargetOutput,
    ) -> Verification:
        """Every request verifies its ℓ drafts; a prefilling one has ℓ = 0 on its last row."""
        table = self.table
        offsets = rows.offsets
        if len(rows.logit_rows) < len(
            rows.token_ids
        ):  # prompts ask for their last row's logits
            offsets = np.zeros(count + 1, np.int64)
            np.cumsum(1 + lengths, out=offsets[1:])
        tokens = self._draft_tokens(count, draft)
        return self._verifier.verify(
            VerifyInputs(
                target_logits=target.logits,
                offsets=offsets,
                draft_tokens=tokens,
                draft_logits=self._draft_logits(count, draft),
                temperature=table.temperature[:count],
                top_k=table.top_k[:count],
                top_p=table.top_p[:count],
                min_p=table.min_p[:count],
                uniforms=table.verify_uniforms[:count],
                processors=self._processed(count, offsets, tokens, lengths),
            )
        )

    def _draft_tokens(self, count: int, draft: _Draft | None) -> Ints:
        """As ``_draft_logits``."""
        if draft is not None and len(draft.output.tokens) == count:
            return draft.output.tokens
        padded = np.zeros((count, self._gamma), np.int64)
        if draft is not None:
            padded[: len(draft.output.tokens)] = draft.output.tokens
        return padded

    def _draft_logits(self, count: int, draft: _Draft | None) -> Floats:
        """The drafter's own buffer, or a larger one where the last rows did not draft: they have ℓ = 0, so
        what stands there is never read.
        """
        if draft is not None and len(draft.output.logits) == count:
            return draft.output.logits
        if not self.table.temperature[:count].any() and self._processors is None:
            return self._no_draft_logits[:count]  # greedy verification reads no logits
        padded = np.zeros((count, self._gamma, self._vocab), np.float32)
        if draft is not None:
            padded[: len(draft.output.logits)] = draft.output.logits
        return padded

    def _processed(
        self, count: int, offsets: Ints, tokens: Ints, lengths: Ints
    ) -> Processors | None:
        """Inputs of the processed graph, if a request of this round needs it."""
        table = self._processors
        if table is None or not any(s.request.uses_processors for s in self.active[:count]):
            return None
        allowed = np.ones((int(offsets[-1]), self._vocab), np.bool_)
        for row, sequence in enumerate(self.active[:count]):
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

    def _before_near_ties(
        self, verified: Verification, lengths: Ints, logits: Floats
    ) -> tuple[Verification, Ints]:
        """Cut greedy requests off before the first token whose two best logits are within the margin; the
        next round decides that token with one row, as plain decoding would.

        Returns the verification, whose last token is then a draft (`accepted` -1: none is left), and the
        number of accepted drafts.
        """
        cut, accepted = verified.accepted.copy(), np.maximum(verified.accepted, 0)
        starts = np.cumsum(1 + lengths) - (1 + lengths)
        for row, sequence in enumerate(self.active[: len(lengths)]):
            if cut[row] < 0 or not lengths[row] or self.table.temperature[row] > 0:
                continue
            own = logits[starts[row] : starts[row] + accepted[row] + 1]
            best = np.partition(own, -2, axis=1)[:, -2:]
            near = np.flatnonzero(best[:, 1] - best[:, 0] < self._strict_margin)
            if len(near):
                cut[row], accepted[row] = near[0] - 1, near[0]
                sequence.is_doubtful = True
        return verified._replace(accepted=cut), accepted

    # Committing ----------------------------------------------------------------------------------

    def _commit(
        self,
        row: int,
        verified: Verification,
        length: int,
        drafted: bool,
        taps: Floats | None,  # of its rows; None: the device keeps them
    ) -> None:
        sequence, table = self.active[row], self.table
        if sequence.finish_reason is not None:  # failed while its masks were made
            return
        accepted = int(verified.accepted[row])
        was_prefilling = sequence.is_prefilling
        if taps is None:
            taps = table.new_taps[row, :0]
            table.new_len[row] = accepted + 1
        if self.feed.is_chain:
            count = len(taps) if was_prefilling else max(accepted + 1, 0)
            taps = self.feed.with_next_tokens(sequence, verified.tokens[row], taps[:count])
        if was_prefilling:
            sequence.prefilled += len(taps)
            table.target_len[row] += len(taps)
            if self.feed.takes(sequence):
                self.feed.prefill(row, sequence.slot, taps)
            if sequence.is_prefilling:
                return
        if accepted < 0 and sequence.is_doubtful:
            return  # its first token is a near tie: nothing of this round counts
        if accepted < 0:
            reason = "the target's logits are not finite or allow no token"
            sequence.finish(FinishReason.ERROR, reason)
            return
        tokens = verified.tokens[row, : accepted + 1].tolist()
        own = TokenKind.BONUS if accepted == length else TokenKind.CORRECTED
        if sequence.is_doubtful:
            own = TokenKind.DRAFTED
        if drafted:
            sequence.record_round(tokens, accepted, length)
        sequence.commit(
            tokens, [TokenKind.DRAFTED] * accepted + [own], _logprobs(sequence, verified, row)
        )
        table.anchor_ids[row] = tokens[-1]
        if self._processors is not None:
            self._processors.count(row, tokens)
        if not was_prefilling:
            table.target_len[row] += accepted + 1
            if self.feed.takes(sequence):
                self.feed.commit(row, sequence.slot, taps[: accepted + 1])
        if sequence.finish_reason is None and sequence.length >= self._max_context_tokens:
            sequence.finish(FinishReason.CAPACITY)


def _logprobs(
    sequence: Sequence, verified: Verification, row: int
) -> list[TokenLogprobs] | None:
    wanted = sequence.request.params.logprobs
    if wanted is None:
        return None
    assert verified.logprobs is not None
    assert verified.top_tokens is not None
    assert verified.top_logprobs is not None
    return [
        TokenLogprobs(
            float(value), tuple(zip(ids[:wanted].tolist(), tops[:wanted].tolist(), strict=True))
        )
        for value, ids, tops in zip(
            verified.logprobs[row],
            verified.top_tokens[row],
            verified.top_logprobs[row],
            strict=True,
        )
    ]
