# SPDX-License-Identifier: Apache-2.0
"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`."""

from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse

from dspark_trt.errors import (
    CapacityError,
    DSparkError,
    EngineClosedError,
    QueueFullError,
    RequestError,
)
from dspark_trt.runtime.request import Completion, FinishReason

_RETRY_S = 1  # what an overloaded server asks for: a place in the queue is free within rounds


class ApiError(Exception):
    """An answer other than success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.code, self.param = code, param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "overloaded_error"}


def overloaded(message: str, *, retry_after_s: int = _RETRY_S) -> ApiError:
    return ApiError(503, message, code="overloaded", retry_after_s=retry_after_s)


def not_ready(reason: str) -> ApiError:
    return ApiError(503, reason, code="not_ready", retry_after_s=_RETRY_S)


def shutting_down() -> ApiError:
    """Another server has to answer: this one does not come back within a retry or two."""
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=5)


def api_error(error: DSparkError) -> ApiError:
    """What the engine refused, as an answer."""
    if isinstance(error, QueueFullError):
        return overloaded(str(error))
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), code="engine_closed", retry_after_s=5)
    if isinstance(error, CapacityError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    return ApiError(500, str(error))


def failure_of(completions: Sequence[Completion]) -> ApiError | None:
    """The error that requests ended with, if one did."""
    for done in completions:
        if done.finish_reason is FinishReason.ERROR:
            return ApiError(500, f"generation failed: {done.error}", code="generation_failed")
        if done.finish_reason is FinishReason.ABORTED:
            return shutting_down()
        if done.finish_reason is FinishReason.TIMEOUT:
            message = "the request took longer than this server allows"
            return ApiError(503, message, code="timeout", retry_after_s=_RETRY_S)
    return None
