# SPDX-License-Identifier: Apache-2.0
"""The backbone of a DeepSeek-V4 drafter (`mtp.*`): stages of the target's own kind over S streams.

Context rows are the taps (of each tapped layer the mean over its streams) through `fc` and a norm; each
stage caches their keys. Block rows are never cached: the window before the anchor is gathered from the
cache and the block's own keys are put behind it, so a step costs the window's length, whatever the
capacity.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark_trt.config import DraftConfig
from dspark_trt.models.deepseek_layers import DeepseekStage
from dspark_trt.models.hyper import HyperHead
from dspark_trt.models.layers import LanguageHead, RMSNorm
from dspark_trt.models.operators import scatter_rows
from dspark_trt.models.rope import RotaryTable


class NormedHead(LanguageHead):
    """Logits of hidden states before the final norm: the confidence head reads them as they are."""

    def __init__(self, config: DraftConfig) -> None:
        decoder = config.decoder
        super().__init__(decoder, config.head_vocab_size)
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:  # [.., H] -> float32 [.., V]
        return super().forward(self.norm(x))


class DeepseekBackbone(nn.Module):
    """`Backbone`'s interface; its hidden states are those before the final norm."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        decoder, deepseek = config.decoder, config.decoder.deepseek
        assert deepseek is not None
        self.embed_tokens = nn.Embedding(decoder.vocab_size, decoder.hidden_size)
        self.fc = nn.Linear(config.tap_size, decoder.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.layers = nn.ModuleList(DeepseekStage(decoder) for _ in range(decoder.num_layers))
        self.hc_head = HyperHead(decoder, deepseek)
        self.rotary = RotaryTable(replace(decoder, head_dim=deepseek.rotary_size))
        self.streams = deepseek.streams

    def append_context(
        self, taps: Tensor, context_len: Tensor, *caches: Tensor
    ) -> list[Tensor]:
        """Write rows `context_len .. context_len + N` of every stage's cache; rows past what the host
        counts as valid are overwritten by later steps.
        """
        rows = self.hidden_norm(functional.linear(taps, self.fc.weight.float()))
        index = torch.arange(taps.shape[1], device=taps.device)
        rotation = self.rotary(context_len[:, None] + index)
        return [
            scatter_rows(cache, stage.self_attn.keys(rows, rotation), context_len)
            for stage, cache in zip(self._stages, caches, strict=True)
        ]

    def forward(
        self,
        anchor_ids: Tensor,  # int64 [B]
        new_taps: Tensor,  # float32 [B, γ+1, m*H]
        new_len: Tensor,  # int64 [B]: valid rows of new_taps
        context_len: Tensor,  # int64 [B]: valid cache rows before them
        *caches: Tensor,  # L x [B, 1, S, D]
    ) -> tuple[Tensor, list[Tensor]]:  # float32 [B, γ, H], caches
        updated = self.append_context(new_taps, context_len, *caches)
        start = context_len + new_len  # the anchor's position
        slots = torch.arange(self.config.block_slots, device=start.device)
        rotation = self.rotary(start[:, None] + slots)
        masks = torch.full_like(start[:, None] + slots[1:], self.config.mask_token_id)
        embedded = self.embed_tokens(torch.cat((anchor_ids[:, None], masks), 1)).float()
        streams = embedded.unsqueeze(2).expand(-1, -1, self.streams, -1)
        for layer, (stage, cache) in enumerate(zip(self._stages, updated, strict=True)):
            window, hidden_rows = self._window(layer, cache, start)
            streams = stage(streams, window, hidden_rows, rotation)
        return self.hc_head(streams)[:, -self.config.gamma :], updated

    @property
    def _stages(self) -> list[DeepseekStage]:
        return [cast("DeepseekStage", layer) for layer in self.layers]

    def _window(self, layer: int, cache: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        """The W rows before each anchor, `[B, 1, W, D]`, and which of them do not exist, `[B, 1, 1, W]`."""
        size = self.config.decoder.window(layer)
        assert size is not None
        batch, _, capacity, _ = cache.shape
        position = start[:, None] + torch.arange(-size, 0, device=start.device)
        first = torch.arange(batch, device=start.device)[:, None] * capacity
        rows = functional.embedding(first + position.clamp(min=0), cache.flatten(0, 2))
        return rows.unsqueeze(1), (position < 0)[:, None, None]
