# SPDX-License-Identifier: Apache-2.0
"""Who shares device memory: drafter, target, verifier and rounds of one engine, and nobody else."""

from collections.abc import Callable
from typing import Generic, TypeVar

Parts = TypeVar("Parts")

_ROLES = 4  # drafter, target, verifier, rounds


class OpenParts(Generic[Parts]):
    """Gives out parts for so many requests; a role asked for again means that the next engine begins."""

    def __init__(self, make: Callable[[int], Parts]) -> None:
        self._make = make
        self._open: dict[int, tuple[Parts, set[str]]] = {}

    def take(self, requests: int, role: str) -> Parts:
        found = self._open.pop(requests, None)
        if found is None or role in found[1]:
            found = (self._make(requests), set())
        parts, taken = found
        taken.add(role)
        if len(taken) < _ROLES:
            self._open[requests] = (parts, taken)
        return parts
