# SPDX-License-Identifier: Apache-2.0
"""The machine's cost curve: how many target steps a second it runs when B tokens go through at once.

SPS(B) of the paper (section 3.2.2). A round costs ``1 / SPS(B)`` for the target step over
B = Σ(1 + ℓ_r) tokens, plus what was measured apart: drafting for R requests, and reading the context
rows of R requests. What was not measured apart has to be inside ``steps_per_second``.

Legend: n measured token counts, c context buckets, m measured request counts, R requests,
B tokens of one target step.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.errors import TableError
from dspark_trt.runtime.cost_model import (
    FLAT_SPREAD,
    CostModel,
    counts,
    finite,
    read_only,
)

FORMAT = "dspark-cost-table-1"
_MAX_TOKENS = 1 << 20  # the curve is tabulated densely up to its last point

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, init=False)
class CostTable(CostModel):
    """Step rate by batch tokens, optionally by mean context length, with the machine it belongs to.

    Between measured points the cost is a staircase when ``padded`` (B tokens pay for the next
    measured size, as captured CUDA graphs do) and linear otherwise. Past the last point it goes on
    with the steepest measured slope, so what was never measured never looks cheap. Measured rates
    that rise with B are noise: the cost used is the running maximum.
    """

    tokens: NDArray[np.int64]  # [n]
    steps_per_second: Floats  # [c, n]
    context_tokens: tuple[int, ...]  # [c], or () with c = 1
    requests: NDArray[np.int64]  # [m]
    draft_seconds: Floats  # [m]
    context_seconds: float
    padded: bool
    origin: Mapping[str, str]  # machine, backend, versions, bundle hash
    flaw: str | None
    sees_context: bool
    _curves: Floats = field(repr=False)  # [c, tokens[-1] + 1] seconds
    _smooth: Floats = field(repr=False)  # the same, linear between points
    _slopes: Floats = field(repr=False)  # [c] seconds a token past the last point

    def __init__(
        self,
        tokens: ArrayLike,  # [n] positive, strictly increasing
        steps_per_second: ArrayLike,  # [n], or [c, n] with context_tokens
        *,
        context_tokens: Sequence[
            int
        ] = (),  # [c] upper edges of the buckets of mean context length
        requests: ArrayLike = (),  # [m] positive, strictly increasing
        draft_seconds: ArrayLike = (),  # [m] what drafting so many requests adds to a step
        context_seconds: float = 0.0,  # for each context row that attention reads
        padded: bool = True,
        origin: Mapping[str, str] | None = None,
    ) -> None:
        """Raises TableError for empty, unequal, non-finite, non-positive or unordered arrays."""
        rates = np.atleast_2d(finite(steps_per_second, "steps_per_second"))
        sizes = counts(tokens, "tokens")
        drafting = counts(requests, "requests")
        added = finite(draft_seconds, "draft_seconds")
        edges = tuple(int(edge) for edge in context_tokens)
        if not sizes.size or rates.ndim != 2 or rates.shape[1] != sizes.size:
            raise TableError(
                f"steps_per_second has shape {rates.shape} for {sizes.size} token counts; "
                "expected one rate for each, and at least one"
            )
        if sizes[-1] > _MAX_TOKENS:
            raise TableError(f"tokens reach {sizes[-1]}, expected at most {_MAX_TOKENS} a step")
        if not np.all(rates > 0):
            raise TableError(f"steps_per_second must be positive, got {rates.min()}")
        if added.shape != drafting.shape or np.any(added < 0):
            raise TableError(
                f"draft_seconds must hold one non-negative value for each of {drafting.size} "
                f"request counts, got {added.tolist()}"
            )
        if not 0 <= context_seconds < np.inf:
            raise TableError(f"context_seconds must be at least 0, got {context_seconds}")
        bucketed = edges or len(rates) > 1
        if (bucketed and len(edges) != len(rates)) or list(edges) != sorted(set(edges)):
            raise TableError(
                f"context_tokens {list(edges)} must be {len(rates)} increasing bucket edges"
            )
        seconds = np.maximum.accumulate(1.0 / rates, axis=1)
        every = np.arange(sizes[-1] + 1)
        smooth = np.stack([np.interp(every, sizes, row) for row in seconds])
        curves = seconds[:, np.searchsorted(sizes, every)] if padded else smooth
        slopes = np.diff(seconds, axis=1) / np.diff(sizes)
        for name, value in {
            "tokens": sizes,
            "steps_per_second": rates,
            "context_tokens": edges,
            "requests": drafting,
            "draft_seconds": added,
            "context_seconds": float(context_seconds),
            "padded": padded,
            "sees_context": bool(context_seconds) or len(edges) > 1,
            "origin": dict(origin or {}),
            "flaw": _flaw(sizes, seconds),
            "_curves": read_only(curves),
            "_smooth": read_only(smooth),
            "_slopes": slopes.max(axis=1, initial=0.0),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def max_tokens(self) -> int:
        """Largest measured B."""
        return int(self.tokens[-1])

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
        """As ``CostModel`` says: ``requests`` are those whose context is read; ``longest`` is not used."""
        bucket = self._bucket(context_tokens)
        curve = (self._smooth if smooth else self._curves)[bucket]
        known = curve[first : last + 1]
        if last >= curve.size:
            beyond = np.arange(max(first, curve.size), last + 1) - (curve.size - 1)
            known = np.concatenate([known, curve[-1] + self._slopes[bucket] * beyond])
        reading = self.context_seconds * requests * (context_tokens or 0.0)
        return np.asarray(known + (self.draft_cost(drafting) + reading))

    def padded_to(self, tokens: int) -> int:
        """The next measured size, or ``tokens`` themselves."""
        if not self.padded or tokens >= self.max_tokens:
            return tokens
        return int(self.tokens[np.searchsorted(self.tokens, tokens)])

    def draft_cost(self, drafting: int, context_tokens: float | None = None) -> float:
        """0 if it was not measured apart; the same at every context."""
        if not drafting or not self.requests.size:
            return 0.0
        return float(np.interp(drafting, self.requests, self.draft_seconds))

    def _bucket(self, context_tokens: float | None) -> int:
        """The first whose upper edge is not below; the last beyond or for None."""
        last = len(self._curves) - 1
        if context_tokens is None:
            return last
        return min(bisect_left(self.context_tokens, context_tokens), last)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "tokens": self.tokens.tolist(),
            "steps_per_second": self.steps_per_second.tolist(),
            "context_tokens": list(self.context_tokens),
            "requests": self.requests.tolist(),
            "draft_seconds": self.draft_seconds.tolist(),
            "context_seconds": self.context_seconds,
            "padded": self.padded,
            "origin": dict(self.origin),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Build from ``to_json`` output; TableError if keys are missing or the fingerprint differs."""
        try:
            table = cls(
                data["tokens"],
                data["steps_per_second"],
                context_tokens=tuple(data["context_tokens"]),
                requests=data["requests"],
                draft_seconds=data["draft_seconds"],
                context_seconds=data["context_seconds"],
                padded=bool(data["padded"]),
                origin=data["origin"],
            )
        except KeyError as missing:
            raise TableError(
                f"cost table lacks {missing}; expected format {FORMAT}"
            ) from missing
        return table.require_fingerprint(data.get("fingerprint", table.fingerprint))


def _flaw(tokens: NDArray[np.int64], seconds: Floats) -> str | None:
    if tokens.size < 2:
        return f"the cost table has one point only ({tokens[0]} tokens)"
    rise = float((seconds[:, -1] / seconds[:, 0]).max() - 1)
    if rise < FLAT_SPREAD:
        return (
            f"the cost table is flat: {tokens[-1]} tokens cost {100 * rise:.2f} % more than "
            f"{tokens[0]}"
        )
    return None
