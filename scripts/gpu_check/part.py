# SPDX-License-Identifier: Apache-2.0
"""What every part has: a clock, a report, and a way to fail."""

import platform
import time
from collections.abc import Iterator
from typing import Any

import torch

Report = dict[str, Any]


class CheckError(Exception):
    """A part found a difference."""


class Clock:
    """Seconds of a part that are left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def has(self, seconds: float = 0.0) -> bool:
        return time.monotonic() + seconds < self._end

    def rounds(self, most: int) -> Iterator[int]:
        """0, 1, .. until the time or `most` is reached; once at least."""
        for i in range(most):
            if i and not self.has():
                return
            yield i


def machine(device: torch.device) -> Report:
    import triton

    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "capability": torch.cuda.get_device_capability(device)
        if device.type == "cuda"
        else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
