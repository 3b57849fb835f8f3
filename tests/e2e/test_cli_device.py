# SPDX-License-Identifier: Apache-2.0
"""`--device` of every command that runs a bundle: honoured, or refused in one sentence."""

import json

import pytest
import torch

from dspark_trt.bundle import Bundle
from dspark_trt.cli import main
from dspark_trt.gpu import visible_gpu

no_gpu = pytest.mark.skipif(
    visible_gpu() is not None or torch.cuda.is_available(), reason="says what a CPU says"
)
COMMANDS = {
    "generate": ["--prompt-ids", "1,5,9"],
    "chat": [],
    "bench": [],
    "profile": [],
    "calibrate": [],
    "compare": [],
    "serve": ["--port", "0"],
}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr("sys.argv", ["dspark-trt", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@no_gpu
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_a_gpu_that_is_not_there_ends_in_one_sentence(
    command: str,
    backend: str,
    tiny_bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = [str(tiny_bundle.path), "--backend", backend, "--device", "cuda"]
    assert run(monkeypatch, command, *where, *COMMANDS[command]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = [line for line in printed.err.splitlines() if line.startswith("error:")]
    reason = "no CUDAExecutionProvider" if backend == "onnxruntime" else "sees 0 CUDA devices"
    assert reason in line
    assert "device cpu" in line  # what to do


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_the_cpu_can_be_asked_for(
    backend: str,
    tiny_bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = [str(tiny_bundle.path), "--backend", backend, "--device", "cpu"]
    asked = [*COMMANDS["generate"], "--max-new-tokens", "5", "--threads", "1", "--json"]
    assert run(monkeypatch, "generate", *where, *asked) == 0
    assert len(json.loads(capsys.readouterr().out)[0]["token_ids"]) == 5
