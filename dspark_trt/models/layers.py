# SPDX-License-Identifier: Apache-2.0
"""Building blocks shared by drafter and target. Residual stream, norms and rotary run in float32;
matrix products take operands of the module's dtype.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark_trt.config import DecoderConfig
from dspark_trt.models.operators import rms_norm


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [.., size] -> float32 [.., size]
        return rms_norm(x, self.weight, self.eps)


class Projection(nn.Linear):
    """A linear layer fed by the float32 stream: casts down to its weights, and back up."""

    def forward(self, x: Tensor) -> Tensor:  # [.., in] -> float32 [.., out]
        return functional.linear(x.to(self.weight.dtype), self.weight, self.bias).float()


class MLP(nn.Module):
    """SwiGLU with gate and up in one product."""

    def __init__(self, decoder: DecoderConfig) -> None:
        super().__init__()
        hidden, inner = decoder.hidden_size, decoder.intermediate_size
        self.gate_up_proj = Projection(hidden, 2 * inner, bias=False)
        self.down_proj = Projection(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)
