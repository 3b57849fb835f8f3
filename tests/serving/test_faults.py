# SPDX-License-Identifier: Apache-2.0
"""Clients that leave, bodies that are hostile, answers that fail: nothing stays behind, nothing else suffers."""

import asyncio
import json
import shutil
import socket
import subprocess
import threading
import time
from typing import Any

import httpx
import numpy as np
import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.runtime.engine import EngineOptions
from dspark_trt.runtime.text import TextCodec
from tests.serving.conftest import HTTP, MODEL, PROMPT, Running, running_server

LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": PROMPT,
    "max_tokens": 1000,
    "ignore_eos": True,
}


def aborted(server: Running) -> int:
    finished: dict[str, int] = server.service.engine.status()["finished"]
    return finished.get("aborted", 0)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


# Clients that leave -------------------------------------------------------------------------------


def test_leaving_a_stream_aborts_the_request(server: Running) -> None:
    before = aborted(server)
    with HTTP.stream(
        "POST", f"{server.url}/v1/completions", json={**LONG, "stream": True, "n": 2}
    ) as stream:
        next(stream.iter_lines())
    server.wait_until_idle()
    assert aborted(server) == before + 2


def test_leaving_before_a_whole_answer_aborts_the_request(server: Running) -> None:
    before = aborted(server)
    with pytest.raises(httpx.ReadTimeout):
        HTTP.post(f"{server.url}/v1/completions", json={**LONG, "n": 8}, timeout=0.1)
    server.wait_until_idle()
    assert aborted(server) > before


def test_leaving_the_queue_gives_the_place_back(tiny_bundle: Bundle) -> None:
    """One decodes, one waits and leaves: it never takes a turn."""
    with running_server(tiny_bundle, options=EngineOptions(max_batch=1)) as server:

        async def run() -> None:
            async with httpx.AsyncClient(
                verify=False, base_url=server.url, timeout=30
            ) as client:
                first = asyncio.create_task(client.post("/v1/completions", json=LONG))
                while server.engine.metrics.rounds < 2:
                    await asyncio.sleep(0.005)
                waiting = asyncio.create_task(
                    client.post("/v1/completions", json={**LONG, "stream": True})
                )
                while server.service.generating < 2:
                    await asyncio.sleep(0.005)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                assert (await first).status_code == 200

        asyncio.run(run())
        server.wait_until_idle()
        assert server.service.engine.status()["finished"] == {"length": 1, "aborted": 1}


def test_half_a_request_holds_nothing(server: Running) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 500\r\n\r\n{"model": "ti'
        )
    assert HTTP.get(f"{server.url}/health").is_success
    server.wait_until_idle()


