# SPDX-License-Identifier: Apache-2.0
"""Polygraphy over either of the two libraries."""

from importlib import import_module
from typing import Any


def polygraphy_loaders(backend: str) -> Any:
    """Polygraphy's TensorRT loaders, bound to the backend's library.

    Polygraphy decides once a process, when its loaders are first imported.
    """
    from polygraphy import config

    config.USE_TENSORRT_RTX = backend == "tensorrt-rtx"
    return import_module("polygraphy.backend.trt")
