# SPDX-License-Identifier: Apache-2.0
"""One JSON line a request, and the counts Prometheus sees. Prompts and answers are left out unless asked for."""

import json
import logging
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark_trt.runtime.serving.http_metrics import HttpMetrics

access_logger = logging.getLogger("dspark_trt.access")
_RECORD = "dspark_trt.record"  # in the scope of a request


@dataclass(slots=True)
class AccessRecord:
    """Filled by whoever knows; fields that nobody knew are left out of the line."""

    request_id: str = field(default_factory=lambda: f"req-{uuid4().hex}")
    key: str | None = None  # short name of the API key
    stream: bool | None = None
    choices: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    accepted_length: float | None = None
    first_token_seconds: float | None = None
    finish_reasons: tuple[str, ...] | None = None
    error: str | None = None  # its code
    disconnected: bool | None = None
    prompt: Any = None  # only where the operator wants it


def record_of(scope: Scope) -> AccessRecord:
    """The record of the request under way."""
    record: AccessRecord = scope.setdefault(_RECORD, AccessRecord())
    return record


class AccessLog:
    """ASGI middleware, the outermost: it sees every answer, refusals included, and names each request."""

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics, is_logged: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._is_logged = is_logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = record_of(scope)
        started, status = time.perf_counter(), 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", record.request_id.encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "other")  # never what a client made up
            self._metrics.answered(route, status or 500, seconds)
            if record.disconnected:
                self._metrics.disconnects.inc()
            if self._is_logged:
                access_logger.info(_line(scope, record, status or 500, seconds))


def _line(scope: Scope, record: AccessRecord, status: int, seconds: float) -> str:
    values = {name: getattr(record, name) for name in AccessRecord.__slots__}
    return json.dumps(
        {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "client": (scope.get("client") or (None,))[0],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 6),
            **{name: value for name, value in values.items() if value is not None},
        }
    )
