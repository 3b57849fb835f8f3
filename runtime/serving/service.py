# SPDX-License-Identifier: Apache-2.0
"""The state behind the routes: who is being answered, whether new requests are taken, how a drain ends."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dspark_trt.errors import DSparkError
from dspark_trt.runtime.async_engine import AsyncEngine, RequestGroup
from dspark_trt.runtime.request import Request
from dspark_trt.runtime.serving.errors import ApiError, api_error, overloaded, shutting_down
from dspark_trt.runtime.serving.http_metrics import HttpMetrics
from dspark_trt.runtime.serving.round_trace import round_tracer
from dspark_trt.runtime.serving.settings import ServerSettings
from dspark_trt.runtime.serving.translate import Translator

_LAST_WORDS_S = 5.0  # for answers whose requests were aborted to be sent


class Service:
    """One engine as a server sees it. Belongs to one event loop."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        bundle = engine.engine.bundle
        self.engine = engine
        self.settings = settings
        self.translator = Translator(bundle, settings)
        self.model_name = settings.model_name or bundle.path.resolve().name
        self.fingerprint = bundle.fingerprint()
        self.started = int(time.time())
        self.metrics = HttpMetrics()
        self.is_draining = False
        self._is_aborting = False
        self._running: set[RequestGroup] = set()
        self._generating = 0
        engine.engine.observers.append(round_tracer(engine.engine))

    @property
    def generating(self) -> int:
        """HTTP requests whose answer is being made."""
        return self._generating

    def why_not_ready(self) -> str | None:
        if self.engine.failure is not None:
            return f"the engine failed: {self.engine.failure}"
        return "the server is shutting down" if self.is_draining else None

    def check_model(self, name: str) -> None:
        """Raise what a client gets that asks for another model."""
        if name != self.model_name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self.model_name!r}",
                code="model_not_found",
                param="model",
            )

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of the places for requests that generate; raises `ApiError` where none is free."""
        if self.is_draining:
            raise shutting_down()
        most = self.settings.max_concurrent_requests
        if self._generating >= most:
            raise overloaded(f"{most} requests are being answered, the most this server takes")
        self._generating += 1
        self.metrics.running.set(self._generating)
        try:
            yield
        finally:
            self._generating -= 1
            self.metrics.running.set(self._generating)

    async def submit(self, requests: Sequence[Request]) -> RequestGroup:
        """Queue the sequences of one HTTP request; close the group with `leave`."""
        try:
            group = await self.engine.submit(requests)
        except DSparkError as error:
            raise api_error(error) from error
        self._running.add(group)
        if self._is_aborting:
            group.abort()
        return group

    def leave(self, group: RequestGroup) -> None:
        """Count what finished, abort what did not."""
        self._running.discard(group)
        for done in group.completions.values():
            self.metrics.finished(done)
        group.close()

    async def metrics_text(self) -> bytes:
        """The engine's metrics, read between two rounds, and the server's."""
        from prometheus_client import generate_latest

        ours = generate_latest(self.metrics.registry)
        engine = self.engine.call(lambda each: generate_latest(each.metrics.registry))
        return bytes(await asyncio.wrap_future(engine)) + bytes(ours)

    async def status(self) -> dict[str, Any]:
        """See `Engine.status`."""
        return await asyncio.wrap_future(self.engine.call(lambda each: each.status()))

    # Shutting down -------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Refuse new requests from now on."""
        self.is_draining = True

    async def drained(self, seconds: float) -> bool:
        """Wait for running answers; abort after so many seconds what is left. True: nothing was."""
        if await self._is_quiet_within(seconds):
            return True
        self._is_aborting = True
        for group in self._running:
            group.abort()
        await self._is_quiet_within(_LAST_WORDS_S)
        return False

    async def _is_quiet_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._generating and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._generating
