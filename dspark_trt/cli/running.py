# SPDX-License-Identifier: Apache-2.0
"""Options of commands that run a bundle: what runs it, and where."""

from typing import Annotated

import typer

BackendName = Annotated[
    str,
    typer.Option(
        "--backend",
        help="What runs the graphs: onnxruntime, torch, tensorrt or tensorrt-rtx.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        help="CPU threads. Default: all usable; one where the weights are under 64 MB.",
        show_default=False,
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="cpu, cuda or cuda:N. Default: the CPU for onnxruntime, else a GPU where there is one.",
        show_default=False,
    ),
]
