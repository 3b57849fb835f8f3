# SPDX-License-Identifier: Apache-2.0
"""Rotary tables: default, linear, Llama 3 and YaRN (arXiv 2309.00071, as in
`transformers.modeling_rope_utils`).
"""

import math

import torch
from torch import Tensor

from dspark_trt.config import DecoderConfig, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies float32 `[D/2]` and the factor on cos and sin."""
    # Always on the CPU: these are constants, real even where a module is built without weights.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / rope.theta**exponents
    turning = int(rope.rotary_fraction * head_dim // 2)
    frequencies[turning:] = 0.0
    if rope.llama3_factor > 1:
        return _llama3(frequencies, rope), 1.0
    if rope.yarn_factor == 1.0:
        return frequencies / rope.linear_factor, 1.0
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


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Slow pairs are slowed down further, fast ones kept, those between mixed by their turns over the
    training length.
    """
    assert rope.original_positions is not None  # checked in RopeConfig
    turns = frequencies * rope.original_positions / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return frequencies / rope.llama3_factor * (1 - kept) + frequencies * kept


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
