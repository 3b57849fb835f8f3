# SPDX-License-Identifier: Apache-2.0
"""Drafter, target and verifier over static buffers and captured graphs.

Each call writes its inputs into the buffers, padded to a bucket, runs the bucket's graph, and reads what the
host asks for. Logits and taps stay on the device until somebody looks (`DeviceArray`).
"""

from abc import ABC, abstractmethod
from typing import cast

import numpy as np
import torch
from torch import Tensor

from dspark_trt.config import DraftConfig
from dspark_trt.plugins.distribution import Processors as LogitProcessors
from dspark_trt.plugins.distribution import process_logits
from dspark_trt.plugins.specification import token_logprobs, verify_rejection
from dspark_trt.runtime.backends.interface import (
    CacheRows,
    DraftInputs,
    DraftOutput,
    Floats,
    Ints,
    TargetOutput,
    Verification,
    VerifyInputs,
)
from dspark_trt.runtime.backends.torch_buffers import DeviceArray, StaticBuffers
from dspark_trt.runtime.backends.torch_caches import DeviceCaches
from dspark_trt.runtime.backends.torch_failures import fails_alone
from dspark_trt.runtime.backends.torch_graphs import StepGraphs
from dspark_trt.runtime.backends.torch_steps import Prefill, Steps
from dspark_trt.runtime.cuda_graphs.buckets import Buckets
from dspark_trt.runtime.cuda_graphs.padding import (
    own_pad_index,
    pad_offsets,
    pad_ragged,
)
from dspark_trt.runtime.ragged import RaggedRows, ragged_rows


class DeviceModel(ABC):
    """What drafter and target share: caches, one row a request, and graphs."""

    def __init__(
        self, buffers: StaticBuffers, caches: DeviceCaches, graphs: StepGraphs, buckets: Buckets
    ) -> None:
        self.caches, self.graphs, self.buckets = caches, graphs, buckets
        self._buffers = buffers

    @property
    def waits(self) -> int:
        return self._buffers.waits.count

    @property
    def capacity_rows(self) -> int:
        return self.caches.capacity_rows

    def reserve(self, context_tokens: int) -> None:
        self.caches.reserve(context_tokens)

    def swap_rows(self, first: int, second: int) -> None:
        self.caches.swap(first, second)

    @fails_alone
    def read_rows(self, row: int, count: int) -> CacheRows:
        return self.caches.read_rows(row, count)

    @fails_alone
    def write_rows(self, row: int, saved: CacheRows) -> None:
        self.caches.write_rows(row, saved)

    def warm_up(self) -> None:
        """Self-test at start-up: the smallest and the largest bucket run once. Kernels are compiled, graphs
        captured and held against the eager step (`StepGraphs`); what that wrote is cleared.
        """
        for batch in {self.buckets.batch[0], self.buckets.batch[-1]}:
            self._run_once(batch)
        for row in range(self.buckets.batch[-1]):
            self.caches.clear(row)

    @abstractmethod
    def _run_once(self, batch: int) -> None:
        """One step of `batch` requests."""

    def close(self) -> None:
        self.graphs.clear()  # before the memory they point at
        self.caches.close()


