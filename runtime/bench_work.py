# SPDX-License-Identifier: Apache-2.0
"""Bytes and operations of each part of a round, counted from a bundle's description: what its graphs cannot do
without. Weights are read once a step (of the sequential head once a drafted token, since each waits for the
one before), caches as far as contexts reach, logits are written. Tests compare with counts over the graphs.

Legend: B requests, T target rows, c context tokens of each request, K = γ drafted tokens.
"""

from dataclasses import dataclass
from typing import Self

from dspark_trt.config import DecoderConfig, DraftConfig, HeadType, TargetConfig
from dspark_trt.runtime.bench_limits import MachineLimits

_FLOAT32 = 4
_SAMPLED_OPERATIONS = 6  # a logit: maximum, difference, exponential, sum, quotient, comparison


@dataclass(frozen=True, slots=True)
class Work:
    nbytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Self) -> "Work":
        return Work(self.nbytes + other.nbytes, self.flops + other.flops)

    def seconds(self, limits: MachineLimits) -> float:
        """The least time it takes: reading and computing overlap at best."""
        return max(self.nbytes / limits.bytes_per_second, self.flops / limits.flops)


def draft_work(
    config: DraftConfig,
    *,
    batch: int,
    context: float,
    weight_bytes: float = _FLOAT32,
    cache_bytes: float = _FLOAT32,
) -> Work:
    """One fused draft step of B requests; bytes are those of one element of a matrix, of a cache."""
    decoder, gamma = config.decoder, config.gamma
    new, slots = batch * (gamma + 1), batch * config.block_slots
    hidden, vocab = decoder.hidden_size, config.head_vocab_size
    work = _product(
        config.tap_size, hidden, new, _FLOAT32
    )  # in float32 whatever the model's precision
    for _ in range(decoder.num_layers):
        work += _product(hidden, decoder.num_heads * decoder.head_dim, slots, weight_bytes)
        work += _product(hidden, _kv_width(decoder), new + slots, weight_bytes)
        work += _product(decoder.num_heads * decoder.head_dim, hidden, slots, weight_bytes)
        work += _mlp(decoder, decoder.intermediate_size, slots, weight_bytes)
        rows = context + gamma + 1 + config.block_slots
        work += _attention(decoder, batch, config.block_slots, rows, cache_bytes)
    work += _product(hidden, vocab, batch * gamma, weight_bytes)
    for _ in range(gamma if config.head_type is not HeadType.NONE else 0):
        work += _head_step(config, batch, weight_bytes)
    return work + _written_logits(batch * gamma, decoder.vocab_size)


def target_work(
    config: TargetConfig, *, batch: int, rows: float, logit_rows: float, context: float,
    weight_bytes: float = _FLOAT32,
    cache_bytes: float = _FLOAT32,
) -> Work:  # fmt: skip
    """One target step of T rows over B requests."""
    decoder = config.decoder
    hidden, query = decoder.hidden_size, decoder.num_heads * decoder.head_dim
    work = Work()
    for layer in range(decoder.num_layers):
        work += _product(hidden, query + _kv_width(decoder), rows, weight_bytes)
        work += _product(query, hidden, rows, weight_bytes)
        experts = decoder.experts
        if experts is not None and layer in experts.layers:
            reached = experts.count * (1 - (1 - experts.per_token / experts.count) ** rows)
            own = _mlp(decoder, experts.intermediate_size, 1, weight_bytes)
            work += Work(reached * own.nbytes, experts.per_token * rows * own.flops)
            work += _product(hidden, experts.count, rows, _FLOAT32)
        else:
            work += _mlp(decoder, decoder.intermediate_size, rows, weight_bytes)
        work += _attention(decoder, batch, rows / batch, context + rows / batch, cache_bytes)
    work += _product(hidden, decoder.vocab_size, logit_rows, weight_bytes)
    return work + _written_logits(logit_rows, decoder.vocab_size)


def verify_work(vocab: int, *, target_rows: float, draft_rows: float, is_greedy: bool) -> Work:
    """Verification reads the target's logits, and the drafter's as well where it samples."""
    if is_greedy:
        return Work(_FLOAT32 * target_rows * vocab, target_rows * vocab)
    read = (target_rows + draft_rows) * vocab
    return Work(_FLOAT32 * read, _SAMPLED_OPERATIONS * read)


def _product(inner: int, outer: int, rows: float, weight_bytes: float) -> Work:
    return Work(weight_bytes * inner * outer, 2.0 * inner * outer * rows)


def _kv_width(decoder: DecoderConfig) -> int:
    return 2 * decoder.num_kv_heads * decoder.head_dim


def _mlp(decoder: DecoderConfig, inner: int, rows: float, weight_bytes: float) -> Work:
    gate_up = _product(decoder.hidden_size, 2 * inner, rows, weight_bytes)
    return gate_up + _product(inner, decoder.hidden_size, rows, weight_bytes)


def _attention(
    decoder: DecoderConfig, batch: int, rows: float, seen: float, cache_bytes: float
) -> Work:
    """`rows` queries of each request over `seen` cache rows: scores and their sums."""
    width = decoder.num_heads * decoder.head_dim
    return Work(
        cache_bytes * batch * seen * _kv_width(decoder), 4.0 * batch * rows * seen * width
    )


def _head_step(config: DraftConfig, batch: int, weight_bytes: float) -> Work:
    rank, hidden = config.markov_rank, config.decoder.hidden_size
    work = _product(rank, config.head_vocab_size, batch, weight_bytes)
    if config.head_type is HeadType.GATED:
        work += _product(hidden + rank, rank, batch, weight_bytes)
    elif config.head_type is HeadType.RNN:
        work += _product(2 * rank + hidden, 3 * rank, batch, weight_bytes)
    return work


def _written_logits(rows: float, vocab: int) -> Work:
    return Work(_FLOAT32 * rows * vocab)
