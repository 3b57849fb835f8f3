# SPDX-License-Identifier: Apache-2.0
"""One drafter, one target and one verifier for all engines of a comparison, and the time their calls take."""

from collections.abc import Callable
from typing import Any

from dspark_trt.runtime.backends import Backend
from dspark_trt.runtime.backends.interface import DraftModel, TargetModel, Verifier
from dspark_trt.runtime.bench_turns import Clock

ON_BACKEND = ("draft", "target", "verify")


class CallTimes:
    """Seconds inside calls, by part, all on one clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.spent: dict[str, float] = {}
        self.ended: dict[str, float] = {}  # when the last call of a part did

    def forget(self) -> None:
        self.spent = dict.fromkeys(self.spent, 0.0)

    def watch(self, owner: object, method: str, part: str) -> None:
        """Time a method from now on. The object stays itself, protocols it satisfies included."""
        call: Callable[..., Any] = getattr(owner, method)
        self.spent.setdefault(part, 0.0)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = self.clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.ended[part] = self.clock()
                self.spent[part] += self.ended[part] - started

        setattr(owner, method, timed)


class SharedModels:
    """A backend whose engines use the same models: only one of them may have work at a time."""

    def __init__(self, backend: Backend, most_requests: int, times: CallTimes) -> None:
        self.name, self.bundle, self.options = backend.name, backend.bundle, backend.options
        self._drafter = backend.draft_model(most_requests)
        self._target = backend.target_model(most_requests)
        self._verifier = backend.verifier(most_requests)
        times.watch(self._drafter, "draft", "draft")
        times.watch(self._drafter, "append", "append")
        times.watch(self._target, "step", "target")
        times.watch(self._verifier, "verify", "verify")

    def draft_model(self, requests: int) -> DraftModel:
        return self._drafter

    def target_model(self, requests: int) -> TargetModel:
        return self._target

    def verifier(self, requests: int) -> Verifier:
        return self._verifier

    def reserve(self, context_tokens: int) -> None:
        self._drafter.reserve(context_tokens)
        self._target.reserve(context_tokens)

    def close(self) -> None:
        self._drafter.close()
        self._target.close()
