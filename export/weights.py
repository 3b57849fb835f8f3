# SPDX-License-Identifier: Apache-2.0
"""One weight file for all graphs of a bundle.

Graphs share tensors (fused draft and its parts, borrowed embeddings, tied heads), so equal tensors are
stored once: by source, and by content where two files hold the same bytes. Tensors are read, transposed
and written one at a time; the whole model is never in memory.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import BinaryIO

import onnx_ir as ir
import torch

from dspark_trt.bindings import TRANSPOSED_SUFFIX
from dspark_trt.block_weights import PACKED_SUFFIX, SCALES_SUFFIX, pack
from dspark_trt.errors import ExportError
from dspark_trt.models.loading import ParameterSource

DIGEST = "sha256"  # metadata of every weight: the hash of its bytes
INLINE_BYTES = 1024  # smaller tensors stay in the graph file
_ALIGNMENT = 4096  # page size: lets a runtime map a tensor in place

_IR_DTYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.uint8: ir.DataType.UINT8,
    torch.int64: ir.DataType.INT64,
}


class WeightFile:
    """Appends tensors to a file and hands out the graph tensors that point at them."""

    def __init__(
        self,
        stream: BinaryIO,
        location: str,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._stream, self._location, self._on_bytes = stream, location, on_bytes
        self._by_source: dict[tuple[object, ...], ir.TensorProtocol] = {}
        self._by_content: dict[str, tuple[int, int]] = {}

    def attach(
        self,
        model: ir.Model,
        sources: Mapping[str, ParameterSource],
        bits: int | None = None,  # of quantised matrices
    ) -> None:
        """Give every parameter of `model` its stored tensor.

        Raises:
            ExportError: a weight is not finite, or has no place in the precision asked for.
        """
        for name, value in model.graph.initializers.items():
            form, stem = _form(name)
            source = sources.get(stem)
            if source is not None:
                value.const_value = self._stored(name, source, form, bits)
                value.type = ir.TensorType(value.const_value.dtype)

    def _stored(
        self, name: str, source: ParameterSource, form: str, bits: int | None
    ) -> ir.TensorProtocol:
        if form not in (PACKED_SUFFIX, SCALES_SUFFIX):
            bits = None
        if (source, form, bits) not in self._by_source:
            tensor = source.load(transposed=form == TRANSPOSED_SUFFIX)
            _check_finite(name, tensor)
            if bits is not None:
                packed, scales = pack(tensor.numpy(), bits)
                forms = {PACKED_SUFFIX: packed, SCALES_SUFFIX: scales}
                written = {f: torch.from_numpy(values) for f, values in forms.items()}
            else:
                written = {form: tensor}
            for each, values in written.items():
                self._by_source[source, each, bits] = self._write(name, values)
        return self._by_source[source, form, bits]

    def _write(self, name: str, tensor: torch.Tensor) -> ir.TensorProtocol:
        shape, dtype = ir.Shape(tensor.shape), _IR_DTYPES[tensor.dtype]
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        digest = hashlib.sha256(raw.data).hexdigest()
        metadata = {DIGEST: digest}
        if raw.nbytes < INLINE_BYTES:
            return ir.Tensor(
                raw.view(dtype.numpy()).reshape(tuple(tensor.shape)),
                dtype=dtype,
                name=name,
                metadata_props=metadata,
            )
        if digest not in self._by_content:
            self._stream.write(b"\0" * (-self._stream.tell() % _ALIGNMENT))
            self._by_content[digest] = (self._stream.tell(), raw.nbytes)
            self._stream.write(raw.data)
        offset, length = self._by_content[digest]
        self._on_bytes(raw.nbytes)
        return ir.ExternalTensor(
            self._location,
            offset,
            length,
            dtype,
            shape=shape,
            name=name,
            metadata_props=metadata,
        )


def _form(name: str) -> tuple[str, str]:
    """How an initializer holds its parameter, and the parameter's name."""
    if name.endswith(TRANSPOSED_SUFFIX):
        return TRANSPOSED_SUFFIX, name.removesuffix(TRANSPOSED_SUFFIX)
    for form in (PACKED_SUFFIX, SCALES_SUFFIX):
        if name.endswith(form):
            return form, name.removesuffix(form)
    return "", name


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    low, high = torch.aminmax(tensor)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        precision = str(tensor.dtype).removeprefix("torch.")
        raise ExportError(
            f"{name} holds values that are not finite in {precision}. Export with --dtype bfloat16 or "
            "float32; if they are not finite there either, the checkpoint is damaged."
        )
