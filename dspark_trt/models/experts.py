# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts as one wide MLP whose columns the router scales.

Every expert runs on every row: exact, of static shape, and one matrix product instead of a loop. It
costs `count / per_token` times the arithmetic of running only the experts taken, and reads every
expert's weights each step.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark_trt.config import DecoderConfig, ExpertsConfig
from dspark_trt.models.layers import Projection


class ExpertWeights(nn.Module):
    """The experts side by side: E gates then E ups in one product, E downs in another."""

    def __init__(self, hidden: int, experts: ExpertsConfig) -> None:
        super().__init__()
        width = experts.count * experts.intermediate_size
        self.gate_up_proj = Projection(hidden, 2 * width, bias=False)
        self.down_proj = Projection(width, hidden, bias=False)


class MixtureOfExperts(nn.Module):
    def __init__(self, decoder: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.config = experts
        self.gate = nn.Linear(decoder.hidden_size, experts.count, bias=False)
        self.experts = ExpertWeights(decoder.hidden_size, experts)

    def forward(self, x: Tensor) -> Tensor:  # float32 [T, H] -> float32 [T, H]
        gate, up = self.experts.gate_up_proj(x).chunk(2, dim=-1)
        columns = (functional.silu(gate) * up).unflatten(-1, (self.config.count, -1))
        return self.experts.down_proj((columns * self._shares(x).unsqueeze(-1)).flatten(-2))

    def _shares(self, x: Tensor) -> Tensor:  # float32 [T, H] -> float32 [T, E]
        """What each expert counts for a row: zero for those not taken."""
        chances = torch.softmax(self.gate(x), -1)
        taken, index = chances.topk(self.config.per_token, dim=-1)
        if self.config.normalised:
            taken = taken / taken.sum(-1, keepdim=True)
        return torch.zeros_like(chances).scatter(-1, index, taken)
