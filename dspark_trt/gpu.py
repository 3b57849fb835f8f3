# SPDX-License-Identifier: Apache-2.0
"""The GPU this process sees, asked of the driver itself: no CUDA toolkit, torch or TensorRT needed."""

import ctypes
import sys
from dataclasses import dataclass

_MAJOR, _MINOR = 75, 76  # CUdevice_attribute: compute capability


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    arch: str  # "sm89"


def visible_gpu(index: int = 0) -> Gpu | None:
    """A visible CUDA device; None without a driver or so many devices."""
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    count, device = ctypes.c_int(), ctypes.c_int()
    failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if failed or index >= count.value or cuda.cuDeviceGet(ctypes.byref(device), index):
        return None
    name = ctypes.create_string_buffer(256)
    major, minor = ctypes.c_int(), ctypes.c_int()
    failed = (
        cuda.cuDeviceGetName(name, len(name), device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    )
    if failed:
        return None
    return Gpu(name.value.decode(errors="replace"), f"sm{major.value}{minor.value}")
