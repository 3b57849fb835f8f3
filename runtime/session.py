# SPDX-License-Identifier: Apache-2.0
"""`DraftSession`: drafting for hosts that own their target, their scheduler loop, or both."""

from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.bundle import CALIBRATION, Bundle, load_bundle
from dspark_trt.errors import (
    CapacityError,
    EngineClosedError,
    MissingContextError,
    RequestError,
)
from dspark_trt.runtime.backends import Backend, open_backend
from dspark_trt.runtime.backends.interface import (
    BackendOptions,
    CacheRows,
    DraftInputs,
    DraftOutput,
)
from dspark_trt.runtime.calibration import Calibration
from dspark_trt.runtime.context_rows import ContextRows
from dspark_trt.runtime.survival import survival_from_confidence

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Proposal(NamedTuple):
    """One draft step of R slots, in the order asked for. Arrays are the caller's to keep."""

    tokens: Ints  # [R, γ]
    logits: Floats  # [R, γ, V]: after the sequential head, before temperature
    confidence_logits: Floats | None  # [R, γ]; None: the drafter has no confidence head
    confidence: NDArray[np.float64] | None  # [R, γ]: calibrated P(x_k accepted | x_<k accepted)
    survival: (
        NDArray[np.float64] | None
    )  # [R, γ]: P(first k all accepted), their cumulative product


class ContextSnapshot(NamedTuple):
    """The drafter's context of one prefix, in the cache's own form."""

    length: int
    rows: CacheRows
    latest: (
        Floats  # the rows at its end as they were appended, as many as are known (of a chain)
    )


