# SPDX-License-Identifier: Apache-2.0
"""Matrices of 8 or 4 bits beside their scales, as DeepSeek files hold them, read as float32.

FP8: e4m3 elements, one scale a block of 128 x 128. FP4: e2m1 elements, two in a byte, the first in the low
half; one scale for 32 of a row. V4's scales are powers of two (e8m0), so what is read is exact, in bfloat16
too; V3's are float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_trt.checkpoint.tensors import FLOAT_DTYPES, Shape, TensorRef
from dspark_trt.errors import CheckpointError

if TYPE_CHECKING:
    import torch

FP8_BLOCK = (128, 128)
FP4_BLOCK = (1, 32)

_WEIGHT = ".weight"
_SCALES = (".scale", ".weight_scale_inv")  # of V4 files, of V3 files
_FP8 = "float8_e4m3fn"
_FP4 = ("int8", "uint8")  # bytes of two elements
_SCALE_DTYPES = ("float8_e8m0fnu", "float32", "bfloat16")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # fmt: skip  # by three bits; the fourth is the sign


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedRef(TensorRef):
    """A matrix that ``load`` dequantises; ``shape`` and ``dtype`` are those of the result."""

    scale: TensorRef
    block: Shape  # rows and columns that share a scale
    is_fp4: bool

    @property
    def kind(self) -> str:
        return "FP4" if self.is_fp4 else "FP8"

    @property
    def files(self) -> frozenset[Path]:
        return frozenset({self.file, self.scale.file})

    def load(self) -> "torch.Tensor":
        """The matrix, float32."""
        stored = self.stored()
        values = _e2m1(stored) if self.is_fp4 else stored.float()
        scales = self.scale.load().float()
        for axis, size in enumerate(self.block):
            scales = scales.repeat_interleave(size, axis).narrow(axis, 0, self.shape[axis])
        return values * scales


def pair_scales(files: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """Every tensor, those of few bits joined with their scales; scales alone are left for the accounting.

    Raises:
        CheckpointError: a quantised tensor without a scale, or in a form that is not known.
    """
    joined = {
        key: _joined(ref, files) if _is_quantised(ref) else ref for key, ref in files.items()
    }
    for ref in tuple(joined.values()):
        if isinstance(ref, QuantisedRef):
            del joined[ref.scale.key]
    return joined


def _is_quantised(ref: TensorRef) -> bool:
    return ref.key.endswith(_WEIGHT) and ref.dtype not in FLOAT_DTYPES


def _joined(ref: TensorRef, files: Mapping[str, TensorRef]) -> QuantisedRef:
    stem = ref.key.removesuffix(_WEIGHT)
    scale = next((files[stem + end] for end in _SCALES if stem + end in files), None)
    is_fp4 = ref.dtype in _FP4
    if len(ref.shape) != 2 or (ref.dtype != _FP8 and not is_fp4):
        raise CheckpointError(
            f"{ref.file}: {ref.key} is {ref.dtype} {ref.shape}, which is not supported; supported are "
            "float8_e4m3fn matrices (FP8) and int8 ones of two FP4 elements a byte"
        )
    shape = (ref.shape[0], ref.shape[1] * (2 if is_fp4 else 1))
    block = FP4_BLOCK if is_fp4 else FP8_BLOCK
    wanted = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
    kind = "FP4" if is_fp4 else "FP8"
    if scale is None:
        raise CheckpointError(
            f"{ref.file}: {ref.key} is {kind}, but {stem}{_SCALES[0]} (or {_SCALES[1]}) is missing"
        )
    if scale.shape != wanted or scale.dtype not in _SCALE_DTYPES:
        raise CheckpointError(
            f"{scale.file}: {scale.key} is {scale.dtype} {scale.shape}, expected {_SCALE_DTYPES[0]} "
            f"{wanted}: one scale a {block[0]} x {block[1]} block of {kind} elements"
        )
    plain = {field.name: getattr(ref, field.name) for field in fields(ref)}
    return QuantisedRef(
        **{**plain, "dtype": "float32", "shape": shape}, scale=scale, block=block, is_fp4=is_fp4
    )


def _e2m1(packed: "torch.Tensor") -> "torch.Tensor":  # int8 [R, C/2] -> float32 [R, C]
    import torch

    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    raw = packed.view(torch.uint8).int()
    return table[torch.stack((raw & 15, raw >> 4), -1)].flatten(-2)
