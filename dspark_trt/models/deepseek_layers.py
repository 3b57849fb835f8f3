# SPDX-License-Identifier: Apache-2.0
"""Layers of a DeepSeek-V4 drafter: low-rank attention over a window with sinks, experts, streams.

One key head serves all query heads, and its keys are the values: what their rotation put into the mixed
values is turned back at the query's position. A sink is one more logit a head, whose value is zero.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark_trt.config import DecoderConfig, DeepseekConfig, ExpertsConfig
from dspark_trt.models.experts import ExpertWeights
from dspark_trt.models.hyper import HyperConnection, reconnect, unit_rms
from dspark_trt.models.layers import Projection, RMSNorm
from dspark_trt.models.operators import rotary

Rotation = tuple[Tensor, Tensor]  # cos, sin: float32 [B, N, R/2]


def turn_tail(x: Tensor, rotation: Rotation) -> Tensor:  # float32 [B, heads, N, D] -> the same
    """Rotary embedding of the last elements of each head."""
    size = 2 * rotation[0].shape[-1]
    plain, tail = x.split([x.shape[-1] - size, size], dim=-1)
    return torch.cat((plain, rotary(tail, *rotation, interleaved=True)), -1)


class SinkAttention(nn.Module):
    def __init__(self, decoder: DecoderConfig, deepseek: DeepseekConfig) -> None:
        super().__init__()
        self.decoder, self.deepseek = decoder, deepseek
        hidden, width = decoder.hidden_size, decoder.num_heads * decoder.head_dim
        outputs = deepseek.output_groups * deepseek.output_rank
        self.wq_a = Projection(hidden, deepseek.query_rank, bias=False)
        self.q_norm = RMSNorm(deepseek.query_rank, decoder.rms_norm_eps)
        self.wq_b = Projection(deepseek.query_rank, width, bias=False)
        self.wkv = Projection(hidden, decoder.head_dim, bias=False)
        self.kv_norm = RMSNorm(decoder.head_dim, decoder.rms_norm_eps)
        self.attn_sink = nn.Parameter(torch.empty(decoder.num_heads))
        self.wo_a = nn.Linear(width // deepseek.output_groups, outputs, bias=False)
        self.wo_b = Projection(outputs, hidden, bias=False)

    def keys(self, rows: Tensor, rotation: Rotation) -> Tensor:
        """Rows `[B, N, H]` -> keys, which are the values, `[B, 1, N, D]` of the cache's dtype."""
        keys = self.kv_norm(self.wkv(rows)).unsqueeze(1)
        return turn_tail(keys, rotation).to(self.wkv.weight.dtype)

    def forward(
        self,
        block: Tensor,  # float32 [B, K, H]
        window: Tensor,  # [B, 1, W, D]: keys of the rows before the anchor
        hidden_rows: Tensor,  # bool [B, 1, 1, W]: of them, those before position 0
        rotation: Rotation,  # of the block's slots
    ) -> Tensor:  # float32 [B, K, H]
        """Every slot sees the window and the whole block."""
        queries = self.wq_b(self.q_norm(self.wq_a(block)))
        queries = queries.unflatten(-1, (self.decoder.num_heads, -1)).transpose(1, 2)
        queries = turn_tail(unit_rms(queries, self.decoder.rms_norm_eps), rotation)
        keys = torch.cat((window, self.keys(block, rotation)), 2)
        scores = (queries.to(keys.dtype) @ keys.transpose(-1, -2)).float()
        scores = scores * self.decoder.head_dim**-0.5  # [B, Hq, K, W + K]
        hidden = functional.pad(hidden_rows, (0, block.shape[1]))
        sinks = self.attn_sink[:, None, None].expand(*scores.shape[:-1], 1)
        shares = torch.softmax(torch.cat((scores.masked_fill(hidden, -1e30), sinks), -1), -1)
        mixed = (shares[..., :-1].to(keys.dtype) @ keys).float()
        cos, sin = rotation
        return self._output(turn_tail(mixed, (cos, -sin)))

    def _output(self, mixed: Tensor) -> Tensor:  # float32 [B, Hq, K, D] -> float32 [B, K, H]
        """Each group of heads through a projection of its own, then all of them together."""
        batch, _, slots, _ = mixed.shape
        groups = self.deepseek.output_groups
        columns = mixed.transpose(1, 2).reshape(batch * slots, groups, -1).transpose(0, 1)
        weight = self.wo_a.weight.unflatten(0, (groups, -1)).transpose(1, 2)  # [G, in, R]
        ranks = (columns.to(weight.dtype) @ weight).float()  # [G, B*K, R]
        return self.wo_b(ranks.transpose(0, 1).reshape(batch, slots, -1))


