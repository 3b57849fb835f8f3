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

from dspark_trt.errors import BackendError
from dspark_trt.runtime.backends.interface import (
    CountsWaits,
    DraftModel,
    DraftOutput,
    PaysCapacity,
    Shrinks,
    TargetModel,
    TargetOutput,
    Verification,
    Verifier,
)
from dspark_trt.runtime.drafter_feed import DrafterFeed
from dspark_trt.runtime.drafter_window import DrafterWindow
from dspark_trt.runtime.launched_rounds import LaunchedRounds
from dspark_trt.runtime.planner import DraftedRequests, PlannedRound, Planner, all_alike
from dspark_trt.runtime.ragged import RaggedRows, block_rows, ragged_rows
from dspark_trt.runtime.request import FinishReason, TokenKind, TokenLogprobs
from dspark_trt.runtime.round_report import RoundReport, Stages
from dspark_trt.runtime.round_verification import RoundVerification
from dspark_trt.runtime.rows import RowTable
from dspark_trt.runtime.scheduler import Budget
from dspark_trt.runtime.sequence import Sequence

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]


_USUAL_ANSWER = 256  # tokens; growing again for a longer one costs copies


class _Standing(NamedTuple):
    """What stays as it is for as long as the same requests decode in the same rows. B requests, R decode."""

    decoding: Bools  # [B]
    may_draft: Bools  # [B]
    all_decode: bool
    all_may_draft: bool
    nobody_may_draft: bool
    uses_processors: bool  # any of them
    rows: Ints  # [R] that decode
    ids: Ints  # [R]
    slots: Ints  # [R]
    temperature: Floats  # [R]
    sampling: list[int]  # rows that decode and sample


