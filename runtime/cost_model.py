# SPDX-License-Identifier: Apache-2.0
"""What schedulers ask of costs, however they were measured: seconds of a whole round.

Two descriptions of a machine answer: ``CostTable``, the paper's SPS(B) by tokens of a step, and
``RoundCosts``, a grid by requests and verified drafts, for machines where both count.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import TableError
from dspark_trt.files import write_json

FLAT_SPREAD = (
    0.01  # costs that rise less than this tell verification lengths apart by noise only
)

Floats = NDArray[np.float64]


class CostModel(ABC):
    """Costs of one machine, bundle and backend, and where they come from."""

    origin: Mapping[str, str]  # machine, backend, versions, bundle hash
    flaw: str | None  # why they cannot tell verification lengths apart
    pays_longest: bool = (
        False  # whether the longest block and context of a step cost all requests
    )
    sees_context: bool = False  # whether context length changes the cost

    @abstractmethod
    def seconds(
        self,
        first: int,
        last: int,
        *,
        requests: int = 0,
        drafting: int = 0,
        context_tokens: float | None = None,
        smooth: bool = False,
        longest: int | None = None,
    ) -> Floats:
        """Seconds of a round over B = first..last target tokens, [last - first + 1].

        ``requests`` run, ``drafting`` of them drafted; ``context_tokens`` is their mean context length,
        or the longest where that costs all (None: the longest measured). ``smooth`` draws lines between measured sizes. ``longest`` is the
        longest verification length of the step (None: lengths are even).
        """

    @abstractmethod
    def draft_cost(self, drafting: int, context_tokens: float | None = None) -> float:
        """Seconds that drafting for so many requests adds to a round."""

    @abstractmethod
    def padded_to(self, tokens: int) -> int:
        """The size that ``tokens`` of a step pay for anyway."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]: ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 over every number and the origin."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return sha256(canonical.encode()).hexdigest()

    def require_fingerprint(self, recorded: str) -> Self:
        """Raise TableError if the costs are not those that were saved; return them otherwise."""
        if recorded != self.fingerprint:
            raise TableError(
                "the cost table was edited after it was measured (its fingerprint differs)",
                "Measure it again: dspark-trt profile BUNDLE",
            )
        return self

    def require_informative(self) -> Self:
        """Raise TableError for costs that are flat or a single point; return them otherwise."""
        if self.flaw:
            raise TableError(self.flaw, "Measure more sizes: dspark-trt profile BUNDLE")
        return self

    def require_origin(self, **expected: str) -> Self:
        """Raise TableError unless measured on this machine, backend and bundle."""
        foreign = [
            f"{key} {self.origin.get(key, 'not recorded')!r} instead of {value!r}"
            for key, value in expected.items()
            if self.origin.get(key) != value
        ]
        if foreign:
            raise TableError(
                f"the cost table is foreign: {', '.join(foreign)}",
                "Measure this machine: dspark-trt profile BUNDLE",
            )
        return self

    def save(self, path: Path) -> None:
        """Write the costs with their fingerprint; nothing half-written stays behind."""
        write_json(path, {**self.to_json(), "fingerprint": self.fingerprint})


def read_only(values: NDArray[Any]) -> NDArray[Any]:
    values.setflags(write=False)
    return values


def finite(values: Any, name: str) -> Floats:
    """A read-only copy; TableError unless all are finite numbers in one shape."""
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TableError(f"{name} must be numbers in rows of one length: {error}") from error
    if not np.all(np.isfinite(array)):
        raise TableError(
            f"{name} holds {array[~np.isfinite(array)][0]}, expected finite numbers"
        )
    return read_only(array)


def counts(values: Any, name: str) -> NDArray[np.int64]:
    """Positive, strictly increasing integers; TableError otherwise."""
    exact = finite(values, name)
    if exact.ndim != 1 or np.any((exact < 1) | (exact >= 2**63) | (exact != np.floor(exact))):
        raise TableError(f"{name} must be a list of positive integers, got {exact.tolist()}")
    array = exact.astype(np.int64)
    if np.any(np.diff(array) <= 0):
        raise TableError(f"{name} must be strictly increasing, got {array.tolist()}")
    return read_only(array)
