# SPDX-License-Identifier: Apache-2.0
"""Parts of a repository of `triton-repo` in a real Triton Inference Server.

The wheel's server has no backend for them: it loads them up to there, and some of them with a stand-in. Where
TRITON_ONNXRUNTIME_BACKEND names a folder with `libtriton_onnxruntime.so` for that server (2.51, of Triton 24.10)
and an onnxruntime of 1.26 or later, every part answers in its own backend.
test_triton_repository.py holds all configurations against the graphs.
"""

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dspark_trt.bundle import Bundle
from tests.command_line import dspark
from tests.serving.seeded_requests import here, requests_about
from tests.serving.triton_rounds import (
    Arrays,
    call_the_other_parts,
    committed_tokens,
    with_fused_target,
)
from tests.serving.triton_server import (
    NEEDS_SERVER,
    Installation,
    tensor,
)

OWN_BACKEND = os.environ.get("TRITON_ONNXRUNTIME_BACKEND")
needs_own_backend = pytest.mark.skipif(
    not OWN_BACKEND,
    reason="the wheel has no backend for ONNX models: TRITON_ONNXRUNTIME_BACKEND names none",
)

pytestmark = NEEDS_SERVER


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return with_fused_target(tiny_bundle, tmp_path_factory.mktemp("fused") / "bundle")


def parts_of(bundle: Bundle, output: Path, *options: str) -> Path:
    """The repository of parts."""
    common = ["--name", "tiny", "--max-batch", "4", "--threads", "1"]
    done = dspark("triton-repo", bundle.path, "-o", output, *common, *options)
    assert done.code == 0, done.stderr
    return output / "tiny" / "parts"


