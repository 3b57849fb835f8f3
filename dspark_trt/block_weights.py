# SPDX-License-Identifier: Apache-2.0
"""Matrices of 8 or 4 bits with a scale a block of inputs: how they are made, stored and read back.

A matrix [out, in] is stored as the operands of onnxruntime's `MatMulNBits`: bytes `[out, blocks, block·bits/8]`
around the middle of their range, and float32 scales `[out, blocks]`. Four-bit values lie in pairs, the first in
the low half of a byte.
"""

import numpy as np
from numpy.typing import NDArray

PACKED_SUFFIX, SCALES_SUFFIX = ".packed", ".scales"  # initializers that stand for one weight

_ROWS_AT_ONCE = 4096

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def block_size(inputs: int, bits: int) -> int:
    """Inputs that share a scale: fewer where bits are few, and never so many that a row is mostly padding."""
    most = 128 if bits == 8 else 32
    return next((size for size in (128, 64, 32) if size <= most and inputs % size == 0), 32)


def packed_shapes(
    outputs: int, inputs: int, bits: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of bytes and scales."""
    size = block_size(inputs, bits)
    blocks = -(-inputs // size)
    return (outputs, blocks, size * bits // 8), (outputs, blocks)


def pack(matrix: Floats, bits: int) -> tuple[Bytes, Floats]:
    """Round to the nearest step; of each block the largest magnitude is exact."""
    outputs, inputs = matrix.shape
    bytes_shape, scales_shape = packed_shapes(outputs, inputs, bits)
    packed, scales = np.empty(bytes_shape, np.uint8), np.empty(scales_shape, np.float32)
    for start in range(0, len(matrix), _ROWS_AT_ONCE):  # temporaries are several times a matrix
        rows = slice(start, start + _ROWS_AT_ONCE)
        packed[rows], scales[rows] = _packed_rows(matrix[rows], bits)
    return packed, scales


def _packed_rows(matrix: Floats, bits: int) -> tuple[Bytes, Floats]:
    outputs, inputs = matrix.shape
    size = block_size(inputs, bits)
    padded = np.pad(matrix, ((0, 0), (0, -inputs % size))).reshape(outputs, -1, size)
    middle = 1 << (bits - 1)
    extreme = np.take_along_axis(padded, np.abs(padded).argmax(-1)[..., None], -1)[..., 0]
    # The range reaches one step further below the middle than above: the extreme goes there.
    scales = (extreme / -middle).astype(np.float32)
    steps = padded / np.where(scales == 0, 1, scales)[..., None]
    values = np.clip(np.rint(steps) + middle, 0, 2 * middle - 1).astype(np.uint8)
    if bits == 4:
        values = values[..., ::2] | values[..., 1::2] << 4
    return values, scales


def unpack(packed: Bytes, scales: Floats, inputs: int) -> Floats:  # -> [out, in]
    """The matrix that `MatMulNBits` multiplies with."""
    bits = 8 if packed.shape == packed_shapes(len(packed), inputs, 8)[0] else 4
    values = np.stack((packed & 15, packed >> 4), -1) if bits == 4 else packed
    steps = values.reshape(*scales.shape, -1).astype(np.float32) - (1 << (bits - 1))
    return (steps * scales[..., None]).reshape(len(packed), -1)[:, :inputs]
