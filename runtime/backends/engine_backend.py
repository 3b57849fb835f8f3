# SPDX-License-Identifier: Apache-2.0
"""Backends `tensorrt` and `tensorrt-rtx`: a bundle's engines in the place of the torch modules.

Buffers, caches, buckets, padding and CUDA graphs are those of the torch backend, which gives device memory
and streams; this module imports torch only where it runs.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dspark_trt import bindings
from dspark_trt.bundle import Bundle
from dspark_trt.config import DecoderConfig
from dspark_trt.engine_manifest import EngineSet, build_command, check_engine, find_engines
from dspark_trt.errors import BackendError, CapacityError
from dspark_trt.gpu import visible_gpu
from dspark_trt.runtime.backends.engine_contexts import EngineContexts, EngineLoader
from dspark_trt.runtime.backends.interface import (
    BackendOptions,
    DraftModel,
    TargetModel,
    Verifier,
)
from dspark_trt.runtime.backends.open_parts import OpenParts
from dspark_trt.runtime.cuda_graphs.buckets import Buckets, GraphKey
from dspark_trt.tensorrt_library import load_library

if TYPE_CHECKING:
    from torch import Tensor

    from dspark_trt.runtime.backends.torch_backend import DeviceParts
    from dspark_trt.runtime.backends.torch_caches import DeviceCaches
    from dspark_trt.runtime.backends.torch_steps import Prefill


class EngineBackend:
    """Opens the engines of one bundle that fit the installed library and the GPU at hand."""

    def __init__(self, name: str, bundle: Bundle, options: BackendOptions) -> None:
        """Check everything that can be checked before a library sees a plan.

        Raises:
            BackendError: no GPU, library or torch; or the options ask for another device.
            BundleError: no engines, or none of this version, architecture and bundle.
        """
        self.name, self.bundle, self.options = name, bundle, options
        gpu = visible_gpu()
        if gpu is None:
            raise BackendError(
                f"backend {name} runs engines on a GPU, and no CUDA device is visible here. "
                "Use backend onnxruntime or torch, or run it on the GPU machine."
            )
        library = load_library(name)
        self.engines = find_engines(bundle, name, version=library.version, device_arch=gpu.arch)
        self._device = _cuda_device(name, options.device)
        self._loader = EngineLoader(library)
        self._parts = OpenParts(self._new_parts)

    def draft_model(self, requests: int) -> DraftModel:
        parts, steps = self._parts.take(requests, "drafter")
        steps.load("draft", "context")
        return parts.draft_model(steps)

    def target_model(self, requests: int) -> TargetModel:
        self.bundle.graph_path("target")
        parts, steps = self._parts.take(requests, "target")
        steps.load("target")
        return parts.target_model(steps)

    def verifier(self, requests: int) -> Verifier:
        parts, steps = self._parts.take(requests, "verifier")
        steps.load("verify")
        return parts.verifier(steps)

    def _new_parts(self, requests: int) -> "tuple[DeviceParts, EngineSteps]":
        from dspark_trt.runtime.backends.torch_backend import DeviceParts

        parts = DeviceParts(
            self.bundle.draft,
            self.bundle.target,
            dtype=self.bundle.dtype,
            requests=requests,
            device=self._device,
            max_graphs=self.options.max_graphs,
            top_logprobs=self.bundle.top_logprobs,
            buckets=engine_buckets(self.engines, requests, self.bundle),
            fixed_rows=self.engines.limits.capacity,
        )
        return parts, EngineSteps(self, parts)

    def contexts(self, graph: str) -> EngineContexts:
        """One engine of the bundle, its file compared with the manifest first.

        Raises:
            BundleError: not built, missing, changed, or built from another bundle.
            BackendError: the library does not load it.
        """
        plugins = self.engines.plugin_sha256 if self.name == "tensorrt" else None
        file = check_engine(self.engines, graph, self.bundle, plugin_sha256=plugins)
        record = self.engines.engines[graph]
        return EngineContexts(graph, self._loader.load(file), record, self._loader)


class EngineSteps:
    """Steps of engines, on the static buffers and caches of `parts`."""

    def __init__(self, backend: EngineBackend, parts: "DeviceParts") -> None:
        self._backend, self._parts = backend, parts
        self._engines: dict[str, EngineContexts] = {}
        self._memories: list[Tensor] = []

    def load(self, *graphs: str) -> None:
        """Load engines. They run one by one and share scratch memory; a greedier one gets new memory, and
        those before it keep theirs: captured graphs hold its address.
        """
        import torch

        for graph in graphs:
            engine = self._backend.contexts(graph)
            needed = max(engine.memory_bytes, 1)
            if not self._memories or self._memories[-1].numel() < needed:
                device = self._parts.device
                self._memories.append(torch.empty(needed, dtype=torch.uint8, device=device))
            engine.use_memory(self._memories[-1].data_ptr(), self._memories[-1].numel())
            self._engines[graph] = engine

    def draft(self, key: GraphKey) -> None:
        self._run("draft", key, self._draft_caches(key.batch))

    def target(self, key: GraphKey) -> None:
        self._run("target", key, self._target_caches(key.batch))

    def verify(self, key: GraphKey) -> None:
        self._run("verify", key, {})

    def append(self, row: int, taps: "Tensor", start: int) -> None:
        import torch

        caches = {name: c[row : row + 1] for name, c in self._draft_caches(None).items()}
        limits = self._backend.engines.limits
        chunks: Any = taps.split(min(limits.tokens, limits.capacity))  # type: ignore[no-untyped-call]
        for chunk in chunks:
            context_len = torch.full((1,), start, dtype=torch.int64, device=taps.device)
            inputs = {"taps": chunk[None].contiguous(), "context_len": context_len}
            self._enqueue("context", inputs | caches)
            start += len(chunk)

    def prefill(self, rows: "Prefill") -> "tuple[Tensor, Tensor]":
        import torch

        config, device = self._parts.draft_config, self._parts.device
        logits = torch.empty((len(rows.logit_rows), config.decoder.vocab_size), device=device)
        taps = torch.empty((len(rows.token_ids), config.tap_size), device=device)
        tensors = {**rows._asdict(), "logits": logits, "taps": taps}
        del tensors["span"]  # an engine's caches have their whole capacity
        self._enqueue("target", tensors | self._target_caches(len(rows.context_len)))
        return logits, taps

    def _run(self, graph: str, key: GraphKey, caches: "dict[str, Tensor]") -> None:
        from dspark_trt.runtime.backends.torch_steps import buffer_name, graph_contracts

        bundle, buffers = self._backend.bundle, self._parts.buffers
        sizes = {
            "batch": key.batch,
            "offsets": key.batch + 1,
            "rows": key.rows,
            "logit_rows": key.rows,
        }
        contract = graph_contracts(bundle.draft, bundle.target, bundle.dtype)[graph]
        tensors = {
            binding.name: buffers[buffer_name(graph, binding.name)][
                : sizes[str(binding.shape[0])]
            ]
            for binding in (*contract.inputs, *contract.outputs)
        }
        self._enqueue(graph, tensors | caches, key)

    def _enqueue(
        self, graph: str, tensors: "Mapping[str, Tensor]", key: GraphKey | None = None
    ) -> None:
        import torch

        stream: Any = torch.cuda.current_stream()
        self._engines[graph].run(tensors, stream=stream.cuda_stream, key=key)

    def _draft_caches(self, batch: int | None) -> "dict[str, Tensor]":
        decoder = self._backend.bundle.draft.decoder
        return self._named(decoder, self._parts.draft_caches, batch)

    def _target_caches(self, batch: int) -> "dict[str, Tensor]":
        target, caches = self._backend.bundle.target, self._parts.target_caches
        assert target is not None
        assert caches is not None
        return self._named(target.decoder, caches, batch)

    def _named(
        self, decoder: DecoderConfig, caches: "DeviceCaches", batch: int | None
    ) -> "dict[str, Tensor]":
        names = bindings.cache_bindings(decoder, self._backend.bundle.dtype, "past")
        return {b.name: t[:batch] for b, t in zip(names, caches.tensors, strict=True)}


def engine_buckets(engines: EngineSet, requests: int, bundle: Bundle) -> Buckets:
    """The engines' buckets for up to `requests` requests.

    Raises:
        CapacityError: the engines take fewer.
    """
    limits = engines.limits
    if requests > limits.batch:
        again = build_command(bundle, engines.backend, engines.archs)
        raise CapacityError(
            f"{engines.path} holds {limits.batch} requests, {requests} are wanted. "
            f"Build it again with: {again} --max-batch {requests}"
        )
    rows = requests * (bundle.draft.gamma + 1)
    batch = {b for b in engines.batch_buckets if b < requests}
    tokens = {t for t in engines.token_buckets if t < rows}
    return Buckets(tuple(sorted(batch | {requests})), tuple(sorted(tokens | {rows})))


def _cuda_device(name: str, wanted: str | None) -> Any:
    try:
        from dspark_trt.runtime.backends.torch_backend import choose_device
    except ImportError as error:
        raise BackendError(
            f"backend {name} takes device memory and CUDA graphs from torch ({error}). "
            "Install it with: pip install torch"
        ) from error
    device = choose_device(wanted or "cuda")
    if device.type != "cuda":
        raise BackendError(f"backend {name} runs on cuda, not on device {wanted!r}")
    return device