@pytest.fixture(scope="module")
def parts(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parts_of(bundle, tmp_path_factory.mktemp("repository") / "repository")


def test_parts_are_read_up_to_the_missing_backend(
    installation: Installation, parts: Path, bundle: Bundle
) -> None:
    """Fields and names are checked before it looks for one."""
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    options = ["--model-repository", str(parts), "--model-control-mode", "explicit"]
    with (
        installation.serving(*options) as server,
        InferenceServerClient(server.grpc) as client,
    ):
        names = {each.name for each in client.get_model_repository_index().models}
        assert names == {f"tiny_{graph}" for graph in bundle.graph_names}
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
    installation: Installation, parts: Path, tmp_path: Path
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
        shutil.copytree(parts / name, tmp_path / name)
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


# In their own backend -------------------------------------------------------------------------------


@pytest.fixture
def own_backend(installation: Installation, tmp_path: Path) -> Installation:
    assert OWN_BACKEND is not None
    assert (Path(OWN_BACKEND) / "libtriton_onnxruntime.so").is_file(), OWN_BACKEND
    backends = tmp_path / "backends"
    backends.mkdir()
    (backends / "onnxruntime").symlink_to(Path(OWN_BACKEND).absolute())
    return replace(installation, backends=backends)


@dataclass(slots=True)
class Calls:
    """Calls of parts, each of which must say what onnxruntime says here."""

    client: Any
    bundle: Bundle
    parts: Path
    sequence: int = 0  # none: caches are sent
    counts: Counter[str] = field(default_factory=Counter)
    sequences: dict[str, list[Any]] = field(default_factory=dict)  # graph -> what was sent last

    def run(self, graph: str, inputs: Arrays) -> Arrays:
        """What the server answers; caches that it keeps come from here."""
        expected = run_here(self.bundle.graph_path(graph), inputs)
        if self.sequence and graph == "context":
            self._append(inputs["taps"][0])
            return expected
        answer = self._ask(graph, inputs)
        for name, value in expected.items():
            found = answer.as_numpy(name)
            if found is None:
                assert self.sequence
                assert name.startswith("present_")
                continue
            assert found.dtype == value.dtype
            np.testing.assert_allclose(found, value, atol=1e-5, err_msg=f"{graph} {name}")
            expected[name] = found
        return expected

    def _ask(self, graph: str, inputs: Arrays) -> Any:
        config = (self.parts / f"tiny_{graph}" / "config.pbtxt").read_text()
        is_stateful = "sequence_batching" in config
        is_batched = "max_batch_size: 0" not in config
        sent = [
            tensor(name, value[:, None] if is_batched and value.ndim == 1 else value)
            for name, value in inputs.items()
            if not (is_stateful and name.startswith("past_"))
        ]
        options = {}
        if is_stateful:
            options = {"sequence_id": self.sequence, "sequence_start": not self.counts[graph]}
            self.sequences[graph] = sent
        self.counts[graph] += 1
        return self.client.infer(f"tiny_{graph}", sent, **options)

    def end(self) -> None:
        """The server forgets the caches. A sequence ends with a call; here with the last one once more."""
        for graph, sent in self.sequences.items():
            self.client.infer(
                f"tiny_{graph}", sent, sequence_id=self.sequence, sequence_end=True
            )

    def _append(self, taps: NDArray[np.float32]) -> None:
        """A prompt into the drafter's caches, some rows a call; the drafts are for nothing."""
        rows = self.bundle.draft.gamma + 1
        for start in range(0, len(taps), rows):
            new = taps[start : start + rows]
            inputs = {
                "anchor_ids": np.array([0]),
                "new_taps": np.pad(new, ((0, rows - len(new)), (0, 0)))[None],
                "new_len": np.array([len(new)]),
                "context_len": np.array([start]),
            }
            self._ask("draft_greedy", inputs)


@cache
def session_of(graph: Path) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3  # caches are copied here
    options.intra_op_num_threads = 1
    return ort.InferenceSession(graph, options)


def run_here(graph: Path, inputs: Arrays) -> Arrays:
    session = session_of(graph)
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def loaded(installation: Installation, parts: Path) -> Any:
    options = ["--model-repository", str(parts), "--log-warning", "false"]
    return installation.serving(*options)


@needs_own_backend
def test_every_part_answers_in_its_own_backend(
    own_backend: Installation, parts: Path, bundle: Bundle
) -> None:
    from tritonclient.grpc import InferenceServerClient

    requests = [requests_about(bundle, 14)[number] for number in (0, 3)]
    prompts = [request.prompt_ids for request in requests]
    with loaded(own_backend, parts) as server, InferenceServerClient(server.grpc) as client:
        calls = Calls(client, bundle, parts)
        greedy = committed_tokens(bundle, calls.run, prompts, 0.0, rounds=6)
        committed_tokens(bundle, calls.run, prompts, 0.8, rounds=3)
        call_the_other_parts(bundle, calls.run)
    assert set(calls.counts) == set(bundle.graph_names)
    for tokens, done in zip(greedy, here(bundle, requests), strict=True):
        compared = min(len(tokens), len(done.token_ids))
        assert compared >= 7
        assert tokens[:compared] == list(done.token_ids)[:compared]


@needs_own_backend
def test_the_server_keeps_caches_of_sequences(
    own_backend: Installation, bundle: Bundle, tmp_path: Path
) -> None:
    """Four requests at a time, each a sequence, in turns that nobody orders."""
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    parts = parts_of(bundle, tmp_path / "repository", "--cache-rows", "128")
    requests = requests_about(bundle, 14)[:4]

    def generated(client: Any, sequence: int, prompt: Sequence[int]) -> list[int]:
        calls = Calls(client, bundle, parts, sequence)
        (tokens,) = committed_tokens(bundle, calls.run, [prompt], 0.0, rounds=6)
        calls.end()
        return tokens

    with loaded(own_backend, parts) as server, InferenceServerClient(server.grpc) as client:
        with ThreadPoolExecutor(4) as pool:
            answers = list(
                pool.map(
                    lambda each: generated(client, each[0], each[1].prompt_ids),
                    enumerate(requests, start=1),
                )
            )
        stranger = Calls(client, bundle, parts, sequence=9, counts=Counter({"target": 1}))
        with pytest.raises(InferenceServerException, match="START flag"):
            committed_tokens(bundle, stranger.run, [[1, 2]], 0.0, rounds=1)
    for tokens, done in zip(answers, here(bundle, requests), strict=True):
        compared = min(len(tokens), len(done.token_ids))
        assert compared >= 7
        assert tokens[:compared] == list(done.token_ids)[:compared]
