# SPDX-License-Identifier: Apache-2.0
"""A step as captured graphs, one a bucket; eagerly where there are none, or where they were refused."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dspark_trt.errors import BackendError, first_line
from dspark_trt.runtime.backends.torch_failures import call_alone
from dspark_trt.runtime.cuda_graphs.buckets import GraphKey, RecentGraphs

_log = logging.getLogger(__name__)

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


class StepGraphs:
    """Runs `step(key)`, which reads and writes static buffers only. Run again on the same inputs it gives the
    same outputs, once `state` is put back: the tensors it changes as well as reads.

    The first run of a bucket is eager; the graph captured then is replayed and has to give the same bits, or
    this step uses no graphs any more: `refusal` says why, and so does the log.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[GraphKey], None],
        outputs: Sequence[Tensor],
        *,
        capture: Capture | None,
        limit: int,
        state: Sequence[Tensor] = (),
        named: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.name = name
        self.refusal: str | None = None
        self.captured = self.replayed = 0
        self._step, self._capture = step, capture
        self._outputs, self._state = outputs, state
        self._named = named  # a range of the profiler's timeline
        self._graphs: RecentGraphs[Replay] = RecentGraphs(max(limit, 1))
        self._version = 0

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Buckets with a graph, least recently used first."""
        return self._graphs.keys

    def run(self, key: GraphKey, version: int = 0) -> None:
        """Run one step; `version` changes when buffers outside the plan (caches) have moved.

        Raises:
            BackendError: torch failed, for want of memory as a rule; the step can be run again.
        """
        named = f"{self.name} {key.batch}x{key.rows}"
        with self._named(named):
            call_alone(f"step {named}", self._run, key, version)

    def _run(self, key: GraphKey, version: int) -> None:
        if self._capture is None or self.refusal is not None:
            self._step(key)
            return
        if version != self._version:
            self._graphs.clear()
            self._version = version
        replay = self._graphs.get(key)
        if replay is None:
            self._first(key, self._capture)
        else:
            self.replayed += 1
            replay()

    def clear(self) -> None:
        """Release all graphs: before the memory they point at."""
        self._graphs.clear()

    def _first(self, key: GraphKey, capture: Capture) -> None:
        before = [tensor.clone() for tensor in self._state]
        try:
            eager = self._outputs_of(lambda: self._step(key))
        except (RuntimeError, BackendError):
            self._put_back(before)  # the step is run again, and counts once
            raise
        try:
            self._put_back(before)
            replay = capture(lambda: self._step(key))
            self._put_back(before)
            replayed = self._outputs_of(replay)
        except (RuntimeError, BackendError) as error:
            reason = f"capture failed: {first_line(error)}"
        else:
            if all(map(_same_bits, eager, replayed)):
                self.captured += 1
                self._graphs.put(key, replay)
                return
            reason = "a replay gave other bits than the eager step"
        self.refusal = f"{self.name} {key.batch}x{key.rows}: {reason}"
        self._graphs.clear()
        _log.warning("CUDA graphs are not used: %s", self.refusal)
        self._put_back(before)
        self._step(key)

    def _outputs_of(self, run: Callable[[], None]) -> list[Tensor]:
        for output in self._outputs:
            output.zero_()  # a graph that records nothing must not pass
        run()
        return [tensor.clone() for tensor in (*self._outputs, *self._state)]

    def _put_back(self, state: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._state, state, strict=True):
            tensor.copy_(value)


def cuda_capture(pool: Any) -> Capture:
    """Capture into graphs that share one memory pool: they run one after the other."""

    def capture(step: Callable[[], None]) -> Replay:
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels are compiled and libraries allocate before the capture
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            step()
        return graph.replay

    return capture


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
