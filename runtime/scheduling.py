# SPDX-License-Identifier: Apache-2.0
"""Which scheduler an engine gets, by name, and the costs it weighs; what is not possible is said aloud."""

from dataclasses import dataclass
from pathlib import Path

from dspark_trt.bundle import COST_TABLE
from dspark_trt.config import ConfidenceInput
from dspark_trt.errors import RequestError, TableError
from dspark_trt.runtime.backends import Backend
from dspark_trt.runtime.backends.interface import RunsRounds, TargetModel
from dspark_trt.runtime.bypass import Bypass
from dspark_trt.runtime.cost_model import CostModel
from dspark_trt.runtime.cost_table_formats import load_cost_table
from dspark_trt.runtime.machine import cost_origin
from dspark_trt.runtime.round_costs import RoundCosts
from dspark_trt.runtime.scheduler import (
    Algorithm1,
    Asynchronous,
    Fixed,
    Global,
    Scheduler,
    Threshold,
)

AUTO = "auto"
NAMES = "auto, fixed:K, threshold:C, algorithm1, async"


@dataclass(frozen=True, slots=True)
class Scheduling:
    """A scheduler, the costs it weighs, and who stops drafting."""

    scheduler: Scheduler
    costs: CostModel | None
    bypass: Bypass | None
    note: str | None = None  # what is missing, and the command that mends it


def choose_scheduling(
    choice: str | Scheduler,
    backend: Backend,
    *,
    costs: CostModel | None = None,
    bypass: Bypass | None = None,
    target: TargetModel | None = None,
) -> Scheduling:
    """Resolve a name or take a scheduler as it is.

    Args:
        choice: ``auto`` weighs costs if there is a cost table that holds here (as ``async`` where a GPU runs
            whole rounds, else as ``algorithm1``), else every draft is verified; ``fixed:K`` (0: never draft), ``threshold:C``, ``algorithm1``, ``async``; or a
            scheduler.
        backend: what runs the bundle, in whose folder the cost table is looked for.
        costs: instead of the bundle's own.
        bypass: who stops drafting; named schedulers that weigh costs have one by default.
        target: the host's own target in place of the bundle's.

    Raises:
        RequestError: an unknown name, a length beyond γ, or a scheduler that rejection verification
            cannot be exact with.
    """
    if isinstance(choice, Global):
        raise RequestError(
            "the engine verifies by rejection, which the global scheduler biases (paper, appendix A). "
            "Use 'async' or 'algorithm1'"
        )
    if not isinstance(choice, str):
        return Scheduling(choice, costs, bypass)
    gamma = backend.bundle.draft.gamma
    unweighed = without_costs(choice, gamma)
    if unweighed is not None:
        return Scheduling(unweighed, costs, bypass)
    if choice not in (AUTO, "algorithm1", "async"):
        raise RequestError(f"scheduler {choice!r} is unknown; expected one of {NAMES}")
    note = None
    if costs is None:
        costs, note = bundled_costs(backend, target)
    if costs is None and choice == AUTO:
        return Scheduling(Fixed(gamma), None, None, note)
    is_ahead = choice == "async" or (choice == AUTO and _gains_from_launching(backend, target))
    scheduler = Asynchronous(costs) if is_ahead else Algorithm1(costs)
    return Scheduling(scheduler, costs, bypass or Bypass(), note)


def without_costs(choice: str, gamma: int) -> Fixed | Threshold | None:
    """``fixed:K`` (``fixed``: γ) and ``threshold:C``, which weigh no costs; None: another name.

    Raises:
        RequestError: a length beyond γ, or no probability.
    """
    name, _, value = choice.partition(":")
    if name == "fixed":
        return Fixed(_length(value, gamma))
    if name == "threshold":
        return Threshold(_probability(value))
    return None


def _gains_from_launching(backend: Backend, target: TargetModel | None) -> bool:
    """Whether a budget from the past saves waits for a GPU; elsewhere this round's confidences are better."""
    draft = backend.bundle.draft
    can_launch = isinstance(backend, RunsRounds) and target is None and draft.chain is None
    has_head = draft.confidence is not ConfidenceInput.NONE
    return can_launch and has_head and backend.options.device != "cpu"


def bundled_costs(
    backend: Backend, target: TargetModel | None = None
) -> tuple[CostModel | None, str | None]:
    """The bundle's cost table if it holds here, or why there is none."""
    path = backend.bundle.path / COST_TABLE
    if not path.exists():
        return None, (
            "no cost table: drafts are not trimmed by cost and drafting is never bypassed. "
            f"{_how_to_measure(backend, target)}"
        )
    try:
        costs = load_cost_table(path).require_origin(**cost_origin(backend, target))
        return costs.require_informative(), None
    except TableError as error:
        return None, f"{error.reason}; it is not used. {_how_to_measure(backend, target)}"


def _how_to_measure(backend: Backend, target: TargetModel | None) -> str:
    if target is not None:
        return "Measure one for your target: profile of dspark_trt.runtime.profiling"
    options = backend.options
    threads = "" if options.threads is None else f" --threads {options.threads}"
    others = "" if backend.name == "onnxruntime" else f" --backend {backend.name}"
    return f"Measure one here: dspark-trt profile {backend.bundle.path}{threads}{others}"


def beyond_measured(costs: CostModel | None, max_batch: int, bundle: Path) -> str | None:
    """What to measure if the engine may run more requests at a time than its costs know."""
    if not isinstance(costs, RoundCosts) or costs.requests[-1] >= max_batch:
        return None
    return (
        f"the cost table knows rounds of up to {costs.requests[-1]} requests, this engine runs up to {max_batch}: "
        f"beyond it costs are extrapolated. Measure: dspark-trt profile {bundle} --max-requests {max_batch}"
    )


def _length(text: str, gamma: int) -> int:
    if not text:
        return gamma
    if not text.isdecimal() or int(text) > gamma:
        raise RequestError(f"fixed:{text}: expected a length from 0 to {gamma}")
    return int(text)


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise RequestError(f"threshold:{text}: expected a probability from 0 to 1")
    return value
