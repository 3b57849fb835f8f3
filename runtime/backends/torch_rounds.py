# SPDX-License-Identifier: Apache-2.0
"""Decoding rounds that stay on the device: the asynchronous form of the schedule.

The budget K is the host's and known before the draft step ends; which drafts share it, the ragged batch that
follows, and what was committed are worked out on the device. A round is two launches, and the host reads the
committed tokens when it likes, one round late if it likes.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark_trt.errors import RequestError
from dspark_trt.runtime.backends.interface import (
    Committed,
    DecodingRows,
    DraftOutput,
    Floats,
    Ints,
    RoundInputs,
)
from dspark_trt.runtime.backends.torch_backend import DeviceParts
from dspark_trt.runtime.backends.torch_buffers import Arrival
from dspark_trt.runtime.backends.torch_failures import fails_alone
from dspark_trt.runtime.backends.torch_models import as_floats
from dspark_trt.runtime.backends.torch_steps import Steps
from dspark_trt.runtime.cuda_graphs.buckets import GraphKey
from dspark_trt.runtime.cuda_graphs.schedule import Step, round_launches


class DeviceRaggedRows(NamedTuple):
    """`RaggedRows` worked out where the lengths are; T is the bucket's, rows behind the last are fillers."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    pad_index: Tensor  # int64 [B, L]
    unpad_index: Tensor  # int64 [T]
    offsets: Tensor  # int64 [B+1]


def budgeted_lengths(survival: Tensor, limits: Tensor, budget: Tensor) -> Tensor:
    """Verification lengths that share `budget` drafts, the likeliest to be accepted first.

    Survival falls along a block, so the likeliest drafts of a request are its first ones; equal values are
    handed out request by request, as `survival.best_lengths` does on the host.

    Shapes: survival float64 [B, K], limits int64 [B], budget int64 [1] -> int64 [B], each at most its limit.
    """
    gamma = survival.shape[1]
    allowed = torch.arange(gamma, device=survival.device) < limits[:, None]
    ranked = survival.masked_fill(~allowed, -1.0).flatten()
    order = ranked.sort(descending=True, stable=True).indices
    places = torch.arange(len(order), device=order.device)
    chosen = torch.zeros_like(order).scatter(0, order, (places < budget).to(order.dtype))
    lengths: Tensor = (chosen.view_as(survival) * allowed).sum(1)
    return lengths


def ragged_on_device(
    anchors: Tensor,  # int64 [B]
    drafts: Tensor,  # int64 [B, K]
    lengths: Tensor,  # int64 [B]
    context_len: Tensor,  # int64 [B]
    *,
    rows: int,
) -> DeviceRaggedRows:
    """Rows of a target step: each request's anchor and its first `lengths` drafts."""
    batch, gamma = drafts.shape
    padded, device = gamma + 1, anchors.device
    offsets = torch.zeros(batch + 1, dtype=torch.int64, device=device)
    offsets[1:] = (1 + lengths).cumsum(0)
    flat = torch.arange(rows, device=device)
    request = torch.searchsorted(offsets[1:], flat, right=True).clamp(max=batch - 1)
    within = flat - offsets[request]
    is_filler = within > lengths[request]
    block = torch.cat((anchors[:, None], drafts), 1)
    places = torch.arange(padded, device=device)
    within = within.masked_fill(is_filler, 0)
    return DeviceRaggedRows(
        token_ids=block[request, within].masked_fill(is_filler, 0),
        positions=(context_len[request] + within).masked_fill(is_filler, 0),
        pad_index=offsets[:-1, None] + torch.minimum(places, lengths[:, None]),
        unpad_index=(request * padded + within).masked_fill(is_filler, 0),
        offsets=offsets,
    )


