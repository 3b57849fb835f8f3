# SPDX-License-Identifier: Apache-2.0
"""``dspark-trt attach-verify``: let a language model exported by any tool return verified tokens."""

from pathlib import Path
from typing import Annotated

import typer

from dspark_trt.cli.output import console, print_json
from dspark_trt.errors import ExportError


def command(
    model: Annotated[
        Path,
        typer.Argument(help="ONNX model with logits [T, V] or [B, L, V].", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; MODEL-verify.onnx if not given."),
    ] = None,
    gamma: Annotated[
        int, typer.Option(min=1, help="Most drafted tokens a request can have.")
    ] = 7,
    mode: Annotated[
        str, typer.Option(help="rejection, coupled (same seed, same tokens) or greedy.")
    ] = "rejection",
    logits: Annotated[
        str | None, typer.Option(help="Output that holds logits.", show_default=False)
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Columns of the logits, where the graph does not say.", show_default=False
        ),
    ] = None,
    keep_logits: Annotated[
        bool, typer.Option("--keep-logits", help="Return the logits as well.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Put lossless verification behind MODEL's logits.

    The model that is written returns counts and tokens.
    """
    from dspark_trt.plugins.attach import attach_to_file
    from dspark_trt.plugins.contract import VerifyMode

    if mode not in list(VerifyMode):
        raise ExportError(f"mode {mode} is unknown; choose one of {', '.join(VerifyMode)}")
    destination = output or model.with_name(f"{model.stem}-verify.onnx")
    attached = attach_to_file(
        model,
        destination,
        mode=mode,
        gamma=gamma,
        logits=logits,
        vocab_size=vocab_size,
        keep_logits=keep_logits,
    )
    inputs = [value.name for value in attached.graph.input]
    outputs = [value.name for value in attached.graph.output]
    if as_json:
        print_json(
            {"model": str(destination), "mode": mode, "inputs": inputs, "outputs": outputs}
        )
        return
    console.print(f"wrote {destination}")
    console.print(f"inputs:  {', '.join(inputs)}")
    console.print(f"outputs: {', '.join(outputs)}")
