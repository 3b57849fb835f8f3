# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections of as many streams and steps as are released: float64 NumPy, and an engine."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dspark_trt.checkpoint import read_draft
from dspark_trt.engine_manifest import Profile
from dspark_trt.export.engines.build import run_job
from dspark_trt.export.engines.engine_from_onnx import Job
from dspark_trt.models.hyper import HyperConnection
from tests.checkpoints_deepseek import write_deepseek_draft
from tests.export.draft_reference import Doubles

STREAMS, STEPS = 4, 20


@pytest.fixture
def connection(tmp_path: Path) -> HyperConnection:
    path = write_deepseek_draft(tmp_path / "draft", streams=STREAMS, sinkhorn=STEPS)
    decoder = read_draft(path).config.decoder
    assert decoder.deepseek is not None
    return HyperConnection(decoder, decoder.deepseek).eval().requires_grad_(False)


def balanced(logits: Doubles, eps: float) -> Doubles:
    """Sinkhorn's iteration, sum by sum."""
    mix = np.exp(logits - logits.max(-1, keepdims=True))
    mix = mix / mix.sum(-1, keepdims=True) + eps
    for axis in (-2, *(-1, -2) * (STEPS - 1)):
        mix = mix / (mix.sum(axis, keepdims=True) + eps)
    return mix


@pytest.mark.parametrize("spread", [1.0, 8.0, 60.0])  # the last: softmax is all but one-hot
def test_the_mix_equals_float64(connection: HyperConnection, spread: float) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 7, STREAMS, STREAMS)) * spread
    ours = connection._balanced(torch.from_numpy(logits).float()).numpy()
    np.testing.assert_allclose(ours, balanced(logits, connection.eps), rtol=1e-5)
    np.testing.assert_allclose(ours.sum(-2), 1, atol=1e-5)


@pytest.mark.trt
@pytest.mark.timeout(120)  # with reductions for sums it had not ended after 20 minutes
def test_its_engine_is_built(connection: HyperConnection, tmp_path: Path) -> None:
    for weight in connection.parameters():
        weight.normal_(generator=torch.Generator())
    streams = torch.zeros(1, 5, STREAMS, connection.fn.shape[1] // STREAMS)
    file = tmp_path / "mix.onnx"
    torch.onnx.export(
        connection, (streams,), file, opset_version=24, external_data=False, verbose=False
    )
    job = Job(
        backend="tensorrt-rtx", graph=file, output=tmp_path / "mix.engine", capacity=1, gamma=1,
        vocab_size=1, profiles=(Profile(name="all", shapes={}),), archs=("ampere+",), device_arch=None,
    )  # fmt: skip
    built = run_job(job, "mix", lambda _: None)
    # One product gives the logits, one more each sum: the steps were not folded away.
    assert built["layers"]["MATRIX_MULTIPLY"] == 1 + 1 + 2 * (STEPS - 1)
    assert built["size_bytes"] == job.output.stat().st_size > 0
