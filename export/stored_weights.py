# SPDX-License-Identifier: Apache-2.0
"""Weights as the graphs of a bundle hold them: back in modules, and held against their own hashes."""

import hashlib
import warnings
from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from dspark_trt.bundle import Bundle
from dspark_trt.errors import BundleError
from dspark_trt.export.passes import TRANSPOSED_SUFFIX
from dspark_trt.export.weights import DIGEST


def module_weights(
    bundle: Bundle, graphs: Iterable[str], module: nn.Module
) -> dict[str, Tensor]:
    """Every parameter of `module`, from the files of the bundle, mapped: not to be written to.

    Raises:
        BundleError: no graph of `graphs` holds a parameter.
    """
    stored: dict[str, Tensor] = {}
    for graph in graphs:
        for name, tensor in _initializers(bundle, graph):
            value = _mapped(tensor)
            plain = name.removesuffix(TRANSPOSED_SUFFIX)
            stored[plain] = value if plain == name else value.t()
    wanted = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    if missing := [name for name in wanted if name not in stored]:
        raise BundleError(
            f"{bundle.path}: no graph holds {', '.join(missing)}. Export the bundle again."
        )
    return {name: stored[name] for name in wanted}


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


def _mapped(tensor: ir.TensorProtocol) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(tensor.numpy())
