# SPDX-License-Identifier: Apache-2.0
"""Arms of one comparison take turns, in another order every time, so that what else the machine does hits
all of them alike; figures are medians, and ratios are taken within one run.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

Arm = Callable[[], object]
Clock = Callable[[], float]


def seconds_by_turns(
    arms: Mapping[str, Arm],
    *,
    seconds: float,
    turns: int = 5,
    calls: int = 1,
    clock: Clock = time.perf_counter,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Seconds of every call of every arm.

    Args:
        arms: what to run, by name. One call of each warms up and is not counted.
        seconds: to go on for, once there were enough turns.
        turns: at least so many.
        calls: of an arm in a row; the first of several finds the caches of others and is not counted.
        clock: `clock_for` says which.
        seed: of the order.
    """
    order = np.random.default_rng(seed)
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        arm()
    end = time.perf_counter() + seconds
    turn = 0
    while turn < turns or time.perf_counter() < end:
        for name in order.permutation(list(arms)).tolist():
            own = [_timed(arms[name], clock) for _ in range(calls)]
            taken[name] += own[calls > 1 :]
        turn += 1
    return taken


def clock_for(threads: int | None) -> Clock:
    """With one thread on a CPU its own time, so that what other processes take does not count."""
    return time.thread_time if threads == 1 else time.perf_counter


def medians(taken: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in taken.items()}


def _timed(arm: Arm, clock: Clock) -> float:
    started = clock()
    arm()
    return clock() - started