class TorchRounds:
    """`interface.DeviceRounds` on the buffers, caches and steps of one engine's models.

    State lies on the device, one row a request; rounds advance the first rows. Launching and reading may
    overlap: a round can be read after the next one is launched.
    """

    def __init__(self, parts: DeviceParts, steps: Steps) -> None:
        """Raises RequestError for a chain drafter, whose context rows the host makes."""
        if parts.draft_config.chain is not None:
            raise RequestError(
                "an Eagle3 drafter runs in the engine, not in rounds on the device"
            )
        assert parts.target_caches is not None
        self._parts, self._steps, self._buffers = parts, steps, parts.buffers
        self._gamma = parts.draft_config.gamma
        self._target_caches = parts.target_caches
        self._has_confidence = "draft.confidence_logits" in parts.plan.placements
        rows, device = parts.buckets.batch[-1], parts.device
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        self._anchors, self._target_len, self._draft_len = (zeros.clone() for _ in range(3))
        self._new_len = zeros.clone()
        self._slope = torch.ones(self._gamma, dtype=torch.float64, device=device)
        self._most_rows = np.zeros(rows, np.int64)  # the host's bound of `target_len`
        self._takes = 0
        # Accepted count, length and tokens of each request side by side: one copy brings them all.
        self._result = torch.zeros((rows, self._gamma + 3), dtype=torch.int64, device=device)
        self._scores = torch.zeros((rows, self._gamma), device=device)
        pinned = device.type == "cuda"
        self._results = [
            tuple(
                torch.zeros_like(each, device="cpu", pin_memory=pinned)
                for each in (self._result, self._scores)
            )
            for _ in range(2)
        ]
        outputs = ("draft.tokens", "draft.logits", "draft.confidence_logits")
        self.draft_graphs = parts.graphs("draft", self._draft, outputs)
        state = (self._anchors, self._target_len, self._draft_len, self._new_len)
        self.round_graphs = parts.graphs(
            "round",
            self._after_draft,
            ("verify.target_logits", "target.taps"),
            state=(*state, self._buffers["draft.new_taps"], self._result),
        )

    def warm_up(self) -> None:
        """Self-test at start-up: rounds of the smallest and of the largest batch run once, as single steps do
        (`DeviceModel.warm_up`). For a fresh engine: its caches are cleared.
        """
        gamma, width = self._gamma, self._parts.draft_config.tap_size
        for batch in {self._parts.buckets.batch[0], self._parts.buckets.batch[-1]}:
            zeros, ones = np.zeros(batch, np.int64), np.ones(batch, np.int64)
            floats, taps = (
                np.ones(batch, np.float32),
                np.ones((batch, gamma + 1, width), np.float32),
            )
            rows = DecodingRows(
                zeros, taps, ones, ones, ones, floats, zeros, floats, floats * 0
            )
            self.take(rows)
            uniforms = np.full((batch, gamma + 1), 0.5, np.float32)
            shifts = np.zeros((batch, gamma))
            drafts = batch * gamma
            inputs = RoundInputs(drafts, ones * gamma, shifts, uniforms[:, 1:], uniforms)
            self.launch(inputs).read()
        for row in range(self._parts.buckets.batch[-1]):
            self._parts.draft_caches.clear(row)
            self._target_caches.clear(row)

    def calibrate(self, slope: NDArray[np.float64]) -> None:
        """Confidence is σ(slope · logit + shift), slope `[γ]`; written in place, graphs stay."""
        self._slope.copy_(torch.tensor(slope))

    @fails_alone
    def take(self, rows: DecodingRows) -> None:
        """The first rows belong to these requests now."""
        count, buffers = len(rows.anchor_ids), self._buffers
        for place, values in (
            (self._anchors, rows.anchor_ids), (self._target_len, rows.target_len),
            (self._draft_len, rows.draft_len), (self._new_len, rows.new_len),
            (buffers["draft.new_taps"], rows.new_taps),
            (buffers["draft.temperature"], rows.temperature),
            (buffers["verify.temperature"], rows.temperature), (buffers["verify.top_k"], rows.top_k),
            (buffers["verify.top_p"], rows.top_p), (buffers["verify.min_p"], rows.min_p),
        ):  # fmt: skip
            place[:count].copy_(torch.tensor(values))
        self._most_rows[:count] = rows.target_len
        self._takes += 1

    @fails_alone
    def new_taps(self, count: int) -> Floats:
        """Taps of the last committed tokens `[count, γ+1, m*H]`, which the next draft step takes."""
        return np.array(self._buffers.on_demand("draft.new_taps", count))

    def drafted(self, count: int) -> DraftOutput:
        """Drafts of the last round."""
        tokens, logits = (
            self._buffers.on_demand(f"draft.{name}", count) for name in ("tokens", "logits")
        )
        scores = self._results[0][1][:count].numpy() if self._has_confidence else None
        return DraftOutput(cast("Ints", tokens), as_floats(logits), scores)

    @fails_alone
    def launch(self, inputs: RoundInputs) -> "TorchRound":
        """Launch a round of the first B rows and return at once.

        Raises:
            CapacityError: more requests than the largest graph takes.
            RequestError: a negative budget.
            BackendError: a step failed, or caches cannot grow; nothing was committed.
        """
        batch = len(inputs.limits)
        if inputs.budget < 0:
            raise RequestError(f"the budget of a round must be at least 0, got {inputs.budget}")
        keys = {
            each.step: each.key
            for each in round_launches(
                batch, gamma=self._gamma, buckets=self._parts.buckets, budget=inputs.budget
            )
        }
        draft, rest = keys[Step.DRAFT], keys[Step.TARGET]
        assert draft is not None
        assert rest is not None
        self._make_room(batch, inputs.limits)
        self._tell(batch, inputs)
        version = self._parts.draft_caches.version + self._target_caches.version
        with self._parts.named(f"launch {batch} requests, {inputs.budget} drafts"):
            begin = _Instant(self._parts.device)
            self.draft_graphs.run(draft, version)
            between = _Instant(self._parts.device)
            self.round_graphs.run(rest, version)
            end = _Instant(self._parts.device)
        self._results.reverse()
        hosts = tuple(each[:batch] for each in self._results[0])
        for host, source in zip(hosts, (self._result, self._scores), strict=True):
            host.copy_(source[:batch], non_blocking=True)
        self._most_rows[:batch] += 1 + inputs.limits
        limits, takes = inputs.limits.copy(), self._takes

        def learn(accepted: Ints) -> None:
            """The bound comes down to what there is, unless the rows have changed hands."""
            if takes == self._takes:
                self._most_rows[:batch] -= limits - accepted

        arrival = self._buffers.arrival()
        instants = (begin, between, end)
        return TorchRound(self._parts, arrival, hosts, self._has_confidence, instants, learn)

    def _tell(self, batch: int, inputs: RoundInputs) -> None:
        """Write what the host decided; it reads nothing."""
        buffers = self._buffers
        buffers.settle("round.requests")
        buffers.host["round.requests"][0] = batch
        buffers.host["round.budget"][0] = inputs.budget
        buffers.host["round.limits"][:batch] = inputs.limits
        buffers.host["round.shifts"][:batch] = inputs.shifts
        buffers.upload("round.requests", "round.shifts", batch)
        for name, uniforms in (
            ("draft.uniforms", inputs.draft_uniforms), ("verify.uniforms", inputs.verify_uniforms),
        ):  # fmt: skip
            buffers.settle(name)
            buffers.host[name][:batch] = uniforms
            buffers.upload(name, name, batch)

    def _make_room(self, batch: int, limits: Ints) -> None:
        """A round commits a token more than its limit at most; how many it was is not waited for."""
        most = int((self._most_rows[:batch] + 1 + limits).max())
        self._target_caches.reserve(most)
        self._parts.draft_caches.reserve(most)

    # On the device -------------------------------------------------------------------------------

    def _is_active(self, batch: int) -> Tensor:
        """Requests of the round; the others only fill its batch up."""
        return torch.arange(batch, device=self._parts.device) < self._buffers["round.requests"]

    def _draft(self, key: GraphKey) -> None:
        batch, buffers = key.batch, self._buffers
        active = self._is_active(batch)
        scratch = self._parts.draft_caches.scratch_start
        for name, state, filler in (
            ("anchor_ids", self._anchors, 0),
            ("new_len", self._new_len, 0),
            ("context_len", self._draft_len, scratch),
        ):
            buffers[f"draft.{name}"][:batch] = state[:batch].masked_fill(~active, filler)
        self._steps.draft(key)

    def _after_draft(self, key: GraphKey) -> None:
        (batch, rows), buffers = key, self._buffers
        active = self._is_active(batch)
        limits = buffers["round.limits"][:batch].masked_fill(~active, 0)
        lengths = budgeted_lengths(self._survival(batch), limits, buffers["round.budget"])
        drafts = buffers["draft.tokens"][:batch]
        context_len = self._target_len[:batch].masked_fill(
            ~active, self._target_caches.scratch_start
        )
        ragged = ragged_on_device(
            buffers["draft.anchor_ids"][:batch], drafts, lengths, context_len, rows=rows
        )
        for name, count in (
            ("token_ids", rows), ("positions", rows), ("unpad_index", rows), ("pad_index", batch),
        ):  # fmt: skip
            buffers[f"target.{name}"][:count] = getattr(ragged, name)
        buffers["target.logit_rows"][:rows] = torch.arange(rows, device=self._parts.device)
        buffers["target.context_len"][:batch] = context_len
        self._steps.target(key)
        buffers["verify.offsets"][: batch + 1] = ragged.offsets
        buffers["verify.draft_tokens"][:batch] = drafts
        self._steps.verify(key)
        self._commit(batch, active, lengths, ragged.offsets)

    def _survival(self, batch: int) -> Tensor:
        """P(first k drafts all accepted) `[B, K]`, in float64 as on the host; by place alone where the drafter
        has no confidence head. A NaN buys nothing.
        """
        if not self._has_confidence:
            order = torch.arange(1, self._gamma + 1, device=self._parts.device)
            return 1.0 / order.double().expand(batch, -1)
        scores = self._buffers["draft.confidence_logits"][:batch].double()
        logits = scores * self._slope + self._buffers["round.shifts"][:batch]
        confidence = 0.5 + 0.5 * torch.tanh(0.5 * logits)
        survival: Tensor = confidence.nan_to_num(0.0).cumprod(1)
        return survival

    def _commit(self, batch: int, active: Tensor, lengths: Tensor, offsets: Tensor) -> None:
        buffers = self._buffers
        accepted, tokens = buffers["verify.accepted"][:batch], buffers["verify.tokens"][:batch]
        self._result[:batch] = torch.cat((accepted[:, None], lengths[:, None], tokens), 1)
        if self._has_confidence:
            self._scores[:batch] = buffers["draft.confidence_logits"][:batch]
        advance = (accepted + 1).masked_fill(~active, 0)  # 0: refused, nothing is committed
        last = (advance - 1).clamp(min=0)
        self._draft_len[:batch] += self._new_len[:batch].masked_fill(~active, 0)
        self._new_len[:batch] = torch.where(active, advance, self._new_len[:batch])
        self._target_len[:batch] += advance
        committed = tokens.gather(1, last[:, None]).squeeze(1)
        self._anchors[:batch] = torch.where(advance > 0, committed, self._anchors[:batch])
        places = torch.arange(self._gamma + 1, device=active.device)
        taps = buffers["target.taps"][offsets[:-1, None] + torch.minimum(places, last[:, None])]
        new_taps = buffers["draft.new_taps"][:batch]
        new_taps.copy_(torch.where(active[:, None, None], taps, new_taps))


