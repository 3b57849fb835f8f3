# SPDX-License-Identifier: Apache-2.0
"""Modules filled from a bundle's own weights: the initializers of its graphs, under the modules' names."""

from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dspark_trt.bindings import TRANSPOSED_SUFFIX
from dspark_trt.bundle import Bundle
from dspark_trt.errors import BundleError
from dspark_trt.models.drafter import Drafter
from dspark_trt.models.loading import drafter_skeleton, fill, target_skeleton
from dspark_trt.models.target import Target

if TYPE_CHECKING:
    from onnx import TensorProto

Place = Callable[[Tensor], Tensor]  # where a weight is to live: moves it to a device


def stored_drafter(bundle: Bundle, place: Place | None = None) -> Drafter:
    """The drafter with the weights of the bundle.

    Raises:
        BundleError: no graph holds a parameter.
    """
    module = drafter_skeleton(bundle.draft)
    fill(module, stored_weights(bundle, ("draft", "context"), module, place))
    return module


def stored_target(bundle: Bundle, place: Place | None = None) -> Target:
    """The target with the weights of the bundle.

    Raises:
        BundleError: the bundle has no target, or no graph holds a parameter.
    """
    bundle.graph_path("target")
    assert bundle.target is not None  # graph_path has refused a bundle without target
    module = target_skeleton(bundle.target, bundle.draft.target_layer_ids)
    fill(module, stored_weights(bundle, ("target",), module, place))
    return module


def stored_weights(
    bundle: Bundle, graphs: Iterable[str], module: nn.Module, place: Place | None = None
) -> dict[str, Tensor]:
    """Every parameter of `module` from the graphs of a bundle.

    Args:
        bundle: whose files to read.
        graphs: names of the graphs that hold the module's parameters.
        module: whose parameters, by name.
        place: applied to each tensor; None: they stay mapped to the file, private to this process.

    Raises:
        BundleError: no graph of `graphs` holds a parameter.
    """
    wanted = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    stored: dict[str, Tensor] = {}
    for graph in graphs:
        for tensor in _initializers(bundle.graph_path(graph)):
            name = tensor.name.removesuffix(TRANSPOSED_SUFFIX)
            if name in wanted and name not in stored:
                value = _mapped(tensor, bundle.path)
                value = value if place is None else place(value)
                stored[name] = value if name == tensor.name else value.t()
    if missing := [name for name in wanted if name not in stored]:
        raise BundleError(
            f"{bundle.path}: no graph holds {', '.join(missing)}. Export the bundle again."
        )
    return stored


def _initializers(graph: Path) -> Iterator["TensorProto"]:
    import onnx

    yield from onnx.load(graph, load_external_data=False).graph.initializer


def _mapped(tensor: "TensorProto", folder: Path) -> Tensor:
    dtype = _torch_dtype(tensor.data_type)
    if not tensor.external_data:
        return torch.frombuffer(bytearray(tensor.raw_data), dtype=dtype).view(*tensor.dims)
    where = {entry.key: entry.value for entry in tensor.external_data}
    nbytes = prod(tensor.dims) * dtype.itemsize
    start = int(where.get("offset", 0))
    # Mapped from the file's beginning: pages are read when they are touched.
    whole = torch.from_file(
        str(folder / where["location"]),
        shared=False,
        size=start + nbytes,
        dtype=torch.uint8,
    )
    return whole[start:].view(dtype).view(*tensor.dims)


def _torch_dtype(data_type: int) -> torch.dtype:
    from onnx import TensorProto

    dtypes: dict[int, torch.dtype] = {
        TensorProto.FLOAT: torch.float32,
        TensorProto.FLOAT16: torch.float16,
        TensorProto.BFLOAT16: torch.bfloat16,
        TensorProto.INT64: torch.int64,  # the map of a reduced draft vocabulary
    }
    return dtypes[data_type]