class DeviceDraftModel(DeviceModel):
    def __init__(
        self,
        config: DraftConfig,
        steps: Steps,
        buffers: StaticBuffers,
        caches: DeviceCaches,
        graphs: StepGraphs,
        buckets: Buckets,
    ) -> None:
        super().__init__(buffers, caches, graphs, buckets)
        self._config, self._steps = config, steps
        self._has_confidence = "draft.confidence_logits" in buffers.host

    def _run_once(self, batch: int) -> None:
        gamma, width = self._config.gamma, self._config.context_size
        ones = np.ones(batch, np.int64)
        self.draft(
            DraftInputs(
                anchor_ids=ones * 0,
                new_taps=np.ones((batch, gamma + 1, width), np.float32),
                new_len=ones,
                context_len=ones,
                temperature=np.ones(batch, np.float32),
                uniforms=np.full((batch, gamma), 0.5, np.float32),
            )
        )

    @fails_alone
    def append(self, row: int, taps: Floats, start: int) -> None:
        self.reserve(start + len(taps))
        if start == 0:
            self.caches.clear(row)
        self._steps.append(row, self._on_device(taps), start)

    def _on_device(self, taps: Floats) -> Tensor:
        if isinstance(taps, DeviceArray):
            return taps.tensor
        return torch.from_numpy(np.ascontiguousarray(taps, np.float32)).to(self._buffers.device)

    @fails_alone
    def draft(self, inputs: DraftInputs) -> DraftOutput:
        batch, buffers = len(inputs.anchor_ids), self._buffers
        key = self.buckets.require(batch, batch)
        self.reserve(int((inputs.context_len + inputs.new_len).max()))
        for row in np.flatnonzero(inputs.context_len == 0):
            self.caches.clear(int(row))
        buffers.settle("draft.anchor_ids")
        for name in ("anchor_ids", "new_len", "temperature", "uniforms", "context_len"):
            place = buffers.host[f"draft.{name}"]
            place[:batch] = getattr(inputs, name)
            place[batch : key.batch] = 0
        most = int(inputs.new_len.max())  # of the taps behind a request's own nothing is read
        buffers.host["draft.new_taps"][:batch, :most] = inputs.new_taps[:, :most]
        buffers.host["draft.context_len"][batch : key.batch] = self.caches.scratch_start
        buffers.upload("draft.anchor_ids", "draft.new_taps", batch)
        self.graphs.run(key, self.caches.version)
        read = ("draft.tokens", "draft.confidence_logits")[: 1 + self._has_confidence]
        buffers.download(*read, count=batch).wait()
        tokens, *confidence = (buffers.host[name][:batch] for name in read)
        logits = as_floats(buffers.on_demand("draft.logits", batch))
        return DraftOutput(tokens, logits, confidence[0] if confidence else None)


class DeviceTargetModel(DeviceModel):
    def __init__(
        self,
        gamma: int,
        steps: Steps,
        buffers: StaticBuffers,
        caches: DeviceCaches,
        graphs: StepGraphs,
        buckets: Buckets,
    ) -> None:
        super().__init__(buffers, caches, graphs, buckets)
        self._padded, self._steps = gamma + 1, steps

    def _run_once(self, batch: int) -> None:
        tokens = [np.zeros(self._padded, np.int64)] * batch
        self.step(ragged_rows(tokens, np.ones(batch, np.int64), np.ones(batch, np.bool_)))

    @fails_alone
    def step(self, rows: RaggedRows) -> TargetOutput:
        padded = rows.pad_index.shape[1]
        self.reserve(int(rows.context_len.max()) + padded)
        for row in np.flatnonzero(rows.context_len == 0):
            self.caches.clear(int(row))
        key = self.buckets.find(rows.batch, len(rows.token_ids))
        if padded > self._padded or key is None:
            return self._prefill(rows)
        buffers, total = self._buffers, len(rows.token_ids)
        filled = pad_ragged(
            rows, key, padded=self._padded, scratch_start=self.caches.scratch_start
        )
        buffers.settle("target.token_ids")
        for name, count in (
            ("token_ids", key.rows), ("positions", key.rows), ("unpad_index", key.rows),
            ("logit_rows", key.rows), ("context_len", key.batch), ("pad_index", key.batch),
        ):  # fmt: skip
            buffers.host[f"target.{name}"][:count] = getattr(filled, name)
        buffers.upload("target.token_ids", "target.context_len", key.batch)
        self.graphs.run(key, self.caches.version)
        arrival = buffers.download("target.taps", count=total)
        taps = DeviceArray(
            buffers["target.taps"][:total],
            buffers.host["target.taps"][:total],
            arrival,
            waits=buffers.waits,
        )
        logits = buffers.on_demand("verify.target_logits", len(rows.logit_rows))
        return TargetOutput(as_floats(logits), as_floats(taps))

    def _prefill(self, rows: RaggedRows) -> TargetOutput:
        """Prompts have any shape: no graph, and caches only as far as the longest context."""
        device = self._buffers.device

        def moved(values: Ints) -> Tensor:
            return torch.tensor(values, device=device)

        logits, taps = self._steps.prefill(
            Prefill(
                token_ids=moved(rows.token_ids),
                positions=moved(rows.positions),
                pad_index=moved(own_pad_index(rows)),
                unpad_index=moved(rows.unpad_index),
                logit_rows=moved(rows.logit_rows),
                context_len=moved(rows.context_len),
                span=int(rows.context_len.max()) + rows.pad_index.shape[1],
            )
        )
        place = self._buffers["verify.target_logits"]
        if len(logits) <= len(place):  # verification finds them there
            logits = place[: len(logits)].copy_(logits)
        waits = self._buffers.waits
        return TargetOutput(
            as_floats(DeviceArray(logits, waits=waits)),
            as_floats(DeviceArray(taps, waits=waits)),
        )