class _Instant:
    """A moment on the device's own clock, which nobody waits for."""

    def __init__(self, device: torch.device) -> None:
        self._host, self._event = time.perf_counter(), None
        if device.type == "cuda":
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._event = event

    def seconds_to(self, end: "_Instant") -> float:
        """Once both are over."""
        if self._event is None:
            return end._host - self._host
        return float(self._event.elapsed_time(end._event)) / 1000


class TorchRound:
    """A launched round. Its results last until the next but one is launched."""

    def __init__(
        self,
        parts: DeviceParts,
        arrival: Arrival,
        hosts: tuple[Tensor, ...],
        has_confidence: bool,
        instants: tuple[_Instant, _Instant, _Instant],
        learn: Callable[[Ints], None],
    ) -> None:
        self._named = parts.named
        self._arrival, self._hosts, self._has_confidence = arrival, hosts, has_confidence
        self._instants, self._learn = instants, learn
        self._committed: Committed | None = None

    @fails_alone
    def read(self) -> Committed:
        """Wait for the committed tokens."""
        if self._committed is None:
            with self._named("wait for committed tokens"):
                self._arrival.wait()
            result, scores = (each.numpy().copy() for each in self._hosts)
            begin, between, end = self._instants
            self._committed = Committed(
                accepted=result[:, 0],
                tokens=result[:, 2:],
                lengths=result[:, 1],
                confidence_logits=scores if self._has_confidence else None,
                draft_seconds=begin.seconds_to(between),
                step_seconds=between.seconds_to(end),
            )
            self._learn(self._committed.accepted)
        return self._committed
