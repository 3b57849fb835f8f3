# SPDX-License-Identifier: Apache-2.0
"""Steps that run a bundle's graphs, as engines or in onnxruntime, on static buffers and device caches."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from dspark_trt import bindings
from dspark_trt.bundle import Bundle
from dspark_trt.config import DecoderConfig
from dspark_trt.runtime.backends.torch_backend import DeviceParts
from dspark_trt.runtime.backends.torch_caches import DeviceCaches
from dspark_trt.runtime.backends.torch_steps import Prefill, buffer_name, graph_contracts
from dspark_trt.runtime.cuda_graphs.buckets import GraphKey


class GraphRunner(Protocol):
    """Runs one graph on tensors by name: all inputs and outputs, and each cache under its input's name, to be
    written in place. A `key` stands for shapes and addresses that never change; None: any shapes.
    """

    def __call__(
        self, graph: str, tensors: Mapping[str, Tensor], key: GraphKey | None
    ) -> None: ...


class GraphSteps:
    """`torch_steps.Steps` over a `GraphRunner`.

    Args:
        bundle: whose graphs.
        parts: buffers and caches.
        run: runs a graph.
        context_rows: taps that one run of the context graph takes at most; None: any number.
    """

    def __init__(
        self,
        bundle: Bundle,
        parts: DeviceParts,
        run: GraphRunner,
        *,
        context_rows: int | None = None,
    ) -> None:
        self._bundle, self._parts, self._run = bundle, parts, run
        self._context_rows = context_rows
        self._contracts = graph_contracts(bundle.draft, bundle.target, bundle.dtype)

    def draft(self, key: GraphKey) -> None:
        self._step("draft", key, self._draft_caches(slice(key.batch)))

    def target(self, key: GraphKey) -> None:
        self._step("target", key, self._target_caches(key.batch))

    def verify(self, key: GraphKey) -> None:
        self._step("verify", key, {})

    def append(self, row: int, taps: Tensor, start: int) -> None:
        caches = self._draft_caches(slice(row, row + 1))
        for first in range(0, len(taps), self._context_rows or len(taps)):
            chunk = taps[first:][: self._context_rows]
            position = torch.full((1,), start + first, dtype=torch.int64, device=taps.device)
            inputs = {"taps": chunk[None].contiguous(), "context_len": position}
            self._run("context", inputs | caches, None)

    def prefill(self, rows: Prefill) -> tuple[Tensor, Tensor]:
        config, device = self._bundle.draft, self._parts.device
        logits = torch.empty((len(rows.logit_rows), config.decoder.vocab_size), device=device)
        taps = torch.empty((len(rows.token_ids), config.tap_size), device=device)
        tensors = {**rows._asdict(), "logits": logits, "taps": taps}
        del tensors["span"]  # a graph's caches have their whole capacity
        caches = self._target_caches(len(rows.context_len))
        self._run("target", tensors | caches, None)
        return logits, taps

    def _step(self, graph: str, key: GraphKey, caches: dict[str, Tensor]) -> None:
        sizes = {
            "batch": key.batch,
            "offsets": key.batch + 1,
            "rows": key.rows,
            "logit_rows": key.rows,
        }
        contract, buffers = self._contracts[graph], self._parts.buffers
        tensors = {
            binding.name: buffers[buffer_name(graph, binding.name)][
                : sizes[str(binding.shape[0])]
            ]
            for binding in (*contract.inputs, *contract.outputs)
        }
        self._run(graph, tensors | caches, key)

    def _draft_caches(self, requests: slice) -> dict[str, Tensor]:
        return self._named(self._bundle.draft.decoder, self._parts.draft_caches, requests)

    def _target_caches(self, batch: int) -> dict[str, Tensor]:
        target, caches = self._bundle.target, self._parts.target_caches
        assert target is not None
        assert caches is not None
        return self._named(target.decoder, caches, slice(batch))

    def _named(
        self, decoder: DecoderConfig, caches: DeviceCaches, requests: slice
    ) -> dict[str, Tensor]:
        names = bindings.cache_bindings(decoder, self._bundle.dtype, "past")
        return {b.name: t[requests] for b, t in zip(names, caches.tensors, strict=True)}
