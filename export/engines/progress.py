# SPDX-License-Identifier: Apache-2.0
"""How far a build is, from the nested phases that TensorRT's `IProgressMonitor` reports."""

from dataclasses import dataclass


@dataclass(slots=True)
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class PhaseTree:
    """Phases that are running. A phase counts as done as its steps, plus the fraction of a running child."""

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._furthest = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        self._phases[name] = _Phase(parent, max(steps, 1))

    def step(self, name: str, index: int) -> None:
        self._phases[name].done = index + 1

    def finish(self, name: str) -> None:
        self._phases.pop(name, None)

    @property
    def current(self) -> str:
        """The phase started last."""
        return next(reversed(self._phases), "")

    @property
    def fraction(self) -> float:
        """In [0, 1], never falling."""
        roots = [
            name for name, phase in self._phases.items() if phase.parent not in self._phases
        ]
        furthest = max((self._fraction(name) for name in roots), default=0.0)
        self._furthest = max(self._furthest, furthest)
        return self._furthest

    def _fraction(self, name: str) -> float:
        phase = self._phases[name]
        children = [child for child, other in self._phases.items() if other.parent == name]
        inside = max(map(self._fraction, children), default=0.0)
        return min((phase.done + inside) / phase.steps, 1.0)
