# SPDX-License-Identifier: Apache-2.0
"""The examples, run as their first lines say, against the engine in this process."""

import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.runtime.engine import Engine
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.text import TextCodec
from tests.conftest import ROOT, TINY_TARGET, drafter_alone

PROGRAMS = ("threads", "spawned_process")
QUESTIONS = (
    "Explain what a stack is.",
    "Write a Python function that adds two numbers.",
    "Tom has 3 apples and buys 4. How many does he have?",
)


@pytest.fixture(scope="module")
def answers(tiny_bundle: Bundle) -> dict[str, str]:
    """What the engine here says, without speculation."""
    codec = TextCodec(tiny_bundle)
    chats = [codec.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    params = SamplingParams(max_new_tokens=48)
    requests = [Request(prompt_ids=ids, params=params, speculate=False) for ids in chats]
    with Engine.load(tiny_bundle) as engine:
        texts = [codec.decode(done.token_ids) for done in engine.generate(requests)]
    assert len(set(texts)) == len(texts)
    return dict(zip(QUESTIONS, texts, strict=True))


def run(name: str, *arguments: object) -> str:
    command = [sys.executable, f"examples/{name}/main.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def serving(name: str, bundle: Bundle) -> Iterator[str]:
    """The example as a server, until SIGTERM; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = f"examples/{name}/main.py"
    command = [sys.executable, program, str(bundle.path), "--port", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            _await_port(port, server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.communicate(timeout=30)


def _await_port(port: int, server: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, server.communicate()[1]
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("the example does not listen")


def post(url: str, body: bytes) -> str:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


def follow_curls(name: str, address: str) -> list[str]:
    """What the commands of the first lines print."""
    lines = (ROOT / "examples" / name / "main.py").read_text().splitlines()
    typed = [line.strip() for line in lines if line.strip().startswith("curl ")]
    return [
        subprocess.check_output(
            shlex.split(
                line.replace("localhost:8000", address).replace("curl", "curl -sSf", 1)
            ),
            text=True,
            timeout=60,
        )
        for line in typed
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_answer_as_the_engine_here(
    name: str, tiny_bundle: Bundle, answers: dict[str, str]
) -> None:
    shown = run(name, tiny_bundle.path)
    assert shown.startswith("".join(f"> {q}\n{text}\n" for q, text in answers.items()))
    if name == "spawned_process":
        assert shown.endswith("ended with code 0\n")


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_say_what_they_take(name: str) -> None:
    command = [sys.executable, f"examples/{name}/main.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "arguments are required: bundle" in done.stderr


@pytest.mark.slow
def test_a_host_that_owns_its_target(tiny_bundle: Bundle, tmp_path: Path) -> None:
    alone = drafter_alone(tiny_bundle, tmp_path)
    shown = run("host_owned_target", alone.path, TINY_TARGET)
    assert "same tokens: yes" in shown


def test_fastapi_service(tiny_bundle: Bundle, answers: dict[str, str]) -> None:
    """Its own routes, and OpenAI's below /llm, from the same engine."""
    with serving("fastapi_service", tiny_bundle) as address:
        with urllib.request.urlopen(f"{address}/", timeout=10) as home:
            assert json.load(home) == {"service": "yours"}

        def ask(question: str) -> str:
            return post(f"{address}/ask", json.dumps({"question": question}).encode())

        with ThreadPoolExecutor() as clients:
            assert list(clients.map(ask, QUESTIONS)) == list(answers.values())
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            ask("?" * 4096)
        assert "positions" in json.load(refused.value)["detail"]
        asked, models = follow_curls("fastapi_service", address)
        assert asked == answers[QUESTIONS[0]]
        assert tiny_bundle.path.name in models
        chat = {
            "model": tiny_bundle.path.name,
            "messages": [{"role": "user", "content": QUESTIONS[0]}],
            "temperature": 0,
            "max_tokens": 48,
        }
        said = json.loads(post(f"{address}/llm/v1/chat/completions", json.dumps(chat).encode()))
        assert said["choices"][0]["message"]["content"] == answers[QUESTIONS[0]]


def test_wsgi_service(tiny_bundle: Bundle, answers: dict[str, str]) -> None:
    with serving("wsgi_service", tiny_bundle) as address:
        with ThreadPoolExecutor() as clients:
            said = clients.map(lambda q: json.loads(post(address, q.encode())), QUESTIONS)
        assert [each["text"] for each in said] == list(answers.values())
        assert (
            answers[QUESTIONS[0]]
            in json.loads(follow_curls("wsgi_service", address)[0])["text"]
        )
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            post(address, b"?" * 4096)
        assert "positions" in json.load(refused.value)["error"]


def test_every_example_is_run_here_and_short() -> None:
    files = {file.parent.name: file for file in (ROOT / "examples").glob("*/main.py")}
    assert files.keys() == {*PROGRAMS, "host_owned_target", "fastapi_service", "wsgi_service"}
    for file in files.values():
        assert len(file.read_text().splitlines()) < 80, file
