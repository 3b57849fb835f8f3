# SPDX-License-Identifier: Apache-2.0
"""The one place that knows which of the two libraries is meant: TensorRT and TensorRT-RTX share an API."""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from dspark_trt.engine_manifest import BACKENDS
from dspark_trt.errors import BackendError

_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


@dataclass(frozen=True, slots=True)
class Library:
    backend: str
    module: ModuleType

    @property
    def version(self) -> str:
        return str(self.module.__version__)

    @property
    def archs(self) -> tuple[str, ...]:
        """Architectures that can be built for by name; empty: only the GPU at hand."""
        capabilities = getattr(self.module, "ComputeCapability", None)
        names = capabilities.__members__ if capabilities is not None else ()
        return tuple(sorted(name.lower() for name in names if name.startswith("SM")))


def load_library(backend: str) -> Library:
    """Import the library behind a backend.

    Raises:
        BackendError: unknown backend, or its library is not installed or cannot be loaded.
    """
    if backend not in BACKENDS:
        raise BackendError(f"backend {backend!r} has no engines; {' and '.join(BACKENDS)} have")
    try:
        return Library(backend, import_module(_MODULES[backend]))
    except ImportError as error:
        raise BackendError(
            f"backend {backend} needs the Python package {_MODULES[backend]} ({error}). "
            f"Install it with: pip install 'dspark-trt[{backend}]'"
        ) from error
