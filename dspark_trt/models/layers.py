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


class LanguageHead(Projection):
    """Logits over a vocabulary, soft-capped where the architecture has a cap."""

    def __init__(self, decoder: DecoderConfig, vocab_size: int) -> None:
        super().__init__(decoder.hidden_size, vocab_size, bias=False)
        self.softcap = None if decoder.gemma is None else decoder.gemma.logit_softcap

    def forward(self, x: Tensor) -> Tensor:  # [.., H] -> float32 [.., V]
        logits = super().forward(x)
        if self.softcap is None:
            return logits
        return (logits / self.softcap).tanh() * self.softcap


class MLP(nn.Module):
    """SwiGLU, or its like with tanh GELU, with gate and up in one product."""

    def __init__(self, decoder: DecoderConfig) -> None:
        super().__init__()
        hidden, inner = decoder.hidden_size, decoder.intermediate_size
        self.is_gelu = decoder.gemma is not None
        self.gate_up_proj = Projection(hidden, 2 * inner, bias=False)
        self.down_proj = Projection(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        if self.is_gelu:
            return self.down_proj(functional.gelu(gate, approximate="tanh") * up)
        return self.down_proj(functional.silu(gate) * up)
