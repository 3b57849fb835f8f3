# SPDX-License-Identifier: Apache-2.0
"""Who may ask, how much and how often; what an overloaded server says, and that it recovers."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.cli import serve
from dspark_trt.errors import RequestError
from dspark_trt.runtime.engine import EngineOptions
from dspark_trt.runtime.serving.limits import ApiKeys, RateLimit
from dspark_trt.runtime.serving.settings import ServerSettings, keys_of_environment
from tests.serving.conftest import HTTP, MODEL, PROMPT, Running, running_server

KEY, OTHER = "sk-first-0123456789", "sk-second-0123456789"
SHORT = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
LONG = {"model": MODEL, "prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def narrow(tiny_bundle: Bundle) -> Iterator[Running]:
    """Two places, and room for two sequences to wait."""
    settings = ServerSettings(
        model_name=MODEL,
        max_body_bytes=4000,
        max_prompt_tokens=50,
        max_output_tokens=900,
        max_concurrent_requests=2,
    )
    options = EngineOptions(max_batch=1, max_waiting=2)
    with running_server(tiny_bundle, settings, options) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tiny_bundle: Bundle) -> Iterator[Running]:
    settings = ServerSettings(
        model_name=MODEL, api_keys=(KEY, OTHER), requests_per_minute=120, max_body_bytes=4000
    )
    with running_server(tiny_bundle, settings) as running:
        yield running


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


# Sizes --------------------------------------------------------------------------------------------


def test_a_large_body_is_refused_unread(narrow: Running) -> None:
    body = json.dumps({**SHORT, "prompt": "a" * 4000})
    refused = HTTP.post(f"{narrow.url}/v1/completions", content=body)
    assert refused.status_code == 413
    assert error_of(refused)["message"] == "the body is larger than 4000 bytes"


def test_a_body_that_declares_no_size_is_cut_off(narrow: Running) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    headers = {"content-type": "application/json"}
    refused = HTTP.post(f"{narrow.url}/v1/completions", content=chunks(), headers=headers)
    assert refused.status_code == 413
    assert error_of(refused)["code"] == "body_too_large"


def test_a_body_that_only_claims_a_size_holds_nothing(narrow: Running) -> None:
    """A terabyte announced, nothing sent: refused at once."""
    port = int(narrow.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n"
        )
        raw.settimeout(10)
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompt": "a b c d " * 40}, "this server takes 50"),
        ({"max_tokens": 901}, "this server gives 900"),
    ],
)
def test_tokens_are_limited(narrow: Running, changes: Any, sentence: str) -> None:
    refused = HTTP.post(f"{narrow.url}/v1/completions", json={**SHORT, **changes})
    assert refused.status_code == 400
    assert sentence in error_of(refused)["message"]


# Overload -----------------------------------------------------------------------------------------


def test_overload_is_refused_and_over_afterwards(narrow: Running) -> None:
    """Two are answered, the third gets 503 at once, and later everyone is served again."""

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(verify=False, base_url=narrow.url, timeout=30) as client:
            running = [
                asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(2)
            ]
            while narrow.service.generating < 2:
                await asyncio.sleep(0.005)
            refused = await client.post("/v1/completions", json=SHORT)
            assert all(r.status_code == 200 for r in await asyncio.gather(*running))
            assert (await client.post("/v1/completions", json=SHORT)).status_code == 200
            return refused

    refused = asyncio.run(run())
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert error_of(refused)["code"] == "overloaded"


def test_a_full_queue_refuses_all_of_a_request_or_nothing(narrow: Running) -> None:
    """One decodes and two wait: of four choices not even one stays behind."""
    refused = HTTP.post(f"{narrow.url}/v1/completions", json={**SHORT, "n": 4})
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert "Try again later" in error_of(refused)["message"]
    narrow.wait_until_idle()
    assert HTTP.post(f"{narrow.url}/v1/completions", json={**SHORT, "n": 2}).is_success


def test_a_deadline_ends_a_request(tiny_bundle: Bundle) -> None:
    settings = ServerSettings(model_name=MODEL, request_timeout_s=0.05)
    with running_server(tiny_bundle, settings) as running:
        late = HTTP.post(f"{running.url}/v1/completions", json=LONG)
        assert late.status_code == 503
        assert error_of(late)["code"] == "timeout"
        with HTTP.stream(
            "POST", f"{running.url}/v1/completions", json={**LONG, "stream": True}
        ) as stream:
            events = [line for line in stream.iter_lines() if line]
        assert stream.status_code == 200
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        running.wait_until_idle()


# Keys and rates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer sk-wrong", f"Basic {KEY}", KEY])
@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/status", "/openapi.json", "/none"]
)
def test_without_a_key_nothing_is_shown(
    guarded: Running, path: str, header: str | None
) -> None:
    headers = {} if header is None else {"authorization": header}
    refused = HTTP.get(guarded.url + path, headers=headers)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert error_of(refused)["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/health", "/ready", "/ui", "/ui/page.js", "/ui/page.css"])
def test_probes_and_the_empty_page_are_open(guarded: Running, path: str) -> None:
    assert HTTP.get(guarded.url + path).status_code == 200


def test_a_browser_is_led_to_the_page(guarded: Running) -> None:
    answer = HTTP.get(guarded.url + "/")
    assert (answer.status_code, answer.headers["location"]) == (307, "ui")


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_either_key_opens(guarded: Running, key: str) -> None:
    headers = {"authorization": f"bearer {key}"}
    assert HTTP.get(f"{guarded.url}/v1/models", headers=headers).is_success


def test_a_body_without_a_key_is_not_read(guarded: Running) -> None:
    refused = HTTP.post(f"{guarded.url}/v1/completions", content=b"{" * 5000)
    assert refused.status_code == 401


def test_keys_are_compared_whole() -> None:
    keys = ApiKeys((KEY,))
    assert keys.owner(f"Bearer {KEY}") is not None
    for wrong in (KEY[:-1], KEY + "x", KEY.upper(), "", "\udc80"):
        assert keys.owner(f"Bearer {wrong}") is None
    assert KEY not in str(keys.owner(f"Bearer {KEY}"))


def test_rates_are_per_key_and_come_back(tiny_bundle: Bundle) -> None:
    settings = ServerSettings(
        model_name=MODEL, api_keys=(KEY, OTHER), requests_per_minute=30, max_body_bytes=4000
    )
    with running_server(tiny_bundle, settings) as running:

        def ask(key: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return HTTP.post(f"{running.url}/v1/completions", json=SHORT, headers=headers)

        answers = [ask(KEY) for _ in range(31)]
        assert [a.status_code for a in answers].count(200) >= 30
        while (refused := ask(KEY)).status_code == 200:  # slow machines earn a token meanwhile
            pass
        assert refused.status_code == 429
        assert error_of(refused)["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 2
        assert ask(OTHER).status_code == 200
        time.sleep(int(refused.headers["retry-after"]))
        assert ask(KEY).status_code == 200


def test_a_bucket_refills_steadily() -> None:
    now = 0.0
    rate = RateLimit(60, now=lambda: now)
    assert [rate.seconds_to_wait("a") for _ in range(60)] == [0] * 60
    assert rate.seconds_to_wait("a") == pytest.approx(1)
    assert rate.seconds_to_wait("b") == 0
    now = 0.25
    assert rate.seconds_to_wait("a") == pytest.approx(0.75)
    now = 1.0
    assert rate.seconds_to_wait("a") == 0
    assert rate.seconds_to_wait("a") == pytest.approx(1)
    now = 1000.0  # a quiet time earns a minute's worth, no more
    assert [rate.seconds_to_wait("a") for _ in range(60)] == [0] * 60
    assert rate.seconds_to_wait("a") > 0


def test_the_rate_limit_forgets_the_oldest_clients() -> None:
    rate = RateLimit(60, now=lambda: 0.0)
    for number in range(10_100):
        rate.seconds_to_wait(str(number))
    assert len(rate._buckets) == 10_000


def test_an_empty_list_of_keys_opens_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for empty in ("", " , "):
        monkeypatch.setenv("DSPARK_API_KEYS", empty)
        with pytest.raises(RequestError, match="DSPARK_API_KEYS is set and holds no API key"):
            serve.command(Path("bundle"))
    monkeypatch.setenv("DSPARK_API_KEYS", "sk-one, sk-two,")
    assert keys_of_environment() == ("sk-one", "sk-two")
    monkeypatch.delenv("DSPARK_API_KEYS")
    assert keys_of_environment() == ()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_body_bytes": 0}, "max_body_bytes must be at least 1, got 0"),
        ({"requests_per_minute": 0}, "requests_per_minute must be above 0, got 0"),
        ({"drain_s": -1}, "drain_s must be at least 0, got -1"),
        ({"api_keys": ("ä",)}, "an API key is empty or has characters"),
        ({"api_keys": "secret"}, "api_keys must be a sequence of strings, got one string"),
    ],
)
def test_settings_are_checked(changes: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        ServerSettings(**changes)
