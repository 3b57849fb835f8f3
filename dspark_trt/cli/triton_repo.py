# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt triton-repo`: a model repository for Triton Inference Server."""

from pathlib import Path
from typing import Annotated

import typer

from dspark_trt.cli.output import console, err_console, print_json

_PARTS = "all"


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.", show_default=False)],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Repository folder.", show_default=False)
    ],
    name: Annotated[
        str | None, typer.Option(help="Of the model; default: the bundle's folder name.")
    ] = None,
    graph: Annotated[
        list[str] | None,
        typer.Option(
            help="Graph to serve by itself as well, or all; may be repeated.",
            show_default=False,
        ),
    ] = None,
    max_batch: Annotated[
        int, typer.Option(help="Requests decoded at the same time.", min=1)
    ] = 8,
    prefix_cache_mib: Annotated[
        int, typer.Option(help="Memory for the beginnings of earlier prompts.", min=0)
    ] = 256,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; default: all usable.", min=1)
    ] = None,
    scheduler: Annotated[
        str, typer.Option(help="auto, fixed:K, threshold:C, algorithm1 or async.")
    ] = "auto",
    backend: Annotated[str, typer.Option(help="Backend that runs the graphs.")] = "onnxruntime",
    gpu: Annotated[
        bool, typer.Option("--gpu", help="The engine's instance has a GPU.")
    ] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing repository.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a bundle as a model repository for Triton Inference Server."""
    from dspark_trt.bundle import load_bundle
    from dspark_trt.export.engines.profiles import graph_bindings
    from dspark_trt.runtime.serving.triton_repository import EngineSettings, write_repository

    loaded = load_bundle(bundle)
    names = loaded.graph_names if graph == [_PARTS] else tuple(graph or ())
    models = write_repository(
        loaded,
        output,
        name=name,
        settings=EngineSettings(
            max_batch=max_batch,
            prefix_cache_mib=prefix_cache_mib,
            threads=threads,
            scheduler=scheduler,
            backend=backend,
            on_gpu=gpu,
        ),
        graphs={each: graph_bindings(loaded, each) for each in names},
        overwrite=overwrite,
    )
    if json:
        print_json({"repository": str(output), "models": list(models)})
        return
    for model in models:
        console.print(model, highlight=False)
    err_console.print(
        f"tritonserver --model-repository {output}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
