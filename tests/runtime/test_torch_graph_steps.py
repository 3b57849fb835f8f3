# SPDX-License-Identifier: Apache-2.0
"""A bundle's graphs on static buffers and device caches: the path of engines and of onnxruntime on a GPU, here with
onnxruntime's CPU provider.
"""

import numpy as np
import onnxruntime
import pytest
import torch

from dspark_trt.bundle import Bundle
from dspark_trt.errors import BackendError
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.backends.interface import BackendOptions, RunsRounds
from dspark_trt.runtime.backends.ort_device_backend import OrtDeviceBackend
from dspark_trt.runtime.backends.torch_graph_steps import GraphSteps
from dspark_trt.runtime.backends.torch_rounds import TorchRounds
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from tests.conftest import ExportBundle

CPU = BackendOptions(device="cpu", threads=1)
PROMPTS = [(1, 5, 9, 20), (1, 5, 9, *range(30, 52)), (1, 80, 81)]


def requests(**params: object) -> list[Request]:
    wanted = {"max_new_tokens": 24, "ignore_eos": True, **params}
    return [
        Request(
            prompt_ids=prompt,
            params=SamplingParams(temperature=[0.0, 0.9][i % 2], seed=i, **wanted),  # type: ignore[arg-type]
        )
        for i, prompt in enumerate((*PROMPTS, *PROMPTS))
    ]


@pytest.mark.parametrize("drafter", ["dspark-vanilla", "eagle3"])
def test_graphs_on_device_buffers_give_the_same_tokens_and_copy_no_cache(
    drafter: str, fixture_bundle: ExportBundle, capfd: pytest.CaptureFixture[str]
) -> None:
    """Onnxruntime warns on stderr where a cache's output is not its input."""
    bundle, made = fixture_bundle(drafter), []
    capfd.readouterr()  # of the export
    for backend in (open_backend("onnxruntime", bundle), OrtDeviceBackend(bundle, CPU)):
        with Engine(backend, EngineOptions(max_batch=2, max_tokens_per_step=20)) as engine:
            done = engine.generate(requests())
        assert all(each.error is None for each in done)
        made.append([each.token_ids for each in done])
    assert made[0] == made[1]
    assert capfd.readouterr().err == ""


class LaunchingOrt(OrtDeviceBackend):
    """Rounds over graphs, as engines have them: onnxruntime waits for each of its steps, which is no matter
    here.
    """

    def rounds(self, requests: int) -> TorchRounds:
        parts, steps = self._parts.take(requests, "rounds")
        return TorchRounds(parts, steps)


def test_launched_rounds_run_graphs_as_they_run_modules(tiny_bundle: Bundle) -> None:
    made = []
    for backend in (
        LaunchingOrt(tiny_bundle, CPU),
        open_backend("torch", tiny_bundle, CPU),
        open_backend("onnxruntime", tiny_bundle),
    ):
        with Engine(backend, EngineOptions(max_batch=2, max_tokens_per_step=40)) as engine:
            made.append([each.token_ids for each in engine.generate(requests())])
            launched = engine.status()["launched_rounds"]["rounds"]
            assert (launched > 10) == isinstance(backend, RunsRounds)
    assert made[0] == made[1] == made[2]


def test_long_prompts_are_appended_in_runs_that_engines_take(tiny_bundle: Bundle) -> None:
    taps = np.random.default_rng(0).normal(0, 1, (20, 384)).astype(np.float32)
    caches = []
    for context_rows in (None, 7, 20):
        backend = OrtDeviceBackend(tiny_bundle, CPU)
        parts, _ = backend._new_parts(2)
        steps = GraphSteps(tiny_bundle, parts, backend._run, context_rows=context_rows)
        parts.draft_model(steps).append(1, taps, 0)
        caches.append([cache[:, :, :20].clone() for cache in parts.draft_caches.tensors])
    for other in caches[1:]:
        for one, own in zip(caches[0], other, strict=True):
            torch.testing.assert_close(one, own, atol=1e-5, rtol=1e-5)
    assert not any(cache[0].any() for cache in caches[0])


def test_providers_that_are_not_there_or_not_supported_are_refused(tiny_bundle: Bundle) -> None:
    for providers, message in (
        (("CUDAExecutionProvider",), r"has no CUDAExecutionProvider; it has .*CPUExecution"),
        (("DmlExecutionProvider", "CPUExecutionProvider"), r"DmlExecutionProvider: only CPU"),
    ):
        with pytest.raises(BackendError, match=message):
            open_backend("onnxruntime", tiny_bundle, BackendOptions(providers=providers))


def test_a_provider_that_does_not_start_is_no_silent_cpu(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build for GPUs on a machine without one: onnxruntime itself would go on on the CPU."""
    there = onnxruntime.get_available_providers()
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", *there]
    )
    with (
        pytest.warns(UserWarning, match="CUDAExecutionProvider"),
        pytest.raises(BackendError, match="would run on the CPU instead: no usable GPU"),
    ):
        open_backend("onnxruntime", tiny_bundle, BackendOptions(device="cuda"))
