# SPDX-License-Identifier: Apache-2.0
"""The drafter's parallel backbone (DFlash style): block rows attend to context rows and to each other.

Context rows are taps projected by `fc` and normalised once for all layers; they pass no
`input_layernorm`. Row p of a cache is absolute position p; the block's slot 0 is the anchor's position.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark_trt.config import DecoderConfig, DraftConfig
from dspark_trt.models.layers import MLP, Projection, RMSNorm
from dspark_trt.models.operators import cached_attention, rotary, scatter_rows
from dspark_trt.models.rope import RotaryTable
from dspark_trt.models.windows import block_window, masked_attention

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
        if self.window is None:
            mixed = cached_attention(
                queries, key_cache, value_cache, valid_len, is_causal=False
            )
        else:
            visible = packing.visible[self.window]
            mixed = masked_attention(
                queries, key_cache, value_cache, valid_len, visible=visible
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


class Backbone(nn.Module):
    """From anchors, new taps and caches to the hidden states that predict x_1..x_γ."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        decoder = config.decoder
        self.embed_tokens = nn.Embedding(decoder.vocab_size, decoder.hidden_size)
        self.fc = nn.Linear(config.tap_size, decoder.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.layers = nn.ModuleList(
            DraftLayer(decoder, layer) for layer in range(decoder.num_layers)
        )
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.rotary = RotaryTable(decoder)

    def context_rows(self, taps: Tensor) -> Tensor:  # float32 [B, N, m*H] -> float32 [B, N, H]
        """Float32 even with 16-bit weights: taps beyond 2e4 are real and their products overflow."""
        return self.hidden_norm(functional.linear(taps, self.fc.weight.float()))

    def append_context(
        self, taps: Tensor, context_len: Tensor, *caches: Tensor
    ) -> list[Tensor]:
        """Write rows `context_len .. context_len + N` of every layer's caches; rows past what the host
        counts as valid are overwritten by later steps.
        """
        rows = self.context_rows(taps)
        positions = context_len[:, None] + torch.arange(taps.shape[1], device=taps.device)
        rotation = self.rotary(positions)
        updated = []
        for layer, key_cache, value_cache in zip(
            self.layers, caches[::2], caches[1::2], strict=True
        ):
            attention = cast("DraftAttention", layer.self_attn)
            keys, values = attention.keys_values(rows, rotation)
            updated += [
                scatter_rows(key_cache, keys, context_len),
                scatter_rows(value_cache, values, context_len),
            ]
        return updated

    def pack(
        self, new_len: Tensor, context_len: Tensor, new_rows: int, capacity: int
    ) -> Packing:
        slots = self.config.block_slots
        total = new_rows + slots
        index = torch.arange(total, device=new_len.device).expand(new_len.shape[0], -1)
        # Distance from a packed block row to its source row.
        shift = new_rows - new_len[:, None]
        row = torch.where(index < new_len[:, None], index, (index + shift).clamp(max=total - 1))
        first = torch.arange(new_len.shape[0], device=new_len.device)[:, None] * total
        start = context_len + new_len  # the anchor's position
        slot = torch.arange(slots, device=new_len.device)
        return Packing(
            source=first + row,
            write_indices=context_len,
            valid_len=start + slots,
            block_rotation=self.rotary(start[:, None] + slot),
            row_rotation=self.rotary(context_len[:, None] + index),
            visible={
                window: block_window(self.config.window_rule, start, slots, capacity, window)
                for window in set(self.config.decoder.windows)
                if window is not None
            },
        )

    def forward(
        self,
        anchor_ids: Tensor,  # int64 [B]
        new_taps: Tensor,  # float32 [B, γ+1, m*H]
        new_len: Tensor,  # int64 [B]: valid rows of new_taps
        context_len: Tensor,  # int64 [B]: valid cache rows before them
        *caches: Tensor,  # 2L x [B, Hkv, S, D]
    ) -> tuple[Tensor, list[Tensor]]:  # float32 [B, γ, H], caches
        packing = self.pack(new_len, context_len, new_taps.shape[1], caches[0].shape[2])
        context = self.context_rows(new_taps)
        masks = torch.full_like(
            packing.source[:, 1 : self.config.block_slots], self.config.mask_token_id
        )
        hidden = self.embed_tokens(torch.cat((anchor_ids[:, None], masks), 1)).float()
        updated = []
        for layer, key_cache, value_cache in zip(
            self.layers, caches[::2], caches[1::2], strict=True
        ):
            hidden, key_cache, value_cache = layer(
                hidden, context, packing, key_cache, value_cache
            )
            updated += [key_cache, value_cache]
        return self.norm(hidden)[:, -self.config.gamma :], updated
