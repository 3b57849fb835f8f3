# SPDX-License-Identifier: Apache-2.0
"""Calls replicas by handle, in the words of `AsyncEngine`; a replica that dies costs time, not a request."""

import asyncio
from collections.abc import AsyncIterator

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from dspark_trt.errors import EngineClosedError, first_line
from dspark_trt.runtime.request import Completion, Request, TokenEvent

_GONE = (RayActorError, EngineClosedError)


class RayEngine:
    """An application of `dspark_trt.runtime.serving.ray` as an engine.

    Args:
        handle: from `serve.run` or `serve.get_app_handle`.
        model: of the application's bundles; empty: the default one.
        attempts: replicas to try before a request is given up.
    """

    def __init__(self, handle: DeploymentHandle, *, model: str = "", attempts: int = 3) -> None:
        self._handle = handle.options(multiplexed_model_id=model) if model else handle
        self._attempts = attempts

    async def complete(self, request: Request) -> Completion:
        """The whole answer. Asked again elsewhere if the replica died: answers have no effects.

        Raises:
            RequestError: the engine refuses the request.
            EngineClosedError: every replica that was tried died.
        """
        for attempt in range(1, self._attempts + 1):
            response = self._handle.complete.remote(request)
            try:
                done: Completion = await response
            except _GONE as error:
                if attempt == self._attempts:
                    raise _given_up(attempt, error) from error
            except BaseException:  # the caller goes: Ray would let the request run
                response.cancel()
                raise
            else:
                return done
        raise AssertionError

    async def stream(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Tokens as they are committed. Asked again only before the first: what a reader has seen stays.

        Raises:
            RequestError: the engine refuses the request.
            EngineClosedError: the replica died behind the first token, or every one before it.
        """
        streaming = self._handle.options(stream=True)
        for attempt in range(1, self._attempts + 1):
            seen, response = 0, streaming.stream.remote(request)
            try:
                async for event in response:
                    seen += len(event.token_ids)
                    yield event
                return
            except _GONE as error:
                if seen or attempt == self._attempts:
                    raise _given_up(attempt, error, seen) from error
            finally:
                response.cancel()  # nothing, unless the reader goes

    def generate(self, request: Request, timeout_s: float | None = None) -> Completion:
        """`complete` for threads without an event loop.

        Raises:
            TimeoutError: not finished after `timeout_s`; the request is aborted.
        """
        return asyncio.run(asyncio.wait_for(self.complete(request), timeout_s))


def _given_up(attempts: int, error: Exception, seen: int = 0) -> EngineClosedError:
    where = f"after {seen} tokens" if seen else f"{attempts} times"
    return EngineClosedError(f"the replica went away {where}: {first_line(error)}")
