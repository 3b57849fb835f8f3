# SPDX-License-Identifier: Apache-2.0
"""Backends by name, behind one interface (`interface.py`)."""

import os
from dataclasses import dataclass, replace

from dspark_trt.bundle import WEIGHTS, Bundle
from dspark_trt.errors import BackendError
from dspark_trt.runtime.backends.interface import (
    BackendOptions,
    DraftModel,
    TargetModel,
    Verifier,
)

BACKENDS = ("onnxruntime",)


@dataclass(frozen=True, slots=True)
class Backend:
    """Opens the parts of one bundle. Models share nothing but the files."""

    name: str
    bundle: Bundle
    options: BackendOptions

    def draft_model(self, requests: int) -> DraftModel:
        from dspark_trt.runtime.backends.ort import OrtDraftModel

        return OrtDraftModel(self.bundle, requests, self.options)

    def target_model(self, requests: int) -> TargetModel:
        from dspark_trt.runtime.backends.ort import OrtTargetModel

        return OrtTargetModel(self.bundle, requests, self.options)

    def verifier(self, requests: int) -> Verifier:
        from dspark_trt.runtime.backends.ort import OrtVerifier

        return OrtVerifier(self.bundle, requests, self.options)


def open_backend(name: str, bundle: Bundle, options: BackendOptions | None = None) -> Backend:
    """Choose a backend for a bundle.

    Raises:
        BackendError: unknown name, or a precision the backend cannot run.
    """
    if name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}; there are {', '.join(BACKENDS)}")
    if bundle.dtype == "bfloat16":
        raise BackendError(
            "onnxruntime's CPU provider has no bfloat16 kernels. "
            "Export the bundle again with --dtype float32 or float16."
        )
    options = options or BackendOptions()
    if options.threads is None:
        options = replace(options, threads=_threads_for(bundle))
    return Backend(name, bundle, options)


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