class DeviceVerifier:
    def __init__(
        self, buffers: StaticBuffers, graphs: StepGraphs, buckets: Buckets, top_logprobs: int
    ) -> None:
        self.graphs = graphs
        self._buffers, self._buckets = buffers, buckets
        self._top_logprobs = top_logprobs

    @fails_alone
    def verify(self, inputs: VerifyInputs) -> Verification:
        if inputs.processors is not None:
            return verify_processed(inputs, self._top_logprobs)
        batch, buffers = len(inputs.temperature), self._buffers
        key = self._buckets.require(batch, len(inputs.target_logits))
        self._place("verify.target_logits", inputs.target_logits)
        if inputs.draft_logits.shape[-1]:  # none where nobody samples
            self._place("draft.logits", inputs.draft_logits)
        buffers.settle("verify.offsets")
        buffers.host["verify.offsets"][: key.batch + 1] = pad_offsets(inputs.offsets, key.batch)
        for name in ("temperature", "top_k", "top_p", "min_p", "draft_tokens", "uniforms"):
            place = buffers.host[f"verify.{name}"]
            place[:batch] = getattr(inputs, name)
            place[batch : key.batch] = 0
        buffers.upload("verify.offsets", "verify.uniforms", key.batch)
        self.graphs.run(key)
        buffers.download("verify.accepted", "verify.tokens", count=batch).wait()
        return Verification(
            buffers.host["verify.accepted"][:batch], buffers.host["verify.tokens"][:batch]
        )

    def _place(self, name: str, logits: Floats) -> None:
        """Logits that a model of this backend left where they are need no copy; others are a host's."""
        buffer = self._buffers[name]
        if not isinstance(logits, DeviceArray):
            buffer[: len(logits)].copy_(torch.from_numpy(np.ascontiguousarray(logits)))
        elif logits.tensor.data_ptr() != buffer.data_ptr():
            buffer[: len(logits)].copy_(logits.tensor)


def verify_processed(inputs: VerifyInputs, top_logprobs: int) -> Verification:
    """Penalties, masks and log-probabilities: by the specification, on the host."""
    assert inputs.processors is not None
    logits, draft_logits = np.asarray(inputs.target_logits), np.asarray(inputs.draft_logits)
    processed = process_logits(
        logits, inputs.offsets, inputs.draft_tokens, LogitProcessors(*inputs.processors)
    )
    verified = verify_rejection(
        target_logits=processed,
        offsets=inputs.offsets,
        draft_tokens=inputs.draft_tokens,
        draft_logits=draft_logits,
        draft_temperature=inputs.temperature,
        temperature=inputs.temperature,
        top_k=inputs.top_k,
        top_p=inputs.top_p,
        min_p=inputs.min_p,
        uniforms=inputs.uniforms,
    )
    shown = token_logprobs(logits, inputs.offsets, verified.tokens, top_logprobs)
    return Verification(verified.accepted, verified.tokens, *shown)


def as_floats(array: DeviceArray) -> Floats:
    """Every reader goes through NumPy's array protocol, which a `DeviceArray` answers."""
    return cast("Floats", array)
