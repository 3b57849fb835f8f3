# SPDX-License-Identifier: Apache-2.0
"""What a round costs where requests and rows both count, as on a CPU: a measured grid.

SPS(B) of the paper knows tokens only: right where weights are read once for all of them. On a CPU eight
rows of one request and one row of eight requests are different steps, and where attention is padded to
the longest block, so are even and uneven lengths. The grid holds rounds in which R requests with a
context of so many tokens verify k drafts each; in between it is linear. A step whose longest block is L
costs what R blocks of L cost, less ``row_seconds`` for each row that shorter blocks leave out.

Legend: m measured request counts, n measured lengths, c measured contexts, R requests, V = Σℓ.
"""

from collections.abc import Mapping
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
from dspark_trt.runtime.cost_table import CostTable

FORMAT = "dspark-round-costs-1"
_CONTEXT_STEP = 32

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, init=False)
class RoundCosts(CostModel):
    """Seconds of measured rounds. A longer block never costs less: what was measured otherwise is noise."""

    requests: NDArray[np.int64]  # [m]
    lengths: NDArray[np.int64]  # [n] 0, .., γ
    context_tokens: NDArray[np.int64]  # [c]
    step_seconds: Floats  # [c, m, n] all but the draft step
    draft_seconds: Floats  # [c, m]
    row_seconds: Floats  # [c, m]
    origin: Mapping[str, str]
    flaw: str | None
    pays_longest: bool
    sees_context: bool
    _curves: dict[tuple[int, int, int, int | None], Floats] = field(repr=False)
    _draft_costs: dict[tuple[int, int], float] = field(repr=False)

    def __init__(
        self,
        requests: ArrayLike,
        lengths: ArrayLike,
        step_seconds: ArrayLike,
        draft_seconds: ArrayLike,
        *,
        context_tokens: ArrayLike,
        row_seconds: ArrayLike | None = None,  # None: uneven lengths cost what even ones do
        origin: Mapping[str, str] | None = None,
    ) -> None:
        """Raises TableError for arrays that do not fit together, are not finite or not positive."""
        running, blocks = counts(requests, "requests"), _lengths(lengths)
        contexts = counts(context_tokens, "context_tokens")
        shape = (contexts.size, running.size, blocks.size)
        steps = _shaped(step_seconds, "step_seconds", shape)
        drafts = _shaped(draft_seconds, "draft_seconds", shape[:2])
        rows = (
            np.zeros(shape[:2])
            if row_seconds is None
            else _shaped(row_seconds, "row_seconds", shape[:2])
        )
        if not np.all(steps > 0):
            raise TableError(f"step_seconds must be positive, got {steps.min()}")
        if drafts.min() < 0 or rows.min() < 0:
            raise TableError("draft_seconds and row_seconds must be at least 0")
        for name, value in {
            "requests": running,
            "lengths": blocks,
            "context_tokens": contexts,
            "step_seconds": read_only(np.maximum.accumulate(steps, axis=2)),
            "draft_seconds": drafts,
            "row_seconds": rows,
            "origin": dict(origin or {}),
            "flaw": _flaw(blocks, steps),
            "pays_longest": row_seconds is not None,
            "sees_context": contexts.size > 1,
            "_curves": {},
            "_draft_costs": {},
        }.items():
            object.__setattr__(self, name, value)

    @property
    def gamma(self) -> int:
        return int(self.lengths[-1])

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
        """As ``CostModel`` says; without ``requests`` every token is one request's."""
        running = requests or first
        key = (running, drafting, self._rounded(context_tokens), longest)
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = read_only(self._curve(*key))
        known = curve[first - running : last - running + 1]
        beyond = last - running - curve.size + 1
        if beyond > 0:  # more than γ drafts a request were never measured: go on as steeply
            slope = curve[-1] - curve[-2]
            known = np.append(known, curve[-1] + slope * np.arange(1, beyond + 1))
        return known[first - last - 1 :]

    def draft_cost(self, drafting: int, context_tokens: float | None = None) -> float:
        """Linear between measured request counts."""
        key = (drafting, self._rounded(context_tokens))
        cost = self._draft_costs.get(key)
        if cost is None:
            cost = float(self._at(self.draft_seconds, *key)) * (drafting > 0)
            self._draft_costs[key] = cost
        return cost

    def padded_to(self, tokens: int) -> int:
        """``tokens`` themselves: no size is padded."""
        return tokens

    def cost_table(self, requests: int, context_tokens: float | None = None) -> CostTable:
        """SPS(B) of so many requests, for formats that know tokens only."""
        return CostTable(
            requests * (1 + self.lengths),
            1.0 / self._at(self.step_seconds, requests, context_tokens),
            requests=self.requests,
            draft_seconds=self._at_context(self.draft_seconds, context_tokens),
            padded=False,
            origin=self.origin,
        )

    def _rounded(self, context_tokens: float | None) -> int:
        """Curves are tabulated for contexts this far apart."""
        if context_tokens is None:
            return int(self.context_tokens[-1])
        return -(-int(context_tokens) // _CONTEXT_STEP) * _CONTEXT_STEP

    def _curve(self, requests: int, drafting: int, context: int, longest: int | None) -> Floats:
        """Seconds of a round by V, [R·γ + 1]."""
        measured = self._at(self.step_seconds, requests, context)
        drafts = np.arange(requests * self.gamma + 1)
        step = np.interp(drafts / requests, self.lengths, measured)
        if longest is not None:
            full = np.interp(longest, self.lengths, measured)
            row = self._at(self.row_seconds, requests, context)
            step = np.maximum(step, full - row * (requests * longest - drafts))
        return np.asarray(step + self.draft_cost(drafting, context))

    def _at(self, values: Floats, requests: int, context: float | None) -> Floats:
        """[c, m, ..] -> [..]."""
        return _between(self.requests, self._at_context(values, context), requests)

    def _at_context(self, values: Floats, context: float | None) -> Floats:  # [c, ..] -> [..]
        longest = float(self.context_tokens[-1])
        return _between(self.context_tokens, values, longest if context is None else context)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "requests": self.requests.tolist(),
            "lengths": self.lengths.tolist(),
            "context_tokens": self.context_tokens.tolist(),
            "step_seconds": self.step_seconds.tolist(),
            "draft_seconds": self.draft_seconds.tolist(),
            "row_seconds": self.row_seconds.tolist() if self.pays_longest else None,
            "origin": dict(self.origin),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Build from ``to_json`` output; TableError if keys are missing or the fingerprint differs."""
        try:
            costs = cls(
                data["requests"],
                data["lengths"],
                data["step_seconds"],
                data["draft_seconds"],
                context_tokens=data["context_tokens"],
                row_seconds=data["row_seconds"],
                origin=data["origin"],
            )
        except KeyError as missing:
            raise TableError(
                f"cost table lacks {missing}; expected format {FORMAT}"
            ) from missing
        return costs.require_fingerprint(data.get("fingerprint", costs.fingerprint))


def _between(
    points: NDArray[np.int64], values: Floats, place: float
) -> Floats:  # [p, ..] -> [..]
    """Linear between points, the first value below them, and on as the last two go beyond them."""
    if points.size == 1 or place <= points[0]:
        return np.asarray(values[0])
    upper = min(int(np.searchsorted(points, place)), points.size - 1)
    low, high = points[upper - 1 : upper + 1]
    rise = np.maximum(values[upper] - values[upper - 1], 0.0)
    return np.asarray(values[upper - 1] + rise * ((place - low) / (high - low)))


def _lengths(values: ArrayLike) -> NDArray[np.int64]:
    blocks = np.asarray(values)
    if blocks.ndim != 1 or not blocks.size or blocks[0] != 0:
        raise TableError(f"lengths must start at 0, got {blocks.tolist()}")
    return read_only(np.append(0, counts(blocks[1:], "lengths")).astype(np.int64))


def _shaped(values: ArrayLike, name: str, shape: tuple[int, ...]) -> Floats:
    array = finite(values, name)
    if array.shape != shape:
        raise TableError(f"{name} must be {list(shape)}, got {list(array.shape)}")
    return array


def _flaw(lengths: NDArray[np.int64], steps: Floats) -> str | None:
    if lengths.size < 2:
        return "the cost table has one point only (length 0)"
    rise = float((steps[..., -1] / steps[..., 0]).max() - 1)
    if rise < FLAT_SPREAD:
        return (
            f"the cost table is flat: verifying {lengths[-1]} drafts costs {100 * rise:.2f} % more "
            "than none"
        )
    return None
