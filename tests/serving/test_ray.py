# SPDX-License-Identifier: Apache-2.0
"""Applications on a real Ray of this machine: handles, HTTP, several models, routing, dead replicas."""

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext
from ray.serve.handle import DeploymentHandle

from dspark_trt.bundle import Bundle
from dspark_trt.errors import EngineClosedError, RequestError
from dspark_trt.runtime.async_engine import AsyncEngine
from dspark_trt.runtime.engine import Engine
from dspark_trt.runtime.request import Completion, Request, SamplingParams
from dspark_trt.runtime.serving.ray import EngineReplica, RayOptions, app
from dspark_trt.runtime.serving.ray_client import RayEngine
from dspark_trt.runtime.serving.ray_policies import RecentAcceptance, ScaleByWork
from tests.conftest import ROOT, ExportBundle
from tests.e2e.pages import blocks, steps
from tests.serving import seeded_requests
from tests.serving.seeded_requests import here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = ROOT / "docs" / "embedding" / "ray.md"
requests_about = partial(seeded_requests.requests_about, verbs=("Explain", "Show"))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A local Ray with a proxy; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def handle(address: str, tiny_bundle: Bundle) -> DeploymentHandle:
    """Two replicas of the shipped example."""
    options = RayOptions(bundle=str(tiny_bundle.path), replicas=2, max_batch=4)
    return serve.run(app(options), name="two", route_prefix="/two")


async def all_of(engine: RayEngine, requests: list[Request]) -> list[Completion]:
    return await asyncio.gather(*map(engine.complete, requests))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_handles_say_what_the_engine_here_says(
    handle: DeploymentHandle, tiny_bundle: Bundle, temperature: float
) -> None:
    requests = requests_about(tiny_bundle, 40, temperature)
    expected = here(tiny_bundle, requests)
    got = asyncio.run(all_of(RayEngine(handle), requests))
    assert [done.token_ids for done in got] == [done.token_ids for done in expected]
    assert [done.text for done in got] == [done.text for done in expected]

    async def streamed() -> list[int]:
        return [
            t async for event in RayEngine(handle).stream(requests[0]) for t in event.token_ids
        ]

    assert asyncio.run(streamed()) == list(expected[0].token_ids)


def test_refusals_arrive_as_they_are(handle: DeploymentHandle) -> None:
    request = Request(prompt_ids=(10**6,))
    with pytest.raises(RequestError, match="outside the vocabulary"):
        RayEngine(handle).generate(request, timeout_s=30)
    with pytest.raises(RequestError, match="'nope' does not exist; there are"):
        RayEngine(handle, model="nope").generate(request, timeout_s=30)


def test_requests_end_with_their_callers(handle: DeploymentHandle, tiny_bundle: Bundle) -> None:
    """Time-outs and readers that go away end their requests on the replica, which all of them reach."""
    request = requests_about(tiny_bundle, 900)[0]
    engine = RayEngine(handle)

    async def leave() -> None:
        async for _ in engine.stream(request):
            return

    for _ in range(4):
        with pytest.raises(TimeoutError):
            engine.generate(request, timeout_s=0.1)
        asyncio.run(leave())

    def are_aborted() -> bool:
        statuses = [handle.status.remote().result() for _ in range(8)]
        return any(status["finished"].get("aborted", 0) >= 6 for status in statuses)

    wait_until(are_aborted, seconds=20)


def test_openai_api_over_ray(
    handle: DeploymentHandle, address: str, tiny_bundle: Bundle
) -> None:
    request = requests_about(tiny_bundle, 40)[0]
    body = {
        "model": tiny_bundle.path.name,
        "prompt": list(request.prompt_ids),
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
    }
    url = f"{address}/two/v1/completions"
    whole = httpx.post(url, json=body, timeout=60)
    assert whole.json()["choices"][0]["text"] == here(tiny_bundle, [request])[0].text
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line]
    assert len(lines) > 3
    assert lines[-1] == "data: [DONE]"
    unknown = httpx.post(url, json=body, headers={"serve_multiplexed_model_id": "nope"})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"


def test_equal_beginnings_go_to_one_replica(
    handle: DeploymentHandle, tiny_bundle: Bundle
) -> None:
    """Only the first of each beginning finds no rows in the prefix cache: another replica would have none."""
    engine = RayEngine(handle)

    async def cached(beginning: list[int]) -> list[int]:
        found = []
        for last in range(8):
            params = SamplingParams(max_new_tokens=2, ignore_eos=True)
            request = Request(prompt_ids=(*beginning, 30 + last), params=params)
            found.append((await engine.complete(request)).stats.cached_tokens)
        return found

    for start in range(4):
        first, *others = asyncio.run(cached([20 + start, *range(40, 103)]))
        assert first < min(others)


