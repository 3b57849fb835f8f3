# SPDX-License-Identifier: Apache-2.0
"""Which context rows of a slot are valid: kept as facts about appended rows, never assumed."""

from dspark_trt.errors import MissingContextError


class ContextRows:
    """Disjoint intervals of absolute positions whose rows were appended, in order."""

    def __init__(self) -> None:
        self._intervals: list[tuple[int, int]] = []  # [start, end), ascending, never touching

    @property
    def end(self) -> int:
        """Position after the last row: where the anchor sits."""
        return self._intervals[-1][1] if self._intervals else 0

    def add(self, start: int, count: int) -> None:
        """Rows `start .. start + count` were written.

        Writing over rows that exist rewrites history, so everything behind the written rows is dropped;
        filling a gap keeps what is behind it.
        """
        end = start + count
        overlaps = any(a < end and start < b for a, b in self._intervals)
        kept = [
            (a, min(b, start)) if a < start else (a, b)
            for a, b in self._intervals
            if a < start or (a >= end and not overlaps)
        ]
        merged: list[tuple[int, int]] = []
        for a, b in sorted([*kept, (start, end)]):
            if merged and merged[-1][1] == a:
                merged[-1] = (merged[-1][0], b)
            else:
                merged.append((a, b))
        self._intervals = merged

    def truncate(self, length: int) -> None:
        """Forget rows from position `length` on."""
        self._intervals = [(a, min(b, length)) for a, b in self._intervals if a < length]

    def require_complete(self, slot: int) -> int:
        """Number of rows, all of them valid.

        Raises:
            MissingContextError: naming the first missing rows.
        """
        position = 0
        for a, b in self._intervals:
            if a != position:
                raise MissingContextError(
                    f"slot {slot}: context rows {position}..{a - 1} were never appended "
                    f"(rows up to {self.end - 1} are there). Append their taps before proposing."
                )
            position = b
        if position == 0:
            raise MissingContextError(
                f"slot {slot} has no context. Append the prompt's taps before proposing."
            )
        return position
