# SPDX-License-Identifier: Apache-2.0
"""Every command and every program of the pages is run: a page in order, in a folder with what it takes for
granted, by a real shell. The tables say what is smaller than on the page, what is refused on a machine without a
GPU, and what is not run here and why.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from dspark_trt.runtime.calibration import Calibration
from dspark_trt.runtime.cost_table import CostTable
from tests.conftest import DATA, ROOT, TINY_TARGET, ExportBundle
from tests.e2e.pages import PAGES, README, SHELL, Step, blocks, name_of, steps

DRAFTER = ROOT / "examples" / "tiny" / "drafter"

# Start of a command -> options behind it: the same at toy size, a port that is free.
SMALLER = {
    "dspark-trt profile": "--max-requests 1 --seconds 0.05",
    "dspark-trt bench": "--requests 1 --temperatures 0 --repeats 1 --new-tokens 4",
    "dspark-trt simulate": "--rounds 300",
    "dspark-trt build BUNDLE": "--graph verify_greedy",
    "dspark-trt serve": "--port 0 --no-access-log",
    "python benchmarks/baselines.py": "--bundle bundle --count 1 --new-tokens 4 --temperatures 0",
}
# What a page says -> what is typed here.
HERE = {
    r"(localhost|127\.0\.0\.1):8000": r"\1:PORT",
    r"--port 0\b": "--port PORT",  # of SMALLER
    "^make ": f"make -n -C {ROOT} ",  # what it would do
    "^python benchmarks/": f"python {ROOT}/benchmarks/",
}
# Said to a command that asks.
TYPED = "What is 3 + 4?\n"

# Without a GPU, or TensorRT, these end with code 2 and this sentence.
REFUSED = {
    "dspark-trt build BUNDLE --backend tensorrt": r"tensorrt.*(needs the Python package|GPU)",
    "dspark-trt build A --backend tensorrt-rtx --arch sm89 --strip-weights": "no CUDA device is visible",
    "dspark-trt build B --backend tensorrt-rtx --refit A/engines/tensorrt-rtx-sm89-VERSION-stripped": (
        "holds no engines"
    ),
}

_INDEX = "a package index; tests/packaging installs the wheel"
_SERVER = (
    "NVIDIA's server, from `make triton-server`; with it tests/serving/test_triton.py runs this"
)
_RAY = "Ray; tests/serving/test_ray.py runs this in its cluster"
NOT_RUN = {
    "pip install 'dspark-trt[cpu]'": _INDEX,
    "pip install 'dspark-trt[cpu,export]'": _INDEX,
    "pip install 'dspark-trt[cpu,ray]'": _INDEX,
    "pip install 'dspark-trt[cpu,serve]'": _INDEX,
    "serve run dspark_trt.runtime.serving.ray:app bundle=bundle replicas=2": _RAY,
    "curl localhost:8000/v1/models": _RAY,
    "from ray import serve": _RAY,
    "tritonserver --model-repository repository": _SERVER,
    """curl localhost:8000/v2/models/chat/generate_stream -d '{"text_input": "Once", "max_tokens": 20}'""": _SERVER,
    "import tritonclient.grpc as triton": _SERVER,
    "scripts/gpu_check.sh": "a GPU",
    "scripts/gpu_check.sh --bundle BUNDLE": "a GPU",
    "scripts/gpu_check.sh --device cpu --small": "nothing more; tests/runtime/test_gpu_check.py runs it",
    "python examples/smollm2/prepare.py OUT": "the hub, or a package index",
    "dspark-trt export --draft examples/smollm2/drafter --target OUT -o bundle --draft-weights int8": (
        "what prepare.py fetches; tests/e2e/test_smollm2.py exports it where it is"
    ),
    "python benchmarks/curves.py --plots figures": "minutes: it exports seven models",
    "python benchmarks/judged.py": "minutes: it exports larger models",
}  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """Where commands run: the page's folder, the environment, a free port in the place of 8000."""

    folder: Path
    environment: Mapping[str, str]
    port: int


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH: this interpreter, this source tree, and a curl that fails as its answer does."""
    folder = tmp_path_factory.mktemp("bin")
    python = shlex.quote(sys.executable)
    scripts = {
        "python": f"exec {python}",
        "python3": f"exec {python}",
        "dspark-trt": f"exec {python} -m dspark_trt",
        "curl": f"exec {shutil.which('curl')} -sSf --max-time 60",
    }
    for name, line in scripts.items():
        (folder / name).write_text(f'#!/bin/sh\n{line} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def things(fixture_bundle: ExportBundle, programs: Path) -> dict[str, Callable[[Path], object]]:
    """What pages take for granted, by the name they have for it."""

    def exported(dtype: str | None = None) -> Callable[[Path], object]:
        options = {} if dtype is None else {"dtype": dtype}
        return lambda path: shutil.copytree(
            fixture_bundle("dspark-vanilla", **options).path, path
        )

    def link(source: Path) -> Callable[[Path], object]:
        return lambda path: path.symlink_to(source)

    bundle = exported()
    return {
        "bundle": bundle,
        "BUNDLE": bundle,
        "A": exported("float16"),
        "B": exported("float16"),
        "BUNDLE/calibration.json": lambda path: Calibration.identity(7).save(path),
        "BUNDLE/sps.json": write_cost_table,
        "judged": lambda path: bundle(
            path / "tiny"
        ),  # where that benchmark finds its first model
        "DRAFTER": link(DRAFTER),
        "TARGET": link(TINY_TARGET),
        "rounds.npz": link(DATA / "traces" / "smollm2_T1.npz"),
        "prompts.txt": lambda path: path.write_text(
            "".join(f"What is {n} + {n + 3}?\n" for n in range(64))
        ),
        "model.onnx": write_language_model,
        "examples/tiny/drafter": link(DRAFTER),
        "examples/tiny/target": link(TINY_TARGET),
        "examples/smollm2/calibration.json": link(ROOT / "examples/smollm2/calibration.json"),
        "scripts": link(ROOT / "scripts"),
        ".venv/bin/dspark-trt": link(programs / "dspark-trt"),
        ".demo/smollm2/bundle": bundle,
    }


def write_cost_table(path: Path) -> None:
    table = CostTable(tokens=[1, 8, 64], steps_per_second=[100, 80, 20])
    path.write_text(json.dumps(table.to_json()))


def write_language_model(path: Path) -> None:
    """As another tool might: token_ids [B, L] -> logits [B, L, 32]."""
    ids = helper.make_tensor_value_info("token_ids", TensorProto.INT64, ("B", "L"))
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ("B", "L", 32))
    table = numpy_helper.from_array(np.eye(32, dtype=np.float32), "table")
    node = helper.make_node("Gather", ["table", "token_ids"], ["logits"])
    graph = helper.make_graph([node], "model", [ids], [logits], [table])
    opset = helper.make_opsetid("", 20)
    save(helper.make_model(graph, opset_imports=[opset], ir_version=10), path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if steps(page)], ids=name_of)
def test_a_page_does_what_it_says(
    page: Path,
    things: dict[str, Callable[[Path], object]],
    programs: Path,
    fixture_bundle: ExportBundle,
    tmp_path: Path,
) -> None:
    """What the README has too is run there."""
    there = {step.text for step in steps(README)} if page != README else set()
    run = [
        step
        for step in steps(page)
        if step.name not in NOT_RUN and (step.text not in there or is_export(step))
    ]
    for name in named(run) & things.keys() - made(run):
        assert not (tmp_path / name).exists(), f"two things for {name}"
    for name in sorted(named(run) & things.keys() - made(run)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        things[name](tmp_path / name)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    bench = Bench(tmp_path, environment, free_port())
    with ExitStack() as servers:
        for step in run:
            if step.text.startswith("dspark-trt serve"):
                servers.enter_context(serving(step, bench))
            elif is_export(step):
                export(step, bench, fixture_bundle)
            else:
                follow(step, bench)


def follow(step: Step, bench: Bench) -> None:
    done = subprocess.run(
        [sys.executable, "-c", typed(step, bench)]
        if step.is_python
        else ["bash", "-euo", "pipefail", "-c", typed(step, bench)],
        cwd=bench.folder, env=bench.environment, input=TYPED, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if step.text in REFUSED:
        assert done.returncode == 2, done
        assert re.search(REFUSED[step.text], done.stderr), done.stderr
    else:
        assert done.returncode == 0, f"{step.text}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
    pattern = ".*?".join(re.escape(line).replace("…", ".*?") for line in step.shown)
    assert re.search(pattern, done.stdout, re.DOTALL), f"{step.text}\n{done.stdout}"


def typed(step: Step, bench: Bench) -> str:
    text = " && ".join(map(smaller, parts(step)))
    for said, done in HERE.items():
        text = re.sub(said, done.replace("PORT", str(bench.port)), text)
    return text


def parts(step: Step) -> list[str]:
    return step.text.split(" && ")


def smaller(command: str) -> str:
    options = [more for start, more in SMALLER.items() if command.startswith(start)]
    return " ".join([command, *options])


def is_export(step: Step) -> bool:
    return step.text.startswith("dspark-trt export")


def export(step: Step, bench: Bench, fixture_bundle: ExportBundle) -> None:
    """An export is made once for all tests, by the same command (see conftest)."""
    words = shlex.split(step.text)[2:]
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert (bench.folder / options.pop("--draft")).resolve() == DRAFTER
    assert (bench.folder / options.pop("--target")).resolve() == TINY_TARGET
    output = options.pop("-o")
    made = fixture_bundle("dspark-vanilla", **{k.lstrip("-"): v for k, v in options.items()})
    shutil.copytree(made.path, bench.folder / output)


@contextmanager
def serving(step: Step, bench: Bench) -> Iterator[None]:
    """Until the page's last step, then SIGTERM, and code 0."""
    command = ["bash", "-c", f"exec {typed(step, bench)}"]
    with subprocess.Popen(
        command, cwd=bench.folder, env=bench.environment, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            await_ready(f"http://127.0.0.1:{bench.port}/ready", server)
            yield
        finally:
            server.terminate()
            _, errors = server.communicate(timeout=60)
    assert server.returncode == 0, errors[-3000:]


def await_ready(url: str, server: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, server.communicate()[1]
        try:
            urllib.request.urlopen(url, timeout=10).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    pytest.fail(f"{url} does not answer")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def named(run: list[Step]) -> set[str]:
    """Words of the commands, smaller ones included, and their folders."""
    text = " ".join(smaller(part) for step in run for part in parts(step))
    words = {word.rstrip("/") for word in re.findall(r"[\w./-]+", text)}
    return words | {word.split("/")[0] for word in words}


def made(run: list[Step]) -> set[str]:
    """What the page's own commands write."""
    text = " ".join(step.text for step in run)
    return set(re.findall(r"(?:-o|--trace) (\S+)", text))


def test_tables_hold_nothing_else() -> None:
    """A line that no page has any more is no exception any more."""
    every = [step for page in PAGES for step in steps(page)]
    assert NOT_RUN.keys() <= {step.name for step in every}
    assert REFUSED.keys() <= {step.text for step in every}
    commands = [part for step in every for part in parts(step)]
    assert [start for start in SMALLER if not any(c.startswith(start) for c in commands)] == []


def test_blocks_say_what_they_are() -> None:
    """A block without a language would be a command that nobody runs."""
    known = {*SHELL, "python", "text", "mermaid", "yaml"}
    unknown = [
        (name_of(p), language)
        for p in PAGES
        for language, _ in blocks(p)
        if language not in known
    ]
    assert unknown == []


def test_a_step_that_fails_is_seen(programs: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    bench = Bench(tmp_path, environment, free_port())
    follow(Step("echo one two; echo three", shown=("one …", "three")), bench)
    for wrong in (
        Step("false | true"),
        Step("raise SystemExit(1)", is_python=True),
        Step("make no-such-target"),
        Step("curl http://127.0.0.1:8000/"),
        Step("echo one", shown=("two",)),
    ):
        with pytest.raises(AssertionError):
            follow(wrong, bench)
    with pytest.raises(AssertionError), serving(Step("dspark-trt serve nowhere"), bench):
        pass


def test_extras_exist() -> None:
    """Of what pages tell to install."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    found = [re.findall(r"dspark-trt\[([\w,-]+)\]", page.read_text()) for page in PAGES]
    named_extras = {name for each in found for extra in each for name in extra.split(",")}
    assert len(named_extras) > 5
    assert named_extras <= extras.keys()
