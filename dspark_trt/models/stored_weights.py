# SPDX-License-Identifier: Apache-2.0
"""Modules filled from a bundle's own weights: the initializers of its graphs, under the modules' names."""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dspark_trt.bindings import TRANSPOSED_SUFFIX
from dspark_trt.block_weights import PACKED_SUFFIX, SCALES_SUFFIX, unpack
from dspark_trt.bundle import Bundle
from dspark_trt.errors import BundleError
from dspark_trt.models.chain import ChainDrafter
from dspark_trt.models.drafter import Drafter
from dspark_trt.models.loading import draft_skeleton, fill, target_skeleton
from dspark_trt.models.target import Target

if TYPE_CHECKING:
    from onnx import TensorProto


class StoredWeights:
    """Reads weights of a bundle, each once: what models or graphs share is one tensor.

    Without a device they stay mapped to the file, private to this process.
    """

    def __init__(self, bundle: Bundle, device: torch.device | None = None) -> None:
        self._bundle, self._device = bundle, device
        self._seen: dict[tuple[str, str, tuple[int, ...]], Tensor] = {}

    def drafter(self) -> Drafter:
        """The drafter with its weights, if it drafts blocks.

        Raises:
            BundleError: no graph holds a parameter.
        """
        module = self.draft_module()
        assert isinstance(module, Drafter)
        return module

    def draft_module(self) -> Drafter | ChainDrafter:
        """The drafter with its weights, of either kind.

        Raises:
            BundleError: no graph holds a parameter.
        """
        module = draft_skeleton(self._bundle.draft)
        fill(module, self._of(("draft", "context"), module))
        return module if self._device is None else module.to(self._device)

    def target(self) -> Target:
        """The target with its weights.

        Raises:
            BundleError: the bundle has no target, or no graph holds a parameter.
        """
        self._bundle.graph_path("target")
        assert self._bundle.target is not None  # graph_path has refused a bundle without target
        module = target_skeleton(self._bundle.target, self._bundle.draft.target_layer_ids)
        fill(module, self._of(("target",), module))
        return module if self._device is None else module.to(self._device)

    def _of(self, graphs: tuple[str, ...], module: nn.Module) -> dict[str, Tensor]:
        wanted = dict(module.named_parameters(remove_duplicate=False))
        stored: dict[str, Tensor] = {}
        for graph in graphs:
            tensors = {t.name: t for t in _initializers(self._bundle.graph_path(graph))}
            for name, parameter in wanted.items():
                value = None if name in stored else self._parameter(name, parameter, tensors)
                if value is not None:
                    stored[name] = value
        if missing := [name for name in wanted if name not in stored]:
            raise BundleError(
                f"{self._bundle.path}: no graph holds {', '.join(missing)}. Export the bundle again."
            )
        return stored

    def _parameter(
        self, name: str, parameter: Tensor, tensors: Mapping[str, "TensorProto"]
    ) -> Tensor | None:
        """As it is, transposed, or of few bits: then the float32 matrix that these stand for."""
        if name in tensors:
            return self._read(tensors[name])
        if (transposed := tensors.get(name + TRANSPOSED_SUFFIX)) is not None:
            return self._read(transposed).t()
        if (packed := tensors.get(name + PACKED_SUFFIX)) is not None:
            parts = (packed, tensors[name + SCALES_SUFFIX])
            values, scales = (self._read(part).cpu().numpy() for part in parts)
            return torch.from_numpy(unpack(values, scales, parameter.shape[1])).to(self._device)
        return None

    def _read(self, tensor: "TensorProto") -> Tensor:
        dtype = _torch_dtype(tensor.data_type)
        if not tensor.external_data:
            inline = torch.frombuffer(bytearray(tensor.raw_data), dtype=dtype)
            return inline.view(*tensor.dims).to(self._device)
        where = {entry.key: entry.value for entry in tensor.external_data}
        place = (where["location"], where.get("offset", "0"), tuple(tensor.dims))
        if place not in self._seen:
            file = self._bundle.path / place[0]
            self._seen[place] = _mapped(file, int(place[1]), place[2], dtype).to(self._device)
        return self._seen[place]


def _initializers(graph: Path) -> Iterator["TensorProto"]:
    import onnx

    yield from onnx.load(graph, load_external_data=False).graph.initializer


def _mapped(file: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Mapped from the file's beginning on; pages are read when they are touched."""
    stop = offset + prod(shape) * dtype.itemsize
    whole = torch.from_file(str(file), shared=False, size=stop, dtype=torch.uint8)
    return whole[offset:].view(dtype).view(*shape)


def _torch_dtype(data_type: int) -> torch.dtype:
    from onnx import TensorProto

    dtypes: dict[int, torch.dtype] = {
        TensorProto.FLOAT: torch.float32,
        TensorProto.FLOAT16: torch.float16,
        TensorProto.BFLOAT16: torch.bfloat16,
        TensorProto.UINT8: torch.uint8,  # bytes of `block_weights`
        TensorProto.INT64: torch.int64,  # the map of a reduced draft vocabulary
    }
    return dtypes[data_type]
