# SPDX-License-Identifier: Apache-2.0
"""The engine: requests join and leave between rounds; each round runs drafter and target once.

Prompts are prefilled in chunks beside decoding requests, within one budget of target rows a step. What
fails, ends alone: a request whose logits, masks or backend calls fail gets its reason, the others go on.
"""

import logging
import os
import time
from collections.abc import Callable, Generator
from collections.abc import Sequence as Listed
from dataclasses import asdict
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any, Self

from dspark_trt.bundle import Bundle, load_bundle
from dspark_trt.config import ConfidenceInput
from dspark_trt.errors import (
    BackendError,
    BundleError,
    CapacityError,
    EngineClosedError,
    RequestError,
)
from dspark_trt.runtime.admission import AdmissionLimits, WaitingQueue
from dspark_trt.runtime.backends import Backend, open_backend
from dspark_trt.runtime.backends.interface import (
    BackendOptions,
    OpensLate,
    RunsRounds,
    TargetModel,
)
from dspark_trt.runtime.bypass import Bypass
from dspark_trt.runtime.cost_model import CostModel
from dspark_trt.runtime.drafter_window import DrafterWindow
from dspark_trt.runtime.engine_options import EngineOptions as EngineOptions
from dspark_trt.runtime.launched_rounds import LaunchedRounds
from dspark_trt.runtime.metrics import EngineMetrics
from dspark_trt.runtime.planner import Planner
from dspark_trt.runtime.request import Completion, FinishReason, Request, TokenEvent
from dspark_trt.runtime.round_report import RoundReport
from dspark_trt.runtime.rounds import Rounds
from dspark_trt.runtime.scheduler import Scheduler
from dspark_trt.runtime.scheduling import AUTO, beyond_measured, choose_scheduling
from dspark_trt.runtime.sequence import Sequence
from dspark_trt.runtime.session import load_calibration
from dspark_trt.runtime.shared_prefixes import SharedPrefixes
from dspark_trt.runtime.targets.host import HostTargetModel
from dspark_trt.runtime.text import TextCodec

_log = logging.getLogger(__name__)

RoundObserver = Callable[[RoundReport], None]


def require_own_process(opened_in: int) -> None:
    """Threads stay behind in a fork: whoever waits for them waits for ever.

    Raises:
        EngineClosedError: this is another process than the one that opened the engine.
    """
    if os.getpid() != opened_in:
        raise EngineClosedError(
            f"the engine was opened in process {opened_in}, and its threads did not come into this fork of it. "
            "Open an engine in each process"
        )


