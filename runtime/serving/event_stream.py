# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, and what happens when nobody listens any more."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dspark_trt.runtime.serving.access_log import record_of

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The result of the work; None if the client went away first, and the work is cancelled then."""
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        listening.cancel()
        working.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Returns when the client has left; its body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events until there are no more or the client leaves; closes `held` in either case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], held: ExitStack) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            if await unless_gone(self._send(send), receive) is None:
                record_of(scope).disconnected = True

    async def _send(self, send: Send) -> bool:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for each in self._events:
                await send({"type": "http.response.body", "body": each, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()
        return True
