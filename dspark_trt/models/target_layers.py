# SPDX-License-Identifier: Apache-2.0
"""Layers of a target on ragged rows: padded to `[B, L]` only around attention."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from dspark_trt.config import DecoderConfig
from dspark_trt.models.experts import MixtureOfExperts
from dspark_trt.models.layers import MLP, Projection, RMSNorm
from dspark_trt.models.operators import cached_attention, rotary, scatter_rows
from dspark_trt.models.windows import masked_attention

Rotation = tuple[Tensor, Tensor]  # cos, sin: float32 [B, L, D/2]


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """How flattened rows sit in the padded batch. Rows of a request are left-aligned, so its row i sees
    cache rows up to `context_len + i`; padding rows write garbage past the valid end, seen by nobody.
    """

    pad_index: (
        Tensor  # int64 [B, L]: flattened row at each padded place (any row where there is none)
    )
    unpad_index: Tensor  # int64 [T]: padded place of each flattened row
    context_len: Tensor  # int64 [B]
    rotation: Rotation
    window_rotation: Rotation  # of layers with a window
    visible: Mapping[int, Tensor]  # window -> rows in it, bool [B, 1, L, S]


class TargetAttention(nn.Module):
    def __init__(self, decoder: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.window = decoder.window(layer)
        self.scale: float | None = None
        heads, kv_heads, head_dim = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
        self.sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        bias = decoder.attention_bias
        self.qkv_proj = Projection(decoder.hidden_size, sum(self.sizes), bias=bias)
        output_bias = bias and decoder.output_bias
        self.o_proj = Projection(heads * head_dim, decoder.hidden_size, bias=output_bias)
        if decoder.qk_norm:
            self.q_norm = RMSNorm(head_dim, decoder.rms_norm_eps)
            self.k_norm = RMSNorm(head_dim, decoder.rms_norm_eps)

    def forward(
        self, rows: Tensor, ragged: RaggedRows, key_cache: Tensor, value_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = self._project(rows, ragged)
        dtype = self.o_proj.weight.dtype
        queries, keys, values = (x.to(dtype) for x in (queries, keys, values))
        key_cache = scatter_rows(key_cache, keys, ragged.context_len)
        value_cache = scatter_rows(value_cache, values, ragged.context_len)
        valid_len = ragged.context_len + ragged.pad_index.shape[1]
        if self.window is None and self.scale is None:
            mixed = cached_attention(queries, key_cache, value_cache, valid_len, is_causal=True)
        else:
            visible = None if self.window is None else ragged.visible[self.window]
            mixed = masked_attention(
                queries,
                key_cache,
                value_cache,
                valid_len,
                visible=visible,
                is_causal=visible is None,
                scale=self.scale,
            )
        flat = mixed.transpose(1, 2).flatten(-2).flatten(0, 1)
        return (
            self.o_proj(functional.embedding(ragged.unpad_index, flat)),
            key_cache,
            value_cache,
        )

    def _project(self, rows: Tensor, ragged: RaggedRows) -> tuple[Tensor, Tensor, Tensor]:
        """Rows `[T, H]` -> queries, keys, values `[B, heads, L, D]`."""
        padded = functional.embedding(ragged.pad_index, self.qkv_proj(rows))
        queries, keys, values = map(self._heads, padded.split(self.sizes, dim=-1))
        if self.decoder.qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries = rotary(queries.transpose(1, 2), *ragged.rotation)
        keys = rotary(keys.transpose(1, 2), *ragged.rotation)
        return queries, keys, values.transpose(1, 2)

    def _heads(self, x: Tensor) -> Tensor:  # [B, L, heads*D] -> [B, L, heads, D]
        return x.unflatten(-1, (-1, self.decoder.head_dim))


class TargetLayer(nn.Module):
    def __init__(self, decoder: DecoderConfig, layer: int) -> None:
        super().__init__()
        experts = decoder.experts
        self.input_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.self_attn = TargetAttention(decoder, layer)
        self.post_attention_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        if experts is not None and layer in experts.layers:
            self.mlp: nn.Module = MixtureOfExperts(decoder, experts)
        else:
            self.mlp = MLP(decoder)

    def forward(
        self, hidden: Tensor, ragged: RaggedRows, key_cache: Tensor, value_cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed, key_cache, value_cache = self.self_attn(
            self.input_layernorm(hidden), ragged, key_cache, value_cache
        )
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), key_cache, value_cache
