# SPDX-License-Identifier: Apache-2.0
"""Draft, target and verify steps on static buffers: the reference modules with the Triton kernels."""

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dspark_trt import bindings
from dspark_trt.bindings import Binding, GraphBindings
from dspark_trt.config import DraftConfig, TargetConfig
from dspark_trt.models.chain import ChainDrafter
from dspark_trt.models.drafter import Drafter
from dspark_trt.models.fixed_shapes import Sampler, fixed_shapes
from dspark_trt.models.target import Target
from dspark_trt.plugins import specification
from dspark_trt.plugins.contract import VerifyMode, verify_bindings
from dspark_trt.runtime.backends.torch_buffers import StaticBuffers
from dspark_trt.runtime.backends.torch_caches import DeviceCaches
from dspark_trt.runtime.cuda_graphs.buckets import GraphKey
from dspark_trt.runtime.cuda_graphs.buffers import Traffic, Wanted

# One memory under several names: what a step leaves for the next one is not copied.
SHARED = {
    "target.logits": "verify.target_logits",
    "verify.draft_logits": "draft.logits",
    "verify.draft_temperature": "verify.temperature",
}
_DOWNLOADED = (
    "draft.tokens", "draft.confidence_logits", "target.taps", "verify.accepted", "verify.tokens",
)  # fmt: skip


class Prefill(NamedTuple):
    """A target step of any shape, on the device (`RaggedRows`)."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    pad_index: Tensor  # int64 [B, L]
    unpad_index: Tensor  # int64 [T]
    logit_rows: Tensor  # int64 [R]
    context_len: Tensor  # int64 [B]
    span: int  # cache rows the step reads and writes


class Steps(Protocol):
    """What runs a step whose inputs lie in the static buffers; with fixed shapes it can be captured."""

    def draft(self, key: GraphKey) -> None: ...

    def target(self, key: GraphKey) -> None: ...

    def verify(self, key: GraphKey) -> None: ...

    def append(self, row: int, taps: Tensor, start: int) -> None:
        """Write context rows of one request into the drafter's caches, from taps `[N, m*H]`."""

    def prefill(self, rows: Prefill) -> tuple[Tensor, Tensor]:
        """Logits `[R, V]` and taps `[T, m*H]` of a step that no bucket holds."""


def graph_contracts(
    draft: DraftConfig, target: TargetConfig | None, dtype: str
) -> dict[str, GraphBindings]:
    """Bindings of the steps, caches left out."""
    contracts = {
        "draft": bindings.draft_bindings(draft, dtype),
        "verify": verify_bindings(
            VerifyMode.REJECTION, gamma=draft.gamma, vocab_size=draft.decoder.vocab_size
        ),
    }
    if target is not None:
        contracts["target"] = bindings.target_bindings(target, draft.tap_size, dtype)
    return {
        name: GraphBindings(
            tuple(b for b in contract.inputs if not b.name.startswith("past_")),
            tuple(b for b in contract.outputs if not b.name.startswith("present_")),
        )
        for name, contract in contracts.items()
    }


def buffer_name(graph: str, binding: str) -> str:
    """Name of the buffer behind a tensor of a graph."""
    name = f"{graph}.{binding}"
    return SHARED.get(name, name)


def wanted_buffers(contracts: dict[str, GraphBindings]) -> list[Wanted]:
    """Buffers of all steps; a step's inputs lie together, the largest last, so that one copy uploads them."""
    wanted = []
    for graph, contract in contracts.items():
        uploaded = [b for b in contract.inputs if not b.name.endswith("_logits")]
        uploaded.sort(key=_width)
        wanted += [_wanted(graph, b, Traffic.UPLOADED) for b in uploaded]
        rest = (*(b for b in contract.inputs if b not in uploaded), *contract.outputs)
        for binding in rest:
            is_read = f"{graph}.{binding.name}" in _DOWNLOADED
            wanted.append(
                _wanted(graph, binding, Traffic.DOWNLOADED if is_read else Traffic.RESIDENT)
            )
    return [each for each in wanted if each is not None]


def round_buffers(gamma: int) -> list[Wanted]:
    """What the host tells a launched round, in one copy."""
    uploaded = (
        Binding("requests", "int64", (1,)),
        Binding("budget", "int64", (1,)),
        Binding("limits", "int64", ("batch",)),
        Binding("shifts", "float64", ("batch", gamma)),
    )
    return [Wanted(f"round.{b.name}", b, Traffic.UPLOADED) for b in uploaded]


def _width(binding: Binding) -> int:
    return int(np.prod([d for d in binding.shape if isinstance(d, int)]))


def _wanted(graph: str, binding: Binding, traffic: Traffic) -> Wanted | None:
    name = f"{graph}.{binding.name}"
    return None if name in SHARED else Wanted(name, binding, traffic)


