# SPDX-License-Identifier: Apache-2.0
"""Real servers on real ports: in a thread where a test looks inside, as a process where it sends signals."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.runtime.async_engine import AsyncEngine
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Completion, Request
from dspark_trt.runtime.serving.app import create_app
from dspark_trt.runtime.serving.server import (
    DrainingServer,
    listening_socket,
    uvicorn_config,
)
from dspark_trt.runtime.serving.service import Service
from dspark_trt.runtime.serving.settings import ServerSettings
from tests.serving.triton_server import Installation, install

HTTP = httpx.Client(
    verify=False, timeout=60
)  # certificates would take longer than the requests
MODEL = "tiny"
PROMPT = "Sam has 3 apples and buys 4 more. How many"


@dataclass(frozen=True, slots=True)
class Running:
    """A server in a thread of this process."""

    url: str
    service: Service

    @property
    def engine(self) -> Engine:
        return self.service.engine.engine

    def wait_until_idle(self) -> None:
        """Nobody is answered, nothing is queued, nothing is remembered."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if not (self.service.generating or self.engine.has_work or self.engine._known):
                break
            time.sleep(0.01)
        assert self.service.generating == 0
        assert self.service._running == set()
        assert self.engine._known == {}
        self.service.engine.call(lambda engine: engine.check_integrity()).result()


@contextmanager
def running_server(
    bundle: Bundle,
    settings: ServerSettings | None = None,
    options: EngineOptions | None = None,
) -> Iterator[Running]:
    settings = settings or ServerSettings(model_name=MODEL)
    engine = AsyncEngine(Engine.load(bundle, options=options or EngineOptions(max_batch=8)))
    listening = threading.Event()
    with engine, listening_socket("127.0.0.1", 0) as listener:
        app = create_app(engine, settings)
        server = DrainingServer(uvicorn_config(app), app.state.service, listening.set)
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
        thread.start()
        try:
            assert listening.wait(20)
            port = listener.getsockname()[1]
            yield Running(f"http://127.0.0.1:{port}", app.state.service)
        finally:
            server.should_exit = True
            thread.join(20)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(tiny_bundle: Bundle) -> Iterator[Running]:
    with running_server(tiny_bundle) as running:
        yield running


@pytest.fixture(scope="module")
def alone(tiny_bundle: Bundle) -> Iterator[Callable[[Request], Completion]]:
    """What the engine gives for a request in this process, without a server."""
    with Engine.load(tiny_bundle, options=EngineOptions(max_batch=1)) as engine:
        yield lambda request: engine.generate([request])[0]


@dataclass(slots=True)
class ServerProcess:
    process: "subprocess.Popen[str]"
    url: str
    errors: list[str]  # lines of stderr so far

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)

    def access_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.errors if line.startswith("{")]


@contextmanager
def server_process(
    bundle: Bundle, *options: str, environment: dict[str, str] | None = None
) -> Iterator[ServerProcess]:
    """The command as an operator runs it."""
    command = [sys.executable, "-m", "dspark_trt", "serve", str(bundle.path), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--json", "--model-name", MODEL, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    assert process.stdout is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        line = process.stdout.readline()
        assert line, "".join(errors)
        yield ServerProcess(process, json.loads(line)["url"], errors)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(5)


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Of the Triton server."""
    return install(tmp_path_factory.mktemp("triton"))
