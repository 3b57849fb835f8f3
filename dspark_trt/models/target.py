# SPDX-License-Identifier: Apache-2.0
"""Targets (Qwen2, Qwen3, Qwen3-MoE, Llama family) on ragged rows, with taps.

Matrix products run on the T = Σ(1+ℓ_r) flattened rows of all requests; rows are padded to `[B, L]` only
around attention, so a step's cost follows the tokens really verified.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark_trt.config import DecoderConfig, TargetConfig
from dspark_trt.models.experts import MixtureOfExperts
from dspark_trt.models.layers import MLP, Projection, RMSNorm
from dspark_trt.models.operators import cached_attention, rotary, scatter_rows
from dspark_trt.models.rope import RotaryTable
from dspark_trt.models.windows import causal_window, masked_attention


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
    rotation: tuple[Tensor, Tensor]  # float32 [B, L, D/2]
    visible: Mapping[int, Tensor]  # window -> rows in it, bool [B, 1, L, S]


class TargetAttention(nn.Module):
    def __init__(self, decoder: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.window = decoder.window(layer)
        heads, kv_heads, head_dim = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
        self.sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
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
        padded = functional.embedding(ragged.pad_index, self.qkv_proj(rows))
        queries, keys, values = map(self._heads, padded.split(self.sizes, dim=-1))
        if self.decoder.qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries = rotary(queries.transpose(1, 2), *ragged.rotation)
        keys = rotary(keys.transpose(1, 2), *ragged.rotation)
        dtype = self.qkv_proj.weight.dtype
        queries, keys, values = (x.to(dtype) for x in (queries, keys, values.transpose(1, 2)))
        key_cache = scatter_rows(key_cache, keys, ragged.context_len)
        value_cache = scatter_rows(value_cache, values, ragged.context_len)
        valid_len = ragged.context_len + ragged.pad_index.shape[1]
        if self.window is None:
            mixed = cached_attention(queries, key_cache, value_cache, valid_len, is_causal=True)
        else:
            visible = ragged.visible[self.window]
            mixed = masked_attention(
                queries, key_cache, value_cache, valid_len, visible=visible
            )
        flat = mixed.transpose(1, 2).flatten(-2).flatten(0, 1)
        return (
            self.o_proj(functional.embedding(ragged.unpad_index, flat)),
            key_cache,
            value_cache,
        )

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


class Target(nn.Module):
    """A language model that also returns taps: outputs of `target_layer_ids`, concatenated."""

    def __init__(self, config: TargetConfig, target_layer_ids: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        self.target_layer_ids = target_layer_ids
        decoder = config.decoder
        self.embed_tokens = nn.Embedding(decoder.vocab_size, decoder.hidden_size)
        self.layers = nn.ModuleList(
            TargetLayer(decoder, layer) for layer in range(decoder.num_layers)
        )
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.lm_head = Projection(decoder.hidden_size, decoder.vocab_size, bias=False)
        self.rotary = RotaryTable(decoder)

    def forward(
        self,
        token_ids: Tensor,  # int64 [T]
        positions: Tensor,  # int64 [T]
        pad_index: Tensor,  # int64 [B, L]
        unpad_index: Tensor,  # int64 [T]
        logit_rows: Tensor,  # int64 [R]: rows whose logits are wanted
        context_len: Tensor,  # int64 [B]
        *caches: Tensor,  # 2L x [B, Hkv, S, D]
    ) -> tuple[Tensor, ...]:
        """Logits float32 `[R, V]`, taps float32 `[T, m*H]`, caches."""
        padded = functional.embedding(pad_index, positions.unsqueeze(-1)).squeeze(-1)
        ragged = RaggedRows(
            pad_index,
            unpad_index,
            context_len,
            self.rotary(padded),
            self._visible(context_len, pad_index.shape[1], caches),
        )
        hidden = self.embed_tokens(token_ids).float()
        taps = {-1: hidden}
        updated = []
        for i, (layer, key_cache, value_cache) in enumerate(
            zip(self.layers, caches[::2], caches[1::2], strict=True)
        ):
            hidden, key_cache, value_cache = layer(hidden, ragged, key_cache, value_cache)
            updated += [key_cache, value_cache]
            if i in self.target_layer_ids:
                taps[i] = hidden
        wanted = functional.embedding(logit_rows, hidden)
        logits = self.lm_head(self.norm(wanted))
        return (logits, torch.cat([taps[i] for i in self.target_layer_ids], -1), *updated)

    def _visible(
        self, context_len: Tensor, padded: int, caches: tuple[Tensor, ...]
    ) -> dict[int, Tensor]:
        """Mask of each window that a layer has."""
        windows = {window for window in self.config.decoder.windows if window is not None}
        rows = context_len[:, None] + torch.arange(padded, device=context_len.device)
        return {window: causal_window(rows, caches[0].shape[2], window) for window in windows}
