# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt triton-repo`: a model repository for Triton Inference Server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark_trt.cli.output import console, err_console, print_json
from dspark_trt.cli.running import BackendName

if TYPE_CHECKING:
    from dspark_trt.bindings import GraphBindings
    from dspark_trt.bundle import Bundle


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
            help="Part to serve by itself as well: a graph, as ONNX model and, where built, as TensorRT "
            "plan; or none; may be repeated. Default: all.",
            show_default=False,
        ),
    ] = None,
    tensorrt_version: Annotated[
        str | None,
        typer.Option(
            help="Of the engines to serve, where the bundle has those of several.",
            show_default=False,
        ),
    ] = None,
    cache_rows: Annotated[
        int | None,
        typer.Option(
            help="Of each cache that the server keeps for a sequence of requests. Default: caches are "
            "inputs and outputs of the graphs.",
            min=1,
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
        int | None,
        typer.Option(
            help="CPU threads. Default: all usable; of the engine: one where the weights are under 64 MB.",
            min=1,
            show_default=False,
        ),
    ] = None,
    scheduler: Annotated[
        str, typer.Option(help="auto, fixed:K, threshold:C, algorithm1 or async.")
    ] = "auto",
    backend: BackendName = "onnxruntime",
    gpu: Annotated[
        bool, typer.Option("--gpu", help="The models' instances have a GPU.")
    ] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing repository.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a model repository for Triton Inference Server."""
    from dspark_trt.bundle import load_bundle
    from dspark_trt.runtime.serving.triton_config import EngineSettings
    from dspark_trt.runtime.serving.triton_repository import write_repository

    loaded = load_bundle(bundle)
    written = write_repository(
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
        graphs={each: _contract(loaded, each) for each in _graphs(loaded, graph)},
        tensorrt_version=tensorrt_version,
        cache_rows=cache_rows,
        overwrite=overwrite,
    )
    if json:
        print_json(
            {
                "repository": str(output),
                "model": written.model,
                "parts_repository": written.parts_path and str(written.parts_path),
                "parts": list(written.parts),
                "left_out": dict(written.left_out),
            }
        )
        return
    for model in (written.model, *written.parts):
        console.print(model, highlight=False)
    for name, reason in written.left_out.items():
        _say(f"{name} is no model: {reason}")
    _say(f"tritonserver --model-repository {output}")
    if written.parts_path is not None:
        _say(f"loads {written.model}; the others with --model-repository {written.parts_path}")


def _graphs(bundle: "Bundle", asked: list[str] | None) -> tuple[str, ...]:
    if asked is None or asked == ["all"]:
        return bundle.graph_names
    return () if asked == ["none"] else tuple(asked)


def _contract(bundle: "Bundle", graph: str) -> "GraphBindings":
    from dspark_trt.bundle import FUSED_TARGET
    from dspark_trt.export.engines.profiles import graph_bindings
    from dspark_trt.runtime.serving.triton_parts import fused_target_bindings

    bundle.graph_path(graph)  # says which there are
    if graph != FUSED_TARGET:
        return graph_bindings(bundle, graph)
    return fused_target_bindings(*(graph_bindings(bundle, g) for g in ("target", "verify")))


def _say(text: str) -> None:
    err_console.print(text, highlight=False, soft_wrap=True, markup=False)
