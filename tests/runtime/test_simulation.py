# SPDX-License-Identifier: Apache-2.0
"""The simulated engine: its arithmetic, its loads, and what the policies come to on a roofline."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.errors import RequestError, TableError
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.calibration_metrics import conditional_acceptance
from dspark_trt.runtime.capacity import plan_capacity
from dspark_trt.runtime.cost_table import CostTable
from dspark_trt.runtime.roofline import (
    GPUS,
    MODELS,
    ModelShape,
    dense_shape,
    named_table,
    roofline_table,
)
from dspark_trt.runtime.scheduler import Fixed
from dspark_trt.runtime.scheduling import choose_scheduling
from dspark_trt.runtime.simulation import (
    Load,
    Outcome,
    Policy,
    policies_named,
    simulate,
    standard_policies,
)
from dspark_trt.runtime.traces import load_traces, traces_from_arrays
from dspark_trt.runtime.workload import Workload

_DATA = Path(__file__).parents[1] / "data" / "traces"
# Conditional acceptance that hardly decays with position, three domains (docs/scheduling.md).
_ACCEPTANCE = [
    [0.90, 0.88, 0.87, 0.86, 0.86, 0.85, 0.85],
    [0.86, 0.84, 0.83, 0.82, 0.81, 0.81, 0.80],
    [0.76, 0.74, 0.72, 0.71, 0.70, 0.70, 0.69],
]


def _workload(gamma: int = 7) -> Workload:
    rows = [row[:gamma] for row in _ACCEPTANCE]
    return Workload.synthetic(
        rows, domain_names=("math", "code", "chat"), requests=150, rounds=80
    )


@pytest.fixture(scope="module")
def workload() -> Workload:
    return _workload()


@pytest.fixture(scope="module")
def table() -> CostTable:
    return named_table("h100-sxm", "qwen3-8b")


def _certain(accepted: int) -> Workload:
    """One request whose every round accepts the same number of two drafts."""
    mask = np.tile(np.arange(2) < accepted, (5, 1))
    return Workload.from_traces(
        traces_from_arrays(
            conf_logits=np.zeros((5, 2)), accept_prefix_mask=mask, request_id=np.zeros(5)
        )
    )


def test_a_closed_loop_of_certain_rounds_is_plain_arithmetic() -> None:
    table = CostTable([1, 3, 6], [1.0, 0.8, 0.5], requests=[2], draft_seconds=[0.2])
    outcome = simulate(
        _certain(accepted=2),
        Policy(Fixed(2)),
        table,
        Load(slots=2, output_tokens=1e9),
        rounds=200,
    )
    assert outcome.accepted_length == 3
    assert outcome.drafts_verified_per_round == 2
    assert outcome.tokens_per_second == pytest.approx(6 / (2.0 + 0.2))
    assert outcome.tokens_per_second_per_user == pytest.approx(3 / (2.0 + 0.2))
    plain = simulate(
        _certain(accepted=2), Policy(Fixed(0), drafts=False), table, Load(slots=2), rounds=200
    )
    assert plain.tokens_per_second == pytest.approx(2 / (1 / 0.8))


def test_rejected_drafts_leave_the_bonus_token() -> None:
    table = CostTable([1, 3], [1.0, 0.8])
    outcome = simulate(
        _certain(accepted=0),
        Policy(Fixed(2)),
        table,
        Load(slots=1, output_tokens=1e9),
        rounds=50,
    )
    assert outcome.accepted_length == 1


def test_requests_end_at_their_length() -> None:
    table = CostTable([1, 3], [1.0, 0.8])
    load = Load(slots=1, output_tokens=1.0)  # one token each: nothing may be verified
    outcome = simulate(_certain(accepted=2), Policy(Fixed(2)), table, load, rounds=50)
    assert (outcome.accepted_length, outcome.drafts_verified_per_round) == (1, 0)


def test_poisson_arrivals_are_served_at_their_rate(
    workload: Workload, table: CostTable
) -> None:
    policy = standard_policies(table, 7)["fixed:3"]
    load = Load(slots=256, arrivals_per_second=20.0, output_tokens=100)
    outcome = simulate(workload, policy, table, load, rounds=60_000)
    assert outcome.tokens_per_second == pytest.approx(20 * 100, rel=0.15)
    # Little's law: running requests = arrivals a second · seconds in service.
    assert outcome.running == pytest.approx(
        outcome.tokens_per_second / outcome.tokens_per_second_per_user, rel=0.2
    )
    assert outcome.waiting_seconds < 0.05


def test_an_overloaded_engine_makes_requests_wait(workload: Workload, table: CostTable) -> None:
    policy = standard_policies(table, 7)["fixed:0"]
    load = Load(slots=4, arrivals_per_second=50.0, output_tokens=100)
    outcome = simulate(workload, policy, table, load, rounds=5_000)
    assert outcome.running > 3.5
    assert outcome.waiting_seconds > 1.0


@pytest.mark.parametrize("name", ["fixed:0", "fixed:3", "fixed", "threshold:0.25", "async"])
def test_policies_have_the_engines_names(
    name: str, table: CostTable, tiny_bundle: Bundle
) -> None:
    backend = open_backend("onnxruntime", tiny_bundle)
    policy = policies_named([name], table, 7)[name]
    assert policy.scheduler == choose_scheduling(name, backend, costs=table).scheduler
    assert policy.drafts == (name != "fixed:0")


def test_a_seed_repeats(workload: Workload, table: CostTable) -> None:
    policy = standard_policies(table, 7)["async"]
    runs = [simulate(workload, policy, table, Load(slots=8), rounds=2_000) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.fixture(scope="module")
def outcomes(workload: Workload, table: CostTable) -> dict[int, dict[str, Outcome]]:
    policies = standard_policies(table, 7)
    return {
        slots: {
            name: simulate(
                workload, policy, table, Load(slots=slots), rounds=max(4_000, 150 * slots)
            )
            for name, policy in policies.items()
        }
        for slots in (1, 16, 64, 256)
    }


def _best_fixed(by_policy: dict[str, Outcome]) -> float:
    return max(
        outcome.tokens_per_second
        for name, outcome in by_policy.items()
        if name.startswith("fixed")
    )


@pytest.mark.parametrize("policy", ["algorithm1", "async"])
def test_adaptive_never_loses_to_the_best_fixed_length(
    outcomes: dict[int, dict[str, Outcome]], policy: str
) -> None:
    for by_policy in outcomes.values():
        adaptive = by_policy[policy].tokens_per_second
        assert adaptive >= 0.99 * _best_fixed(by_policy)
        assert adaptive <= by_policy["oracle"].tokens_per_second


def test_adaptive_beats_the_full_block_at_saturation(
    outcomes: dict[int, dict[str, Outcome]],
) -> None:
    saturated = outcomes[256]
    full = saturated["fixed:7"].tokens_per_second
    assert saturated["async"].tokens_per_second >= 1.15 * full
    assert saturated["algorithm1"].tokens_per_second >= 1.15 * full


def test_the_budget_falls_with_load_as_in_the_paper(table: CostTable) -> None:
    workload = _workload(gamma=5)
    policy = standard_policies(table, 5)["async"]
    budget = [
        simulate(
            workload, policy, table, Load(slots=slots), rounds=max(4_000, 100 * slots)
        ).drafts_verified_per_round
        for slots in (2, 64, 512)
    ]
    assert 4 <= budget[0] <= 6
    assert budget[0] > budget[1] + 0.5
    assert budget[1] > budget[2]


def test_a_useless_drafter_costs_at_most_five_percent(table: CostTable) -> None:
    useless = Workload.synthetic([[0.01] * 7], domain_names=("any",), requests=20, rounds=50)
    policies = standard_policies(table, 7)
    for slots in (1, 32):
        speed = {
            name: simulate(
                useless, policies[name], table, Load(slots=slots), rounds=300 * slots
            ).tokens_per_second
            for name in ("fixed:0", "async", "fixed:7")
        }
        assert speed["async"] >= 0.95 * speed["fixed:0"]
        assert speed["fixed:7"] < 0.85 * speed["fixed:0"]


def test_synthetic_rounds_have_the_acceptance_asked_for(workload: Workload) -> None:
    mask = np.arange(7) < workload.accepted[:, None]
    wanted = np.mean(_ACCEPTANCE, axis=0)
    assert conditional_acceptance(mask)[0] == pytest.approx(wanted[0], abs=0.02)
    rounds_each = len(mask) // workload.start.size
    math = np.repeat(workload.domain == 0, rounds_each)
    assert conditional_acceptance(mask[math]) == pytest.approx(_ACCEPTANCE[0], abs=0.04)


def test_traces_are_replayed_in_the_order_of_their_request() -> None:
    workload = Workload.from_traces(load_traces(_DATA / "smollm2_T1.npz"))
    first, second = workload.start[:2]
    row = first
    for _ in range(second - first):
        assert first <= row < second
        row = workload.following[row]
    assert row == first


def test_capacity_is_the_most_users_at_the_promised_speed(
    workload: Workload, table: CostTable
) -> None:
    policies = standard_policies(table, 7)
    chosen = {name: policies[name] for name in ("fixed:0", "fixed:7", "async")}
    held = plan_capacity(workload, table, chosen, sla=100, load_requests=1000, rounds=3_000)
    assert held["fixed:0"].requests < held["fixed:7"].requests < held["async"].requests
    for capacity in held.values():
        assert capacity.tokens_per_second_per_user >= 100
        assert capacity.gpus == -(-1000 // capacity.requests)
    impossible = plan_capacity(
        workload, table, {"fixed:0": chosen["fixed:0"]}, sla=1e4, rounds=500
    )
    assert (impossible["fixed:0"].requests, impossible["fixed:0"].gpus) == (0, None)


def test_the_roofline_reads_weights_at_small_batches_and_computes_at_large_ones() -> None:
    gpu, model = GPUS["h100-sxm"], MODELS["qwen3-8b"]
    table = roofline_table(gpu, model)
    reading = model.weight_bytes / (gpu.bytes_per_second * gpu.memory_share)
    assert table.seconds(1, 1)[0] == pytest.approx(reading + gpu.launch_seconds, rel=0.01)
    computing = 4096 * model.flops_per_token / (gpu.flops * gpu.compute_share)
    assert table.seconds(4096, 4096)[0] == pytest.approx(computing, rel=0.1)
    assert 7.5e9 < model.flops_per_token / 2 < 8.5e9  # parameters that a token meets


def test_a_mixture_of_experts_reads_more_as_tokens_reach_more_experts() -> None:
    dense = dense_shape(
        "any", hidden=1024, intermediate=4096, layers=8, heads=8, kv_heads=2, head_dim=128,
        vocab=32000,
    )  # fmt: skip
    sparse: ModelShape = replace(dense, experts=64, experts_per_token=4, expert_bytes=2e8)
    table = roofline_table(GPUS["h200"], sparse)
    one, eight, many = (table.seconds(b, b)[0] for b in (1, 8, 128))
    assert eight > 3 * one
    assert many < 3 * eight


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Load(slots=0), "a load needs 1 to 1000000 slots, got 0"),
        (lambda: Load(slots=1, arrivals_per_second=0), "arrivals_per_second must be positive"),
        (lambda: Load(slots=1, output_tokens=0), "must be at least 1"),
        (lambda: Load(slots=10**9), "1 to 1000000 slots, got 1000000000"),
        (lambda: Load(slots=1, prompt_tokens=np.inf), "at least 1 and finite, got inf"),
        (lambda: Load(slots=1, output_tokens=np.nan), "at least 1 and finite, got nan"),
        (lambda: named_table("abacus", "qwen3-8b"), "no roofline for 'abacus'.*h100-sxm"),
        (lambda: Workload.synthetic([[1.0]], domain_names=("a",)), r"must lie in \(0, 1\)"),
        (
            lambda: plan_capacity(_certain(1), CostTable([1], [1.0]), {}, sla=0),
            "sla must be a positive, finite number",
        ),
        (
            lambda: plan_capacity(_certain(1), CostTable([1], [1.0]), {}, sla=np.inf),
            "sla must be a positive, finite number.*got inf",
        ),
    ],
)
def test_refusals(call: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call()  # type: ignore[operator]


def test_traces_without_fully_verified_rounds_are_refused() -> None:
    trimmed = traces_from_arrays(
        conf_logits=np.zeros((2, 2)),
        accept_prefix_mask=np.zeros((2, 2)),
        request_id=[0, 1],
        lengths=[1, 0],
    )
    with pytest.raises(TableError, match="no round of the traces was verified in full"):
        Workload.from_traces(trimmed)
