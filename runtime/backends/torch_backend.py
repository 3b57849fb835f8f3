# SPDX-License-Identifier: Apache-2.0
"""The `torch` backend: reference modules with the bundle's own weights, in CUDA graphs on a GPU.

On a CPU the same buffers, buckets and padding are used without graphs.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from dspark_trt.bundle import Bundle
from dspark_trt.config import DecoderConfig, DraftConfig, TargetConfig
from dspark_trt.errors import BackendError
from dspark_trt.models.chain import ChainDrafter
from dspark_trt.models.drafter import Drafter
from dspark_trt.models.stored_weights import StoredWeights
from dspark_trt.models.target import Target
from dspark_trt.runtime.backends.interface import (
    BackendOptions,
    DeviceRounds,
    DraftModel,
    TargetModel,
    Verifier,
)
from dspark_trt.runtime.backends.open_parts import OpenParts
from dspark_trt.runtime.backends.torch_buffers import StaticBuffers
from dspark_trt.runtime.backends.torch_caches import DeviceCaches
from dspark_trt.runtime.backends.torch_graphs import Capture, StepGraphs, cuda_capture
from dspark_trt.runtime.backends.torch_models import (
    DeviceDraftModel,
    DeviceTargetModel,
    DeviceVerifier,
)
from dspark_trt.runtime.backends.torch_steps import (
    ModuleSteps,
    Steps,
    graph_contracts,
    round_buffers,
    wanted_buffers,
)
from dspark_trt.runtime.cuda_graphs.buckets import Buckets, GraphKey
from dspark_trt.runtime.cuda_graphs.buffers import plan_buffers
from dspark_trt.runtime.cuda_graphs.padding import scratch_rows


class DeviceParts:
    """Buffers, caches, graphs and models of up to `requests` requests, whoever runs the steps.

    Drafter, target and verifier share the buffers: logits go from one to the next without a copy.
    """

    def __init__(
        self,
        draft: DraftConfig,
        target: TargetConfig | None,
        *,
        dtype: str,
        requests: int,
        device: torch.device,
        max_graphs: int,
        top_logprobs: int,
        buckets: Buckets | None = None,
        fixed_rows: int | None = None,
        capture: Capture | None = None,
    ) -> None:
        gamma = draft.gamma
        self.draft_config, self.requests, self.device = draft, requests, device
        self.buckets = buckets or Buckets.up_to(requests, gamma + 1)
        batch, rows = self.buckets.batch[-1], self.buckets.rows[-1]
        self.plan = plan_buffers(
            wanted_buffers(graph_contracts(draft, target, dtype)) + round_buffers(gamma),
            {
                "batch": batch,
                "offsets": batch + 1,
                "rows": rows,
                "logit_rows": rows,
                "padded": gamma + 1,
            },
        )
        self.buffers = StaticBuffers(self.plan, device)
        scratch = scratch_rows(gamma, draft.block_slots)

        def caches(decoder: DecoderConfig) -> DeviceCaches:
            return DeviceCaches(
                decoder,
                requests=batch,
                dtype=getattr(torch, dtype),
                device=device,
                scratch=scratch,
                fixed=fixed_rows,
            )

        self.draft_caches = caches(draft.decoder)
        self.target_caches = None if target is None else caches(target.decoder)
        self._max_graphs, self._top_logprobs = max_graphs, top_logprobs
        self._capture = capture
        # Ranges of the profiler's timeline.
        self.named = torch.cuda.nvtx.range if device.type == "cuda" else nullcontext
        if device.type == "cuda" and max_graphs:
            self._capture = cuda_capture(torch.cuda.graph_pool_handle())

    def graphs(
        self,
        name: str,
        step: Callable[[GraphKey], None],
        outputs: tuple[str, ...],
        state: Sequence[Tensor] = (),
    ) -> StepGraphs:
        """Graphs of a step that writes the buffers `outputs`, those that this drafter has."""
        tensors = [self.buffers[o] for o in outputs if o in self.plan.placements]
        return StepGraphs(
            name,
            step,
            tensors,
            state=state,
            capture=self._capture,
            limit=self._max_graphs,
            named=self.named,
        )

    def draft_model(self, steps: Steps) -> DeviceDraftModel:
        outputs = ("draft.tokens", "draft.logits", "draft.confidence_logits")
        graphs = self.graphs("draft", steps.draft, outputs)
        model = DeviceDraftModel(
            self.draft_config, steps, self.buffers, self.draft_caches, graphs, self.buckets
        )
        if self._capture is not None:
            model.warm_up()
        return model

    def target_model(self, steps: Steps) -> DeviceTargetModel:
        assert self.target_caches is not None
        graphs = self.graphs("target", steps.target, ("verify.target_logits", "target.taps"))
        model = DeviceTargetModel(
            self.draft_config.gamma,
            steps,
            self.buffers,
            self.target_caches,
            graphs,
            self.buckets,
        )
        if self._capture is not None:
            model.warm_up()
        return model

    def verifier(self, steps: Steps) -> DeviceVerifier:
        graphs = self.graphs("verify", steps.verify, ("verify.accepted", "verify.tokens"))
        return DeviceVerifier(self.buffers, graphs, self.buckets, self._top_logprobs)

    def rounds(self, steps: Steps) -> DeviceRounds:
        from dspark_trt.runtime.backends.torch_rounds import TorchRounds

        rounds = TorchRounds(self, steps)
        if self._capture is not None:
            rounds.warm_up()
        return rounds

    def module_steps(
        self, drafter: Drafter | ChainDrafter | None, target: Target | None
    ) -> ModuleSteps:
        return ModuleSteps(
            drafter=drafter,
            target=target,
            buffers=self.buffers,
            draft_caches=self.draft_caches,
            target_caches=self.target_caches,
            gamma=self.draft_config.gamma,
            vocab_size=self.draft_config.decoder.vocab_size,
            max_batch=self.buckets.batch[-1],
        )


class TorchBackend:
    """Opens the parts of one bundle; weights go to the device once, and are shared by drafter and target."""

    name = "torch"

    def __init__(self, bundle: Bundle, options: BackendOptions) -> None:
        self.device = choose_device(options.device)
        self.bundle, self.options = bundle, replace(options, device=str(self.device))
        if self.device.type == "cuda":
            _require_triton()
        if options.threads is not None and self.device.type == "cpu":
            torch.set_num_threads(options.threads)
        self._weights = StoredWeights(bundle, self.device)
        self._parts = OpenParts(self._new_parts)

    def draft_model(self, requests: int) -> DraftModel:
        parts = self._parts.take(requests, "drafter")
        return parts.draft_model(parts.module_steps(self._drafter, None))

    def target_model(self, requests: int) -> TargetModel:
        parts = self._parts.take(requests, "target")
        return parts.target_model(parts.module_steps(None, self._target))

    def verifier(self, requests: int) -> Verifier:
        parts = self._parts.take(requests, "verifier")
        return parts.verifier(parts.module_steps(None, None))

    def rounds(self, requests: int) -> DeviceRounds:
        parts = self._parts.take(requests, "rounds")
        return parts.rounds(parts.module_steps(self._drafter, self._target))

    def _new_parts(self, requests: int) -> DeviceParts:
        return DeviceParts(
            self.bundle.draft,
            self.bundle.target,
            dtype=self.bundle.dtype,
            requests=requests,
            device=self.device,
            max_graphs=self.options.max_graphs,
            top_logprobs=self.bundle.top_logprobs,
        )

    @cached_property
    def _drafter(self) -> Drafter | ChainDrafter:
        return self._weights.draft_module()

    @cached_property
    def _target(self) -> Target:
        return self._weights.target()


def choose_device(wanted: str | None) -> torch.device:
    """The device asked for; by default a GPU where there is one.

    Raises:
        BackendError: no such device here.
    """
    name = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise BackendError(
                f"device {name!r}: torch {torch.__version__} sees {count} CUDA devices. "
                "Use device cpu, or install a torch build for this GPU's CUDA version."
            )
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def _require_triton() -> None:
    from importlib.util import find_spec

    if find_spec("triton") is None:
        raise BackendError(
            "on a GPU tokens are drawn and verified by Triton kernels, and triton is not installed. "
            "Install it with: pip install 'dspark-trt[kernels]'"
        )
