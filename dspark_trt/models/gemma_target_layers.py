# SPDX-License-Identifier: Apache-2.0
"""Gemma4's form of a target's layers; those with a window have sizes of their own."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark_trt.config import DecoderConfig
from dspark_trt.models.layers import Projection, RMSNorm
from dspark_trt.models.operators import rms_norm, rotary
from dspark_trt.models.target_layers import RaggedRows, TargetAttention, TargetLayer


class GemmaTargetAttention(TargetAttention):
    """Scale 1; values get a norm without weight, and may be the keys' own projection."""

    def __init__(self, decoder: DecoderConfig, layer: int) -> None:
        super().__init__(decoder.of_layer(layer), layer)
        gemma = self.decoder.gemma
        assert gemma is not None
        self.scale = 1.0
        self.key_is_value = gemma.key_is_value
        if self.key_is_value:
            del self.qkv_proj
            self.sizes = self.sizes[:2]
            self.qk_proj = Projection(
                decoder.hidden_size, sum(self.sizes), bias=decoder.attention_bias
            )

    def _project(self, rows: Tensor, ragged: RaggedRows) -> tuple[Tensor, Tensor, Tensor]:
        projected = self.qk_proj(rows) if self.key_is_value else self.qkv_proj(rows)
        padded = functional.embedding(ragged.pad_index, projected)
        queries, keys, *rest = map(self._heads, padded.split(self.sizes, dim=-1))
        values = keys if self.key_is_value else rest[0]
        rotation = ragged.rotation if self.window is None else ragged.window_rotation
        queries = rotary(self.q_norm(queries).transpose(1, 2), *rotation)
        keys = rotary(self.k_norm(keys).transpose(1, 2), *rotation)
        ones = torch.ones(self.decoder.head_dim, device=values.device)
        values = rms_norm(values, ones, self.decoder.rms_norm_eps)
        return queries, keys, values.transpose(1, 2)


class GemmaTargetLayer(TargetLayer):
    """Norms on both sides of attention and MLP, and a scalar on the output."""

    def __init__(self, decoder: DecoderConfig, layer: int) -> None:
        super().__init__(decoder, layer)
        self.self_attn = GemmaTargetAttention(decoder, layer)
        self.pre_feedforward_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(
        self, hidden: Tensor, ragged: RaggedRows, key_cache: Tensor, value_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed, key_cache, value_cache = self.self_attn(
            self.input_layernorm(hidden), ragged, key_cache, value_cache
        )
        hidden = hidden + self.post_attention_layernorm(mixed)
        added = self.mlp(self.pre_feedforward_layernorm(hidden))
        hidden = hidden + self.post_feedforward_layernorm(added)
        return hidden * self.layer_scalar, key_cache, value_cache
