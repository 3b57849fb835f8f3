# SPDX-License-Identifier: Apache-2.0
"""What a round costs where requests and rows both count, as on a CPU: a measured grid.

SPS(B) of the paper knows tokens only: right where weights are read once for all of them. On a CPU eight
rows of one request and one row of eight requests are different steps, and where attention is padded to
the longest block, so are even and uneven lengths. The grid holds rounds in which R requests verify k
drafts each; in between it is linear. A step whose longest block is L costs what R blocks of L cost, less
``row_seconds`` for each row that shorter blocks leave out.

Legend: m measured request counts, n measured lengths, c context buckets, R requests, V = Σℓ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.errors import TableError
from dspark_trt.runtime.cost_model import (
    FLAT_SPREAD,
    CostModel,
    bucket_of,
    counts,
    finite,
    read_only,
)
from dspark_trt.runtime.cost_table import CostTable

FORMAT = "dspark-round-costs-1"

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, init=False)
class RoundCosts(CostModel):
    """Seconds of measured rounds. More lengths never cost less: what was measured otherwise is noise."""

    requests: NDArray[np.int64]  # [m]
    lengths: NDArray[np.int64]  # [n] 0, .., γ
    context_tokens: tuple[int, ...]  # [c] upper edges of the buckets
    step_seconds: Floats  # [c, m, n] all but the draft step
    draft_seconds: Floats  # [c, m]
    row_seconds: Floats  # [c, m]
    origin: Mapping[str, str]
    flaw: str | None
    pays_longest: bool
    sees_context: bool
    _curves: dict[tuple[int, int, int, int | None], Floats] = field(repr=False)

    def __init__(
        self,
        requests: ArrayLike,
        lengths: ArrayLike,
        step_seconds: ArrayLike,
        draft_seconds: ArrayLike,
        *,
        context_tokens: Sequence[int],
        row_seconds: ArrayLike | None = None,  # None: uneven lengths cost what even ones do
        origin: Mapping[str, str] | None = None,
    ) -> None:
        """Raises TableError for arrays that do not fit together, are not finite or not positive."""
        running, blocks = counts(requests, "requests"), _lengths(lengths)
        edges = tuple(counts(context_tokens, "context_tokens").tolist())
        shape = (len(edges), running.size, blocks.size)
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
            "context_tokens": edges,
            "step_seconds": read_only(np.maximum.accumulate(steps, axis=2)),
            "draft_seconds": drafts,
            "row_seconds": rows,
            "origin": dict(origin or {}),
            "flaw": _flaw(blocks, steps),
            "pays_longest": row_seconds is not None,
            "sees_context": len(edges) > 1,
            "_curves": {},
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
        key = (running, drafting, bucket_of(self.context_tokens, context_tokens), longest)
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
        bucket = bucket_of(self.context_tokens, context_tokens)
        return float(self._at_requests(self.draft_seconds[bucket], drafting)) * (drafting > 0)

    def padded_to(self, tokens: int) -> int:
        """``tokens`` themselves: no size is padded."""
        return tokens

    def cost_table(self, requests: int, context_tokens: float | None = None) -> CostTable:
        """SPS(B) of so many requests, for formats that know tokens only."""
        bucket = bucket_of(self.context_tokens, context_tokens)
        return CostTable(
            requests * (1 + self.lengths),
            1.0 / self._at_requests(self.step_seconds[bucket], requests),
            requests=self.requests,
            draft_seconds=self.draft_seconds[bucket],
            padded=False,
            origin=self.origin,
        )

    def _curve(self, requests: int, drafting: int, bucket: int, longest: int | None) -> Floats:
        """Seconds of a round by V, [R·γ + 1]."""
        measured = self._at_requests(self.step_seconds[bucket], requests)
        drafts = np.arange(requests * self.gamma + 1)
        step = np.interp(drafts / requests, self.lengths, measured)
        if longest is not None:
            full = np.interp(longest, self.lengths, measured)
            row = self._at_requests(self.row_seconds[bucket], requests)
            step = np.maximum(step, full - row * (requests * longest - drafts))
        if drafting:
            step = step + self._at_requests(self.draft_seconds[bucket], drafting)
        return np.asarray(step)

    def _at_requests(self, values: Floats, requests: int) -> Floats:  # [m, ..] -> [..]
        """Linear between measured request counts, and on as the last two go."""
        if self.requests.size == 1 or requests <= self.requests[0]:
            return np.asarray(values[0])
        upper = min(int(np.searchsorted(self.requests, requests)), self.requests.size - 1)
        low, high = self.requests[upper - 1 : upper + 1]
        share = (requests - low) / (high - low)
        return np.asarray(
            values[upper - 1] + np.maximum(values[upper] - values[upper - 1], 0.0) * share
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "requests": self.requests.tolist(),
            "lengths": self.lengths.tolist(),
            "context_tokens": list(self.context_tokens),
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
