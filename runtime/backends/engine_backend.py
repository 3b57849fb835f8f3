# SPDX-License-Identifier: Apache-2.0
"""Backends `tensorrt` and `tensorrt-rtx`: a bundle's engines in the place of the torch modules.

Buffers, caches, buckets, padding and CUDA graphs are those of the torch backend, which gives device memory
and streams; this module imports torch only where it runs.
"""

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from dspark_trt.bundle import Bundle
from dspark_trt.engine_manifest import EngineSet, build_command, check_engine, find_engines
from dspark_trt.errors import BackendError, CapacityError
from dspark_trt.gpu import visible_gpu
from dspark_trt.runtime.backends.engine_contexts import EngineContexts, EngineLoader
from dspark_trt.runtime.backends.interface import (
    BackendOptions,
    DeviceRounds,
    DraftModel,
    TargetModel,
    Verifier,
)
from dspark_trt.runtime.backends.kernel_cache import KernelCache
from dspark_trt.runtime.backends.open_parts import OpenParts
from dspark_trt.runtime.cuda_graphs.buckets import Buckets, GraphKey
from dspark_trt.tensorrt_library import load_library

if TYPE_CHECKING:
    from torch import Tensor

    from dspark_trt.runtime.backends.torch_backend import DeviceParts
    from dspark_trt.runtime.backends.torch_graph_steps import GraphSteps


class EngineBackend:
    """Opens the engines of one bundle that fit the installed library and the GPU at hand."""

    def __init__(self, name: str, bundle: Bundle, options: BackendOptions) -> None:
        """Check everything that can be checked before a library sees a plan.

        Raises:
            BackendError: no GPU, library or torch; or the options ask for another device.
            BundleError: no engines, or none of this version, architecture and bundle.
        """
        self.name, self.bundle, self.options = name, bundle, options
        wanted = options.device or "cuda"
        gpu = None if wanted == "cpu" else visible_gpu(int(wanted.partition(":")[2] or 0))
        if gpu is None:
            where = (
                "device cpu was asked for" if wanted == "cpu" else f"{_missing(wanted)} here"
            )
            raise BackendError(
                f"backend {name} runs engines on a GPU, and {where}. "
                "Use backend onnxruntime or torch, or run it on the GPU machine."
            )
        library = load_library(name)
        self.engines = find_engines(bundle, name, version=library.version, device_arch=gpu.arch)
        self._device = _cuda_device(name, wanted)
        rtx = name == "tensorrt-rtx"
        self._loader = EngineLoader(
            library,
            KernelCache(self.engines.path / f"kernels-{gpu.arch}.cache") if rtx else None,
            captures=rtx and options.max_graphs == 0,
        )
        self._parts = OpenParts(self._new_parts)

    def draft_model(self, requests: int) -> DraftModel:
        parts, steps, engines = self._parts.take(requests, "drafter")
        engines.load("draft", "context")
        return parts.draft_model(steps)

    def target_model(self, requests: int) -> TargetModel:
        self.bundle.graph_path("target")
        parts, steps, engines = self._parts.take(requests, "target")
        engines.load("target")
        return parts.target_model(steps)

    def verifier(self, requests: int) -> Verifier:
        parts, steps, engines = self._parts.take(requests, "verifier")
        engines.load("verify")
        return parts.verifier(steps)

    def rounds(self, requests: int) -> DeviceRounds:
        """Contexts of their own: a captured graph shares none with the graphs of single steps."""
        from dspark_trt.runtime.backends.torch_graph_steps import GraphSteps

        parts, _, runner = self._parts.take(requests, "rounds")
        return parts.rounds(GraphSteps(self.bundle, parts, runner.for_rounds))

    def _new_parts(self, requests: int) -> "tuple[DeviceParts, GraphSteps, EngineRunner]":
        from dspark_trt.runtime.backends.torch_backend import DeviceParts
        from dspark_trt.runtime.backends.torch_graph_steps import GraphSteps

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
        limits, runner = self.engines.limits, EngineRunner(self)
        most = min(limits.tokens, limits.capacity)
        return parts, GraphSteps(self.bundle, parts, runner, context_rows=most), runner

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


class EngineRunner:
    """Runs engines by the name of their graph, on the current stream."""

    def __init__(self, backend: EngineBackend) -> None:
        self._backend = backend
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
                self._memories.append(torch.empty(needed, dtype=torch.uint8, device="cuda"))
            engine.use_memory(self._memories[-1].data_ptr(), self._memories[-1].numel())
            self._engines[graph] = engine

    def __call__(
        self, graph: str, tensors: "Mapping[str, Tensor]", key: GraphKey | None
    ) -> None:
        self._run(graph, tensors, key)

    def for_rounds(
        self, graph: str, tensors: "Mapping[str, Tensor]", key: GraphKey | None
    ) -> None:
        """A step inside a round that is launched as a whole."""
        self._run(graph, tensors, ("round", key))

    def _run(self, graph: str, tensors: "Mapping[str, Tensor]", key: Hashable | None) -> None:
        import torch

        stream: Any = torch.cuda.current_stream()
        self._engines[graph].run(tensors, stream=stream.cuda_stream, key=key)


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


def _missing(device: str) -> str:
    return "no CUDA device is visible" if device == "cuda" else f"no device {device} is visible"


def _cuda_device(name: str, wanted: str) -> Any:
    try:
        from dspark_trt.runtime.backends.torch_backend import choose_device
    except ImportError as error:
        raise BackendError(
            f"backend {name} takes device memory and CUDA graphs from torch ({error}). "
            "Install it with: pip install torch"
        ) from error
    return choose_device(wanted)
