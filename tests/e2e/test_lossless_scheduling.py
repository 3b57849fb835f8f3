# SPDX-License-Identifier: Apache-2.0
"""Whatever a scheduler does, sampled text is the target's own; and a scheduler that looks ahead is caught."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from numpy.typing import ArrayLike

from dspark_trt.bundle import load_bundle
from dspark_trt.errors import RequestError
from dspark_trt.runtime.bypass import Bypass
from dspark_trt.runtime.cost_table import CostTable
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.round_costs import RoundCosts
from dspark_trt.runtime.scheduler import Global, Plan, Scheduler
from tests.e2e.toy_chain import GAMMA, RANDOM, A, B, S, ToyChain, export_toy_chain, toy_chain
from tests.plugins.chains import chi_square_p_value

# The first draft costs as much as all of them: what appendix A needs to go wrong.
JUMP = CostTable([1, 2, 3, 4], [1.0, 0.5, 0.5, 0.5])
# Costs by requests, blocks padded to the longest: lengths vary with confidences.
GRID = RoundCosts(
    [1, 16], range(GAMMA + 1), [[[1.0, 1.15, 1.4, 1.8], [4.0, 6.0, 9.0, 13.0]]], [[0.1, 0.4]],
    context_tokens=[64], row_seconds=[[0.1, 0.1]],
)  # fmt: skip
CONTEXT = 500


@dataclass(frozen=True)
class LooksAhead(Scheduler):
    """Verifies a block if the second confidence, which the first draft decides, is high: forbidden."""

    def decide(
        self,
        confidence: ArrayLike,
        *,
        limits: ArrayLike | None = None,
        context_tokens: float | None = None,
    ) -> Plan:
        worth = np.asarray(confidence)[:, 1] > 0.75
        return Plan(np.minimum(GAMMA * worth, np.asarray(limits)), "looks ahead")


@pytest.fixture(scope="module")
def chain(shared_folder: Path) -> ToyChain:
    folder = shared_folder / "toy-chain"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            export_toy_chain(folder)
    return toy_chain(load_bundle(folder / "bundle", verify_hashes=False))


Round = tuple[int, list[int]]  # anchor, tokens


def rounds_of(
    chain: ToyChain,
    scheduler: Scheduler | str,
    costs: CostTable | RoundCosts | None,
    *,
    requests: int,
    tokens: int,
    prompt: int = 0,
) -> tuple[list[list[Round]], Engine]:
    """Every request's rounds at temperature 1, ``requests`` at a time."""
    engine = Engine.load(
        chain.bundle,
        options=EngineOptions(max_batch=requests),
        scheduler=scheduler,
        cost_table=costs,
        bypass=None if costs is None else Bypass(),
    )
    count = -(-tokens // CONTEXT)
    ids = [
        engine.submit(
            Request(
                prompt_ids=(prompt,),
                params=SamplingParams(
                    temperature=1.0, max_new_tokens=CONTEXT, seed=n, ignore_eos=True
                ),
            )
        )
        for n in range(count)
    ]
    while engine.has_work:
        engine.step()
    found = []
    for request_id in ids:
        rounds, anchor = [], prompt
        for event in engine.events(request_id):
            rounds.append((anchor, list(event.token_ids)))
            anchor = event.token_ids[-1]
        found.append(rounds)
    return found, engine


def p_value(chain: ToyChain, requests: list[list[Round]]) -> float:
    """Of (anchor, the two tokens behind it), from rounds that are at least two tokens apart."""
    law = chain.target[:RANDOM, :RANDOM]
    counts = np.zeros((RANDOM, RANDOM, RANDOM))
    for rounds in requests:
        text = [token for _, tokens in rounds for token in tokens]
        place, free = 0, 0
        for anchor, tokens in rounds:
            if place >= free and place + 2 <= len(text):
                counts[anchor, text[place], text[place + 1]] += 1
                free = place + 2
            place += len(tokens)
    given_anchor = law[:, :, None] * law[None]
    expected = counts.sum(axis=(1, 2))[:, None, None] * given_anchor
    return chi_square_p_value(counts.reshape(-1), expected.reshape(-1))


SAFE = {
    "fixed": ("fixed:2", None),
    "threshold": ("threshold:0.5", None),
    "algorithm1": ("algorithm1", GRID),
    "asynchronous": ("async", GRID),
    "asynchronous, jump": ("async", JUMP),
}


@pytest.mark.parametrize("name", SAFE)
def test_sixteen_requests_sample_the_targets_distribution(name: str, chain: ToyChain) -> None:
    scheduler, costs = SAFE[name]
    found, engine = rounds_of(chain, scheduler, costs, requests=16, tokens=16_000)
    status = engine.status()
    assert p_value(chain, found) > 1e-3
    if name != "fixed":  # the test says nothing about a scheduler that always does the same
        assert np.count_nonzero(status["verification_lengths"]) > 1


@pytest.mark.parametrize("name", ["algorithm1", "asynchronous", "asynchronous, jump"])
def test_one_request_samples_the_targets_distribution(name: str, chain: ToyChain) -> None:
    scheduler, costs = SAFE[name]
    found, _ = rounds_of(chain, scheduler, costs, requests=1, tokens=6_000)
    assert p_value(chain, found) > 1e-3


def test_a_scheduler_that_looks_ahead_is_caught(chain: ToyChain) -> None:
    found, _ = rounds_of(chain, LooksAhead(), None, requests=1, tokens=12_000)
    assert p_value(chain, found) < 1e-6


def share_of_a(chain: ToyChain, scheduler: Scheduler | str) -> tuple[float, float]:
    """How often a round that starts at S begins with A, and its standard error at 0.7."""
    found, _ = rounds_of(chain, scheduler, JUMP, requests=1, tokens=4_000, prompt=S)
    first = Counter(
        tokens[0] for rounds in found for anchor, tokens in rounds[1:] if anchor == S
    )
    count = first.total()
    assert first[A] + first[B] == count > 500
    return first[A] / count, float(np.sqrt(0.7 * 0.3 / count))


def test_appendix_a_through_the_whole_engine(chain: ToyChain) -> None:
    """0.70 / 0.30 stays; 0.85 / 0.15 comes out where a draft decides whether it is verified."""
    for scheduler in ("algorithm1", "async"):
        share, error = share_of_a(chain, scheduler)
        assert abs(share - 0.70) < 4 * error
    share, error = share_of_a(chain, LooksAhead())
    assert abs(share - 0.85) < 4 * error


def test_the_engine_refuses_the_global_scheduler(chain: ToyChain) -> None:
    with pytest.raises(RequestError, match="verifies by rejection, which the global scheduler"):
        Engine.load(chain.bundle, scheduler=Global(JUMP, verification="coupled"))
