# SPDX-License-Identifier: Apache-2.0
"""What one client may ask: who it is, how often, how much at once. Decided before a body is read."""

import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from math import ceil

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark_trt.runtime.serving.access_log import record_of
from dspark_trt.runtime.serving.errors import ApiError

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ui", "/ui/page.js", "/ui/page.css"})
_MOST_CLIENTS = 10_000  # that the rate limit remembers


class ApiKeys:
    """The keys of a server, as digests."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = tuple(sha256(key.encode()).digest() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, authorization: str | None) -> str | None:
        """A short name of the key in the header, fit for logs; None: no key of ours.

        Takes as long whichever key it is, and however much of it is right.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        known = [hmac.compare_digest(digest, each) for each in self._digests]
        is_known = any(known) and scheme.lower() == "bearer"
        return digest.hex()[:8] if is_known else None


class RateLimit:
    """A bucket a client: so many requests a minute, and as many at once after a quiet minute."""

    def __init__(self, per_minute: float, now: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_minute / 60
        self._most = max(per_minute, 1.0)
        self._now = now
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, when

    def seconds_to_wait(self, client: str) -> float:
        """0 and a token taken, or how long until there is one."""
        now = self._now()
        tokens, since = self._buckets.pop(client, (self._most, now))
        tokens = min(tokens + (now - since) * self._per_second, self._most)
        wait = 0.0 if tokens >= 1 else (1 - tokens) / self._per_second
        self._buckets[client] = (tokens if wait else tokens - 1, now)
        if len(self._buckets) > _MOST_CLIENTS:
            self._buckets.popitem(last=False)
        return wait


class Doorkeeper:
    """ASGI middleware: key, rate and body size."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        rate: RateLimit | None,
        max_body_bytes: int,
    ) -> None:
        self._app = app
        self._keys, self._rate = keys, rate
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            record_of(scope).error = error.code
            await error.response()(scope, receive, send)
            return
        await self._app(scope, _Limited(receive, self._max_body_bytes), send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        client = str((scope.get("client") or ("unknown",))[0])
        if self._keys:
            owner = self._keys.owner(headers.get("authorization"))
            if owner is None:
                message = "no valid API key: send it as 'Authorization: Bearer KEY'"
                raise ApiError(401, message, code="invalid_api_key")
            record_of(scope).key = client = owner
        if self._rate is not None and scope["method"] == "POST":
            wait = self._rate.seconds_to_wait(client)
            if wait:
                message = "too many requests in this minute"
                raise ApiError(
                    429, message, code="rate_limit_exceeded", retry_after_s=ceil(wait)
                )
        declared = headers.get("content-length", "0")
        if len(declared) > 18 or int(declared) > self._max_body_bytes:
            raise too_large(self._max_body_bytes)


def _path(scope: Scope) -> str:
    """Without the prefix that the application is mounted under."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


class _Limited:
    """`receive` that refuses to go on past a number of bytes: a chunked body declares none."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._seen = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if self._seen > self._max_bytes:
            # FastAPI passes this kind on while it reads a body; others it turns into 400.
            raise HTTPException(413, too_large(self._max_bytes).message)
        return message


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
