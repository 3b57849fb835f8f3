# SPDX-License-Identifier: Apache-2.0
"""A real Triton Inference Server, from the wheel of nvidia-pytriton, over a repository of `triton-repo`.

That server (2.51) is built for NumPy 1 and has the Python backend alone: it runs in an environment with an
older NumPy, and loads parts up to the missing backend, some of them with a stand-in for it;
test_triton_repository.py holds their configurations against the graphs.
"""

import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from dspark_trt.bundle import Bundle
from dspark_trt.runtime.request import Request
from tests.command_line import dspark
from tests.conftest import ROOT
from tests.serving.seeded_requests import here, requests_about

NUMPY_1 = Path(sys.prefix) / "numpy-1"  # `make triton-server` puts it there
HAS_SERVER = bool(find_spec("pytriton") and find_spec("tritonclient") and NUMPY_1.is_dir())

# The server waits for open connections before it ends.
HTTP = httpx.Client(verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        not HAS_SERVER, reason="no Triton server here: make triton-server installs one"
    ),
]


@dataclass(frozen=True)
class Server:
    grpc: str
    http: str
    process: "subprocess.Popen[str]"


@dataclass(frozen=True)
class Installation:
    """The wheel's server, with the interpreter of a new environment: the Python backend asks the PATH."""

    program: Path
    backends: Path
    environment: Mapping[str, str]

    @contextmanager
    def serving(self, *options: str) -> Iterator[Server]:
        """Until the block ends, then SIGTERM, and code 0."""
        http, grpc = free_ports(2)
        addresses = {
            "http-address": "127.0.0.1",
            "http-port": http,
            "grpc-address": "127.0.0.1",
            "grpc-port": grpc,
            "allow-metrics": "false",
            "backend-directory": self.backends,
        }
        process = subprocess.Popen(
            [
                self.program,
                *options,
                *(f"--{name}={value}" for name, value in addresses.items()),
            ],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            server = Server(f"127.0.0.1:{grpc}", f"http://127.0.0.1:{http}", process)
            await_ready(server)
            yield server
        finally:
            process.terminate()
            said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said[-3000:]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("triton")
    spec = find_spec("pytriton")
    assert spec is not None
    assert spec.submodule_search_locations
    wheel = Path(spec.submodule_search_locations[0]) / "tritonserver"
    backend = folder / "backends" / "python"
    shutil.copytree(wheel / "backends" / "python", backend)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(
        wheel / "python_backend_stubs" / version / "triton_python_backend_stub", backend
    )
    (backend / "triton_python_backend_stub").chmod(0o755)
    home = folder / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    borrowed = [NUMPY_1, sysconfig.get_path("purelib"), ROOT]
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    program = folder / "tritonserver"
    shutil.copy(wheel / "bin" / "tritonserver", program)
    program.chmod(0o755)
    libraries = [sysconfig.get_config_var("LIBDIR"), wheel.parents[1] / "nvidia_pytriton.libs"]
    environment = {
        **os.environ,
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
    }
    return Installation(program, backend.parent, environment)


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


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def await_ready(server: Server) -> None:
    """Every model is ready that the server was to load; at once where it fails, as the server then ends."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            pytest.fail(server.process.communicate()[0][-3000:])
        with suppress(httpx.TransportError):
            if HTTP.get(f"{server.http}/v2/health/ready").is_success:
                return
        time.sleep(0.05)
    pytest.fail("the server does not get ready")


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


def tensor(name: str, value: Any) -> Any:
    from tritonclient.grpc import InferInput
    from tritonclient.utils import np_to_triton_dtype

    made = InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
    made.set_data_from_numpy(value)
    return made


Answers = dict[str, list[Any]]
Arrays = dict[str, NDArray[Any]]


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


def test_parts_are_read_up_to_the_missing_backend(
    installation: Installation, repository: Path, tiny_bundle: Bundle
) -> None:
    """Fields and names are checked before it looks for one."""
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    parts = repository / "tiny" / "parts"
    options = ["--model-repository", str(parts), "--model-control-mode", "explicit"]
    with (
        installation.serving(*options) as server,
        InferenceServerClient(server.grpc) as client,
    ):
        names = {each.name for each in client.get_model_repository_index().models}
        assert names == {f"tiny_{graph}" for graph in tiny_bundle.graph_names}
        for name in names:
            with pytest.raises(
                InferenceServerException,
                match="unable to find backend library for backend 'onnxruntime'",
            ):
                client.load_model(name)


STAND_IN = """
from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as server


class TritonPythonModel:
    def initialize(self, args):
        path = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        path = path / "model.onnx" if path.is_dir() else path
        self.session = onnxruntime.InferenceSession(path)

    def execute(self, requests):
        return [self.answer(each) for each in requests]

    def answer(self, request):
        given = {each.name(): each.as_numpy() for each in request.inputs()}
        outputs = self.session.run(None, given)
        names = [each.name for each in self.session.get_outputs()]
        return server.InferenceResponse([*map(server.Tensor, names, outputs)])
"""


def test_parts_get_from_the_server_what_their_graphs_take(
    installation: Installation, repository: Path, tmp_path: Path
) -> None:
    """The server's own checks and shapes, batches among them, before a stand-in for the missing backend."""
    import onnxruntime as ort
    from tritonclient.grpc import InferenceServerClient

    random = np.random.default_rng(0)
    logits = random.standard_normal((3, 2048), np.float32)
    # As a client sends them, and where the graph takes something else.
    requests: dict[str, tuple[Arrays, Arrays]] = {
        "tiny_sequential_head": (
            {"base_logits": logits, "previous_ids": np.array([[5], [6], [7]])},
            {"previous_ids": np.array([5, 6, 7])},
        ),
        "tiny_confidence_head": (
            {
                "hidden": random.standard_normal((2, 7, 128), np.float32),
                "previous_ids": np.arange(14).reshape(2, 7),
            },
            {},
        ),
        "tiny_verify_greedy": (
            {
                "target_logits": logits,
                "offsets": np.array([0, 1, 3]),
                "draft_tokens": np.full((2, 7), logits[1].argmax()),
            },
            {},
        ),
    }
    for name in requests:
        shutil.copytree(repository / "tiny" / "parts" / name, tmp_path / name)
        config = tmp_path / name / "config.pbtxt"
        text = config.read_text()
        assert 'platform: "onnxruntime_onnx"' in text
        config.write_text(text.replace('platform: "onnxruntime_onnx"', 'backend: "python"'))
        (tmp_path / name / "1" / "model.py").write_text(STAND_IN)
    with (
        installation.serving("--model-repository", str(tmp_path)) as server,
        InferenceServerClient(server.grpc) as client,
    ):
        for name, (sent, taken) in requests.items():
            found = client.infer(name, [tensor(key, value) for key, value in sent.items()])
            graph = tmp_path / name / "1" / "model.onnx"
            session = ort.InferenceSession(graph / "model.onnx" if graph.is_dir() else graph)
            names = [each.name for each in session.get_outputs()]
            for key, expected in zip(names, session.run(names, sent | taken), strict=True):
                np.testing.assert_array_equal(found.as_numpy(key), expected, err_msg=name)
