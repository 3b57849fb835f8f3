# SPDX-License-Identifier: Apache-2.0
"""Layers of the drafter's backbone: block rows attend to context rows and to each other."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark_trt.config import DecoderConfig
from dspark_trt.models.layers import MLP, Projection, RMSNorm
from dspark_trt.models.operators import cached_attention, rotary, scatter_rows
from dspark_trt.models.windows import masked_attention

Rotation = tuple[Tensor, Tensor]  # cos, sin: float32 [B, N, D/2]


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the rows of one update go: `[valid new context | block | padding]`, contiguous per request.

    TensorRT allows one scatter a cache and step, so context and block share it; rows past `valid_len`
    are garbage that the next step overwrites and attention never sees.
    """

    source: Tensor  # int64 [B, N]: row of the flattened [new context ; block] rows of the batch
    write_indices: Tensor  # int64 [B]: first row written
    valid_len: Tensor  # int64 [B]: rows attention may see
    block_rotation: Rotation  # of the block's slots
    row_rotation: Rotation  # of the packed rows
    visible: Mapping[int, Tensor]  # window -> rows in it, bool [B, 1, slots, S]


class DraftAttention(nn.Module):
    def __init__(self, decoder: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.window = decoder.window(layer)
        self.scale: float | None = None
        hidden, head_dim = decoder.hidden_size, decoder.head_dim
        bias = decoder.attention_bias
        self.q_proj = Projection(hidden, decoder.num_heads * head_dim, bias=bias)
        self.kv_proj = Projection(hidden, 2 * decoder.num_kv_heads * head_dim, bias=bias)
        self.o_proj = Projection(decoder.num_heads * head_dim, hidden, bias=bias)
        if decoder.qk_norm:
            self.q_norm = RMSNorm(head_dim, decoder.rms_norm_eps)
            self.k_norm = RMSNorm(head_dim, decoder.rms_norm_eps)

    def keys_values(self, rows: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rows `[B, N, H]` -> keys and values `[B, Hkv, N, D]` of the cache's dtype."""
        keys, values = map(self._heads, self.kv_proj(rows).chunk(2, dim=-1))
        if self.decoder.qk_norm:
            keys = self.k_norm(keys)
        keys = rotary(keys.transpose(1, 2), *rotation)
        dtype = self.kv_proj.weight.dtype
        return keys.to(dtype), values.transpose(1, 2).to(dtype)

    def _heads(self, x: Tensor) -> Tensor:  # [B, N, heads*D] -> [B, N, heads, D]
        return x.unflatten(-1, (-1, self.decoder.head_dim))

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        packing: Packing,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries = self._heads(self.q_proj(block))
        if self.decoder.qk_norm:
            queries = self.q_norm(queries)
        queries = rotary(queries.transpose(1, 2), *packing.block_rotation)
        candidates = torch.cat((context, block), 1).flatten(0, 1)
        rows = functional.embedding(packing.source, candidates)
        keys, values = self.keys_values(rows, packing.row_rotation)
        key_cache = scatter_rows(key_cache, keys, packing.write_indices)
        value_cache = scatter_rows(value_cache, values, packing.write_indices)
        queries, valid_len = queries.to(keys.dtype), packing.valid_len
        if self.window is None and self.scale is None:
            mixed = cached_attention(
                queries, key_cache, value_cache, valid_len, is_causal=False
            )
        else:
            visible = None if self.window is None else packing.visible[self.window]
            mixed = masked_attention(
                queries, key_cache, value_cache, valid_len, visible=visible, scale=self.scale
            )
        return self.o_proj(mixed.transpose(1, 2).flatten(-2)), key_cache, value_cache


class DraftLayer(nn.Module):
    def __init__(self, decoder: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.self_attn = DraftAttention(decoder, layer)
        self.post_attention_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.mlp = MLP(decoder)

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
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), key_cache, value_cache
