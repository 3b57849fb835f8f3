# SPDX-License-Identifier: Apache-2.0
"""MTP-1: one token drafted with a target's own layer for it (DeepSeek-V3, arXiv 2412.19437, section 2.2).

A row pairs the target's hidden state behind its final norm with the embedding of the token behind it; one
projection makes them the input of an ordinary layer. Only the last row's output is wanted, so all other
rows leave no more than their keys.

Attention is multi-head latent (section 2.1.1) in its absorbed form: a row caches one latent and one rotated
key for all heads, queries are brought into the latents' space, and values come out of the mixed latents.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark_trt.config import DecoderConfig, DraftConfig, ExpertsConfig, MtpConfig
from dspark_trt.models.chain import ChainDrafter
from dspark_trt.models.deepseek_layers import DeepseekExperts, turn_tail
from dspark_trt.models.layers import MLP, LanguageHead, Projection, RMSNorm
from dspark_trt.models.operators import sample_draft, scatter_rows
from dspark_trt.models.rope import RotaryTable

Rotation = tuple[Tensor, Tensor]  # cos, sin: float32 [B, N, R/2]


class LatentAttention(nn.Module):
    def __init__(self, decoder: DecoderConfig, mtp: MtpConfig) -> None:
        super().__init__()
        self.num_heads, self.mtp = decoder.num_heads, mtp
        hidden, eps, heads = decoder.hidden_size, decoder.rms_norm_eps, decoder.num_heads
        queries = heads * (mtp.plain_size + mtp.rotary_size)
        if mtp.query_rank is None:
            self.q_proj = Projection(hidden, queries, bias=False)
        else:
            self.q_a_proj = Projection(hidden, mtp.query_rank, bias=False)
            self.q_a_layernorm = RMSNorm(mtp.query_rank, eps)
            self.q_b_proj = Projection(mtp.query_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = Projection(
            hidden, mtp.latent_rank + mtp.rotary_size, bias=False
        )
        self.kv_a_layernorm = RMSNorm(mtp.latent_rank, eps)
        inner = heads * (mtp.plain_size + mtp.value_size)
        self.kv_b_proj = nn.Linear(mtp.latent_rank, inner, bias=False)
        self.o_proj = Projection(heads * mtp.value_size, hidden, bias=False)

    def keys(self, rows: Tensor, rotation: Rotation) -> Tensor:
        """Rows `[B, N, H]` -> latents and turned keys `[B, 1, N, C + R]` of the cache's dtype."""
        sizes = [self.mtp.latent_rank, self.mtp.rotary_size]
        latent, turning = self.kv_a_proj_with_mqa(rows).split(sizes, dim=-1)
        whole = torch.cat((self.kv_a_layernorm(latent), turning), -1).unsqueeze(1)
        return turn_tail(whole, rotation).to(self.kv_b_proj.weight.dtype)

    def forward(
        self, row: Tensor, cache: Tensor, valid_len: Tensor, rotation: Rotation
    ) -> Tensor:
        """One row a request `[B, 1, H]` over the valid rows of `[B, 1, S, C + R]` -> `[B, 1, H]`."""
        rank = self.mtp.latent_rank
        weight = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))
        to_keys, to_values = weight.split([self.mtp.plain_size, self.mtp.value_size], dim=1)
        queries = self._queries(row).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        queries = turn_tail(queries, rotation)
        plain, turned = queries.split([self.mtp.plain_size, self.mtp.rotary_size], dim=-1)
        latent = (plain.to(weight.dtype) @ to_keys).float()  # [B, heads, 1, C]
        query = torch.cat((latent, turned), -1).to(cache.dtype)
        scores = (query @ cache.transpose(-1, -2)).float() * self.mtp.attention_scale
        columns = torch.arange(cache.shape[2], device=cache.device)
        hidden = columns >= valid_len[:, None, None, None]
        shares = torch.softmax(scores.masked_fill(hidden, -1e30), -1).to(cache.dtype)
        mixed = (shares @ cache)[..., :rank]  # [B, heads, 1, C]
        values = (mixed @ to_values.transpose(-1, -2)).float()  # [B, heads, 1, V]
        return self.o_proj(values.transpose(1, 2).flatten(-2))

    def _queries(self, row: Tensor) -> Tensor:
        if self.mtp.query_rank is None:
            return self.q_proj(row)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(row)))


