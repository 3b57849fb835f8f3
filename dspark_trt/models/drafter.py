# SPDX-License-Identifier: Apache-2.0
"""The whole drafter: backbone, lm_head, sequential head, confidence head; one draft step."""

import torch
from torch import Tensor, nn

from dspark_trt.config import ConfidenceInput, DraftConfig, HeadType
from dspark_trt.models.backbone import Backbone
from dspark_trt.models.deepseek import DeepseekBackbone, NormedHead
from dspark_trt.models.heads import ConfidenceHead, SequentialHead
from dspark_trt.models.layers import LanguageHead
from dspark_trt.models.operators import sample_draft
from dspark_trt.models.vocabulary import UNDRAFTABLE, DraftVocabulary


class Drafter(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        decoder = config.decoder
        self.backbone: Backbone | DeepseekBackbone
        self.lm_head: LanguageHead
        if decoder.deepseek is not None:
            self.backbone, self.lm_head = DeepseekBackbone(config), NormedHead(config)
        else:
            self.backbone = Backbone(config)
            self.lm_head = LanguageHead(decoder, config.head_vocab_size)
        self.vocabulary = None if config.draft_vocab_size is None else DraftVocabulary(config)
        if config.head_type is not HeadType.NONE:
            self.markov_head = SequentialHead(config)
        if config.confidence is not ConfidenceInput.NONE:
            self.confidence_head = ConfidenceHead(config)

    def spread(self, logits: Tensor) -> Tensor:  # float32 [.., Vd] -> [.., V]
        """Logits over the target's vocabulary."""
        if self.vocabulary is None:
            return logits
        return self.vocabulary.spread(logits, UNDRAFTABLE)

    def draft(
        self, anchor_ids: Tensor, hidden: Tensor, temperature: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sample x_1..x_γ left to right from hidden `[B, γ, H]`.

        Returns tokens int64 `[B, γ]`, logits float32 `[B, γ, V]` (the vector each token was drawn from,
        before temperature) and confidence logits `[B, γ]`.
        """
        base = self.lm_head(hidden)
        token, tokens, logits, previous = anchor_ids[:, None], [], [], []
        sequential = self.config.head_type is not HeadType.NONE
        if sequential:
            state = hidden.new_zeros((hidden.shape[0], 1, self.markov_head.state_size))
        # Slots keep their dimension of one: nothing is squeezed on the way in and stacked on the way out.
        for k, step in enumerate(base.split(1, dim=1)):
            if sequential:
                previous.append(self.markov_head.previous(token))
                own = hidden[:, k : k + 1]
                step, state = self.markov_head(step, previous[-1], own, state)
            logits.append(self.spread(step))
            token = sample_draft(logits[-1], temperature, uniforms, k)
            tokens.append(token)
        confidence = None
        if self.config.confidence is not ConfidenceInput.NONE:
            features = torch.cat(previous, 1) if previous else hidden
            confidence = self.confidence_head(hidden, features)
        return (
            torch.cat(tokens, 1),
            torch.cat(logits, 1) if sequential or self.vocabulary is not None else base,
            confidence,
        )

    def forward(
        self,
        anchor_ids: Tensor,  # int64 [B]
        new_taps: Tensor,  # float32 [B, γ+1, m*H]
        new_len: Tensor,  # int64 [B]
        context_len: Tensor,  # int64 [B]
        temperature: Tensor,  # float32 [B]
        uniforms: Tensor,  # float32 [B, γ]
        *caches: Tensor,  # [B, Hkv, S, D] each
    ) -> tuple[Tensor, ...]:
        """One fused draft step: tokens, logits, confidence logits (with a head), caches."""
        hidden, updated = self.backbone(anchor_ids, new_taps, new_len, context_len, *caches)
        tokens, logits, confidence = self.draft(anchor_ids, hidden, temperature, uniforms)
        scores = () if confidence is None else (confidence,)
        return (tokens, logits, *scores, *updated)
