# SPDX-License-Identifier: Apache-2.0
"""onnxruntime on a GPU: the bundle's graphs by the CUDA provider, every tensor and cache bound where it lies on
the device. Memory is torch's; on a CPU the same code runs with the CPU provider.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_trt.bundle import Bundle
from dspark_trt.errors import BackendError, first_line
from dspark_trt.runtime.backends.interface import (
    BackendOptions,
    DraftModel,
    TargetModel,
    Verifier,
)
from dspark_trt.runtime.backends.open_parts import OpenParts
from dspark_trt.runtime.backends.ort import open_session
from dspark_trt.runtime.cuda_graphs.buckets import GraphKey

if TYPE_CHECKING:
    from torch import Tensor

    from dspark_trt.runtime.backends.torch_backend import DeviceParts
    from dspark_trt.runtime.backends.torch_graph_steps import GraphSteps


class OrtDeviceBackend:
    """Steps are launched by onnxruntime itself: no CUDA graphs."""

    name = "onnxruntime"

    def __init__(self, bundle: Bundle, options: BackendOptions) -> None:
        """Open the smallest graph, which says whether the provider is there.

        Raises:
            BackendError: onnxruntime or torch is missing, or has no such provider or device.
        """
        self.bundle, self.options = bundle, options
        self._sessions: dict[str, Any] = {"verify": self._open("verify")}
        try:
            from dspark_trt.runtime.backends.torch_backend import choose_device
        except ImportError as error:
            raise BackendError(
                f"onnxruntime on a GPU takes device memory from torch ({error}). "
                "Install it with: pip install torch"
            ) from error
        self._device = choose_device(options.device or "cuda")
        self._parts = OpenParts(self._new_parts)

    def draft_model(self, requests: int) -> DraftModel:
        parts, steps = self._parts.take(requests, "drafter")
        return parts.draft_model(steps)

    def target_model(self, requests: int) -> TargetModel:
        self.bundle.graph_path("target")
        parts, steps = self._parts.take(requests, "target")
        return parts.target_model(steps)

    def verifier(self, requests: int) -> Verifier:
        parts, steps = self._parts.take(requests, "verifier")
        return parts.verifier(steps)

    def _new_parts(self, requests: int) -> "tuple[DeviceParts, GraphSteps]":
        from dspark_trt.runtime.backends.torch_backend import DeviceParts
        from dspark_trt.runtime.backends.torch_graph_steps import GraphSteps

        parts = DeviceParts(
            self.bundle.draft,
            self.bundle.target,
            dtype=self.bundle.dtype,
            requests=requests,
            device=self._device,
            max_graphs=0,
            top_logprobs=self.bundle.top_logprobs,
        )
        return parts, GraphSteps(self.bundle, parts, self._run)

    def _open(self, graph: str) -> Any:
        return open_session(self.bundle.graph_path(graph), self.options)

    def _run(self, graph: str, tensors: "Mapping[str, Tensor]", key: GraphKey | None) -> None:
        """Bind every tensor by address, run, and wait: onnxruntime has a stream of its own.

        Raises:
            BackendError: onnxruntime failed; the graph can be run again.
        """
        session = self._sessions.get(graph)
        if session is None:
            session = self._sessions[graph] = self._open(graph)
        binding, inputs = session.io_binding(), {value.name for value in session.get_inputs()}
        for name, tensor in tensors.items():
            place = self._place(tensor)
            (binding.bind_input if name in inputs else binding.bind_output)(name, *place)
            if name.startswith("past_"):  # in place: a cache's output is its input
                binding.bind_output(name.replace("past_", "present_"), *place)
        self._synchronise()
        try:
            session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime raises several unrelated types
            raise BackendError(f"graph {graph} failed: {first_line(error)}") from error

    def _place(self, tensor: "Tensor") -> tuple[Any, ...]:
        assert tensor.is_contiguous()
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch.")).type
        index = self._device.index or 0
        return self._device.type, index, dtype, tuple(tensor.shape), tensor.data_ptr()

    def _synchronise(self) -> None:
        """Torch has written the inputs before onnxruntime reads them; a run ends synchronised."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.current_stream().synchronize()
