# SPDX-License-Identifier: Apache-2.0
"""Targets (Qwen2, Qwen3, Qwen3-MoE, Llama family, Gemma4 text) on ragged rows, with taps.

Matrix products run on the T = Σ(1+ℓ_r) flattened rows of all requests; rows are padded to `[B, L]` only
around attention, so a step's cost follows the tokens really verified.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark_trt.config import FINAL_NORM, DecoderConfig, TargetConfig
from dspark_trt.models.gemma_target_layers import GemmaTargetLayer
from dspark_trt.models.layers import LanguageHead, RMSNorm
from dspark_trt.models.rope import RotaryTable
from dspark_trt.models.target_layers import RaggedRows, TargetLayer
from dspark_trt.models.windows import causal_window


class Target(nn.Module):
    """A language model that also returns taps: outputs of `target_layer_ids`, concatenated."""

    def __init__(self, config: TargetConfig, target_layer_ids: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        self.target_layer_ids = target_layer_ids
        decoder = config.decoder
        self.embed_tokens = nn.Embedding(decoder.vocab_size, decoder.hidden_size)
        self.layers = nn.ModuleList(
            _layer(decoder, layer) for layer in range(decoder.num_layers)
        )
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.lm_head = LanguageHead(decoder, decoder.vocab_size)
        self.rotary = RotaryTable(decoder)
        # Gemma4's windowed layers turn otherwise.
        gemma = decoder.gemma
        own = None if gemma is None else gemma.sliding
        self.window_rotary = None
        if gemma is not None and own is not None:
            sizes = replace(decoder, head_dim=own.head_dim, rope=own.rope)
            self.window_rotary = RotaryTable(sizes)

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
        rotation = self.rotary(padded)
        ragged = RaggedRows(
            pad_index,
            unpad_index,
            context_len,
            rotation,
            rotation if self.window_rotary is None else self.window_rotary(padded),
            self._visible(context_len, pad_index.shape[1], caches),
        )
        hidden = self.embed_tokens(token_ids).float()
        if self.config.decoder.gemma is not None:
            hidden = hidden * self.config.decoder.hidden_size**0.5
        taps = {-1: hidden}
        updated = []
        for i, (layer, key_cache, value_cache) in enumerate(
            zip(self.layers, caches[::2], caches[1::2], strict=True)
        ):
            hidden, key_cache, value_cache = layer(hidden, ragged, key_cache, value_cache)
            updated += [key_cache, value_cache]
            if i in self.target_layer_ids:
                taps[i] = hidden
        if FINAL_NORM in self.target_layer_ids:
            taps[FINAL_NORM] = self.norm(hidden)
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


def _layer(decoder: DecoderConfig, layer: int) -> TargetLayer:
    if decoder.gemma is not None:
        return GemmaTargetLayer(decoder, layer)
    return TargetLayer(decoder, layer)