class _Done(NamedTuple):
    """A round that only has to be committed. B requests."""

    standing: _Standing
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
        self.verification = RoundVerification(
            verifier, self.table, gamma=planner.gamma, vocab=vocab, strict_margin=strict_margin
        )
        self._counter = drafter if isinstance(drafter, CountsWaits) else None
        self._gamma = planner.gamma
        self._max_tokens_per_step = max_tokens_per_step
        self._max_context_tokens = max_context_tokens
        self._blocks = np.zeros((max_batch, self._gamma + 1), np.int64)
        self._standings: dict[int, _Standing] = {}
        self._paid_rows = np.zeros(1, np.int64)
        self._free_slots = list(range(max_batch))

    # Rows ----------------------------------------------------------------------------------------

    def join(self, sequence: Sequence) -> int:
        """Give a request the next row."""
        row = len(self.active)
        self._standings.clear()
        self.active.append(sequence)
        sequence.slot = self._free_slots.pop()
        self.planner.joined(sequence.slot, greedy=sequence.request.params.temperature == 0)
        self.feed.joined(sequence.slot)
        self.table.assign(row, sequence.id, sequence.slot, sequence.request.params)
        self.verification.joined(self.active)
        if sequence.request.params.temperature > 0:
            self._draw_uniforms(row)  # for the token behind the prompt
        if row == 0:
            usual = len(sequence.request.prompt_ids) + _USUAL_ANSWER
            self._shrink(min(sequence.most_tokens, usual))
        return row

    def leave(self, sequence: Sequence) -> None:
        """Free a row; the last active request moves into it, so that active rows stay a prefix."""
        self._swap(self.active.index(sequence), len(self.active) - 1)
        self.active.pop()
        self._standings.clear()
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
        self._standings.clear()
        self.drafter.swap_rows(first, second)
        self.target.swap_rows(first, second)
        self.table.swap(first, second)
        self.verification.swap(first, second)
        self.active[first], self.active[second] = self.active[second], self.active[first]

    def _bring_home(self) -> None:
        if self.launched is not None:
            self.launched.bring_home()

    def bring_to_front(self, sequence: Sequence) -> None:
        self._swap(0, self.active.index(sequence))

    # Randomness ----------------------------------------------------------------------------------

    def draw_uniforms(self) -> None:
        """Randomness of one round for every decoding request, once a round even if it is run again."""
        for row in self._standing(len(self.active)).sampling:
            self._draw_uniforms(row)

    def _draw_uniforms(self, row: int) -> None:
        """From the request's own generator and always as much: its tokens do not depend on its company,
        nor on how its prompt was chunked.
        """
        table, random = self.table, self.active[row].random
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
            standing, drafted = self._standing(count), np.zeros(count, np.bool_)
        else:
            standing, drafted = self._drafting_in_front(count)
        if self.launched is not None and not is_plain:
            requests = self._drafted_requests(standing, drafted)
            budget = self.launched.budget(self.active[:count], requests)
            if budget is not None:
                return self._run_launched(self.launched, requests, budget, stages)
            self.launched.bring_home()
        draft = self._draft(int(np.count_nonzero(drafted)))
        stages.end("draft")
        planned, lengths = self._plan(standing, drafted, draft)
        stages.end("schedule")
        rows = self._rows(standing, draft, lengths)
        target = self.target.step(rows)
        stages.end("target")
        verified = self._verify(standing, draft, lengths, rows, target)
        stages.end("verify")
        accepted = verified.accepted.copy()
        if min(accepted.tolist()) < 0:
            accepted = np.maximum(accepted, 0)
        if not standing.all_decode:
            accepted *= standing.decoding
        if draft is not None and self.verification.is_strict:
            verified, accepted = self.verification.before_near_ties(
                self.active[:count], verified, lengths, target.logits
            )
        done = _Done(
            standing=standing,
            drafted=drafted,
            lengths=lengths,
            verified=verified,
            accepted=accepted,
            taps=_by_request(target.taps, rows.offsets),
            target_rows=len(rows.token_ids),
            draft=draft,
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
            standing=self._standing(count),
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
        standing, drafted, lengths = done.standing, done.drafted, done.lengths
        decoding, accepted = standing.decoding, done.accepted
        active = self.active[: len(decoding)]
        before = [len(s.output) for s in active]
        outcomes = zip(
            done.verified.accepted.tolist(), lengths.tolist(), drafted.tolist(), strict=True
        )
        for row, outcome in enumerate(outcomes):
            taps = None if done.taps is None else done.taps[row]
            try:
                self._commit(row, done.verified, *outcome, taps)
            except (
                BackendError
            ) as error:  # its taps were refused: others have committed already
                active[row].finish(FinishReason.ERROR, str(error))
        if done.planned is not None:
            shown = (drafted, lengths, accepted)
            if not standing.all_decode:
                shown = (drafted[decoding], lengths[decoding], accepted[decoding])
            self.planner.learn(done.planned, *shown, self._paid_context(standing.rows))
        self._count_reasons(decoding, drafted, done.planned)
        stages.end("commit")
        committed = [len(s.output) - old for s, old in zip(active, before, strict=True)]
        return RoundReport(
            sequences=tuple(active),
            decoding=decoding,
            drafted=drafted,
            lengths=lengths,
            accepted=accepted,
            committed=np.array(committed, np.int64),
            target_rows=done.target_rows,
            draft=done.draft,
            temperature=self.table.first(len(active)).temperature,
            planned=done.planned,
            undrafted_reason=self.planner.undrafted_reason,
            seconds=stages.seconds,
            waits=stages.waits,
        )

    def _paid_context(self, rows: Ints) -> Ints:
        """Context rows that a step's attention costs for each request; [1] if for all as many."""
        if self._capacity_of is None:
            return self.table.target_len[rows]
        capacity = self._capacity_of.capacity_rows
        if self._paid_rows[0] != capacity:
            self._paid_rows = np.array([capacity])
        return self._paid_rows

    def _count_reasons(
        self, decoding: Bools, drafted: Bools, planned: PlannedRound | None
    ) -> None:
        undrafted = self.planner.undrafted_reason
        reason = undrafted if planned is None else planned.reason
        who = zip(self.active, decoding.tolist(), drafted.tolist(), strict=False)
        for sequence, decodes, drafts in who:
            if decodes and sequence.request.speculate:
                sequence.reasons[reason if drafts else undrafted] += 1

    def _may_draft(self, sequence: Sequence) -> bool:
        """Near ties are looked for in raw logits: strict engines do not draft where others count."""
        is_unsure = self.verification.is_strict and sequence.request.uses_processors
        return sequence.request.speculate and not sequence.is_prefilling and not is_unsure

    def _standing(self, count: int) -> _Standing:
        standing = self._standings.get(count)
        if standing is None:
            standing = self._standings[count] = self._look(self.active[:count])
        return standing

    def _look(self, sequences: Listed[Sequence]) -> _Standing:
        decoding = np.array([not sequence.is_prefilling for sequence in sequences])
        may_draft = np.array([self._may_draft(sequence) for sequence in sequences])
        decoding.setflags(write=False)
        rows = np.flatnonzero(decoding)
        return _Standing(
            decoding=decoding,
            may_draft=may_draft,
            all_decode=bool(decoding.all()),
            all_may_draft=bool(may_draft.all()),
            nobody_may_draft=not may_draft.any(),
            uses_processors=any(s.request.uses_processors for s in sequences),
            rows=rows,
            ids=self.table.request_ids[rows],
            slots=self.table.slots[rows],
            temperature=self.table.temperature[rows],
            sampling=np.flatnonzero(
                decoding & (self.table.temperature[: len(decoding)] > 0)
            ).tolist(),
        )

    def _drafting(self, standing: _Standing) -> Bools:  # [B]
        drafted = standing.may_draft
        if standing.nobody_may_draft:
            return drafted
        may = self.planner.drafting(standing.slots)
        if standing.all_decode:
            return may if standing.all_may_draft else drafted & may
        drafted = drafted.copy()
        drafted[standing.rows] &= may
        return drafted

    def _drafting_in_front(self, count: int) -> tuple[_Standing, Bools]:
        """Who decodes, and who drafts `[count]`; rows change places if somebody drafts behind one who does not,
        for whom the draft step would run in vain.
        """
        standing = self._standing(count)
        drafted = self._drafting(standing)
        drafting = int(np.count_nonzero(drafted))
        if drafting == count or drafted[:drafting].all():
            return standing, drafted
        idle, misplaced = (
            np.flatnonzero(~drafted[:drafting]),
            np.flatnonzero(drafted[drafting:]),
        )
        for front, back in zip(idle.tolist(), misplaced.tolist(), strict=True):
            self._swap(front, drafting + back)
        standing = self._standing(count)
        return standing, self._drafting(standing)

    def _draft(self, batch: int) -> DraftOutput | None:
        """One draft step over the first rows; None where nobody drafts."""
        if not batch:
            return None
        output = self.drafter.draft(self.table.first(batch).draft)
        self.feed.drafted(batch)
        return output

    def _plan(
        self, standing: _Standing, drafted: Bools, draft: DraftOutput | None
    ) -> tuple[PlannedRound | None, Ints]:
        """Verification lengths `[B]`: the scheduler's, within context room and token budget."""
        if draft is None:
            return None, np.zeros(len(drafted), np.int64)
        planned = self.planner.plan(self._drafted_requests(standing, drafted), draft)
        if standing.all_decode:
            return planned, planned.lengths
        lengths = np.zeros(len(drafted), np.int64)
        lengths[standing.rows] = planned.lengths
        return planned, lengths

    def _drafted_requests(self, standing: _Standing, drafted: Bools) -> DraftedRequests:
        """What planning knows of requests that decode."""
        own, context = drafted, self.table.first(len(drafted)).target_len
        if not standing.all_decode:
            own, context = drafted[standing.rows], context[standing.rows]
        drafting = own.tolist().count(True)
        share = (self._max_tokens_per_step - len(self.active)) // max(drafting, 1)
        most = min(max(share, 0), self._gamma)
        # Of anchor, drafts and the target's own token; never below 0: full contexts have ended.
        last = self._max_context_tokens - 2
        if drafting == len(own) and max(context.tolist(), default=0) + most <= last:
            limits = all_alike(drafting, most)
        else:
            limits = np.minimum(last - context, most) * own
        return DraftedRequests(
            rows=standing.rows,
            ids=standing.ids,
            slots=standing.slots,
            drafted=own,
            limits=limits,
            temperature=standing.temperature,
            context_tokens=self._paid_context(standing.rows),
        )

    def _rows(
        self, standing: _Standing, draft: DraftOutput | None, lengths: Ints
    ) -> RaggedRows:
        """Target rows of each request: anchor and drafts, or a chunk of the prompt."""
        count = len(lengths)
        context_len = self.table.first(count).target_len
        blocks = self._blocks[:count]
        blocks[:, 0] = self.table.anchor_ids[:count]
        if draft is not None:
            blocks[: len(draft.tokens), 1:] = draft.tokens
        if standing.all_decode:
            return block_rows(blocks, lengths, context_len)
        spare = self._max_tokens_per_step - int(lengths.sum())
        spare -= sum(not s.is_prefilling for s in self.active)
        waiting = sum(s.is_prefilling for s in self.active)  # each needs a row at least
        tokens: list[Listed[int] | Ints] = []
        for row, sequence in enumerate(self.active[:count]):
            if not sequence.is_prefilling:
                tokens.append(blocks[row, : lengths[row] + 1])
                continue
            waiting -= 1
            chunk = sequence.request.prompt_ids[sequence.prefilled :][: spare - waiting]
            spare -= len(chunk)
            tokens.append(chunk)
        return ragged_rows(tokens, context_len, standing.decoding)

    def _verify(
        self,
        standing: _Standing,
        draft: DraftOutput | None,
        lengths: Ints,
        rows: RaggedRows,
        target: TargetOutput,
    ) -> Verification:
        """Every request verifies its ℓ drafts; a prefilling one has ℓ = 0 on its last row."""
        offsets = rows.offsets
        if not standing.all_decode:  # prompts ask for their last row's logits
            offsets = np.zeros(len(lengths) + 1, np.int64)
            np.cumsum(1 + lengths, out=offsets[1:])
        return self.verification.verify(
            self.active[: len(lengths)],
            draft,
            lengths,
            offsets,
            target.logits,
            uses_processors=standing.uses_processors,
        )

    # Committing ----------------------------------------------------------------------------------

    def _commit(
        self,
        row: int,
        verified: Verification,
        accepted: int,
        length: int,
        drafted: bool,
        taps: Floats | None,  # of its rows; None: the device keeps them
    ) -> None:
        sequence, table = self.active[row], self.table
        if sequence.finish_reason is not None:  # failed while its masks were made
            return
        was_prefilling = sequence.is_prefilling
        if taps is None:
            taps = table.new_taps[row, :0]
            table.new_len[row] = accepted + 1
        if self.feed.is_chain:
            count = len(taps) if was_prefilling else max(accepted + 1, 0)
            taps = self.feed.with_next_tokens(sequence, verified.tokens[row], taps[:count])
        if was_prefilling:
            sequence.prefilled += len(taps)
            self._standings.clear()
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
        self.verification.count(row, tokens)
        if not was_prefilling:
            table.target_len[row] += accepted + 1
            if self.feed.takes(sequence):
                self.feed.commit(row, sequence.slot, taps[: accepted + 1])
        if sequence.finish_reason is None and sequence.length >= self._max_context_tokens:
            sequence.finish(FinishReason.CAPACITY)


def _by_request(taps: Floats, offsets: Ints) -> list[Floats]:  # [T, m*H], [B + 1]
    if len(offsets) == 2:
        return [taps]
    return [taps[first:last] for first, last in pairwise(offsets.tolist())]


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