def test_requests_survive_a_dead_replica(
    handle: DeploymentHandle, address: str, tiny_bundle: Bundle
) -> None:
    """Killed under load: what was asked for whole is answered elsewhere, token for token; a stream that had
    begun ends with an error; over HTTP an answer is right or an error. Nobody waits for ever.
    """
    requests = requests_about(tiny_bundle, 240)
    expected = {
        r.prompt_ids: done
        for r, done in zip(requests, here(tiny_bundle, requests), strict=True)
    }
    engine = RayEngine(handle, attempts=4)

    async def stream(request: Request) -> list[int] | str:
        tokens: list[int] = []
        try:
            async for event in engine.stream(request):
                tokens += event.token_ids
        except EngineClosedError as error:
            assert tokens == list(expected[request.prompt_ids].token_ids[: len(tokens)])
            return str(error)
        return tokens

    async def kill() -> None:
        await asyncio.sleep(0.6)
        ray.kill(ray.get_actor(replica_names()[0], namespace="serve"))

    async def load() -> tuple[list[list[int] | str], list[Completion]]:
        streams = asyncio.gather(*map(stream, requests))
        whole = asyncio.gather(*map(engine.complete, requests))
        await kill()
        return await streams, await whole

    def post(request: Request) -> httpx.Response:
        body = {
            "model": tiny_bundle.path.name,
            "prompt": list(request.prompt_ids),
            "max_tokens": 240,
            "temperature": 0,
            "ignore_eos": True,
        }
        return httpx.post(f"{address}/two/v1/completions", json=body, timeout=60)

    before = set(replica_names())
    with ThreadPoolExecutor() as clients:
        posted = clients.map(post, requests)
        streams, whole = asyncio.run(asyncio.wait_for(load(), 120))
        responses = list(posted)
    for request, done in zip(requests, whole, strict=True):
        assert done.token_ids == expected[request.prompt_ids].token_ids
    broken = [each for each in streams if isinstance(each, str)]
    assert broken  # the dead replica had some
    assert all("went away after" in message for message in broken)
    for request, told in zip(requests, streams, strict=True):
        assert isinstance(told, str) or tuple(told) == expected[request.prompt_ids].token_ids
    for request, response in zip(requests, responses, strict=True):
        if response.status_code == 200:
            text = response.json()["choices"][0]["text"]
            assert text == expected[request.prompt_ids].text
        else:
            assert response.status_code >= 500
    wait_until(lambda: len(set(replica_names())) == 2 and set(replica_names()) != before)


def test_models_take_turns(
    address: str, tiny_bundle: Bundle, fixture_bundle: ExportBundle
) -> None:
    """Two bundles, room for one: each says its own, and leaving does not cost running requests."""
    other = fixture_bundle("dflash")
    bundles = {"one": str(tiny_bundle.path), "other": str(other.path)}
    handle = serve.run(app(RayOptions(bundles=bundles)), name="turns", route_prefix="/turns")
    request = requests_about(tiny_bundle, 60, temperature=0.8)[0]
    expected = {
        name: here(bundle, [request])[0]
        for name, bundle in (("one", tiny_bundle), ("other", other))
    }
    for name in ("other", "one", "other"):
        done = RayEngine(handle, model=name).generate(request, timeout_s=60)
        assert done.token_ids == expected[name].token_ids

    async def together() -> list[Completion]:
        engines = [RayEngine(handle, model=name) for name in bundles]
        return await asyncio.gather(*(e.complete(request) for e in engines for _ in range(3)))

    answers = asyncio.run(together())
    assert [d.token_ids for d in answers[:3]] == [expected["one"].token_ids] * 3
    assert [d.token_ids for d in answers[3:]] == [expected["other"].token_ids] * 3
    url = f"{address}/turns/v1/models"
    listed = httpx.get(url, headers={"serve_multiplexed_model_id": "other"}, timeout=60)
    assert listed.json()["data"][0]["id"] == "other"
    serve.delete("turns")


def test_replicas_are_added_as_drafts_are_accepted_less(
    address: str, tiny_bundle: Bundle
) -> None:
    """All requests at once are too few for a second replica, but for what replicas report of acceptance."""
    requests = requests_about(tiny_bundle, 200)
    options = RayOptions(
        bundle=str(tiny_bundle.path), max_replicas=2, requests_per_replica=2 * len(requests),
        accepted_length=60, upscale_delay_s=1,
    )  # fmt: skip
    handle = serve.run(app(options), name="grows", route_prefix="/grows")
    engine = RayEngine(handle)

    async def load() -> None:
        deadline = time.monotonic() + 60
        while len(replica_names("grows")) < 2 and time.monotonic() < deadline:
            await all_of(engine, requests)

    assert len(replica_names("grows")) == 1
    asyncio.run(load())
    assert len(replica_names("grows")) == 2
    serve.delete("grows")


