# SPDX-License-Identifier: Apache-2.0
"""Decoding rounds that stay on the device: the asynchronous form of the schedule.

The budget K is the host's and known before the draft step ends; which drafts share it, the ragged batch that
follows, and what was committed are worked out on the device. A round is two launches, and the host reads the
committed tokens when it likes, one round late if it likes.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark_trt.errors import RequestError
from dspark_trt.runtime.backends.interface import Floats, Ints
from dspark_trt.runtime.backends.torch_backend import DeviceParts
from dspark_trt.runtime.backends.torch_buffers import Arrival
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


class Committed(NamedTuple):
    accepted: Ints  # [B]; -1: refused
    tokens: Ints  # [B, K+1]; -1 behind the committed ones


def budgeted_lengths(survival: Tensor, limits: Tensor, budget: int) -> Tensor:
    """Verification lengths that share `budget` drafts, the likeliest to be accepted first.

    Survival falls along a block, so the likeliest drafts of a request are its first ones; equal values are
    counted, not chosen, and change nothing.

    Shapes: survival float32 [B, K], limits int64 [B] -> int64 [B], each at most its limit.
    """
    gamma = survival.shape[1]
    allowed = torch.arange(gamma, device=survival.device) < limits[:, None]
    ranked = survival.masked_fill(~allowed, -1.0)
    chosen = torch.zeros_like(ranked, dtype=torch.int64)
    best = ranked.flatten().topk(min(budget, ranked.numel())).indices
    chosen.view(-1)[best] = 1
    lengths: Tensor = (chosen * allowed).sum(1)
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


class DeviceRounds:
    """Rounds of requests whose prompts the models of the same `parts` have prefilled.

    State lies on the device, one row a request; `begin` sets a row, rounds advance the first rows of the
    batch they are launched for.
    """

    def __init__(self, parts: DeviceParts, steps: Steps) -> None:
        """Raises RequestError for a chain drafter, whose context rows the host makes."""
        if parts.draft_config.chain is not None:
            raise RequestError(
                "an Eagle3 drafter runs in the engine, not in rounds on the device"
            )
        self._parts, self._steps, self._buffers = parts, steps, parts.buffers
        self._gamma = parts.draft_config.gamma
        assert parts.target_caches is not None
        self._target_caches = parts.target_caches
        rows = parts.buckets.batch[-1]
        zeros = torch.zeros(rows, dtype=torch.int64, device=parts.device)
        self._anchors, self._target_len, self._draft_len = (zeros.clone() for _ in range(3))
        self._new_len, self._limits = zeros.clone(), zeros.clone()
        self._count = zeros[0].clone()  # requests of the round; the others only fill its batch
        self._slope = torch.ones(self._gamma, device=parts.device)
        self._offset = torch.zeros(self._gamma, device=parts.device)
        self._most_rows = np.zeros(rows, np.int64)  # the host's bound of `target_len`
        self._owners = np.zeros(rows, np.int64)  # counts the requests that began in a row
        self._launched_for = -1
        # Accepted count and tokens of each request side by side: one copy brings both.
        self._result = torch.zeros(
            (rows, self._gamma + 2), dtype=torch.int64, device=parts.device
        )
        pinned = parts.device.type == "cuda"
        self._results = [
            torch.zeros_like(self._result, device="cpu", pin_memory=pinned) for _ in range(2)
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

    def calibrate(self, slope: Floats, offset: Floats) -> None:
        """Confidence logits become slope · logit + offset `[γ]`; written in place, graphs stay."""
        self._slope.copy_(torch.from_numpy(np.asarray(slope, np.float32)))
        self._offset.copy_(torch.from_numpy(np.asarray(offset, np.float32)))

    def begin(
        self,
        row: int,
        *,
        anchor: int,
        target_len: int,
        draft_len: int,
        temperature: float = 0.0,
        limit: int | None = None,
    ) -> None:
        """A request whose context both caches hold, and whose `anchor` is committed."""
        for state, value in (
            (self._anchors, anchor), (self._target_len, target_len), (self._draft_len, draft_len),
            (self._new_len, 0), (self._limits, self._gamma if limit is None else limit),
        ):  # fmt: skip
            state[row] = value
        self._most_rows[row] = target_len
        self._owners[row] += 1
        for name in ("draft.temperature", "verify.temperature"):
            self._buffers[name][row] = temperature
        for name, value in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
            self._buffers[f"verify.{name}"][row] = value

    def launch(
        self,
        batch: int,
        budget: int,
        *,
        draft_uniforms: NDArray[np.float32] | None = None,  # [B, K]
        verify_uniforms: NDArray[np.float32] | None = None,  # [B, K+1]
    ) -> "RoundOnTheWay":
        """Launch a round of the first `batch` requests and return at once.

        At least `budget` drafts are verified together: as many as the graph's rows hold for nothing.

        Raises:
            CapacityError: more requests than the largest graph takes.
            RequestError: a negative budget.
        """
        if budget < 0:
            raise RequestError(f"the budget of a round must be at least 0, got {budget}")
        launches = {
            each.step: each.key
            for each in round_launches(
                batch, gamma=self._gamma, buckets=self._parts.buckets, budget=budget
            )
        }
        self._make_room(batch)
        if self._launched_for != batch:
            self._count.fill_(batch)
            self._launched_for = batch
        for name, uniforms in (("draft", draft_uniforms), ("verify", verify_uniforms)):
            if uniforms is not None:
                place = self._buffers[f"{name}.uniforms"][:batch]
                place.copy_(torch.from_numpy(uniforms), non_blocking=True)
        version = self._parts.draft_caches.version + self._target_caches.version
        draft, rest = launches[Step.DRAFT], launches[Step.TARGET]
        assert draft is not None
        assert rest is not None
        self.draft_graphs.run(draft, version)
        self.round_graphs.run(rest, version)
        self._results.reverse()
        host = self._results[0][:batch]
        host.copy_(self._result[:batch], non_blocking=True)
        owners = self._owners[:batch].copy()
        arrival = self._buffers.arrival()
        return RoundOnTheWay(arrival, host, lambda accepted: self._learn(accepted, owners))

    def _learn(self, accepted: Ints, owners: Ints) -> None:
        """A round was read: the bound comes down, where a row has not changed hands."""
        same = self._owners[: len(owners)] == owners
        self._most_rows[: len(owners)] -= np.where(same, self._gamma - accepted, 0)

    def _make_room(self, batch: int) -> None:
        """A round commits γ+1 tokens at most; how many it was is not waited for."""
        self._most_rows[:batch] += self._gamma + 1
        most = int(self._most_rows[:batch].max())
        self._target_caches.reserve(most)
        self._parts.draft_caches.reserve(most)

    # On the device -------------------------------------------------------------------------------

    def _is_active(self, batch: int) -> Tensor:
        return torch.arange(batch, device=self._parts.device) < self._count

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
        limits = self._limits[:batch].masked_fill(~active, 0)
        lengths = budgeted_lengths(self._survival(batch), limits, rows - batch)
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
        self._commit(batch, active, ragged.offsets)

    def _survival(self, batch: int) -> Tensor:
        """P(first k drafts all accepted) `[B, K]`; by place alone where the drafter has no confidence head."""
        if "draft.confidence_logits" not in self._parts.plan.placements:
            order = torch.arange(1, self._gamma + 1, device=self._parts.device)
            return 1.0 / order.float().expand(batch, -1)
        scores = self._buffers["draft.confidence_logits"][:batch]
        survival: Tensor = (scores * self._slope + self._offset).sigmoid().cumprod(1)
        return survival

    def _commit(self, batch: int, active: Tensor, offsets: Tensor) -> None:
        buffers = self._buffers
        accepted, tokens = buffers["verify.accepted"][:batch], buffers["verify.tokens"][:batch]
        self._result[:batch] = torch.cat((accepted[:, None], tokens), 1)
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


class RoundOnTheWay:
    """A launched round. Its results last until the next but one is launched."""

    def __init__(self, arrival: Arrival, host: Tensor, learn: Callable[[Ints], None]) -> None:
        self._arrival, self._host, self._learn = arrival, host, learn
        self._committed: Committed | None = None

    def read(self) -> Committed:
        """Wait for the committed tokens; copies, the caller's to keep."""
        if self._committed is None:
            self._arrival.wait()
            result = self._host.numpy().copy()
            self._committed = Committed(result[:, 0], result[:, 1:])
            self._learn(self._committed.accepted)
        return self._committed