class GroupRouter(nn.Module):
    """Shares of the experts: the best of the best groups, by scores that a bias moves but does not weigh."""

    def __init__(self, hidden: int, experts: ExpertsConfig, mtp: MtpConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts.count, hidden))
        self.bias = nn.Parameter(torch.empty(experts.count))
        self.config, self.mtp = experts, mtp

    def forward(self, x: Tensor) -> Tensor:  # float32 [.., H] -> float32 [.., E]
        scores = functional.linear(x, self.weight).sigmoid()
        moved = scores + self.bias
        if self.mtp.groups > 1:
            grouped = moved.unflatten(-1, (self.mtp.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1)
            index = best.topk(self.mtp.groups_taken, dim=-1).indices
            ones = torch.ones_like(index, dtype=best.dtype)
            open_groups = torch.zeros_like(best).scatter(-1, index, ones)
            moved = grouped.masked_fill(open_groups.unsqueeze(-1) == 0, -1e30).flatten(-2)
        index = moved.topk(self.config.per_token, dim=-1).indices
        taken = scores.gather(-1, index)
        if self.config.normalised:
            taken = taken / (taken.sum(-1, keepdim=True) + 1e-20)
        return torch.zeros_like(scores).scatter(-1, index, taken * self.mtp.routed_scale)


class MtpDrafter(ChainDrafter):
    """A chain of one link: the interface of Eagle3's drafter, with modules of its own."""

    def __init__(self, config: DraftConfig) -> None:
        nn.Module.__init__(self)
        assert config.chain is not None
        assert config.chain.mtp is not None
        self.config = config
        decoder, mtp = config.decoder, config.chain.mtp
        hidden, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.embed_tokens = nn.Embedding(decoder.vocab_size, hidden)
        self.enorm = RMSNorm(hidden, eps)
        self.hnorm = RMSNorm(hidden, eps)
        self.eh_proj = Projection(2 * hidden, hidden, bias=False)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = LatentAttention(decoder, mtp)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp: nn.Module
        if decoder.experts is None:
            self.mlp = MLP(decoder)
        else:
            router = GroupRouter(hidden, decoder.experts, mtp)
            self.mlp = DeepseekExperts(
                hidden, decoder.experts, router, shared_size=mtp.shared_size
            )
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = LanguageHead(decoder, decoder.vocab_size)
        self.rotary = RotaryTable(replace(decoder, head_dim=mtp.rotary_size))

    def append_context(
        self, rows: Tensor, context_len: Tensor, *caches: Tensor
    ) -> list[Tensor]:
        """Write context rows `context_len ..` `[B, N, H + 1]` into the cache."""
        embedded, hidden = self._row_inputs(rows)
        return [self._cached(self._paired(embedded, hidden), context_len, caches[0])]

    def forward(
        self,
        anchor_ids: Tensor,  # int64 [B]
        new_taps: Tensor,  # float32 [B, 2, H + 1]: rows not yet in the cache, at least one
        new_len: Tensor,  # int64 [B]
        context_len: Tensor,  # int64 [B]
        temperature: Tensor,  # float32 [B]
        uniforms: Tensor,  # float32 [B, 1]
        *caches: Tensor,  # [B, 1, S, C + R]
    ) -> tuple[Tensor, ...]:
        """One draft step: token int64 `[B, 1]`, logits float32 `[B, 1, V]`, cache."""
        count = new_taps.shape[1]
        embedded, hidden = self._row_inputs(new_taps)
        index = torch.arange(count, device=new_taps.device)
        # Behind the last row stands the anchor, whatever the host wrote there.
        is_last = (index == new_len[:, None] - 1).unsqueeze(-1)
        anchors = self.embed_tokens(anchor_ids).float().unsqueeze(1)
        rows = self._paired(torch.where(is_last, anchors, embedded), hidden)
        cache = self._cached(rows, context_len, caches[0])
        first = torch.arange(rows.shape[0], device=rows.device) * count
        last = functional.embedding(first + (new_len - 1).clamp(min=0), rows.flatten(0, 1))
        start = context_len + new_len  # the anchor's position
        stream = last.unsqueeze(1)
        mixed = self.self_attn(
            self.input_layernorm(stream), cache, start, self.rotary(start[:, None] - 1)
        )
        stream = stream + mixed
        stream = stream + self.mlp(self.post_attention_layernorm(stream))
        logits = self.lm_head(self.norm(stream))
        return sample_draft(logits, temperature, uniforms, 0), logits, cache

    def _cached(self, rows: Tensor, context_len: Tensor, cache: Tensor) -> Tensor:
        index = torch.arange(rows.shape[1], device=rows.device)
        rotation = self.rotary(context_len[:, None] + index)
        return scatter_rows(
            cache, self.self_attn.keys(self.input_layernorm(rows), rotation), context_len
        )

    def _paired(self, embedded: Tensor, hidden: Tensor) -> Tensor:  # [B, N, H] each
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))

    def _row_inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of the tokens behind the rows, and the target's hidden states."""
        ids = rows[..., -1].to(torch.int64)
        ids = ids.clamp(0, self.config.decoder.vocab_size - 1)  # padding may hold anything
        return self.embed_tokens(ids).float(), rows[..., :-1]
