# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against their NumPy specification."""

import argparse
from typing import Any

import numpy as np
import torch

from dspark_trt.plugins import specification
from dspark_trt.plugins.contract import VerifyMode, verify_bindings
from gpu_check.part import CheckError, Clock, Report


def kernels(device: torch.device, options: argparse.Namespace, clock: Clock) -> Report:
    """Drawing and verifying: every decision equal to the specification's, over random ragged batches."""
    from dspark_trt.plugins.kernel_launch import Sampler, Verifier

    # Few sizes: each one is compiled anew. The last is the latency part's, the one before a multiple of nothing.
    sizes = ((90, 2),) if options.small else ((90, 3), (9001, 2), (151_936, 7))
    cases, decisions = 0, 0
    for i in clock.rounds(2 if options.small else 400):
        random = np.random.default_rng(i)
        (vocab, gamma), requests = sizes[i % len(sizes)], int(random.integers(1, 4))
        batch = verify_batch(random, requests, gamma, vocab)
        for mode in (VerifyMode.REJECTION, VerifyMode.COUPLED):
            names = verify_bindings(mode, gamma=gamma, vocab_size=vocab).input_names
            inputs = {name: batch[name] for name in names}
            check = getattr(specification, f"verify_{mode.value}")
            expected = check(**inputs)
            verifier = Verifier(
                mode, gamma=gamma, vocab_size=vocab, max_batch=requests, device=device
            )
            moved = {name: torch.from_numpy(a).to(device) for name, a in inputs.items()}
            accepted, tokens = verifier(moved)
            require_equal(f"{mode} accepted, case {i}", accepted, expected.accepted)
            require_equal(f"{mode} tokens, case {i}", tokens, expected.tokens)
            decisions += requests
        logits, uniforms = batch["draft_logits"][:, 0], batch["uniforms"][:, 0].copy()
        draws = Sampler(vocab_size=vocab, max_batch=requests, device=device)(
            *(torch.from_numpy(a).to(device) for a in (logits, batch["temperature"], uniforms))
        )
        wanted = specification.sample_draft(logits, batch["temperature"], uniforms)
        require_equal(f"draft tokens, case {i}", draws, wanted)
        cases += 1
    return {"cases": cases, "decisions": decisions}


def verify_batch(
    random: np.random.Generator, requests: int, gamma: int, vocab: int
) -> dict[str, Any]:
    """A ragged batch with greedy and filtered requests, whose drafts are sometimes right."""
    lengths = random.integers(0, gamma + 1, requests)
    offsets = np.concatenate([[0], np.cumsum(1 + lengths)])
    target = random.normal(0, 2, (int(offsets[-1]), vocab)).astype(np.float32)
    rows = np.minimum(offsets[:-1, None] + np.arange(gamma), len(target) - 1)
    noise = random.normal(0, 1, (requests, gamma, vocab))
    draft = (target[rows] + noise).astype(np.float32)
    greedy = random.random(requests) < 0.3
    temperature = np.where(greedy, 0, random.uniform(0.4, 1.5, requests)).astype(np.float32)
    filtered = random.random(requests) < 0.5
    uniforms = random.random((requests, gamma + 1), np.float32)
    tokens = [
        specification.sample_draft(draft[:, k], temperature, uniforms[:, k])
        for k in range(gamma)
    ]
    return {
        "target_logits": target,
        "offsets": offsets,
        "draft_tokens": np.stack(tokens, 1),
        "draft_logits": draft,
        "draft_temperature": temperature,
        "temperature": temperature,
        "top_k": np.where(filtered, random.integers(1, vocab + 1, requests), 0),
        "top_p": np.where(filtered, random.uniform(0.3, 1, requests), 1).astype(np.float32),
        "min_p": np.where(filtered, 0.01, 0).astype(np.float32),
        "uniforms": random.random((requests, gamma + 1), np.float32),
        "seeds": random.integers(-(2**63), 2**63 - 1, requests),
        "positions": random.integers(0, 2**31, requests),
    }


def require_equal(what: str, found: torch.Tensor, expected: Any) -> None:
    if not np.array_equal(found.cpu().numpy(), expected):
        raise CheckError(f"{what}: {found.cpu().tolist()}, expected {expected.tolist()}")
