# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections (mHC, arXiv 2512.24880): a residual of S streams instead of one.

Before a block, the streams are summed with weights that depend on them; its output is added to each
stream with another weight, while the streams themselves are mixed by a doubly stochastic matrix. All of it
runs in float32.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark_trt.config import DecoderConfig, DeepseekConfig


def unit_rms(x: Tensor, eps: float) -> Tensor:  # float32 [.., D] -> float32 [.., D]
    """RMSNorm without a weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _sums(size: int) -> tuple[Tensor, Tensor]:
    """What a flattened S x S matrix is multiplied by, `[S*S, S*S]`, to have the sum of its row, or of its
    column, at the place of each element.
    """
    # Always on the CPU: these are constants, real even where a module is built without weights.
    same = torch.eye(size, device="cpu")
    every = torch.ones_like(same)
    return torch.kron(same, every), torch.kron(every, same)


class HyperConnection(nn.Module):
    """The weights around one block: `fn` gives S input weights, S output weights and an S x S mix."""

    def __init__(self, decoder: DecoderConfig, deepseek: DeepseekConfig) -> None:
        super().__init__()
        self.streams = count = deepseek.streams
        self.steps, self.eps = deepseek.sinkhorn_steps, deepseek.stream_eps
        self.norm_eps = decoder.rms_norm_eps
        outputs = (2 + count) * count
        self.fn = nn.Parameter(torch.empty(outputs, count * decoder.hidden_size))
        self.base = nn.Parameter(torch.empty(outputs))
        self.scale = nn.Parameter(torch.empty(3))  # of input weights, output weights, mix
        rows, columns = _sums(count)
        self.register_buffer("row_sums", rows, persistent=False)
        self.register_buffer("column_sums", columns, persistent=False)
        self.row_sums: Tensor
        self.column_sums: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Streams `[B, N, S, H]` -> input of the block `[B, N, H]`, its output's weights `[B, N, S]`, and
        the mix `[B, N, S, S]`, from row to column.
        """
        count = self.streams
        parts = [count, count, count * count]
        logits = functional.linear(unit_rms(x.flatten(-2), self.norm_eps), self.fn)
        taken, given, mixed = (
            part * scale + base
            for part, scale, base in zip(
                logits.split(parts, dim=-1),
                self.scale.split(1),
                self.base.split(parts),
                strict=True,
            )
        )
        entering = ((taken.sigmoid() + self.eps).unsqueeze(-1) * x).sum(-2)
        return (
            entering,
            2 * given.sigmoid(),
            self._balanced(mixed.unflatten(-1, (count, count))),
        )

    def _balanced(self, mix: Tensor) -> Tensor:  # [.., S, S] -> [.., S, S]
        """Sinkhorn's iteration: columns, then rows and columns in turn are scaled to sum to 1.

        The sums are matrix products, because TensorRT-RTX 1.7 fuses a chain of reductions and divisions into
        code that grows with every step about tenfold: engines of 2, 3 and 4 steps have 1, 9 and 100 MB.
        """
        mix = (torch.softmax(mix, -1) + self.eps).flatten(-2)
        mix = mix / (mix @ self.column_sums + self.eps)
        for _ in range(self.steps - 1):
            mix = mix / (mix @ self.row_sums + self.eps)
            mix = mix / (mix @ self.column_sums + self.eps)
        return mix.unflatten(-1, (self.streams, self.streams))


def reconnect(x: Tensor, output: Tensor, given: Tensor, mix: Tensor) -> Tensor:
    """Streams behind a block: `[B, N, S, H]`, `[B, N, H]`, `[B, N, S]`, `[B, N, S, S]` -> `[B, N, S, H]`."""
    return given.unsqueeze(-1) * output.unsqueeze(-2) + mix.transpose(-1, -2) @ x


class HyperHead(nn.Module):
    """From the last streams to one: a gated sum, without a mix."""

    def __init__(self, decoder: DecoderConfig, deepseek: DeepseekConfig) -> None:
        super().__init__()
        self.eps, self.norm_eps = deepseek.stream_eps, decoder.rms_norm_eps
        width = deepseek.streams * decoder.hidden_size
        self.fn = nn.Parameter(torch.empty(deepseek.streams, width))
        self.base = nn.Parameter(torch.empty(deepseek.streams))
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:  # [B, N, S, H] -> [B, N, H]
        logits = functional.linear(unit_rms(x.flatten(-2), self.norm_eps), self.fn)
        gates = (logits * self.scale + self.base).sigmoid() + self.eps
        return (gates.unsqueeze(-1) * x).sum(-2)
