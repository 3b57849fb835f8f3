# SPDX-License-Identifier: Apache-2.0
"""Where costs were measured: what has to be the same for a cost table to hold."""

import os
import platform
from importlib import import_module
from pathlib import Path

from dspark_trt.gpu import visible_gpu
from dspark_trt.runtime.backends import Backend
from dspark_trt.runtime.backends.interface import TargetModel

_MODULES = {
    "onnxruntime": "onnxruntime",
    "torch": "torch",
    "tensorrt": "tensorrt",
    "tensorrt-rtx": "tensorrt_rtx",
}


def usable_cpus() -> int:
    """CPUs this process may use: fewer than the machine has inside a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_name() -> str:
    """Processor and GPU, without what differs between two machines of one kind."""
    gpu = visible_gpu()
    cpu = f"{_cpu_model()}, {usable_cpus()} CPUs"
    return cpu if gpu is None else f"{gpu.name} ({gpu.arch}), {cpu}"


def cost_origin(backend: Backend, target: TargetModel | None = None) -> dict[str, str]:
    """Machine, backend with version and threads, and exact weights of a cost table.

    Args:
        backend: what runs the bundle.
        target: the host's own target in place of the bundle's.
    """
    threads = backend.options.threads
    origin = {
        "machine": machine_name(),
        "backend": f"{backend.name} {import_module(_MODULES[backend.name]).__version__}",
        "providers": ", ".join(backend.options.providers),
        "threads": "default" if threads is None else str(threads),
        "bundle": backend.bundle.fingerprint(),
        "target": "bundle" if target is None else type(target).__name__,
    }
    if backend.name == "torch":  # the others say it by their providers, or run on GPUs only
        origin["device"] = (backend.options.device or "").partition(":")[0]
    return origin


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
