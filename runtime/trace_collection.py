# SPDX-License-Identifier: Apache-2.0
"""Traces from the engine itself: prompts are answered, every draft is verified, every round recorded."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dspark_trt.errors import RequestError
from dspark_trt.runtime.engine import Engine
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.scheduler import Fixed
from dspark_trt.runtime.trace_recorder import TraceRecorder
from dspark_trt.runtime.traces import Traces

Progress = Callable[[int, int], None]  # done, of how many


class Prompt(NamedTuple):
    token_ids: tuple[int, ...]
    domain: str = "all"


def collect_traces(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 96,
    temperature: float = 1.0,
    samples: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> Traces:
    """Answer every prompt ``samples`` times and record the rounds.

    A prompt's samples are in one half of the split, and domains are spread over both.

    Raises:
        RequestError: no prompts, or the engine's scheduler does not verify every draft.
        TableError: not one round was drafted.
    """
    if not prompts:
        raise RequestError("no prompts to collect traces with")
    if engine.planner.scheduler != Fixed(engine.gamma):
        raise RequestError(
            f"traces for calibration need every draft verified: open the engine with fixed:{engine.gamma}"
        )
    recorder = TraceRecorder(engine.bundle)
    engine.observers.append(recorder.observe)
    order = sorted(range(len(prompts)), key=lambda index: prompts[index].domain)
    place: dict[
        int, int
    ] = {}  # request id -> place in the order: neighbours go to different halves
    try:
        for sample in range(samples):
            for position, index in enumerate(order):
                params = SamplingParams(
                    temperature=temperature,
                    max_new_tokens=max_new_tokens,
                    seed=seed + sample * len(prompts) + index,
                )
                request = Request(prompt_ids=prompts[index].token_ids, params=params)
                place[engine.submit(request)] = position
        _run(engine, len(place), progress)
    finally:
        engine.observers.remove(recorder.observe)
    for request_id in place:
        engine.discard(request_id)
    domains = sorted({prompt.domain for prompt in prompts})
    return recorder.traces(
        prompt_of=place,
        domain_of={
            request_id: domains.index(prompts[order[position]].domain)
            for request_id, position in place.items()
        },
        domain_names=domains,
    )


def _run(engine: Engine, total: int, progress: Progress | None) -> None:
    before = sum(engine.metrics.finished.values())
    while engine.has_work:
        engine.step()
        if progress is not None:
            progress(sum(engine.metrics.finished.values()) - before, total)
