# SPDX-License-Identifier: Apache-2.0
"""One part, in the process it has for itself."""

import argparse
import logging
from collections.abc import Callable
from importlib import import_module

import torch

from gpu_check.part import CheckError, Clock, Report, machine

_MODULES = {
    "kernels": "kernels", "graphs": "graphs", "shapes": "graphs", "rounds": "rounds",
    "latency": "latency", "engines": "engines",
}  # fmt: skip


def run_part(options: argparse.Namespace) -> Report:
    logging.basicConfig(level=logging.WARNING)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return {"state": "skipped", "reason": f"torch {torch.__version__} sees no CUDA device"}
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    part: Callable[..., Report] = getattr(
        import_module(f"gpu_check.{_MODULES[options.part]}"), options.part
    )
    try:
        found = part(device, options, Clock(options.seconds))
    except CheckError as error:
        found = {"state": "failed", "reason": str(error)}
    return {"state": "passed", "machine": machine(device), **found}
