# SPDX-License-Identifier: Apache-2.0
"""Coupled decoding returns the tokens of plain sampling with the same seed, whoever drafts and schedules."""

import numpy as np
import pytest
from numpy.typing import NDArray

from dspark_trt.plugins.contract import VerifyMode
from dspark_trt.plugins.specification import sample_coupled
from tests.plugins.cases import Batch, session
from tests.plugins.rounds import sampler

VOCAB, GAMMA, LENGTH = 97, 4, 24
REQUESTS = 8
NOTHING = np.float32(0)


def target_logits(model: NDArray[np.float32], context: list[int]) -> NDArray[np.float32]:
    """A model that reads its last three tokens."""
    logits: NDArray[np.float32] = sum(
        np.roll(model[token], place) for place, token in enumerate(context[-3:])
    )
    return logits


class Request:
    def __init__(self, rng: np.random.Generator) -> None:
        self.seed = int(rng.integers(-(2**63), 2**63 - 1))
        self.prompt = rng.integers(0, VOCAB, rng.integers(3, 9)).tolist()
        self.temperature = float(rng.choice([0.0, 0.5, 1.0, 1.3]))
        self.top_k = int(rng.choice([0, 20]))
        self.top_p = float(rng.choice([1.0, 0.9]))
        self.drafter_noise = float(rng.choice([0.0, 0.5, 3.0]))
        self.tokens: list[int] = []

    def plain(self, model: NDArray[np.float32]) -> list[int]:
        context = list(self.prompt)
        for _ in range(LENGTH):
            token = sample_coupled(
                target_logits(model, context),
                np.float32(self.temperature),
                np.int64(self.top_k),
                np.float32(self.top_p),
                NOTHING,
                np.int64(self.seed),
                np.int64(len(context)),
            )
            context.append(token)
        return context[len(self.prompt) :]


def draft(
    request: Request, model: NDArray[np.float32], length: int, rng: np.random.Generator
) -> list[int]:
    context = [*request.prompt, *request.tokens]
    for _ in range(length):
        noise = request.drafter_noise * rng.normal(size=VOCAB)
        feed = {
            "logits": (target_logits(model, context) + noise)[None].astype(np.float32),
            "temperature": np.array([request.temperature], np.float32),
            "seeds": np.array([request.seed]),
            "positions": np.array([len(context)]),
        }
        context.append(int(sampler("SampleCoupled").run(None, feed)[0][0]))
    return context[len(context) - length :]


def decode(
    requests: list[Request], model: NDArray[np.float32], rng: np.random.Generator
) -> tuple[int, int]:
    """Speculative decoding in one batch with lengths drawn anew each round; rounds and tokens."""
    rounds = 0
    while active := [r for r in requests if len(r.tokens) < LENGTH]:
        lengths = rng.integers(0, GAMMA + 1, len(active))
        drafts = [draft(r, model, n, rng) for r, n in zip(active, lengths, strict=True)]
        rows = [
            target_logits(model, [*r.prompt, *r.tokens, *d[:k]])
            for r, d in zip(active, drafts, strict=True)
            for k in range(len(d) + 1)
        ]
        feed: Batch = {
            "target_logits": np.stack(rows),
            "offsets": np.concatenate([[0], np.cumsum(lengths + 1)]),
            "draft_tokens": np.array([d + [0] * (GAMMA - len(d)) for d in drafts]),
            "temperature": np.array([r.temperature for r in active], np.float32),
            "top_k": np.array([r.top_k for r in active]),
            "top_p": np.array([r.top_p for r in active], np.float32),
            "min_p": np.zeros(len(active), np.float32),
            "seeds": np.array([r.seed for r in active]),
            "positions": np.array([len(r.prompt) + len(r.tokens) for r in active]),
        }
        accepted, tokens = session(VerifyMode.COUPLED, GAMMA, VOCAB).run(None, feed)
        for r, n, row in zip(active, accepted, tokens, strict=True):
            r.tokens += row[: n + 1].tolist()
        rounds += len(active)
    return rounds, sum(len(r.tokens) for r in requests)


@pytest.mark.parametrize("trial", range(25))
def test_200_requests_return_the_tokens_of_plain_sampling(trial: int) -> None:
    rng = np.random.default_rng(trial)
    model = (1.5 * rng.normal(size=(VOCAB, VOCAB))).astype(np.float32)
    requests = [Request(rng) for _ in range(REQUESTS)]
    rounds, tokens = decode(requests, model, rng)
    for request in requests:
        assert request.tokens[:LENGTH] == request.plain(model)
    assert tokens > 1.3 * rounds  # drafts were accepted, not merely ignored