# Hostile bodies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "x", "stop": "\\udfff"}',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
        b'{"model": "tiny", "prompt": "x", "seed": 9223372036854775808}',
        b'{"model": "tiny", "prompt": [[1], "x"]}',
        b'{"model": "tiny", "prompt": [[[1]]]}',
        b'{"model": "tiny", "prompt": [true]}',
        b'{"model": "tiny", "prompt": [1e3]}',
        b'{"model": "tiny", "prompt": [-1]}',
        b'{"model": "tiny", "prompt": "x", "__proto__": {}}',
        b'{"model": "tiny", "prompt": "x", "\\ud800": 1}',
        b'{"model": "\\ud800", "prompt": "x"}',
    ],
    ids=lambda body: repr(body[:40]),
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_hostile_bodies_get_one_sentence(server: Running, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    refused = HTTP.post(server.url + path, content=body, headers=headers)
    assert refused.status_code in (400, 404)
    message = refused.json()["error"]["message"]
    assert 0 < len(message) < 500
    assert "\n" not in message
    assert "Traceback" not in message


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}])
def test_a_body_of_another_type_is_told_its_header(
    server: Running, headers: dict[str, str]
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    refused = HTTP.post(f"{server.url}/v1/completions", content=body, headers=headers)
    assert refused.status_code == 400
    assert "header Content-Type: application/json" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "faulty"),
    [
        ("completions", {"prompt": [1.5] * 180_000}),
        ("completions", {"prompt": [[]] * 180_000}),
        ("completions", {"prompt": "x", "logit_bias": {f"{n}x": 1 for n in range(80_000)}}),
        ("completions", {"prompt": "x", **{f"x{n}": 1 for n in range(70_000)}}),
        ("completions", {"prompt": ["x"] * 200_000}),
        ("chat/completions", {"messages": [1] * 300_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": [1] * 300_000}]}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_megabyte_of_faults_is_one_fault(server: Running, path: str, faulty: Any) -> None:
    """A report of each would hold Python's lock, and with it every stream, for ten seconds."""
    body = json.dumps({"model": MODEL, **faulty}, separators=(",", ":"))
    assert 500_000 < len(body) < 1 << 20
    headers = {"content-type": "application/json"}
    before = time.process_time()
    refused = HTTP.post(f"{server.url}/v1/{path}", content=body, headers=headers)
    assert time.process_time() - before < 2  # the server is in this process
    assert refused.status_code == 400
    assert len(refused.json()["error"]["message"]) < 300


def test_a_long_text_is_encoded_beside_the_others(tiny_bundle: Bundle) -> None:
    codec = TextCodec(tiny_bundle)
    text = "Sam has 3 apples. " * 30_000
    done, ticks = threading.Event(), 0

    def encode() -> None:
        codec.encode(text)
        done.set()

    worker = threading.Thread(target=encode)
    worker.start()
    while not done.wait(0.001):
        ticks += 1
    assert ticks > 5
    assert codec.encode(text) == sum(
        (codec.encode(part) for part in ["Sam has 3 apples.", " Sam has 3 apples." * 29_999]),
        (),
    ) + codec.encode(" ")


def test_other_content_types_are_not_read(server: Running) -> None:
    """A page of another origin can send text/plain without asking; it gets nowhere."""
    body = json.dumps({**LONG, "max_tokens": 1})
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        headers = {} if kind is None else {"content-type": kind}
        answer = HTTP.post(f"{server.url}/v1/completions", content=body, headers=headers)
        assert answer.status_code == 400
    answer = HTTP.get(f"{server.url}/v1/models", headers={"origin": "http://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_unknown_paths_and_methods(server: Running) -> None:
    assert HTTP.get(f"{server.url}/v1/none").json()["error"]["code"] == "not_found"
    refused = HTTP.get(f"{server.url}/v1/completions")
    assert refused.status_code == 405
    assert refused.headers["allow"] == "POST"
    for path in ("/docs", "/redoc", "/ui/../api.py", "/ui/page.py"):
        assert HTTP.get(server.url + path).status_code == 404


# Answers that fail --------------------------------------------------------------------------------


def test_a_failing_sequence_ends_alone(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar breaks after some tokens; a stream beside it goes on."""

    class Broken:
        def __call__(self, output: list[int]) -> Any:
            if len(output) > 3:
                raise ValueError("lost the thread")
            return np.ones(2048, np.bool_)

    grammars = server.service.translator._grammars
    monkeypatch.setattr(grammars, "allowed_tokens", lambda _: Broken())
    plain = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 60}
    plain |= {"ignore_eos": True, "seed": 1}
    broken = plain | {"response_format": {"type": "json_object"}, "ignore_eos": False}

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(verify=False, base_url=server.url, timeout=30) as client:
            bodies = [plain, broken, broken | {"stream": True}, plain]
            return await asyncio.gather(
                *(client.post("/v1/chat/completions", json=body) for body in bodies)
            )

    first, whole, stream, last = asyncio.run(run())
    assert first.json()["choices"] == last.json()["choices"]
    assert first.json()["usage"]["completion_tokens"] == 60
    assert whole.status_code == 500
    assert whole.json()["error"]["message"].endswith("allowed_tokens failed: lost the thread")
    events = [line for line in stream.text.split("\n\n") if line]
    assert (
        "lost the thread" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
    )
    server.wait_until_idle()


def test_a_defect_of_the_engine_is_said_and_makes_the_server_unready(
    tiny_bundle: Bundle,
) -> None:
    with running_server(tiny_bundle) as server:

        def broken(_: Any) -> Any:
            raise ZeroDivisionError("a bug")

        server.engine._rounds.target.step = broken  # type: ignore[method-assign, assignment]
        answer = HTTP.post(f"{server.url}/v1/completions", json=LONG)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "generation_failed"
        for path in ("/health", "/ready"):
            assert HTTP.get(server.url + path).status_code == 503
        answer = HTTP.post(f"{server.url}/v1/completions", json=LONG)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"


# curl ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: Running) -> None:
    def curl(*arguments: str) -> str:
        command = ["curl", "--silent", "--show-error", "--no-buffer", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout

    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    url = f"{server.url}/v1/completions"
    whole = json.loads(curl(url, "--json", json.dumps(body)))
    lines = curl(url, "--json", json.dumps({**body, "stream": True})).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    text = "".join(part["choices"][0]["text"] for part in parts)
    assert text == whole["choices"][0]["text"] != ""
    assert len(parts) > 1
    head = curl("--head", "--request", "GET", f"{server.url}/ui")
    assert "default-src 'none'" in head
