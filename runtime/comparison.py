# SPDX-License-Identifier: Apache-2.0
"""Several drafters of one target on the same prompts: what each drafts, what that costs, what it brings.

Acceptance is measured with every draft verified, so that no scheduler hides a position. Speed is measured
twice on the same prompts, in turns: plain decoding, and drafts under the scheduler. The ratio of the two is
what drafters are compared by: it does not depend on what else the machine does.

Legend: K = γ drafted tokens, N rounds.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from dspark_trt.bundle import Bundle
from dspark_trt.errors import RequestError
from dspark_trt.runtime.backends import Backend, open_backend
from dspark_trt.runtime.backends.interface import BackendOptions
from dspark_trt.runtime.bootstrap import interval_of_ratio
from dspark_trt.runtime.break_even import break_even_acceptance, recommended_length
from dspark_trt.runtime.calibration_metrics import conditional_acceptance, reached
from dspark_trt.runtime.cost_model import CostModel
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.profiling import ProfilePlan, profile
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.round_report import RoundReport
from dspark_trt.runtime.scheduling import bundled_costs
from dspark_trt.runtime.trace_collection import Prompt, collect_traces
from dspark_trt.runtime.traces import Traces

PLAIN, SCHEDULED = "fixed:0", "algorithm1"
Progress = Callable[[str], None]  # what is being done


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """How to compare. `requests` decode at the same time."""

    temperature: float = 0.0
    max_new_tokens: int = 64
    requests: int = 4
    turns: int = 3  # of plain and scheduled decoding
    profile_seconds: float = (
        0.3  # for each load, where a bundle has no cost table that holds here
    )
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "requests", "turns"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature must be at least 0, got {self.temperature}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterResult:
    """One drafter. Costs are for the plan's number of requests."""

    bundle: str
    gamma: int
    rounds: int
    accepted_length: float  # tokens a round, the target's own included
    accepted_length_interval: tuple[float, float]  # 95 %, over requests
    conditional_acceptance: tuple[float | None, ...]  # [K]; None: no round reached it
    reached: tuple[int, ...]  # [K] rounds that did
    by_domain: Mapping[str, float]  # accepted length
    draft_ms: float
    step_ms: float  # target, one row a request
    break_even_acceptance: float  # 1: not even certain drafts pay
    recommended_gamma: int  # fixed length with the most tokens a second; 0: do not draft
    plain_tokens_per_second: float
    tokens_per_second: float
    speed_up: float  # median over turns of their ratio


def compare_drafters(
    bundles: Sequence[Bundle],
    prompts: Sequence[Prompt],
    plan: ComparisonPlan,
    *,
    backend: str = "onnxruntime",
    options: BackendOptions | None = None,
    progress: Progress = lambda _: None,
) -> list[DrafterResult]:
    """Measure every bundle, in the order given.

    Raises:
        RequestError: fewer than one bundle or prompt, a bundle without target, or different targets.
    """
    _check(bundles, prompts)
    results = []
    for bundle in bundles:
        name = bundle.path.name
        opened = open_backend(backend, bundle, options)
        progress(f"{name}: acceptance")
        traces = _traces(opened, prompts, plan)
        progress(f"{name}: costs")
        costs = _costs(opened, plan)
        progress(f"{name}: speed")
        plain, scheduled, speed_up = _speeds(opened, prompts, plan, costs)
        results.append(_result(bundle, traces, plan, costs, plain, scheduled, speed_up))
    return results


def _check(bundles: Sequence[Bundle], prompts: Sequence[Prompt]) -> None:
    if not bundles or not prompts:
        raise RequestError("a comparison needs at least one bundle and one prompt")
    for bundle in bundles:
        if bundle.target_source is None:
            raise RequestError(
                f"{bundle.path} has no target: export it again with --target to compare its drafter"
            )
    first = bundles[0]
    for other in bundles[1:]:
        assert first.target_source is not None
        assert other.target_source is not None
        if other.target_source.sha256 != first.target_source.sha256:
            raise RequestError(
                f"{other.path} was exported with the target {other.target_source.name} (sha256 "
                f"{other.target_source.sha256[:12]}…), {first.path} with {first.target_source.name} "
                f"({first.target_source.sha256[:12]}…): compare drafters of one target"
            )
        if other.dtype != first.dtype:
            raise RequestError(
                f"{other.path} is {other.dtype}, {first.path} {first.dtype}: export both with one --dtype"
            )


def _traces(backend: Backend, prompts: Sequence[Prompt], plan: ComparisonPlan) -> Traces:
    scheduler = f"fixed:{backend.bundle.draft.gamma}"
    with Engine(backend, _engine_options(plan, backend), scheduler=scheduler) as engine:
        return collect_traces(
            engine,
            prompts,
            max_new_tokens=plan.max_new_tokens,
            temperature=plan.temperature,
            seed=plan.seed,
        )


