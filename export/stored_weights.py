# SPDX-License-Identifier: Apache-2.0
"""Weights as the graphs of a bundle hold them, held against their own hashes."""

import hashlib
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from dspark_trt.bundle import Bundle
from dspark_trt.export.weights import DIGEST


def changed_weights(bundle: Bundle) -> list[str]:
    """Weights whose bytes are not those the exporter wrote, each as "graph: name".

    Stronger than the hashes of the manifest, which can be made to fit any file.
    """
    changed = []
    seen: dict[tuple[object, ...], str] = {}
    for graph in bundle.graph_names:
        for name, tensor in _initializers(bundle, graph):
            if (expected := tensor.metadata_props.get(DIGEST)) is None:
                continue  # a constant of the graph
            place = _place(graph, name, tensor)
            if place not in seen:
                data = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
                seen[place] = hashlib.sha256(data.data).hexdigest()
            if seen[place] != expected:
                changed.append(f"{graph}: {name}")
    return changed


def _initializers(bundle: Bundle, graph: str) -> Iterator[tuple[str, ir.TensorProtocol]]:
    for name, value in ir.load(bundle.graph_path(graph)).graph.initializers.items():
        assert value.const_value is not None
        yield name, value.const_value


def _place(graph: str, name: str, tensor: ir.TensorProtocol) -> tuple[object, ...]:
    if isinstance(tensor, ir.ExternalTensor):
        return tensor.location, tensor.offset, tensor.length
    return graph, name
