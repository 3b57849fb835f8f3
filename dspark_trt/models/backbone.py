# SPDX-License-Identifier: Apache-2.0
"""The drafter's parallel backbone (DFlash style): block rows attend to context rows and to each other.

Context rows are taps projected by `fc` and normalised once for all layers; they pass no
`input_layernorm`. Row p of a cache is absolute position p; the block's slot 0 is the anchor's position.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark_trt.config import DecoderConfig, DraftConfig
from dspark_trt.models.draft_layers import DraftAttention, DraftLayer, Packing
from dspark_trt.models.gemma_layers import GemmaDraftLayer
from dspark_trt.models.layers import RMSNorm
from dspark_trt.models.operators import scatter_rows
from dspark_trt.models.rope import RotaryTable
from dspark_trt.models.windows import block_window


def draft_layer(decoder: DecoderConfig, layer: int) -> DraftLayer:
    if decoder.gemma is not None:
        return GemmaDraftLayer(decoder, decoder.gemma, layer)
    return DraftLayer(decoder, layer)


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
            draft_layer(decoder, layer) for layer in range(decoder.num_layers)
        )
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.rotary = RotaryTable(decoder)

    def embed(self, token_ids: Tensor) -> Tensor:  # int64 [..] -> float32 [.., H]
        hidden = self.embed_tokens(token_ids).float()
        decoder = self.config.decoder
        return hidden if decoder.gemma is None else hidden * decoder.hidden_size**0.5

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
        hidden = self.embed(torch.cat((anchor_ids[:, None], masks), 1))
        updated = []
        for layer, key_cache, value_cache in zip(
            self.layers, caches[::2], caches[1::2], strict=True
        ):
            hidden, key_cache, value_cache = layer(
                hidden, context, packing, key_cache, value_cache
            )
            updated += [key_cache, value_cache]
        return self.norm(hidden)[:, -self.config.gamma :], updated
