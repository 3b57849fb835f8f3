# SPDX-License-Identifier: Apache-2.0
"""Rotary tables: default and YaRN (arXiv 2309.00071, as in `transformers.modeling_rope_utils`)."""

import math

import torch
from torch import Tensor

from dspark_trt.config import DecoderConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies float32 `[D/2]` and the factor on cos and sin."""
    # Always on the CPU: these are constants, real even where a module is built without weights.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.yarn_factor == 1.0:
        return frequencies, 1.0
    assert rope.original_positions is not None  # checked in RopeConfig
    low, high = (
        _dimension_of_rotations(turns, head_dim, rope.theta, rope.original_positions)
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)  # a degenerate range still ramps
    dimensions = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    ramp = ((dimensions - low) / span).clamp(0, 1)
    mixed = frequencies / rope.yarn_factor * ramp + frequencies * (1 - ramp)
    factor = rope.attention_factor
    return mixed, factor if factor is not None else 0.1 * math.log(rope.yarn_factor) + 1.0


def _dimension_of_rotations(turns: float, head_dim: int, theta: float, positions: int) -> float:
    """Dimension whose wavelength makes `turns` rotations over the training length."""
    return head_dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


class RotaryTable(torch.nn.Module):
    """cos and sin of absolute positions, computed in float32 where they are used."""

    def __init__(self, decoder: DecoderConfig) -> None:
        super().__init__()
        frequencies, self.factor = inverse_frequencies(decoder.rope, decoder.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.frequencies: Tensor

    def forward(
        self, positions: Tensor
    ) -> tuple[Tensor, Tensor]:  # int64 [B, N] -> [B, N, D/2]
        angles = positions.float().unsqueeze(-1) * self.frequencies
        return angles.cos() * self.factor, angles.sin() * self.factor
