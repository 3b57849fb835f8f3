# SPDX-License-Identifier: Apache-2.0
"""Runs the application under uvicorn. SIGTERM or Ctrl-C drains, a second one ends it."""

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from dspark_trt.errors import DSparkError
from dspark_trt.runtime.serving.service import Service

_CLOSE_S = 5  # for connections to close behind the last answer


class DrainingServer(uvicorn.Server):
    """Keeps its port open while it drains: new requests get 503 and Retry-After, not a closed door."""

    def __init__(
        self, config: uvicorn.Config, service: Service, when_listening: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._when_listening = when_listening
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._when_listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: stop within `_CLOSE_S`."""
        if self._service.is_draining:
            self.should_exit = True
        self._service.begin_drain()

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second, in its event loop."""
        if self._service.is_draining and self._drain is None:
            self._drain = asyncio.create_task(self._stop_when_drained())
        return await super().on_tick(counter)

    async def _stop_when_drained(self) -> None:
        await self._service.drained(self._service.settings.drain_s)
        self.should_exit = True


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 gives a free one.

    Raises:
        DSparkError: the address is not ours or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise DSparkError(
            f"cannot listen on {host} port {port}: {error.strerror or error}. "
            "Choose another with --host and --port"
        ) from error


def uvicorn_config(app: FastAPI) -> uvicorn.Config:
    """Uvicorn's own access log is off (ours is structured), and so is trust in forwarded addresses."""
    return uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_S,
        lifespan="off",
        ws="none",
    )


def run(app: FastAPI, listener: socket.socket, *, when_listening: Callable[[], None]) -> None:
    """Serve until a signal comes and the running answers are complete."""
    server = DrainingServer(uvicorn_config(app), app.state.service, when_listening)
    server.run(sockets=[listener])
