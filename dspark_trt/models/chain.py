# SPDX-License-Identifier: Apache-2.0
"""Eagle3 (arXiv 2503.01840): one layer that drafts token by token, γ steps unrolled in one graph.

A row pairs the projected taps of a position with the embedding of the token behind it. The last context
row's output predicts x_1; each later step takes the output of the one before and the token just drafted.
Drafted rows never enter the cache: their keys and values stay beside it, so a step writes each cache once.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark_trt.config import DecoderConfig, DraftConfig
from dspark_trt.models.layers import MLP, LanguageHead, Projection, RMSNorm
from dspark_trt.models.operators import cached_attention, rotary, sample_draft, scatter_rows
from dspark_trt.models.rope import RotaryTable
from dspark_trt.models.vocabulary import UNDRAFTABLE, DraftVocabulary

Rotation = tuple[Tensor, Tensor]  # cos, sin: float32 [B, N, D/2]
KeysValues = tuple[Tensor, Tensor]  # [B, Hkv, N, D]


class ChainAttention(nn.Module):
    """Attention over pairs: its inputs are twice as wide as the stream."""

    def __init__(self, decoder: DecoderConfig) -> None:
        super().__init__()
        self.decoder = decoder
        head_dim, bias = decoder.head_dim, decoder.attention_bias
        width = 2 * decoder.hidden_size
        self.q_proj = Projection(width, decoder.num_heads * head_dim, bias=bias)
        self.kv_proj = Projection(width, 2 * decoder.num_kv_heads * head_dim, bias=bias)
        self.o_proj = Projection(decoder.num_heads * head_dim, decoder.hidden_size, bias=bias)
        if decoder.qk_norm:
            self.q_norm = RMSNorm(head_dim, decoder.rms_norm_eps)
            self.k_norm = RMSNorm(head_dim, decoder.rms_norm_eps)

    def queries(self, pairs: Tensor, rotation: Rotation) -> Tensor:  # -> [B, Hq, N, D]
        queries = self._heads(self.q_proj(pairs))
        if self.decoder.qk_norm:
            queries = self.q_norm(queries)
        return rotary(queries.transpose(1, 2), *rotation).to(self.q_proj.weight.dtype)

    def keys_values(self, pairs: Tensor, rotation: Rotation) -> KeysValues:
        keys, values = map(self._heads, self.kv_proj(pairs).chunk(2, dim=-1))
        if self.decoder.qk_norm:
            keys = self.k_norm(keys)
        keys = rotary(keys.transpose(1, 2), *rotation)
        dtype = self.kv_proj.weight.dtype
        return keys.to(dtype), values.transpose(1, 2).to(dtype)

    def output(self, mixed: Tensor) -> Tensor:  # [B, Hq, N, D] -> float32 [B, N, H]
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))

    def over_cache_and_chain(
        self, query: Tensor, cache: KeysValues, chain: KeysValues, valid_len: Tensor
    ) -> Tensor:
        """One query a request `[B, Hq, 1, D]` over the valid rows of a cache and all rows of the chain."""
        decoder = self.decoder
        group = decoder.num_heads // decoder.num_kv_heads
        grouped = query.squeeze(2).unflatten(1, (decoder.num_kv_heads, group))  # [B, Hkv, G, D]
        scale = decoder.head_dim**-0.5
        cached, drafted = (
            (grouped @ keys.transpose(-1, -2)).float() * scale for keys in (cache[0], chain[0])
        )
        columns = torch.arange(cache[0].shape[2], device=query.device)
        hidden = columns >= valid_len[:, None, None, None]
        weights = torch.softmax(torch.cat((cached.masked_fill(hidden, -1e30), drafted), -1), -1)
        weights = weights.to(query.dtype)
        count = chain[0].shape[2]
        mixed = weights[..., :-count] @ cache[1] + weights[..., -count:] @ chain[1]
        return mixed.flatten(1, 2).unsqueeze(2)

    def _heads(self, x: Tensor) -> Tensor:  # [B, N, heads*D] -> [B, N, heads, D]
        return x.unflatten(-1, (-1, self.decoder.head_dim))


class ChainLayer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        decoder = config.decoder
        assert config.chain is not None
        self.normed_residual = config.chain.normed_residual
        self.input_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.hidden_norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.self_attn = ChainAttention(decoder)
        self.post_attention_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.mlp = MLP(decoder)

    def pairs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of attention `[B, N, 2H]` and the residual `[B, N, H]`."""
        normed = self.hidden_norm(hidden)
        pairs = torch.cat((self.input_layernorm(embedded), normed), -1)
        return pairs, normed if self.normed_residual else hidden

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        hidden = residual + self.self_attn.output(mixed)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class ChainDrafter(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        decoder = config.decoder
        self.embed_tokens = nn.Embedding(decoder.vocab_size, decoder.hidden_size)
        self.fc = nn.Linear(config.tap_size, decoder.hidden_size, bias=False)
        self.layers = nn.ModuleList([ChainLayer(config)])
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.lm_head = LanguageHead(decoder, config.head_vocab_size)
        self.vocabulary = None if config.draft_vocab_size is None else DraftVocabulary(config)
        self.rotary = RotaryTable(decoder)

    @property
    def layer(self) -> ChainLayer:
        return cast("ChainLayer", self.layers[0])

    def append_context(
        self, rows: Tensor, context_len: Tensor, *caches: Tensor
    ) -> list[Tensor]:
        """Write context rows `context_len ..` `[B, N, m*H + 1]` into the caches."""
        embedded, hidden = self._row_inputs(rows)
        index = torch.arange(rows.shape[1], device=rows.device)
        rotation = self.rotary(context_len[:, None] + index)
        keys, values = self.layer.self_attn.keys_values(
            self.layer.pairs(embedded, hidden)[0], rotation
        )
        return [
            scatter_rows(caches[0], keys, context_len),
            scatter_rows(caches[1], values, context_len),
        ]

    def forward(
        self,
        anchor_ids: Tensor,  # int64 [B]
        new_taps: Tensor,  # float32 [B, γ+1, m*H + 1]: rows not yet in the cache, at least one
        new_len: Tensor,  # int64 [B]
        context_len: Tensor,  # int64 [B]
        temperature: Tensor,  # float32 [B]
        uniforms: Tensor,  # float32 [B, γ]
        *caches: Tensor,  # 2 x [B, Hkv, S, D]
    ) -> tuple[Tensor, ...]:
        """One draft step: tokens int64 `[B, γ]`, logits float32 `[B, γ, V]`, caches."""
        attention, gamma = self.layer.self_attn, self.config.gamma
        hidden, updated = self._context(anchor_ids, new_taps, new_len, context_len, *caches)
        cache = (updated[0], updated[1])
        start = context_len + new_len  # the anchor's position
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        chain: KeysValues | None = None
        for k in range(gamma):
            step = self.lm_head(self.norm(hidden))
            if self.vocabulary is not None:
                step = self.vocabulary.spread(step, UNDRAFTABLE)
            tokens.append(sample_draft(step.unsqueeze(1), temperature, uniforms, k).squeeze(1))
            logits.append(step)
            if k + 1 == gamma:
                break
            embedded = self.embed_tokens(tokens[-1]).float().unsqueeze(1)
            pairs, residual = self.layer.pairs(embedded, hidden.unsqueeze(1))
            rotation = self.rotary((start + k)[:, None])
            own = attention.keys_values(pairs, rotation)
            chain = own if chain is None else _joined(chain, own)
            query = attention.queries(pairs, rotation)
            mixed = attention.over_cache_and_chain(query, cache, chain, start)
            hidden = self.layer.finish(residual, mixed).squeeze(1)
        return (torch.stack(tokens, 1), torch.stack(logits, 1), *updated)

    def _context(
        self,
        anchor_ids: Tensor,
        new_taps: Tensor,
        new_len: Tensor,
        context_len: Tensor,
        *caches: Tensor,
    ) -> tuple[Tensor, list[Tensor]]:
        """Output of each request's last row, float32 `[B, H]`, and the caches with the new rows."""
        count = new_taps.shape[1]
        embedded, hidden = self._row_inputs(new_taps)
        index = torch.arange(count, device=new_taps.device)
        # Behind the last row stands the anchor, whatever the host wrote there.
        is_last = (index == new_len[:, None] - 1).unsqueeze(-1)
        anchors = self.embed_tokens(anchor_ids).float().unsqueeze(1)
        pairs, residual = self.layer.pairs(torch.where(is_last, anchors, embedded), hidden)
        rotation = self.rotary(context_len[:, None] + index)
        attention = self.layer.self_attn
        keys, values = attention.keys_values(pairs, rotation)
        key_cache = scatter_rows(caches[0], keys, context_len)
        value_cache = scatter_rows(caches[1], values, context_len)
        # Row i sees rows up to its own; rows past the valid end are garbage that no valid row sees.
        mixed = cached_attention(
            attention.queries(pairs, rotation),
            key_cache,
            value_cache,
            context_len + count,
            is_causal=True,
        )
        outputs = self.layer.finish(residual, mixed)
        first = torch.arange(outputs.shape[0], device=outputs.device) * count
        last = functional.embedding(first + (new_len - 1).clamp(min=0), outputs.flatten(0, 1))
        return last, [key_cache, value_cache]

    def _row_inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of the tokens behind the rows, and projected taps: float32 `[B, N, H]` each."""
        taps, ids = rows[..., :-1], rows[..., -1].to(torch.int64)
        ids = ids.clamp(0, self.config.decoder.vocab_size - 1)  # padding may hold anything
        hidden = functional.linear(taps, self.fc.weight.float())
        return self.embed_tokens(ids).float(), hidden


def _joined(chain: KeysValues, own: KeysValues) -> KeysValues:
    return torch.cat((chain[0], own[0]), 2), torch.cat((chain[1], own[1]), 2)