def replica_names(application: str = "two") -> list[str]:
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if name.startswith(f"SERVE_REPLICA::{application}#")]


def wait_until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if is_so():
            return
        time.sleep(0.2)
    pytest.fail("waited in vain")


def documented(language: str) -> str:
    """The one block of this language in the page."""
    (text,) = (content for each, content in blocks(PAGE) if each == language)
    return text


def beside() -> dict[str, str]:
    """The environment of a command that joins this Ray."""
    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def test_the_documented_file_runs(address: str, tiny_bundle: Bundle, tmp_path: Path) -> None:
    """By the documented command, with a bundle that exists."""
    text = documented("yaml").replace("/models/chat", str(tiny_bundle.path))
    file = tmp_path / "chat.yaml"
    file.write_text(text.replace("name: chat", "name: chat\n    route_prefix: /chat"))
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking", str(file)]
    done = subprocess.run(command, env=beside(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ready = f"{address}/chat/ready"
    wait_until(lambda: httpx.get(ready, timeout=60).is_success)
    assert httpx.get(ready).json() == {"status": "ok"}
    serve.delete("chat")


def test_the_documented_command_runs(address: str, tiny_bundle: Bundle, tmp_path: Path) -> None:
    """Beside a folder of that name, which replicas find though they run elsewhere; then its curl."""
    (tmp_path / "bundle").symlink_to(tiny_bundle.path)
    typed = [step.text for step in steps(PAGE) if not step.is_python]
    (command,) = (text for text in typed if text.startswith("serve run "))
    (curl,) = (text for text in typed if text.startswith("curl "))
    words = [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking"]
    done = subprocess.run(
        [*words, *shlex.split(command)[2:]], cwd=tmp_path, env=beside(), capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    there = curl.replace("localhost:8000", address.removeprefix("http://"))
    shown = subprocess.run(["bash", "-c", there], capture_output=True, check=True, text=True)
    assert json.loads(shown.stdout)["data"][0]["id"] == tiny_bundle.path.name
    assert len(replica_names("default")) == 2


def test_the_documented_program_runs(
    address: str, tiny_bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    program = documented("python").replace('"bundle"', repr(str(tiny_bundle.path)))
    exec(compile(program, "ray.md", "exec"), {})
    request = Request(prompt_ids=(1, 2, 3), params=SamplingParams(seed=1))
    assert f"{here(tiny_bundle, [request])[0].token_ids}\n" in capsys.readouterr().out
    serve.delete("default")


def test_a_replica_whose_engine_failed_says_so_to_ray(tiny_bundle: Bundle) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("a bug")

    request = requests_about(tiny_bundle, 4)[0]
    with AsyncEngine(Engine.load(tiny_bundle)) as engine:
        replica: Any = SimpleNamespace(_loaded=[SimpleNamespace(engine=engine)])
        engine.generate(request, timeout_s=30)
        asyncio.run(EngineReplica.check_health(replica))
        engine.engine._rounds.target.step = broken  # type: ignore[method-assign, assignment]
        assert "a bug" in str(engine.generate(request, timeout_s=30).error)
        with pytest.raises(EngineClosedError, match="a bug"):
            asyncio.run(EngineReplica.check_health(replica))


def test_scaling_counts_requests_by_acceptance() -> None:
    def context(requests: float, recent: dict[str, float] | None) -> AutoscalingContext:
        return AutoscalingContext(
            deployment_id=None, deployment_name="dspark", app_name=None, current_num_replicas=2,
            target_num_replicas=2, running_replicas=[], total_num_requests=requests,
            total_queued_requests=0, aggregated_metrics=None if recent is None else {"accepted_length": recent},
            raw_metrics=None, capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=9,
            policy_state={}, last_scale_up_time=None, last_scale_down_time=None, current_time=None,
            config=AutoscalingConfig(target_ongoing_requests=8),
        )  # fmt: skip

    assert ScaleByWork()(context(20, {"a": 2.0}))[0] == 2.5
    assert ScaleByWork(accepted_length=3.0)(context(20, None))[0] == 2.5
    assert ScaleByWork(accepted_length=3.0)(context(20, {"a": 3.0, "b": 3.0}))[0] == 2.5
    assert ScaleByWork(accepted_length=3.0)(context(20, {"a": 2.0, "b": 1.0}))[0] == 5.0


def test_recent_acceptance_forgets() -> None:
    recent = RecentAcceptance()
    assert recent.update(0, 0) is None
    assert recent.update(100, 300) == 4.0
    assert [recent.update(100 + 100 * n, 300) for n in range(1, 9)][-1] == pytest.approx(
        1, abs=0.02
    )