def _engine_options(plan: ComparisonPlan, backend: Backend) -> EngineOptions:
    rows = plan.requests * (2 + backend.bundle.draft.gamma)
    return EngineOptions(max_batch=plan.requests, max_tokens_per_step=max(512, rows))


def _costs(backend: Backend, plan: ComparisonPlan) -> CostModel:
    """The bundle's cost table if it holds here, else a quick one, which is not kept."""
    costs, _ = bundled_costs(backend)
    if costs is not None:
        return costs
    gamma = backend.bundle.draft.gamma
    room = backend.bundle.max_context_tokens - 4 * (gamma + 1)
    loads = ProfilePlan(
        requests=tuple(sorted({1, plan.requests})),
        lengths=tuple(sorted({0, 1, (gamma + 1) // 2, gamma})),
        context_tokens=(max(1, min(96, room)),),
        seconds=plan.profile_seconds,
        temperature=plan.temperature,
    )
    return profile(backend, loads).costs


def _speeds(
    backend: Backend, prompts: Sequence[Prompt], plan: ComparisonPlan, costs: CostModel
) -> tuple[float, float, float]:
    """Tokens a second: plain, scheduled; and the median ratio of neighbouring turns."""
    options = _engine_options(plan, backend)
    rates: dict[str, list[float]] = {PLAIN: [], SCHEDULED: []}
    with (
        Engine(backend, options, scheduler=PLAIN) as plain,
        Engine(backend, options, scheduler=SCHEDULED, cost_table=costs) as scheduled,
    ):
        arms = [(PLAIN, plain), (SCHEDULED, scheduled)]
        for _, engine in arms:  # graphs are loaded, and caches grow, when they are first needed
            _decoding_rate(engine, prompts[: plan.requests], plan)
        for turn in range(plan.turns):
            for name, engine in arms if turn % 2 == 0 else reversed(arms):
                rates[name].append(_decoding_rate(engine, prompts, plan))
    ratios = [b / a for a, b in zip(rates[PLAIN], rates[SCHEDULED], strict=True)]
    return median(rates[PLAIN]), median(rates[SCHEDULED]), median(ratios)


def _decoding_rate(engine: Engine, prompts: Sequence[Prompt], plan: ComparisonPlan) -> float:
    """Tokens a second of rounds in which no prompt is read."""
    reports: list[RoundReport] = []
    engine.observers.append(reports.append)
    ids = [
        engine.submit(
            Request(
                prompt_ids=prompt.token_ids,
                params=SamplingParams(
                    temperature=plan.temperature,
                    max_new_tokens=plan.max_new_tokens,
                    seed=plan.seed + index,
                ),
            )
        )
        for index, prompt in enumerate(prompts)
    ]
    tokens, seconds = 0, 0.0
    while engine.has_work:
        started = time.perf_counter()
        engine.step()
        taken = time.perf_counter() - started
        for report in reports:
            if report.decoding.all():
                seconds += taken
                tokens += int(report.committed.sum())
        reports.clear()
    engine.observers.remove(reports.append)
    for request_id in ids:
        engine.discard(request_id)
    if not tokens:
        raise RequestError(
            "no round decoded without reading a prompt: give more prompts or more new tokens"
        )
    return tokens / seconds


def _result(
    bundle: Bundle,
    traces: Traces,
    plan: ComparisonPlan,
    costs: CostModel,
    plain: float,
    scheduled: float,
    speed_up: float,
) -> DrafterResult:
    mask = traces.accept_prefix_mask
    conditional = conditional_acceptance(mask)
    known = np.nan_to_num(conditional)  # a position that nothing reached is not counted on
    step = costs.seconds(plan.requests, plan.requests, requests=plan.requests)[0]
    return DrafterResult(
        bundle=str(bundle.path),
        gamma=bundle.draft.gamma,
        rounds=len(traces),
        accepted_length=1 + float(traces.accepted.mean()),
        accepted_length_interval=accepted_length_interval(traces, seed=plan.seed),
        conditional_acceptance=tuple(None if c != c else float(c) for c in conditional),
        reached=tuple(int(count) for count in reached(mask).sum(axis=0)),
        by_domain={
            name: 1 + float(traces.accepted[traces.domain == index].mean())
            for index, name in enumerate(traces.domain_names)
            if np.any(traces.domain == index)
        },
        draft_ms=1e3 * costs.draft_cost(plan.requests),
        step_ms=1e3 * float(step),
        break_even_acceptance=break_even_acceptance(
            costs, bundle.draft.gamma, requests=plan.requests
        ),
        recommended_gamma=recommended_length(costs, known, requests=plan.requests),
        plain_tokens_per_second=plain,
        tokens_per_second=scheduled,
        speed_up=speed_up,
    )


def accepted_length_interval(traces: Traces, *, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the accepted length: requests are drawn again, rounds of one belong
    together.
    """
    _, place = np.unique(traces.request_id, return_inverse=True)
    rounds = np.bincount(place).astype(np.float64)
    accepted = np.bincount(place, traces.accepted.astype(np.float64))
    return interval_of_ratio(accepted + rounds, rounds, seed=seed)
