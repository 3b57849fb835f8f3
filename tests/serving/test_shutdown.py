# SPDX-License-Identifier: Apache-2.0
"""The command as a process: what it prints, and how SIGTERM ends it under load."""

import asyncio
import json
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.main import get_command

from dspark_trt.bundle import Bundle
from dspark_trt.cli import build_app
from dspark_trt.errors import DSparkError
from tests.serving.conftest import HTTP, MODEL, PROMPT, ServerProcess, server_process

SHORT: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
LONG: dict[str, Any] = {**SHORT, "max_tokens": 500, "ignore_eos": True, "stream": True}


async def read(client: httpx.AsyncClient, begun: asyncio.Event) -> list[str]:
    """All events of a long stream."""
    events = []
    async with client.stream("POST", "/v1/completions", json=LONG) as stream:
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            if line:
                events.append(line.removeprefix("data: "))
                begun.set()
    return events


async def sigterm_under_load(
    server: ServerProcess, streams: int
) -> tuple[Any, list[list[str]]]:
    """SIGTERM once every stream has begun; what a new connection gets, and what the streams had."""
    async with httpx.AsyncClient(verify=False, base_url=server.url, timeout=60) as client:
        begun = [asyncio.Event() for _ in range(streams)]
        reading = [asyncio.create_task(read(client, each)) for each in begun]
        for each in begun:
            await asyncio.wait_for(each.wait(), 30)
        server.process.send_signal(signal.SIGTERM)
        async with httpx.AsyncClient(verify=False, base_url=server.url, timeout=10) as fresh:
            while (ready := await fresh.get("/ready")).status_code == 200:
                await asyncio.sleep(0.01)
            refused = await fresh.post("/v1/completions", json=SHORT)
            healthy = await fresh.get("/health")
        assert ready.status_code == 503
        assert healthy.status_code == 200
        return refused, list(await asyncio.gather(*reading))


def test_sigterm_finishes_what_runs_and_refuses_what_comes(tiny_bundle: Bundle) -> None:
    with server_process(tiny_bundle) as server:
        refused, streams = asyncio.run(sigterm_under_load(server, 8))
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["code"] == "shutting_down"
        for events in streams:
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(30) == 0
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def test_what_outlasts_the_drain_is_told_so(tiny_bundle: Bundle) -> None:
    with server_process(tiny_bundle, "--drain-seconds", "0.2") as server:
        _, streams = asyncio.run(sigterm_under_load(server, 4))
        for events in streams:
            assert json.loads(events[-1])["error"]["code"] == "shutting_down"
        started = time.monotonic()
        assert server.process.wait(30) == 0
        assert time.monotonic() - started < 10


def test_a_second_signal_does_not_wait(tiny_bundle: Bundle) -> None:
    with server_process(tiny_bundle, "--drain-seconds", "600") as server:

        async def run() -> None:
            async with httpx.AsyncClient(
                verify=False, base_url=server.url, timeout=60
            ) as client:
                begun = [asyncio.Event() for _ in range(8)]
                reading = [asyncio.create_task(read(client, each)) for each in begun]
                for each in begun:
                    await each.wait()
                for _ in range(2):
                    server.process.send_signal(signal.SIGTERM)
                    await asyncio.sleep(0.3)
                await asyncio.gather(*reading, return_exceptions=True)

        asyncio.run(run())
        assert server.process.wait(20) == 0


# What it writes -----------------------------------------------------------------------------------


def test_the_access_log_is_json_without_prompts(tiny_bundle: Bundle) -> None:
    with server_process(
        tiny_bundle, environment={"DSPARK_API_KEYS": "sk-one, sk-two"}
    ) as server:
        headers = {"authorization": "Bearer sk-two"}
        whole = HTTP.post(f"{server.url}/v1/completions", json=SHORT, headers=headers)
        HTTP.post(f"{server.url}/v1/completions", json={**SHORT, "bogus": 1}, headers=headers)
        HTTP.get(f"{server.url}/v1/models")
        assert server.stop() == 0
    answered, refused, locked = server.access_lines()
    assert answered["request_id"] == whole.headers["x-request-id"]
    assert answered["status"] == 200
    assert answered["prompt_tokens"] == whole.json()["usage"]["prompt_tokens"]
    assert answered["output_tokens"] == whole.json()["usage"]["completion_tokens"]
    assert answered["finish_reasons"] == [whole.json()["choices"][0]["finish_reason"]]
    assert 0 < answered["first_token_seconds"] <= answered["seconds"]
    assert re.fullmatch("[0-9a-f]{8}", answered["key"])
    assert (refused["status"], refused["error"]) == (400, "unknown_parameter")
    assert (locked["status"], locked.get("key")) == (401, None)
    text = "".join(server.errors)
    assert "apples" not in text
    assert "sk-" not in text
    assert "warning" not in text


def test_a_server_says_at_its_start_what_is_open_or_missing_and_logs_prompts_on_demand(
    tiny_bundle: Bundle,
) -> None:
    with server_process(tiny_bundle, "--host", "0.0.0.0", "--log-prompts") as server:
        HTTP.post(f"{server.url}/v1/completions", json=SHORT)
        server.stop()
    assert re.search("warning: 0.0.0.0 can be reached.*no API keys", server.errors[0])
    assert server.errors[1].startswith("note: no cost table: drafts are not trimmed")
    (line,) = server.access_lines()
    assert line["prompt"] == [PROMPT]


def test_keys_come_from_a_file_too(tiny_bundle: Bundle, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# the team's\nsk-file\n")
    options = ("--host", "0.0.0.0", "--api-key-file", str(keys), "--no-access-log")
    with server_process(tiny_bundle, *options) as server:
        assert HTTP.get(f"{server.url}/v1/models").status_code == 401
        headers = {"authorization": "Bearer sk-file"}
        assert HTTP.get(f"{server.url}/v1/models", headers=headers).is_success
        server.stop()
    assert "warning" not in "".join(server.errors)
    assert server.access_lines() == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--max-body-bytes", "0"), "max_body_bytes must be at least 1, got 0"),
        (("--api-key-file", "/none"), "API key file /none cannot be read"),
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1 port 0"),
    ],
)
def test_bad_options_are_one_sentence(
    tiny_bundle: Bundle, options: tuple[str, ...], sentence: str
) -> None:
    command = get_command(build_app())
    arguments = ["serve", str(tiny_bundle.path), "--port", "0", *options]
    with pytest.raises(DSparkError, match=sentence):
        command.main(arguments, standalone_mode=False)


# Numbers ------------------------------------------------------------------------------------------


def test_metrics_count_what_was_answered(tiny_bundle: Bundle) -> None:
    with server_process(tiny_bundle) as server:
        for _ in range(3):
            HTTP.post(f"{server.url}/v1/completions", json={**SHORT, "ignore_eos": True})
        HTTP.get(f"{server.url}/nothing/{'x' * 50}")
        text = HTTP.get(f"{server.url}/metrics").text
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 0  # idle: at once
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['dspark_http_answers_total{route="/v1/completions",status="200"}'] == "3.0"
    assert values['dspark_http_answers_total{route="other",status="404"}'] == "1.0"
    assert values["dspark_output_tokens_total"] == "12.0"
    assert values["dspark_first_token_seconds_count"] == "3.0"
    assert values["dspark_http_generating"] == "0.0"
    assert values["dspark_active_requests"] == "0.0"
    assert values['dspark_finished_requests_total{reason="length"}'] == "3.0"