class DraftSession:
    """Drafts for up to `slots` sequences at a time.

    Per slot: `append` the taps of committed positions, then `propose` from the anchor, the committed
    token whose position follows the appended rows (its own taps come with the next append). A chain
    drafter (Eagle3, MTP) also wants the token behind each row.
    Not thread-safe: one session, one thread at a time.
    """

    def __init__(self, backend: Backend, slots: int) -> None:
        if slots < 1:
            raise RequestError(f"slots must be at least 1, got {slots}")
        self.bundle = backend.bundle
        self.config = backend.bundle.draft
        self.calibration = load_calibration(backend.bundle)
        self._model = backend.draft_model(slots)
        self._is_closed = False
        self._slot_at = list(range(slots))  # which slot sits in each cache row
        self._rows = [ContextRows() for _ in range(slots)]
        self._written = [0] * slots  # rows of the contiguous prefix that are in the cache
        self._pending: list[list[Floats]] = [[] for _ in range(slots)]  # rows right behind them
        self._latest = [
            self._no_rows() for _ in range(slots)
        ]  # a chain starts from the last one

    @classmethod
    def load(
        cls,
        bundle: str | Path | Bundle,
        *,
        backend: str = "onnxruntime",
        slots: int = 1,
        options: BackendOptions | None = None,
    ) -> Self:
        """Open a bundle for drafting.

        Raises:
            BundleError: the bundle does not load.
            BackendError: the backend is missing or cannot run it.
        """
        loaded = bundle if isinstance(bundle, Bundle) else load_bundle(bundle)
        return cls(open_backend(backend, loaded, options), slots)

    def append(
        self, slot: int, taps: ArrayLike, start: int, tokens: ArrayLike | None = None
    ) -> None:
        """Give the taps of committed positions `start .. start + n - 1`.

        Args:
            slot: which sequence.
            taps: float32 `[n, m*H]`: outputs of the tapped layers, concatenated in id order.
            start: absolute position of the first row. Gaps may be filled later, in any order; rows
                that overlap earlier ones replace them and everything behind.
            tokens: int `[n]`, for chain drafters (others do not read them): the committed token behind each row,
                at positions `start + 1 .. start + n`; the last one is the next anchor.

        Raises:
            RequestError: no such slot, wrong shape, non-finite taps, or no tokens for a chain drafter.
            CapacityError: beyond the positions the models were made for.
            BackendError: the device failed; the rows are not there, and can be appended again.
        """
        self._check_slot(slot)
        rows = np.asarray(taps, np.float32)
        if rows.ndim != 2 or rows.shape[1] != self.config.tap_size:
            raise RequestError(
                f"slot {slot}: taps have shape {rows.shape}, expected [n, {self.config.tap_size}] "
                f"({len(self.config.target_layer_ids)} layers x {self.config.target_hidden_size})"
            )
        if not isinstance(start, Integral) or start < 0:
            raise RequestError(
                f"slot {slot}: start must be a whole number of at least 0, got {start!r}"
            )
        if not len(rows):
            return
        if not np.isfinite(rows).all():
            raise RequestError(f"slot {slot}: taps from position {start} on are not finite")
        if start + len(rows) > self.bundle.max_context_tokens:
            raise CapacityError(
                f"slot {slot}: rows up to {start + len(rows)} exceed the {self.bundle.max_context_tokens} "
                "positions this bundle was exported for"
            )
        rows = self._with_tokens(slot, rows, tokens)
        end = self._rows[slot].end
        is_last = start + len(rows) >= end  # else a gap is filled
        queued = sum(map(len, self._pending[slot]))
        if start != self._written[slot] + queued or not is_last:
            self._flush(slot)
            self._model.append(self._slot_at.index(slot), rows, start)
        elif queued + len(rows) > self.config.gamma + 1:
            self._flush(slot, rows)
        else:
            self._pending[slot].append(rows.copy())
        self._rows[slot].add(start, len(rows))  # where a device fails, they are not there
        if is_last and self.config.chain is not None:
            known = [self._latest[slot], rows] if start == end else [rows]
            self._latest[slot] = np.concatenate(known)[-(self.config.gamma + 1) :]
        self._written[slot] = min(self._written[slot], self._rows[slot].end)

    def propose(
        self,
        slots: Sequence[int],
        anchors: Sequence[int] | Ints,
        temperature: float | Sequence[float] | Floats = 0.0,
        seed: int | None = None,
        uniforms: Floats | None = None,
    ) -> Proposal:
        """Draft γ tokens for each slot.

        Args:
            slots: which sequences, each at most once.
            anchors: the last committed token of each.
            temperature: of the distribution drafted from; 0 takes the most likely token.
            seed: makes sampling repeatable; None draws a fresh one.
            uniforms: float32 `[R, γ]` in [0, 1) instead of a seed.

        Raises:
            RequestError: unknown or repeated slot, arguments of unequal length or out of range.
            MissingContextError: a slot has a gap before its anchor, or no context.
        """
        order = list(slots)
        count = len(order)
        self._check_proposal(order, anchors)
        heat = _temperatures(temperature, count)
        uniforms = self._uniforms(count, seed, uniforms)
        context = [self._rows[slot].require_complete(slot) for slot in order]
        if self.config.chain is not None:
            self._require_latest(order)
        self._gather(order)
        output = self._model.draft(self._inputs(order, context, anchors, heat, uniforms))
        for slot, rows in zip(order, context, strict=True):
            self._pending[slot].clear()
            self._written[slot] = rows
        return self._proposal(output)

    def truncate(self, slot: int, length: int) -> None:
        """Forget rows from position `length` on, as when a host rolls a sequence back.

        Raises:
            RequestError: no such slot, or a negative length.
        """
        self._check_slot(slot)
        if length < 0:
            raise RequestError(f"slot {slot}: length must be at least 0, got {length}")
        self._flush(slot)
        dropped = max(self._rows[slot].end - length, 0)
        kept = max(len(self._latest[slot]) - dropped, 0)
        self._latest[slot] = self._latest[slot][:kept]
        self._rows[slot].truncate(length)
        self._written[slot] = min(self._written[slot], length)

    def snapshot(self, slot: int, length: int | None = None) -> ContextSnapshot:
        """A copy of a slot's first `length` context rows (default: all), for a host's prefix cache.

        Raises:
            MissingContextError: a row before `length` was never appended.
            RequestError: there are fewer rows.
        """
        self._check_slot(slot)
        self._flush(slot)
        rows = self._rows[slot].require_complete(slot)
        wanted = rows if length is None else length
        if not 0 < wanted <= rows:
            raise RequestError(f"slot {slot} has {rows} context rows, cannot copy {length}")
        copied = self._model.read_rows(self._slot_at.index(slot), wanted)
        latest = self._latest[slot]
        return ContextSnapshot(wanted, copied, latest[: max(len(latest) - rows + wanted, 0)])

    def restore(self, slot: int, snapshot: ContextSnapshot) -> None:
        """Make a snapshot a slot's whole context: append the suffix next, from its `length` on."""
        self.reset(slot)
        self._model.write_rows(self._slot_at.index(slot), snapshot.rows)
        self._rows[slot].add(0, snapshot.length)
        self._written[slot] = snapshot.length
        self._latest[slot] = snapshot.latest

    def reset(self, slot: int) -> None:
        """Forget a slot's sequence, so that another one can use it."""
        self.truncate(slot, 0)

    def close(self) -> None:
        """Free the caches. The session cannot be used afterwards."""
        self._is_closed = True
        self._model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_slot(self, slot: int) -> None:
        if self._is_closed:
            raise EngineClosedError("the session is closed")
        if not 0 <= slot < len(self._rows):
            raise RequestError(
                f"slot {slot} is not one of the {len(self._rows)} slots 0..{len(self._rows) - 1}"
            )

    def _check_proposal(self, slots: list[int], anchors: Sequence[int] | Ints) -> None:
        for slot in slots:
            self._check_slot(slot)
        if not slots or len(set(slots)) != len(slots):
            raise RequestError(f"slots must be distinct and not empty, got {slots}")
        if len(anchors) != len(slots):
            raise RequestError(f"{len(slots)} slots but {len(anchors)} anchors")
        vocab = self.config.decoder.vocab_size
        if np.asarray(anchors).dtype.kind not in "iu":
            raise RequestError(f"anchors must be whole numbers, got {anchors}")
        for anchor in anchors:
            if not 0 <= anchor < vocab:
                raise RequestError(f"anchor {anchor} is outside the vocabulary of {vocab}")

    def _uniforms(self, count: int, seed: int | None, given: Floats | None) -> Floats:
        shape = (count, self.config.gamma)
        if given is None:
            if seed is not None and seed < 0:
                raise RequestError(f"seed must be at least 0, got {seed}")
            return np.random.default_rng(seed).random(shape, np.float32)
        uniforms = np.ascontiguousarray(given, np.float32)
        if uniforms.shape != shape or not ((uniforms >= 0) & (uniforms < 1)).all():
            raise RequestError(
                f"uniforms must be float32 {list(shape)} in [0, 1), got shape {list(uniforms.shape)} "
                f"between {uniforms.min(initial=np.inf)} and {uniforms.max(initial=-np.inf)}"
            )
        return uniforms

    def _no_rows(self) -> Floats:
        return np.zeros((0, self.config.context_size), np.float32)

    def _with_tokens(self, slot: int, taps: Floats, tokens: ArrayLike | None) -> Floats:
        """Context rows `[n, m*H]`, or `[n, m*H + 1]` where they name the token behind them."""
        if self.config.chain is None:
            return taps
        behind = np.asarray([] if tokens is None else tokens, np.int64)
        if behind.shape != (len(taps),):
            raise RequestError(
                f"slot {slot}: a chain drafter (Eagle3, MTP) wants tokens [{len(taps)}] with the taps, the committed "
                "token behind each row (the last one is the next anchor), got "
                f"{'none' if tokens is None else f'shape {behind.shape}'}"
            )
        vocab = self.config.decoder.vocab_size
        if ((behind < 0) | (behind >= vocab)).any():
            raise RequestError(f"slot {slot}: a token is outside the vocabulary of {vocab}")
        return np.concatenate((taps, behind[:, None].astype(np.float32)), axis=1)

    def _require_latest(self, slots: list[int]) -> None:
        """A chain starts from the last row's output, so that row goes through the draft step, again if need be."""
        for slot in slots:
            if not (self._pending[slot] or len(self._latest[slot])):
                last = self._rows[slot].end - 1
                raise MissingContextError(
                    f"slot {slot}: a chain drafter starts from the taps of row {last}, which a rollback or "
                    f"snapshot has left out. Append that row again, with start={last}."
                )

    def _flush(self, slot: int, *behind: Floats) -> None:
        """Write pending taps, and those behind them, with the context graph: too many for a draft step, or out of order."""
        waiting = [*self._pending[slot], *behind]
        if not waiting:
            return
        taps = np.concatenate(waiting)
        self._model.append(self._slot_at.index(slot), taps, self._written[slot])
        self._pending[slot].clear()
        self._written[slot] += len(taps)

    def _gather(self, slots: list[int]) -> None:
        """Move the caches of `slots` to the first rows, in order. The usual caller asks for the same
        slots every round, which moves nothing.
        """
        for row, slot in enumerate(slots):
            seat = self._slot_at.index(slot)
            if seat != row:
                self._model.swap_rows(row, seat)
                self._slot_at[row], self._slot_at[seat] = slot, self._slot_at[row]

    def _inputs(
        self,
        slots: list[int],
        context: list[int],
        anchors: Sequence[int] | Ints,
        temperature: Floats,
        uniforms: Floats,
    ) -> DraftInputs:
        new_taps = np.zeros(
            (len(slots), self.config.gamma + 1, self.config.context_size), np.float32
        )
        new_len = np.zeros(len(slots), np.int64)
        for row, slot in enumerate(slots):
            for taps in self._pending[slot] or [self._latest[slot][-1:]]:
                new_taps[row, new_len[row] : new_len[row] + len(taps)] = taps
                new_len[row] += len(taps)
        return DraftInputs(
            anchor_ids=np.ascontiguousarray(anchors, np.int64),
            new_taps=new_taps,
            new_len=new_len,
            context_len=np.array(context, np.int64) - new_len,
            temperature=temperature,
            uniforms=uniforms,
        )

    def _proposal(self, output: DraftOutput) -> Proposal:
        scores = output.confidence_logits
        confidence = None if scores is None else self.calibration.confidence(scores)
        return Proposal(
            tokens=output.tokens.copy(),
            logits=output.logits.copy(),
            confidence_logits=None if scores is None else scores.copy(),
            confidence=confidence,
            survival=None if confidence is None else survival_from_confidence(confidence),
        )


def _temperatures(given: ArrayLike, count: int) -> Floats:  # -> [R]
    heat = np.asarray(given, np.float32)
    if heat.shape not in ((), (count,)):
        raise RequestError(f"{count} slots but {heat.size} temperatures")
    if not (np.isfinite(heat).all() and (heat >= 0).all()):
        raise RequestError(f"temperature must be finite and at least 0, got {given!r}")
    return np.ascontiguousarray(np.broadcast_to(heat, (count,)))


def load_calibration(bundle: Bundle) -> Calibration:
    """The bundle's calibration, or the identity where it has none.

    Raises:
        TableError: the file is damaged or of another γ.
    """
    path = bundle.path / CALIBRATION
    if not path.exists():
        return Calibration.identity(bundle.draft.gamma)
    return Calibration.load(path).require_gamma(bundle.draft.gamma)
