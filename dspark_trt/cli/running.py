# SPDX-License-Identifier: Apache-2.0
"""Options of commands that run a bundle: what runs it, and where; and what they all need of it."""

from typing import TYPE_CHECKING, Annotated

import typer

from dspark_trt.errors import BundleError

if TYPE_CHECKING:
    from dspark_trt.bundle import Bundle

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


def require_bundled_target(bundle: "Bundle") -> None:
    """Asked for before prompts, which lack a tokenizer too where the target is missing.

    Raises:
        BundleError: the bundle holds the drafter alone.
    """
    if bundle.target is None:
        raise BundleError(
            f"{bundle.path} has no target. Export it again with --target: a target of your own is driven from "
            "Python (docs/embedding/own-target.md)"
        )
