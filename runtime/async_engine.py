# SPDX-License-Identifier: Apache-2.0
"""An engine with a thread of its own, for services: `asyncio` streams, blocking calls from any thread."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

from dspark_trt.errors import DSparkError, EngineClosedError, RequestError
from dspark_trt.runtime.engine import Engine, require_own_process
from dspark_trt.runtime.request import Completion, Request, TokenEvent

_log = logging.getLogger(__name__)

T = TypeVar("T")
# An event, and with a request's last one its completion. Delivered by the engine's thread: must not block.
Delivered = tuple[TokenEvent, Completion | None]
Deliver = Callable[[TokenEvent, Completion | None], None]
_Post = tuple["asyncio.Queue[Delivered]", Delivered]


class AsyncEngine:
    """Owns an engine. Every public method may be called from any thread or event loop.

    The engine is touched by its own thread alone; everyone else leaves it a note, read between two rounds.
    A consumer that stops reading costs memory for its own tokens only (`max_new_tokens` at most); one that
    goes away (task cancelled, iterator closed) aborts its request.
    """

    def __init__(self, engine: Engine) -> None:
        engine.open_graphs()
        self._engine = engine
        self._notes: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._deliver: dict[int, Deliver] = {}
        self._posts: dict[asyncio.AbstractEventLoop, list[_Post]] = {}
        self._is_closing = False
        self._failure: DSparkError | None = None
        self._stopping = threading.Lock()  # notes are left before the thread stops, or refused
        self._is_stopped = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
        self._thread.start()

    async def submit(self, requests: Sequence[Request]) -> "RequestGroup":
        """Queue all of the requests or none of them.

        Raises:
            RequestError: the engine refuses one of them (see `Engine.submit`).
            EngineClosedError: the engine is closed or its thread failed.
        """
        group = RequestGroup(self, asyncio.get_running_loop())
        try:
            group.request_ids = tuple(
                await asyncio.wrap_future(
                    self._leave(lambda: self._submit(requests, group._deliver, group._known))
                )
            )
        except BaseException:
            group.close()
            raise
        return group

    async def stream(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Tokens as they are committed; the last event carries the finish reason.

        Raises:
            RequestError: the engine refuses the request (see `Engine.submit`).
            EngineClosedError: the engine is closed or its thread failed.
        """
        with await self.submit([request]) as group:
            async for event in group:
                yield event

    async def complete(self, request: Request) -> Completion:
        """The whole answer.

        Raises:
            RequestError: the engine refuses the request.
            EngineClosedError: the engine is closed or its thread failed.
        """
        with await self.submit([request]) as group:
            async for _ in group:
                pass
            return group.completions[group.request_ids[0]]

    def generate(self, request: Request, timeout_s: float | None = None) -> Completion:
        """The whole answer, for threads without an event loop.

        Raises:
            RequestError: the engine refuses the request.
            EngineClosedError: the engine is closed or its thread failed.
            TimeoutError: not finished after `timeout_s`; the request is aborted.
        """
        done: Future[Completion] = Future()

        def deliver(_: TokenEvent, completion: Completion | None) -> None:
            if completion is not None:
                done.set_result(completion)

        known: list[int] = []
        self._require_other_thread()
        try:
            self._leave(lambda: self._submit([request], deliver, known)).result()
            return done.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"request {known[0]} is not finished after {timeout_s} s"
            ) from None
        finally:
            self._forget(known)

    def call(self, ask: Callable[[Engine], T]) -> "Future[T]":
        """Have the engine's thread call `ask(engine)` between two rounds; `asyncio.wrap_future` awaits it."""
        return self._leave(lambda: ask(self._engine))

    def status(self) -> dict[str, Any]:
        """See `Engine.status`. Waits for the round under way."""
        self._require_other_thread()
        return self.call(lambda engine: engine.status()).result()

    @property
    def engine(self) -> Engine:
        """The engine itself; its metrics registry and bundle may be read, nothing else."""
        return self._engine

    @property
    def failure(self) -> DSparkError | None:
        """Why no request is taken any more, if that is a defect."""
        return self._failure

    def close(self, *, drain_s: float = 0.0) -> None:
        """Stop: refuse new requests, let running ones finish for `drain_s` seconds, abort the rest."""
        self._require_other_thread()
        self._is_closing = True
        self._leave(lambda: None)  # wakes the thread; it stops when nothing is left to do
        self._thread.join(drain_s)
        self._abort(self._deliver)
        self._thread.join()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Notes, from any thread ----------------------------------------------------------------------

    def _leave(self, work: Callable[[], T]) -> "Future[T]":
        """A note for the engine's thread; the future has what the work returned or raised."""
        require_own_process(self._process)
        future: Future[T] = Future()

        def obey() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        with self._stopping:
            if self._is_stopped:
                future.set_exception(EngineClosedError("the engine takes no more requests"))
            else:
                self._notes.put(obey)
        return future

    def _require_other_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise RequestError(
                "this call waits for the engine's thread and was made by that thread itself, as masks, observers "
                "and `call` run there. Make it from another thread"
            )

    def _forget(self, request_ids: list[int]) -> None:
        """Drop requests whether they are queued, running or finished. Read after the note that fills the list."""
        self._leave(lambda: self._drop(request_ids))

    def _abort(self, request_ids: Iterable[int]) -> None:
        def abort() -> None:
            for request_id in list(request_ids):
                self._engine.abort(request_id)

        self._leave(abort)

    # The engine's thread -------------------------------------------------------------------------

    def _submit(
        self, requests: Sequence[Request], deliver: Deliver, known: list[int]
    ) -> list[int]:
        """Fills `known` one by one, so that whoever gives up meanwhile can drop what is queued."""
        if self._is_closing or self._failure is not None:
            cause = f": {self._failure}" if self._failure else ""
            raise EngineClosedError(f"the engine takes no more requests{cause}")
        try:
            for request in requests:
                known.append(self._engine.submit(request))  # noqa: PERF401 - known if the next is refused
        except DSparkError:
            self._drop(known)
            raise
        for request_id in known:
            self._deliver[request_id] = deliver
        return known

    def _drop(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._deliver.pop(request_id, None)
            self._engine.abort(request_id)
            self._engine.discard(request_id)

    def _run(self) -> None:
        while not (self._is_closing and not self._engine.has_work and self._notes.empty()):
            self._read_notes(wait=not self._engine.has_work)
            if self._engine.has_work:
                try:
                    self._engine.step()
                except BaseException as error:  # a mask may even ask the interpreter to exit
                    _log.exception("the engine's round failed")
                    self._fail(error)
            self._dispatch()
        with self._stopping:
            self._is_stopped = True
        self._read_notes(wait=False)

    def _read_notes(self, *, wait: bool) -> None:
        """All of them; waiting for the first if there is nothing else to do."""
        try:
            self._notes.get(block=wait)()
            while True:
                self._notes.get_nowait()()
        except Empty:
            return

    def _dispatch(self) -> None:
        for request_id, deliver in list(self._deliver.items()):
            for event in self._engine.events(request_id):
                done = None
                if event.finish_reason is not None:
                    self._deliver.pop(request_id, None)
                    done = self._engine.take(request_id)
                deliver(event, done)
        self._send_posts()

    def _send_posts(self) -> None:
        """Wake each event loop once a round: every wake-up hands it Python's lock in the middle of ours."""
        posts, self._posts = self._posts, {}
        for loop, own in posts.items():
            try:
                loop.call_soon_threadsafe(_put_all, own)
            except RuntimeError:  # the consumers' event loop is gone
                self._drop([event.request_id for _, (event, _) in own])

    def _fail(self, error: BaseException) -> None:
        """A defect of ours: end every request with it instead of leaving consumers waiting."""
        self._failure = (
            error if isinstance(error, DSparkError) else EngineClosedError(repr(error))
        )
        self._engine.fail_all(f"the engine failed: {error!r}")


class RequestGroup:
    """Requests submitted together: an asynchronous iterator over the events of all of them.

    Belongs to one event loop. Leaving it (`close`, or its `with` block) aborts what still runs.
    """

    def __init__(self, engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.request_ids: tuple[int, ...] = ()  # in the order of the requests
        self.completions: dict[int, Completion] = {}  # of the requests that ended
        self._engine = engine
        self._loop = loop
        self._events: asyncio.Queue[Delivered] = asyncio.Queue()
        self._known: list[int] = []  # filled by the engine's thread

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        """The next event of any request; the iterator ends when all of them have."""
        if len(self.completions) == len(self.request_ids):
            raise StopAsyncIteration
        event, done = await self._events.get()
        if done is not None:
            self.completions[event.request_id] = done
        return event

    def abort(self) -> None:
        """End what still runs; the last events say so. Does not wait."""
        self._engine._abort(self._known)

    def close(self) -> None:
        """Abort what still runs, without further events. Does not wait, and may be called twice."""
        if not self.request_ids or len(self.completions) < len(self.request_ids):
            self._engine._forget(self._known)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _deliver(self, event: TokenEvent, done: Completion | None) -> None:
        self._engine._posts.setdefault(self._loop, []).append((self._events, (event, done)))


def _put_all(posts: list[_Post]) -> None:
    for events, delivered in posts:
        events.put_nowait(delivered)