class ClippedMLP(nn.Module):
    """SwiGLU whose products are clipped."""

    def __init__(self, hidden: int, inner: int, limit: float | None) -> None:
        super().__init__()
        self.gate_up_proj = Projection(hidden, 2 * inner, bias=False)
        self.down_proj = Projection(inner, hidden, bias=False)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(clipped_columns(self.gate_up_proj(x), self.limit))


def clipped_columns(gate_up: Tensor, limit: float | None) -> Tensor:  # [.., 2I] -> [.., I]
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return functional.silu(gate) * up


class Router(nn.Module):
    """Shares of the experts: the bias helps to choose, and does not weigh."""

    def __init__(self, hidden: int, experts: ExpertsConfig, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts.count, hidden))
        self.bias = nn.Parameter(torch.empty(experts.count))
        self.per_token, self.scale = experts.per_token, scale

    def forward(self, x: Tensor) -> Tensor:  # float32 [.., H] -> float32 [.., E]
        scores = functional.softplus(functional.linear(x, self.weight)).sqrt()
        index = (scores + self.bias).topk(self.per_token, dim=-1).indices
        taken = scores.gather(-1, index)
        taken = taken / (taken.sum(-1, keepdim=True) + 1e-20) * self.scale
        return torch.zeros_like(scores).scatter(-1, index, taken)


class DeepseekExperts(nn.Module):
    """Routed experts as one wide MLP (see `experts.MixtureOfExperts`), and one that is always there.

    `router` maps float32 `[.., H]` to the shares of all experts `[.., E]`.
    """

    def __init__(
        self,
        hidden: int,
        experts: ExpertsConfig,
        router: nn.Module,
        *,
        shared_size: int,
        limit: float | None = None,
    ) -> None:
        super().__init__()
        self.limit = limit
        self.gate = router
        self.experts = ExpertWeights(hidden, experts)
        self.shared_experts = ClippedMLP(hidden, shared_size, limit)

    def forward(self, x: Tensor) -> Tensor:  # float32 [.., H] -> float32 [.., H]
        shares = self.gate(x).unsqueeze(-1)
        columns = clipped_columns(self.experts.gate_up_proj(x), self.limit)
        weighed = (columns.unflatten(-1, (shares.shape[-2], -1)) * shares).flatten(-2)
        return self.experts.down_proj(weighed) + self.shared_experts(x)


class DeepseekStage(nn.Module):
    """One layer of the drafter over its streams."""

    def __init__(self, decoder: DecoderConfig) -> None:
        super().__init__()
        deepseek, experts = decoder.deepseek, decoder.experts
        assert deepseek is not None
        assert experts is not None  # checked in DecoderConfig
        self.hc_attn = HyperConnection(decoder, deepseek)
        self.input_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.self_attn = SinkAttention(decoder, deepseek)
        self.hc_ffn = HyperConnection(decoder, deepseek)
        self.post_attention_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.mlp = DeepseekExperts(
            decoder.hidden_size,
            experts,
            Router(decoder.hidden_size, experts, deepseek.routed_scale),
            shared_size=experts.intermediate_size,
            limit=deepseek.swiglu_limit,
        )

    def forward(
        self, streams: Tensor, window: Tensor, hidden_rows: Tensor, rotation: Rotation
    ) -> Tensor:  # [B, K, S, H] -> [B, K, S, H]
        entering, given, mix = self.hc_attn(streams)
        mixed = self.self_attn(self.input_layernorm(entering), window, hidden_rows, rotation)
        streams = reconnect(streams, mixed, given, mix)
        entering, given, mix = self.hc_ffn(streams)
        output = self.mlp(self.post_attention_layernorm(entering))
        return reconnect(streams, output, given, mix)
