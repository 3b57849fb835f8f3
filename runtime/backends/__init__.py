# SPDX-License-Identifier: Apache-2.0
"""Backends by name, behind one interface (`interface.py`)."""

import os
import re
from dataclasses import dataclass, replace

from dspark_trt.bundle import WEIGHTS, Bundle
from dspark_trt.errors import BackendError
from dspark_trt.runtime.backends.interface import (
    Backend,
    BackendOptions,
    DraftModel,
    TargetModel,
    Verifier,
)

__all__ = ["BACKENDS", "Backend", "open_backend"]

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
BACKENDS = ("onnxruntime", "torch", "tensorrt", "tensorrt-rtx")


def open_backend(name: str, bundle: Bundle, options: BackendOptions | None = None) -> Backend:
    """Choose a backend for a bundle.

    Raises:
        BackendError: unknown name, a library or device that is missing, or a precision the backend cannot
            run.
        BundleError: the bundle has no engines for this backend, library version and GPU.
    """
    options = options or BackendOptions()
    if options.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        raise BackendError(
            f"device {options.device!r} is unknown; expected cpu, cuda or cuda:N"
        )
    match name:
        case "onnxruntime":
            return _ort_backend(bundle, options)
        case "torch":
            return _torch_backend(bundle, options)
        case "tensorrt" | "tensorrt-rtx":
            from dspark_trt.runtime.backends.engine_backend import EngineBackend

            return EngineBackend(name, bundle, options)
    raise BackendError(f"unknown backend {name!r}; there are {', '.join(BACKENDS)}")


@dataclass(frozen=True, slots=True)
class OrtBackend:
    bundle: Bundle
    options: BackendOptions
    name: str = "onnxruntime"

    def draft_model(self, requests: int) -> DraftModel:
        from dspark_trt.runtime.backends.ort import OrtDraftModel

        return OrtDraftModel(self.bundle, requests, self.options)

    def target_model(self, requests: int) -> TargetModel:
        from dspark_trt.runtime.backends.ort import OrtTargetModel

        return OrtTargetModel(self.bundle, requests, self.options)

    def verifier(self, requests: int) -> Verifier:
        from dspark_trt.runtime.backends.ort import OrtVerifier

        return OrtVerifier(self.bundle, requests, self.options)


def _ort_backend(bundle: Bundle, options: BackendOptions) -> Backend:
    if options.device is not None:  # it says what providers would
        providers = (CPU,) if options.device == "cpu" else (CUDA, CPU)
        options = replace(options, providers=providers)
    if foreign := sorted(set(options.providers) - {CPU, CUDA}):
        raise BackendError(
            f"onnxruntime's {', '.join(foreign)}: only {CPU} and {CUDA} are supported, because caches have "
            "to be bound where they lie. On a GPU, backend tensorrt or tensorrt-rtx runs engines."
        )
    if bundle.dtype == "bfloat16":
        raise BackendError(
            "onnxruntime's CPU provider has no bfloat16 kernels. "
            "Export the bundle again with --dtype float32 or float16."
        )
    if options.threads is None:
        options = replace(options, threads=_threads_for(bundle))
    if CUDA in options.providers:
        from dspark_trt.runtime.backends.ort_device_backend import OrtDeviceBackend

        return OrtDeviceBackend(bundle, options)
    return OrtBackend(bundle, options)


def _torch_backend(bundle: Bundle, options: BackendOptions) -> Backend:
    try:
        from dspark_trt.runtime.backends.torch_backend import TorchBackend
    except ImportError as error:
        raise BackendError(
            f"backend torch needs torch and onnx ({error}). Install them with: pip install torch onnx"
        ) from error
    return TorchBackend(bundle, options)


# Below this much weight a product is over before a second thread has woken up.
_ONE_THREAD_BELOW_BYTES = 64_000_000


def _threads_for(bundle: Bundle) -> int:
    """Threads of one step; CPUs this process may use, fewer than the machine has inside a container."""
    if bundle.files[WEIGHTS].size_bytes < _ONE_THREAD_BELOW_BYTES:
        return 1
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