class ModuleSteps:
    """Steps of torch modules; drafting and verifying draw tokens with kernels, or on a CPU in NumPy."""

    def __init__(
        self,
        *,
        drafter: Drafter | ChainDrafter | None,
        target: Target | None,
        buffers: StaticBuffers,
        draft_caches: DeviceCaches,
        target_caches: DeviceCaches | None,
        gamma: int,
        vocab_size: int,
        max_batch: int,
    ) -> None:
        self._drafter, self._target = drafter, target
        self._buffers = buffers
        self._draft_caches, self._target_caches = draft_caches, target_caches
        self._sample, self._verify = (
            _kernels(gamma, vocab_size, max_batch, buffers)
            if has_kernels(buffers.device)
            else (_sample_in_numpy, _VerifyInNumPy(buffers))
        )

    def draft(self, key: GraphKey) -> None:
        assert self._drafter is not None
        batch, buffers = key.batch, self._buffers
        inputs = (
            buffers[f"draft.{name}"][:batch]
            for name in (
                "anchor_ids", "new_taps", "new_len", "context_len", "temperature", "uniforms",
            )
        )  # fmt: skip
        caches = (cache[:batch] for cache in self._draft_caches.tensors)
        with torch.no_grad(), fixed_shapes(self._sample):
            outputs = self._drafter(*inputs, *caches)
        names = ["tokens", "logits"]
        if len(outputs) > 2 + len(self._draft_caches.tensors):
            names.append("confidence_logits")
        for name, value in zip(names, outputs, strict=False):
            buffers[f"draft.{name}"][:batch].copy_(value)

    def append(self, row: int, taps: Tensor, start: int) -> None:
        assert self._drafter is not None
        caches = (cache[row : row + 1] for cache in self._draft_caches.tensors)
        context_len = torch.full((1,), start, dtype=torch.int64, device=taps.device)
        with torch.no_grad():
            if isinstance(self._drafter, ChainDrafter):
                self._drafter.append_context(taps[None], context_len, *caches)
            else:
                self._drafter.backbone.append_context(taps[None], context_len, *caches)

    def target(self, key: GraphKey) -> None:
        buffers, (batch, rows) = self._buffers, key
        inputs = (
            buffers["target.token_ids"][:rows],
            buffers["target.positions"][:rows],
            buffers["target.pad_index"][:batch],
            buffers["target.unpad_index"][:rows],
            buffers["target.logit_rows"][:rows],
            buffers["target.context_len"][:batch],
        )
        logits, taps = self._run_target(inputs, batch, None)
        buffers["verify.target_logits"][:rows].copy_(logits)
        buffers["target.taps"][:rows].copy_(taps)

    def prefill(self, rows: Prefill) -> tuple[Tensor, Tensor]:
        return self._run_target(rows[:-1], len(rows.context_len), rows.span)

    def _run_target(
        self, inputs: Iterable[Tensor], batch: int, span: int | None
    ) -> tuple[Tensor, Tensor]:
        assert self._target is not None
        assert self._target_caches is not None
        caches = (cache[:batch, :, :span] for cache in self._target_caches.tensors)
        with torch.no_grad(), fixed_shapes(self._sample):
            logits, taps, *_ = self._target(*inputs, *caches)
        return logits, taps

    def verify(self, key: GraphKey) -> None:
        self._verify(key)


def has_kernels(device: torch.device) -> bool:
    """Whether Triton runs here: on a GPU, or interpreted where that was asked for."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def _kernels(
    gamma: int, vocab_size: int, max_batch: int, buffers: StaticBuffers
) -> tuple[Sampler, Callable[[GraphKey], None]]:
    from dspark_trt.plugins.kernel_launch import Sampler as DrawingKernels
    from dspark_trt.plugins.kernel_launch import Verifier

    sample = DrawingKernels(vocab_size=vocab_size, max_batch=max_batch, device=buffers.device)
    verifier = Verifier(
        VerifyMode.REJECTION,
        gamma=gamma,
        vocab_size=vocab_size,
        max_batch=max_batch,
        device=buffers.device,
    )

    def verify(key: GraphKey) -> None:
        accepted, tokens = verifier(_verify_inputs(buffers, key))
        buffers["verify.accepted"][: key.batch].copy_(accepted)
        buffers["verify.tokens"][: key.batch].copy_(tokens)

    return sample, verify


_VERIFY_INPUTS = (
    "target_logits", "offsets", "draft_tokens", "draft_logits", "draft_temperature",
    "temperature", "top_k", "top_p", "min_p", "uniforms",
)  # fmt: skip


def _verify_inputs(buffers: StaticBuffers, key: GraphKey) -> dict[str, Tensor]:
    sizes = {"target_logits": key.rows, "offsets": key.batch + 1}
    return {
        name: buffers[buffer_name("verify", name)][: sizes.get(name, key.batch)]
        for name in _VERIFY_INPUTS
    }


def _sample_in_numpy(logits: Tensor, temperature: Tensor, uniforms: Tensor) -> Tensor:
    drawn = specification.sample_draft(logits.numpy(), temperature.numpy(), uniforms.numpy())
    return torch.from_numpy(drawn)


class _VerifyInNumPy:
    """The specification itself, where there is neither a GPU nor an interpreter for the kernels."""

    def __init__(self, buffers: StaticBuffers) -> None:
        self._buffers = buffers

    def __call__(self, key: GraphKey) -> None:
        inputs = {
            name: tensor.numpy() for name, tensor in _verify_inputs(self._buffers, key).items()
        }
        verified = specification.verify_rejection(**inputs)
        self._buffers.host["verify.accepted"][: key.batch] = verified.accepted
        self._buffers.host["verify.tokens"][: key.batch] = verified.tokens
