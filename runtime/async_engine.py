# SPDX-License-Identifier: Apache-2.0
"""An engine with a thread of its own, for services: `asyncio` streams, blocking calls from any thread."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

from dspark_trt.errors import DSparkError, EngineClosedError
from dspark_trt.runtime.engine import Engine
from dspark_trt.runtime.request import Completion, Request, TokenEvent

_log = logging.getLogger(__name__)

Deliver = Callable[[TokenEvent], None]


class AsyncEngine:
    """Owns an engine. Every public method may be called from any thread or event loop.

    A consumer that stops reading costs memory for its own tokens only (`max_new_tokens` at most); one that
    goes away (task cancelled, iterator closed) aborts its request.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._door = threading.Lock()
        self._callers = 0  # threads that want the lock between two rounds
        self._deliver: dict[int, Deliver] = {}
        self._is_closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
        self._thread.start()

    async def stream(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Tokens as they are committed; the last event carries the finish reason.

        Raises:
            RequestError: the engine refuses the request (see `Engine.submit`).
            EngineClosedError: the engine is closed or its thread failed.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()

        def deliver(event: TokenEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        request_id = await asyncio.to_thread(self._submit, request, deliver)
        try:
            while True:
                event = await events.get()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            loop.run_in_executor(
                None, self._forget, request_id
            )  # never blocks the loop for a round

    async def complete(self, request: Request) -> Completion:
        """The whole answer.

        Raises:
            RequestError: the engine refuses the request.
            EngineClosedError: the engine is closed or its thread failed.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not done.done():  # cancelled in the meantime
                done.set_result(None)

        def deliver(event: TokenEvent) -> None:
            if event.finish_reason is not None:
                loop.call_soon_threadsafe(finish)

        request_id = await asyncio.to_thread(self._submit, request, deliver)
        try:
            await done
            return await asyncio.to_thread(self._take, request_id)
        finally:
            loop.run_in_executor(None, self._forget, request_id)

    def generate(self, request: Request, timeout_s: float | None = None) -> Completion:
        """The whole answer, for threads without an event loop.

        Raises:
            RequestError: the engine refuses the request.
            EngineClosedError: the engine is closed or its thread failed.
            TimeoutError: not finished after `timeout_s`; the request is aborted.
        """
        done = threading.Event()

        def deliver(event: TokenEvent) -> None:
            if event.finish_reason is not None:
                done.set()

        request_id = self._submit(request, deliver)
        try:
            if not done.wait(timeout_s):
                raise TimeoutError(f"request {request_id} is not finished after {timeout_s} s")
            return self._take(request_id)
        finally:
            self._forget(request_id)

    def status(self) -> dict[str, Any]:
        """See `Engine.status`. Waits for the round under way."""
        with self._turn():
            return self._engine.status()

    @property
    def engine(self) -> Engine:
        """The engine itself; its metrics registry and bundle may be read, nothing else."""
        return self._engine

    def close(self, *, drain_s: float = 0.0) -> None:
        """Stop: refuse new requests, let running ones finish for `drain_s` seconds, abort the rest."""
        deadline = time.monotonic() + drain_s
        while not self._is_drained() and time.monotonic() < deadline:
            time.sleep(0.005)
        with self._turn():
            for request_id in list(self._deliver):
                self._engine.abort(request_id)
            self._dispatch()
        self._thread.join()
        self._engine.close()

    def _is_drained(self) -> bool:
        with self._turn():
            self._is_closing = True
            return not self._engine.has_work

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The lock, between two rounds. A lock alone is not fair: the engine's thread would take it again
        before anyone else wakes up, so it waits while there are callers.
        """
        with self._door:
            self._callers += 1
        with self._wake:
            with self._door:
                self._callers -= 1
            yield
            self._wake.notify_all()

    def _submit(self, request: Request, deliver: Deliver) -> int:
        with self._turn():
            if self._is_closing or self._failure is not None:
                cause = f": {self._failure}" if self._failure else ""
                raise EngineClosedError(f"the engine takes no more requests{cause}")
            request_id = self._engine.submit(request)
            self._deliver[request_id] = deliver
            return request_id

    def _take(self, request_id: int) -> Completion:
        with self._turn():
            return self._engine.take(request_id)

    def _forget(self, request_id: int) -> None:
        """Drop a request whether it is running, finished, or taken already."""
        with self._turn():
            self._deliver.pop(request_id, None)
            self._engine.abort(request_id)
            self._engine.discard(request_id)

    def _run(self) -> None:
        with self._wake:
            while not (self._is_closing and not self._engine.has_work):
                if not self._engine.has_work:
                    self._wake.wait()
                    continue
                try:
                    self._engine.step()
                except Exception as error:
                    _log.exception("the engine's round failed")
                    self._fail(error)
                    return
                self._dispatch()
                self._wake.notify_all()
                while self._callers:
                    self._wake.wait(0.01)

    def _dispatch(self) -> None:
        for request_id, deliver in list(self._deliver.items()):
            for event in self._engine.events(request_id):
                try:
                    deliver(event)
                except RuntimeError:  # the consumer's event loop is gone
                    self._engine.abort(request_id)
                if event.finish_reason is not None:
                    self._deliver.pop(request_id, None)

    def _fail(self, error: Exception) -> None:
        """A defect of ours: end every request with it instead of leaving consumers waiting."""
        self._failure = (
            error if isinstance(error, DSparkError) else EngineClosedError(repr(error))
        )
        self._engine.fail_all(f"the engine failed: {error!r}")
        self._dispatch()
        self._wake.notify_all()
