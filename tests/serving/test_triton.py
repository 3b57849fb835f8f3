# SPDX-License-Identifier: Apache-2.0
"""The engine of a repository of `triton-repo` in a real Triton Inference Server."""

import queue
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.runtime.request import Request
from tests.command_line import dspark
from tests.conftest import ROOT
from tests.serving.seeded_requests import here, requests_about
from tests.serving.triton_server import (
    HTTP,
    NEEDS_SERVER,
    Installation,
    Server,
    tensor,
)

pytestmark = NEEDS_SERVER


@pytest.fixture(scope="module")
def repository(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repository") / "repository"
    options = ["--name", "tiny", "--max-batch", "4", "--threads", "1"]
    done = dspark("triton-repo", tiny_bundle.path, "-o", path, *options)
    assert done.code == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def server(installation: Installation, repository: Path) -> Iterator[Server]:
    """As the page has it: the engine alone is loaded, its parts are not."""
    with installation.serving("--model-repository", str(repository)) as found:
        yield found


def inputs_of(request: Request) -> list[Any]:
    """The request as tensors of the client library."""
    params = request.params
    values = {
        "token_ids": np.array(request.prompt_ids, np.int32),
        "max_tokens": np.array([params.max_new_tokens], np.int32),
        "temperature": np.array([params.temperature], np.float32),
        "seed": np.array([params.seed or 0], np.uint64),
        "ignore_eos": np.array([params.ignore_eos]),
    }
    return [tensor(name, value) for name, value in values.items()]


Answers = dict[str, list[Any]]


def streamed(server: Server, requests: Sequence[Sequence[Any]]) -> Answers:
    """Responses or the error of each request, all sent at once over one stream."""
    from tritonclient.grpc import InferenceServerClient

    responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
    found: Answers = {str(number): [] for number in range(len(requests))}
    open_ones = set(found)
    with InferenceServerClient(server.grpc) as client:
        client.start_stream(partial(_collect, responses))
        for number, inputs in enumerate(requests):
            client.async_stream_infer(
                "tiny", list(inputs), request_id=str(number), enable_empty_final_response=True
            )
        while open_ones:
            result, error = responses.get(timeout=60)
            if error is not None:
                assert len(requests) == 1
                return {"0": [error]}
            response = result.get_response()
            if result.as_numpy("output_ids") is not None:
                found[response.id].append(result)
            if response.parameters["triton_final_response"].bool_param:
                open_ones.remove(response.id)
    return found


def _collect(responses: "queue.Queue[tuple[Any, Any]]", result: Any, error: Any) -> None:
    responses.put((result, error))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_streams_say_what_the_engine_here_says(
    server: Server, tiny_bundle: Bundle, temperature: float
) -> None:
    requests = requests_about(tiny_bundle, 40, temperature)
    found = streamed(server, [inputs_of(request) for request in requests])
    for answers, done in zip(found.values(), here(tiny_bundle, requests), strict=True):
        assert len(answers) > 1
        ids = np.concatenate([each.as_numpy("output_ids") for each in answers])
        kinds = np.concatenate([each.as_numpy("token_kinds") for each in answers])
        assert ids.tolist() == list(done.token_ids)
        assert [kind.decode() for kind in kinds] == [kind.value for kind in done.kinds]
        assert b"".join(a.as_numpy("text_output")[0] for a in answers).decode() == done.text
        reasons = [each.as_numpy("finish_reason")[0] for each in answers]
        assert reasons == [b""] * (len(reasons) - 1) + [b"length"]


def test_plain_http_gets_whole_answers_and_events(server: Server, tiny_bundle: Bundle) -> None:
    request = requests_about(tiny_bundle, 40)[0]
    body = {
        "messages": '[{"role": "user", "content": "Explain what a stack is."}]',
        "max_tokens": 40,
        "ignore_eos": True,
    }
    expected = here(tiny_bundle, [request])[0].text
    address = f"{server.http}/v2/models/tiny"
    whole = HTTP.post(f"{address}/generate", json={**body, "stream": False})
    assert whole.json()["text_output"] == expected
    with HTTP.stream("POST", f"{address}/generate_stream", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    texts = [httpx.Response(200, text=line.removeprefix("data: ")).json() for line in lines]
    assert len(texts) > 1
    assert "".join(each["text_output"] for each in texts) == expected


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"token_ids": np.array([10**6], np.int32)}, "outside the vocabulary"),
        ({"max_tokens": np.array([4], np.int32)}, "give one of text_input"),
        ({"messages": np.array([b"{"], object)}, "no JSON list"),
        (
            {"token_ids": np.array([1], np.int32), "temperature": np.array([-1], np.float32)},
            "temperature must be finite and at least 0, got -1",
        ),
    ],
)
def test_refusals_name_the_reason(server: Server, inputs: dict[str, Any], message: str) -> None:
    found = streamed(server, [[tensor(name, value) for name, value in inputs.items()]])
    assert message in str(found["0"][0])


def test_the_documented_clients_run(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "embedding" / "triton.md").read_text()
    page = page.replace("localhost:8001", server.grpc).replace("chat", "tiny")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(program, {})
    assert capsys.readouterr().out.startswith("[b")
    (line,) = re.findall(r"^\$ (curl .*)$", page, re.MULTILINE)
    command = line.replace("localhost:8000", server.http.removeprefix("http://"))
    shown = subprocess.run(["bash", "-c", command], capture_output=True, check=True, text=True)
    assert (
        '"finish_reason":"length"' in shown.stdout or '"finish_reason":"stop"' in shown.stdout
    )


def test_cancelled_requests_leave_the_engine(server: Server, tiny_bundle: Bundle) -> None:
    """Sixteen long answers fill four batches; cancelled, they leave room for a short one at once."""
    from tritonclient.grpc import InferenceServerClient

    long = [inputs_of(request) for request in requests_about(tiny_bundle, 300)] * 2
    short = inputs_of(requests_about(tiny_bundle, 2)[0])
    began = time.monotonic()
    streamed(server, long)
    uncancelled = time.monotonic() - began
    responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with InferenceServerClient(server.grpc) as client:
        client.start_stream(partial(_collect, responses))
        for inputs in long:
            client.async_stream_infer("tiny", inputs)
        responses.get(timeout=60)
        client.stop_stream(cancel_requests=True)
    began = time.monotonic()
    (answers,) = streamed(server, [short]).values()
    assert answers
    assert time.monotonic() - began < uncancelled / 2


def test_the_engine_alone_is_loaded(server: Server) -> None:
    from tritonclient.grpc import InferenceServerClient

    with InferenceServerClient(server.grpc) as client:
        index = client.get_model_repository_index().models
        assert [(each.name, each.state) for each in index] == [("tiny", "READY")]
        assert client.get_model_config("tiny").config.model_transaction_policy.decoupled
