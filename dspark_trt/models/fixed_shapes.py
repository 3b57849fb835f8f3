# SPDX-License-Identifier: Apache-2.0
"""Operators as a CUDA graph can hold them: shapes known beforehand, no length read by the host.

The eager forms in `operators` cut caches to the longest context and sample through NumPy. Within `fixed_shapes`
attention covers the caches' capacity, and a sampler that stays on the device draws the tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn import functional

# Logits float32 [B, V], temperature [B], uniforms [B] -> int64 [B].
Sampler = Callable[[Tensor, Tensor, Tensor], Tensor]

_SAMPLER: ContextVar[Sampler | None] = ContextVar("sampler", default=None)


@contextmanager
def fixed_shapes(sampler: Sampler) -> Iterator[None]:
    """Run modules in this form."""
    token = _SAMPLER.set(sampler)
    try:
        yield
    finally:
        _SAMPLER.reset(token)


def current_sampler() -> Sampler | None:
    """The sampler of the surrounding `fixed_shapes`; None outside."""
    return _SAMPLER.get()


def attention_over_capacity(
    query: Tensor,  # [B, Hq, N, D]
    key: Tensor,  # [B, Hkv, S, D]
    value: Tensor,  # [B, Hkv, S, D]
    valid_len: Tensor,  # int64 [B]
    *,
    is_causal: bool,
    visible: Tensor | None = None,  # bool [B, 1, N, S]: of rows within the valid length
    scale: float | None = None,
) -> Tensor:
    """`operators.cached_attention`, over all rows with a mask.

    Query heads that share keys become rows of one head: caches are read once, and never expanded.
    """
    batch, heads, rows, size = query.shape
    kv_heads, capacity = key.shape[1], key.shape[2]
    limit = valid_len[:, None].expand(-1, rows)
    if is_causal:
        limit = limit - torch.arange(rows - 1, -1, -1, device=query.device)
    mask = torch.arange(capacity, device=query.device) < limit[:, None, :, None]
    if visible is not None:
        mask = mask & visible
    group = heads // kv_heads
    mixed = functional.scaled_dot_product_attention(
        query.reshape(batch, kv_heads, group * rows, size),
        key,
        value,
        attn_mask=mask.repeat(1, 1, group, 1),
        scale=scale,
    )
    return mixed.reshape(batch, heads, rows, size)