class Engine:
    """Runs a bundle's drafter and a target for many requests.

    Not thread-safe: one engine, one thread at a time (`AsyncEngine` gives it a thread of its own).
    """

    def __init__(
        self,
        backend: Backend,
        options: EngineOptions | None = None,
        *,
        scheduler: Scheduler | str = AUTO,
        cost_table: CostModel | None = None,
        bypass: Bypass | None = None,
        target: TargetModel | None = None,
    ) -> None:
        bundle, options = backend.bundle, options or EngineOptions()
        if target is None and bundle.target is None:
            raise BundleError(
                f"{bundle.path} has no target. Export it again with --target, or pass your own target"
            )
        self.bundle = bundle
        self.options = options
        self.gamma = bundle.draft.gamma
        self._vocab = bundle.draft.decoder.vocab_size
        self._codec = TextCodec(bundle) if TextCodec.is_available(bundle) else None
        self._stop_token_ids = bundle.target.stop_token_ids if bundle.target else ()
        self._scheduling = choose_scheduling(
            scheduler, backend, costs=cost_table, bypass=bypass, target=target
        )
        self.planner = Planner(
            self._scheduling.scheduler,
            calibration=load_calibration(bundle),
            slots=options.max_batch,
            table=self._scheduling.costs,
            bypass=self._scheduling.bypass,
        )
        self.metrics = EngineMetrics(self.gamma, lambda: self.planner.drift.gap())
        self.observers: list[RoundObserver] = [self.metrics.observe]
        shares_prefixes = options.prefix_cache_bytes > 0
        if isinstance(target, HostTargetModel):
            target.serve(bundle.draft)
            shares_prefixes = False  # it keeps its own caches
        self._rounds = Rounds(
            drafter=backend.draft_model(options.max_batch),
            target=target or backend.target_model(options.max_batch),
            verifier=backend.verifier(options.max_batch),
            planner=self.planner,
            window=DrafterWindow(
                slots=options.max_batch,
                trained_tokens=options.drafter_trained_tokens,
                rebase_tokens=options.drafter_rebase_tokens,
            ),
            max_batch=options.max_batch,
            max_tokens_per_step=options.max_tokens_per_step,
            max_context_tokens=bundle.max_context_tokens,
            vocab=self._vocab,
            tap_size=bundle.draft.tap_size,
            is_chain=bundle.draft.chain is not None,
            strict_margin=options.strict_margin,
            feeds_every_request=shares_prefixes,
        )
        self._has_head = bundle.draft.confidence is not ConfidenceInput.NONE
        self._why_not_launched = self._refuses_launching(backend, target)
        if self._why_not_launched is None:
            assert isinstance(backend, RunsRounds)
            self._rounds.launched = LaunchedRounds(
                backend.rounds(options.max_batch),
                self.planner,
                self._rounds.table,
                has_confidence=self._has_head,
            )
        elif isinstance(backend, RunsRounds):
            _log.info("no round is launched at once: %s", self._why_not_launched)
        self._waiting = WaitingQueue(
            AdmissionLimits(
                waiting=options.max_waiting, cached_tokens=options.max_cached_tokens
            )
        )
        self._prefixes = (
            SharedPrefixes(self._rounds, max_bytes=options.prefix_cache_bytes)
            if shares_prefixes
            else None
        )
        self._known: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap: time, and whose
        self._next_id = 0
        self._in_round = self._is_closed = False
        self._process = os.getpid()

    def _refuses_launching(self, backend: Backend, target: TargetModel | None) -> str | None:
        """Why no round of this engine is launched at once; None: the backend does that."""
        options = self.options
        if not isinstance(backend, RunsRounds):
            return f"backend {backend.name} runs one step at a time"
        if not options.launch_rounds:
            return "launch_rounds is off"
        if target is not None:
            return "the target is the host's own"
        if self.bundle.draft.chain is not None:
            return "the context rows of an Eagle3 drafter are made on the host"
        if options.strict_margin:
            return "strict_margin looks at logits on the host"
        if options.drafter_rebase_tokens:
            return "drafter_rebase_tokens keeps taps on the host"
        return None

    @classmethod
    def load(
        cls,
        bundle: str | Path | Bundle,
        *,
        backend: str = "onnxruntime",
        backend_options: BackendOptions | None = None,
        options: EngineOptions | None = None,
        scheduler: Scheduler | str = AUTO,
        cost_table: CostModel | None = None,
        bypass: Bypass | None = None,
        target: TargetModel | None = None,
    ) -> Self:
        """Open a bundle for generation.

        Args:
            bundle: folder, or a loaded bundle.
            backend: which runs the graphs.
            backend_options: threads and execution providers.
            options: limits of the engine.
            scheduler: picks verification lengths, by name or as an object (``choose_scheduling``). The
                default weighs the bundle's cost table if it holds on this machine, and verifies every
                draft if not; `status` says which, and why.
            cost_table: what rounds cost on this machine, in place of the bundle's.
            bypass: stops drafting where it does not pay; needs costs.
            target: a target of your own instead of the bundle's (see `runtime.targets`).

        Raises:
            BundleError: the bundle does not load, or nobody provides a target.
            BackendError: the backend is missing or cannot run it.
            RequestError: an unknown scheduler, or one that biases the output.
        """
        loaded = bundle if isinstance(bundle, Bundle) else load_bundle(bundle)
        return cls(
            open_backend(backend, loaded, backend_options),
            options,
            scheduler=scheduler,
            cost_table=cost_table,
            bypass=bypass,
            target=target,
        )

    # Requests ------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Queue a request; returns its id.

        Raises:
            RequestError: a token outside the vocabulary, or text asked of a bundle without tokenizer.
            CapacityError: the prompt leaves no room for a token, or exceeds `max_cached_tokens`.
            QueueFullError: too many requests wait.
            EngineClosedError: the engine is closed, or was opened before this process was forked.
        """
        if self._is_closed:
            raise EngineClosedError("the engine is closed and takes no more requests")
        require_own_process(self._process)
        self._check(request)
        stop = request.params.stop_token_ids
        sequence = Sequence(
            self._next_id,
            request,
            frozenset(self._stop_token_ids if stop is None else stop),
            self._codec,
        )
        self._waiting.push(sequence, self._positions(sequence))
        self._next_id += 1
        self._known[sequence.id] = sequence
        if sequence.deadline is not None:
            heappush(self._deadlines, (sequence.deadline, sequence.id))
            self._forget_deadlines()
        return sequence.id

    def _check(self, request: Request) -> None:
        if not isinstance(request, Request):
            raise RequestError(
                f"expected a Request, got {request!r}; text becomes its prompt_ids with TextCodec.encode"
            )
        limit = self.bundle.max_context_tokens
        if len(request.prompt_ids) >= limit:
            raise CapacityError(
                f"the prompt has {len(request.prompt_ids)} tokens; this bundle holds {limit} positions, "
                "the answer included"
            )
        params = request.params
        for name, tokens in (
            ("prompt", request.prompt_ids),
            ("logit_bias", [token for token, _ in params.logit_bias]),
            ("stop", params.stop_token_ids or ()),
        ):
            for token in tokens:
                if not 0 <= token < self._vocab:
                    raise RequestError(
                        f"{name} token {token} is outside the vocabulary of {self._vocab}"
                    )
        if (params.logprobs or 0) > self.bundle.top_logprobs:
            raise RequestError(
                f"logprobs must be at most {self.bundle.top_logprobs} here, got {params.logprobs}"
            )
        if request.wants_text and self._codec is None:
            raise RequestError(
                "this bundle has no tokenizer: it gives token ids, no text or stop strings"
            )

    def _positions(self, sequence: Sequence) -> int:
        return min(sequence.most_tokens, self.bundle.max_context_tokens)

    def abort(self, request_id: int) -> None:
        """End a request now, keeping the tokens it has; finished or unknown requests are left alone."""
        sequence = self._known.get(request_id)
        if sequence is not None and sequence.finish_reason is None:
            self._end(sequence, FinishReason.ABORTED)

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

    def discard(self, request_id: int) -> None:
        """Forget a finished request without its result; unknown ones are left alone."""
        sequence = self._known.get(request_id)
        if sequence is not None and sequence.finish_reason is not None:
            del self._known[request_id]

    def open_graphs(self) -> None:
        """Open what opens with the first request that needs it, so that no request waits for it; `AsyncEngine` does.

        Raises:
            BackendError: the backend refuses one.
        """
        for part in (self._rounds.drafter, self._rounds.verification.verifier):
            if isinstance(part, OpensLate):
                part.open_graphs()

    def fail_all(self, error: str) -> None:
        """End every request with an error: what a service does before it gives an engine up."""
        for sequence in self._from_last():
            self._end(sequence, FinishReason.ERROR, error)

    def _from_last(self) -> list[Sequence]:
        """All requests, in an order in which none moves into another's row: a broken device moves nothing."""
        return [*self._waiting, *reversed(self._rounds.active)]

    def events(self, request_id: int) -> list[TokenEvent]:
        """Events of a request since the last call, oldest first.

        Raises:
            RequestError: no such request.
        """
        sequence = self._known.get(request_id)
        if sequence is None:
            raise RequestError(f"request {request_id} is unknown")
        found = list(sequence.events)
        sequence.events.clear()
        return found

    def stream(self, request: Request) -> Generator[TokenEvent, None, None]:
        """Submit a request and run rounds until it ends, yielding its tokens as they are committed.

        Other requests of the engine advance as well. Closing the iterator aborts the request; `take` with
        an event's `request_id` gives the statistics.
        """
        request_id = self.submit(request)
        try:
            while True:
                for event in self.events(request_id):
                    yield event
                    if event.finish_reason is not None:
                        return
                self.step()
        finally:
            self.abort(request_id)

    def generate(self, requests: Listed[Request]) -> list[Completion]:
        """Run requests to their end, however many; results in the order of the requests.

        Raises:
            RequestError: one of them is refused (see `submit`); none goes on.
        """
        ids: list[int] = []
        try:
            for request in requests:
                while 0 < self.options.max_waiting <= len(self._waiting):
                    self.step()
                ids.append(self.submit(request))
            while any(self._known[i].finish_reason is None for i in ids):
                self.step()
            return [self.take(i) for i in ids]
        finally:
            for each in ids:
                self.abort(each)
                self.discard(each)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._rounds.active)

    def status(self) -> dict[str, Any]:
        """What a dashboard asks: load, speed by stage, acceptance, and what is off and why."""
        metrics, planner = self.metrics, self.planner
        gap = planner.drift.gap()
        return {
            "active": len(self._rounds.active),
            "waiting": len(self._waiting),
            "rounds": metrics.rounds,
            "output_tokens": metrics.tokens,
            "target_rows": metrics.target_rows,
            "accepted_length": metrics.accepted_length,
            "position_acceptance": [
                accepted / reached if reached else None
                for accepted, reached in zip(
                    metrics.accepted.tolist(), metrics.reached.tolist(), strict=True
                )
            ],
            "verification_lengths": metrics.lengths.tolist(),
            "calibration_gap": [float(value) if value == value else None for value in gap],
            "calibration_drifted": planner.drift.has_drifted(),
            "stage_seconds": dict(metrics.seconds),
            "finished": dict(metrics.finished),
            "prefix_cache": self._prefixes and self._prefixes.status(),
            "scheduler": type(planner.scheduler).__name__,
            "launched_rounds": self._launching(),
            "reasons": dict(metrics.reasons),
            "bypass": planner.bypassed,
            "cost_table": None if planner.table is None else dict(planner.table.origin),
            "notes": self._notes(),
            "options": asdict(self.options),
        }

    def _launching(self) -> dict[str, Any]:
        """Rounds launched without waiting in between, and the others by why they waited."""
        launched = self._rounds.launched
        return {
            "rounds": 0 if launched is None else launched.rounds,
            "never": self._why_not_launched,
            "waited": {} if launched is None else dict(launched.waiting),
        }

    def _notes(self) -> list[str]:
        """What is missing or switched off, said aloud."""
        costs, most = self.planner.table, self.options.max_batch
        notes = [
            note
            for note in (self._scheduling.note, beyond_measured(costs, most, self.bundle.path))
            if note is not None
        ]
        if not self._has_head and self.planner.calibration.estimator is None:
            notes.append(
                "the drafter has no confidence head and no fitted estimator: its own probabilities "
                f"are used as they are. Fit one: dspark-trt calibrate {self.bundle.path}"
            )
        if self.options.prefix_cache_bytes and self._prefixes is None:
            notes.append("no prefix cache: a host's target keeps its own caches")
        if self._codec is None:
            notes.append("no tokenizer in the bundle: token ids only")
        return notes

    def check_integrity(self) -> None:
        """Raise AssertionError if rows, slots or cached prefixes do not add up."""
        self._rounds.check_integrity()
        if self._prefixes is not None:
            self._prefixes.check_integrity()

    def close(self) -> None:
        """Abort what runs and free the caches: the engine takes no requests afterwards."""
        self._is_closed = True
        for sequence in self._from_last():
            self._end(sequence, FinishReason.ABORTED)
        self._rounds.drafter.close()
        self._rounds.target.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Rounds --------------------------------------------------------------------------------------

    def step(self) -> None:
        """Admit what fits, then run one round for every active request."""
        self._end_overdue()
        self._admit()
        self.metrics.active, self.metrics.waiting = len(self._rounds.active), len(self._waiting)
        if not self._rounds.active:
            return
        self._rounds.draw_uniforms()
        try:
            if self.options.strict_margin:
                self._decide_near_ties()
            self._round(len(self._rounds.active))
        except BackendError as error:
            self._isolate(error)

    def _decide_near_ties(self) -> None:
        """Requests stopped before a near tie decode one token alone, on one row."""
        for sequence in [s for s in self._rounds.active if s.is_doubtful]:
            self._rounds.bring_to_front(sequence)
            self._round(1, is_plain=True)

    def _round(self, count: int, *, is_plain: bool = False) -> None:
        if not count:
            return
        prefilling = [s for s in self._rounds.active[:count] if s.is_prefilling]
        self._in_round = True
        try:
            report = self._rounds.run(count, is_plain=is_plain)
        finally:
            self._in_round = False
        if self._prefixes is not None:
            for sequence in prefilling:
                if not sequence.is_prefilling and sequence.finish_reason is None:
                    self._prefixes.store(sequence)
        for sequence in report.sequences:
            if sequence.finish_reason is not None:
                self._leave(sequence)
        for observe in self.observers:
            observe(report)

    def _isolate(self, error: BackendError) -> None:
        """A round failed: run every request alone, and end those that fail again."""
        _log.warning(
            "a round of %d requests failed, running each alone: %s",
            len(self._rounds.active),
            error,
        )
        for sequence in list(self._rounds.active):
            self._rounds.bring_to_front(sequence)
            try:
                self._round(1)
            except BackendError as own:
                sequence.finish(FinishReason.ERROR, str(own))
                self._leave(sequence)

    def _end_overdue(self) -> None:
        while self._deadlines and self._deadlines[0][0] < time.perf_counter():
            sequence = self._known.get(heappop(self._deadlines)[1])
            if sequence is not None and sequence.finish_reason is None:
                self._end(sequence, FinishReason.TIMEOUT)

    def _forget_deadlines(self) -> None:
        """Of requests that ended, once they are the most: a service keeps long deadlines and short answers."""
        if len(self._deadlines) > 64 + 2 * len(self._known):
            self._deadlines = [each for each in self._deadlines if each[1] in self._known]
            heapify(self._deadlines)

    def _admit(self) -> None:
        rounds = self._rounds
        while self._waiting and len(rounds.active) < self.options.max_batch:
            held = sum(self._positions(s) for s in rounds.active)
            sequence = self._waiting.pop_if_fits(held, self._positions)
            if sequence is None:
                return
            row = rounds.join(sequence)
            if self._prefixes is None:
                continue
            try:
                self._prefixes.restore(sequence, row)
            except BackendError as error:  # no room for its rows: others go on
                sequence.finish(FinishReason.ERROR, str(error))
                self._leave(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End a request between rounds, wherever it is."""
        sequence.finish(reason, error)
        if self._waiting.remove(sequence):
            self.metrics.waiting = len(self._waiting)
            self.metrics.finish(reason)
        elif (
            not self._in_round
        ):  # where a mask or a host's target asks, rows stay until it ends
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.finish_reason is not None
        self._rounds.leave(sequence)
        self.metrics.active = len(self._rounds.active)
        self.metrics.finish(sequence.finish_reason)
        if sequence.error:
            _log.warning("request %d failed: %s", sequence.id, sequence.error)
        stats = sequence.completion().stats
        _log.info(
            "request %d finished: %s",
            sequence.id,
            sequence.finish_reason.value,
            extra={  # for structured handlers; never the text
                "request_id": sequence.id,
                "finish_reason": sequence.finish_reason.value,
                "prompt_tokens": stats.prompt_tokens,
                "output_tokens": stats.output_tokens,
                "accepted_length": stats.accepted_length,
                "first_token_seconds": stats.first_token_seconds,
                "seconds": stats.seconds,
            },
        )
