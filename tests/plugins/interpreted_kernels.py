# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against the specification. `test_kernels` runs this file in the interpreter, in a process
of its own (Triton decides for good when it is imported); on a machine with a GPU it is run there.
"""

import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from dspark_trt.errors import CapacityError, RequestError
from dspark_trt.plugins.contract import VerifyMode
from dspark_trt.plugins.kernel_launch import Verifier
from dspark_trt.plugins.specification import Verified
from tests.plugins.cases import Batch, batches, inputs_of, ragged_batch, run_specification, same

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
MODES = (VerifyMode.REJECTION, VerifyMode.COUPLED)
SETTINGS = settings(
    max_examples=int(os.environ.get("DSPARK_KERNEL_EXAMPLES", "15")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def run_kernels(mode: VerifyMode, batch: Batch, dtype: torch.dtype = torch.float32) -> Verified:
    requests, gamma = batch["draft_tokens"].shape
    vocab_size = batch["target_logits"].shape[1]
    verifier = Verifier(
        mode, gamma=gamma, vocab_size=vocab_size, max_batch=requests, device=DEVICE
    )
    tensors = {n: torch.from_numpy(a).to(DEVICE) for n, a in inputs_of(mode, batch).items()}
    for name in ("target_logits", "draft_logits"):
        if name in tensors:
            tensors[name] = tensors[name].to(dtype)
    return Verified(*(tensor.cpu().numpy() for tensor in verifier(tensors)))


@pytest.mark.parametrize("mode", MODES)
@SETTINGS
@given(batch=batches((1, 5, 63, 513, 9001), max_requests=2))
def test_kernels_agree_with_specification(mode: VerifyMode, batch: Batch) -> None:
    expected = run_specification(mode, batch)
    assert same(run_kernels(mode, batch), expected), expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_read_as_they_are(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(4)
    batch = ragged_batch(rng, requests=3, gamma=2, vocab_size=300, filtered=0.0)
    for name in ("target_logits", "draft_logits"):
        batch[name] = torch.from_numpy(batch[name]).to(dtype).float().numpy()
    expected = run_specification(VerifyMode.REJECTION, batch)
    assert same(run_kernels(VerifyMode.REJECTION, batch, dtype), expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_real_vocabulary_that_is_a_multiple_of_nothing(mode: VerifyMode) -> None:
    rng = np.random.default_rng(6)
    batch = ragged_batch(rng, requests=2, gamma=1, vocab_size=151_937, greedy=0.0, filtered=0.0)
    assert same(run_kernels(mode, batch), run_specification(mode, batch))


def test_drafts_summarised_before_their_lengths_are_decided() -> None:
    batch = ragged_batch(
        np.random.default_rng(8), requests=3, gamma=2, vocab_size=90, greedy=0.0
    )
    inputs = inputs_of(VerifyMode.REJECTION, batch)
    tensors = {name: torch.from_numpy(array).to(DEVICE) for name, array in inputs.items()}
    verifier = Verifier(
        VerifyMode.REJECTION, gamma=2, vocab_size=90, max_batch=3, device=DEVICE
    )
    names = ("draft_logits", "temperature", "draft_temperature")
    full = torch.arange(0, 12, 3, device=DEVICE)
    verifier.summarise_drafts({"offsets": full} | {name: tensors[name] for name in names})
    result = verifier(tensors, drafts_summarised=True)
    expected = run_specification(VerifyMode.REJECTION, batch)
    assert same(Verified(*(tensor.cpu().numpy() for tensor in result)), expected)


def test_a_tensor_the_kernels_would_misread_is_refused() -> None:
    batch = ragged_batch(np.random.default_rng(0), requests=2, gamma=2, vocab_size=40)
    inputs = inputs_of(VerifyMode.COUPLED, batch)
    tensors = {name: torch.from_numpy(array).to(DEVICE) for name, array in inputs.items()}
    verifier = Verifier(VerifyMode.COUPLED, gamma=2, vocab_size=40, max_batch=1, device=DEVICE)
    with pytest.raises(CapacityError, match="2 requests, but there is room for 1"):
        verifier(tensors)
    verifier = Verifier(VerifyMode.COUPLED, gamma=2, vocab_size=40, max_batch=2, device=DEVICE)
    strided = torch.stack([tensors["target_logits"]] * 2, dim=-1)[..., 0]
    for name, value in {
        "target_logits": strided,
        "temperature": tensors["temperature"].double(),
        "seeds": tensors["seeds"][:1],
    }.items():
        with pytest.raises(RequestError, match=f"{name} is .*the kernels read contiguous"):
            verifier(tensors | {name: value})
    with pytest.raises(RequestError, match=r"verification takes target_logits.*positions; got"):
        verifier({name: tensors[name] for name in ("target_logits", "offsets")})
