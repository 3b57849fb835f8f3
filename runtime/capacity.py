# SPDX-License-Identifier: Apache-2.0
"""How many requests one GPU holds at a promised speed, and how many GPUs a load needs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from dspark_trt.errors import RequestError
from dspark_trt.runtime.cost_model import CostModel
from dspark_trt.runtime.simulation import Load, Policy, simulate
from dspark_trt.runtime.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The most requests in a closed loop that each still get the promised tokens a second."""

    requests: int  # 0: not even one
    tokens_per_second: float
    tokens_per_second_per_user: float
    gpus: int | None  # for the load asked about; None: no load, or no GPU number serves it

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def plan_capacity(
    workload: Workload,
    table: CostModel,
    policies: Mapping[str, Policy],
    *,
    sla: float,  # tokens a second for every user
    load_requests: int | None = None,  # concurrent requests to serve in all
    output_tokens: float = 256.0,  # means, as in `Load`
    prompt_tokens: float = 512.0,
    most: int = 1024,
    rounds: int = 20_000,
    seed: int = 0,
) -> dict[str, Capacity]:
    """Capacity of each policy, by bisection over the number of slots up to ``most``.

    Speed a user falls with the number of users, up to noise of the simulation: the answer is exact to
    about the noise of ``rounds`` rounds.
    """
    if not 0 < sla < inf:
        raise RequestError(
            f"sla must be a positive, finite number of tokens a second a user, got {sla}"
        )
    load = Load(slots=1, output_tokens=output_tokens, prompt_tokens=prompt_tokens)
    return {
        name: _capacity(workload, table, policy, load, sla, load_requests, most, rounds, seed)
        for name, policy in policies.items()
    }


def _capacity(
    workload: Workload,
    table: CostModel,
    policy: Policy,
    load: Load,
    sla: float,
    load_requests: int | None,
    most: int,
    rounds: int,
    seed: int,
) -> Capacity:
    def speed(slots: int) -> tuple[float, float]:
        enough = max(rounds, 50 * slots)
        many = replace(load, slots=slots)
        outcome = simulate(workload, policy, table, many, rounds=enough, seed=seed)
        return outcome.tokens_per_second_per_user, outcome.tokens_per_second

    held, reached = 0, (0.0, 0.0)
    low, high = 0, 1
    while high <= most and (now := speed(high))[0] >= sla:
        held, reached = high, now
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1 + low // 50:  # two percent is the noise
        middle = (low + high) // 2
        now = speed(middle)
        if now[0] >= sla:
            low, held, reached = middle, middle, now
        else:
            high = middle
    return Capacity(
        requests=held,
        tokens_per_second=reached[1],
        tokens_per_second_per_user=reached[0],
        gpus=ceil(load_requests / held) if load_requests is not None and held else None,
    )
