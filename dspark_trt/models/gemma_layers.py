# SPDX-License-Identifier: Apache-2.0
"""Gemma4's form of the backbone's layers (DeepSpec `modeling/dspark/gemma4`)."""

import torch
from torch import Tensor, nn

from dspark_trt.config import DecoderConfig, GemmaConfig
from dspark_trt.models.draft_layers import DraftAttention, DraftLayer, Packing, Rotation
from dspark_trt.models.layers import Projection, RMSNorm
from dspark_trt.models.operators import rms_norm, rotary


class GemmaDraftAttention(DraftAttention):
    """Scale 1; values get a norm without weight, and may be the keys' own projection."""

    def __init__(self, decoder: DecoderConfig, gemma: GemmaConfig, layer: int) -> None:
        super().__init__(decoder, layer)
        self.scale = 1.0
        self.key_is_value = gemma.key_is_value
        if self.key_is_value:
            del self.kv_proj
            width, bias = decoder.num_kv_heads * decoder.head_dim, decoder.attention_bias
            self.k_proj = Projection(decoder.hidden_size, width, bias=bias)

    def keys_values(self, rows: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        if self.key_is_value:
            keys = values = self._heads(self.k_proj(rows))
            dtype = self.k_proj.weight.dtype
        else:
            keys, values = map(self._heads, self.kv_proj(rows).chunk(2, dim=-1))
            dtype = self.kv_proj.weight.dtype
        keys = rotary(self.k_norm(keys).transpose(1, 2), *rotation)
        ones = torch.ones(self.decoder.head_dim, device=values.device)
        values = rms_norm(values, ones, self.decoder.rms_norm_eps).transpose(1, 2)
        return keys.to(dtype), values.to(dtype)


class GemmaDraftLayer(DraftLayer):
    """Norms on both sides of attention and MLP, and a scalar on the output."""

    def __init__(self, decoder: DecoderConfig, gemma: GemmaConfig, layer: int) -> None:
        super().__init__(decoder, layer)
        self.self_attn = GemmaDraftAttention(decoder, gemma, layer)
        self.pre_feedforward_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(
        self,
        hidden: Tensor,
        context: Tensor,
        packing: Packing,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed, key_cache, value_cache = self.self_attn(
            self.input_layernorm(hidden), context, packing, key_cache, value_cache
        )
        hidden = hidden + self.post_attention_layernorm(mixed)
        added = self.mlp(self.pre_feedforward_layernorm(hidden))
        hidden = hidden + self.post_feedforward_layernorm(added)
        return hidden * self.layer_scalar, key_cache, value_cache
