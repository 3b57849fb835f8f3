# SPDX-License-Identifier: Apache-2.0
"""What an engine is: its tensors, the shapes it takes, where it runs, and its layers."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspark_trt.engine_manifest import (
    EngineRecord,
    EngineSet,
    check_engine_file,
    covers,
    read_engine_manifest,
)
from dspark_trt.errors import BackendError, BundleError
from dspark_trt.export.engines.layer_times import layer_shares
from dspark_trt.gpu import visible_gpu
from dspark_trt.tensorrt_library import load_library


def describe_engine(path: Path) -> dict[str, Any]:
    """Facts about one engine file, JSON-ready.

    Args:
        path: `…/engines/<backend>-<arch>-<version>/<graph>.engine`.

    Raises:
        BundleError: no manifest beside it, an engine the manifest does not know, or a damaged file.
    """
    engines = read_engine_manifest(path.parent)
    graph = next((g for g, r in engines.engines.items() if r.file == path.name), None)
    if graph is None:
        known = ", ".join(record.file for record in engines.engines.values()) or "none"
        raise BundleError(f"{path.parent} has no engine {path.name}; it has {known}")
    check_engine_file(engines, graph)
    record = engines.engines[graph]
    return {
        "graph": graph,
        "backend": engines.backend,
        "version": engines.version,
        "archs": list(engines.archs),
        "gpu": engines.gpu,
        "limits": asdict(engines.limits),
        "holds_weights": not engines.stripped,
        "bytes": record.size_bytes,
        "seconds": record.seconds,
        "peak_bytes": record.peak_bytes,
        "inputs": [
            {
                **asdict(binding),
                "profiles": {p.name: p.shapes[binding.name] for p in record.profiles},
            }
            for binding in record.inputs
        ],
        "outputs": [
            {**asdict(binding), "in_place_of": record.aliases.get(binding.name)}
            for binding in record.outputs
        ],
        "network_layers": dict(record.layers),
        **_on_its_gpu(engines, record, path),
    }


def _on_its_gpu(engines: EngineSet, record: EngineRecord, path: Path) -> dict[str, Any]:
    """Names of the fused layers and their shares of the time; None where the engine cannot be loaded."""
    unknown = {"engine_layers": None, "layer_times": None}
    gpu = visible_gpu()
    if gpu is None or not covers(engines.archs, gpu.arch) or engines.stripped:
        return unknown
    try:
        library = load_library(engines.backend)
    except BackendError:
        return unknown
    if library.version != engines.version:
        return unknown
    trt = library.module
    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        return unknown
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    layers = [
        item if isinstance(item, str) else item["Name"] for item in json.loads(text)["Layers"]
    ]
    return {"engine_layers": layers, "layer_times": layer_shares(trt, engine, record)}
