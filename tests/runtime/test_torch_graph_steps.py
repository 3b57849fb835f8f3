# SPDX-License-Identifier: Apache-2.0
"""A bundle's graphs on static buffers and device caches: the path of engines and of onnxruntime on a GPU, here with
onnxruntime's CPU provider.
"""

import numpy as np
import pytest
import torch

from dspark_trt.bundle import Bundle
from dspark_trt.errors import BackendError
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.backends.interface import BackendOptions
from dspark_trt.runtime.backends.ort_device_backend import OrtDeviceBackend
from dspark_trt.runtime.backends.torch_graph_steps import GraphSteps
from dspark_trt.runtime.backends.torch_rounds import DeviceRounds
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.ragged import ragged_rows
from dspark_trt.runtime.request import Request, SamplingParams

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


def test_graphs_on_device_buffers_give_the_same_tokens_and_copy_no_cache(
    tiny_bundle: Bundle, capfd: pytest.CaptureFixture[str]
) -> None:
    """Onnxruntime warns on stderr where a cache's output is not its input."""
    made = []
    for backend in (
        open_backend("onnxruntime", tiny_bundle),
        OrtDeviceBackend(tiny_bundle, CPU),
    ):
        with Engine(backend, EngineOptions(max_batch=2, max_tokens_per_step=20)) as engine:
            done = engine.generate(requests())
        assert all(each.error is None for each in done)
        made.append([each.token_ids for each in done])
    assert made[0] == made[1]
    assert capfd.readouterr().err == ""


def test_rounds_on_the_device_run_graphs_as_they_run_modules(tiny_bundle: Bundle) -> None:
    parts, steps = OrtDeviceBackend(tiny_bundle, CPU)._new_parts(len(PROMPTS))
    draft, target = parts.draft_model(steps), parts.target_model(steps)
    count = len(PROMPTS)
    rows = ragged_rows(PROMPTS, np.zeros(count, np.int64), np.zeros(count, np.bool_))
    output = target.step(rows)
    first = np.asarray(output.logits).argmax(1).tolist()
    rounds, outputs = DeviceRounds(parts, steps), [[token] for token in first]
    for r, prompt in enumerate(PROMPTS):
        draft.append(r, output.taps[rows.offsets[r] : rows.offsets[r + 1]], 0)
        rounds.begin(r, anchor=first[r], target_len=len(prompt), draft_len=len(prompt))
    for i in range(12):
        committed = rounds.launch([3, 2, 1][i % 3], [21, 0, 6][i % 3]).read()
        for row, accepted in enumerate(committed.accepted):
            outputs[row] += committed.tokens[row, : accepted + 1].tolist()
    engine = Engine.load(tiny_bundle, options=EngineOptions(max_batch=3))
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    expected = engine.generate([Request(prompt_ids=p, params=params) for p in PROMPTS])
    for own, theirs in zip(outputs, expected, strict=True):
        length = min(len(own), 40)
        assert own[:length] == list(theirs.token_ids)[:length]


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
