# SPDX-License-Identifier: Apache-2.0
"""Attention with a mask beside the valid length: sliding windows, and scales of its own.

A window never moves rows: the cache keeps them all, at their absolute positions, and the mask hides what
lies behind the window.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dspark_trt.config import WindowRule
from dspark_trt.models.fixed_shapes import attention_over_capacity, current_sampler

_OPSET = 24


def causal_window(positions: Tensor, capacity: int, window: int) -> Tensor:
    """Rows of a cache within the window of queries at `positions` `[B, N]` -> bool `[B, 1, N, S]`.

    A query sees `window` rows, its own included, and none ahead.
    """
    columns = torch.arange(capacity, device=positions.device)
    own = positions.unsqueeze(-1)
    return ((columns > own - window) & (columns <= own)).unsqueeze(1)


def block_window(
    rule: WindowRule, start: Tensor, slots: int, capacity: int, window: int
) -> Tensor:
    """Rows of a drafter's cache that a block of `slots` sees, anchors at `start` `[B]` -> bool
    `[B, 1, slots, S]`; rows past the block are left to the valid length.
    """
    columns = torch.arange(capacity, device=start.device)
    slot = (start[:, None] + torch.arange(slots, device=start.device)).unsqueeze(-1)
    if rule is WindowRule.SLOT:
        visible = (columns > slot - window) & (columns < slot + window)
    else:
        visible = columns >= (start - window)[:, None, None]
        last = slot if rule is WindowRule.ANCHOR_CAUSAL else slot[:, -1:]
        visible = visible & (columns <= last)
    return visible.unsqueeze(1).expand(-1, -1, slots, -1)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid_len: Tensor,
    *,
    visible: Tensor | None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """`operators.cached_attention` with a mask bool `[B, 1, N, S]` of visible rows and a scale.

    ONNX `Attention` with `attn_mask` and `nonpad_kv_seqlen`; a row must pass both. A mask says all there
    is to say: TensorRT takes none beside the causal rule.
    """
    assert visible is None or not is_causal
    if torch.compiler.is_exporting():
        attrs: dict[str, Any] = {"is_causal": int(is_causal), "softmax_precision": 1}
        if scale is not None:
            attrs["scale"] = scale
        node: Tensor = torch.onnx.ops.symbolic(
            "Attention",
            (query, key, value, visible, None, None, valid_len),
            attrs,
            dtype=query.dtype,
            shape=query.shape,
            version=_OPSET,
        )
        return node
    if current_sampler() is not None:
        return attention_over_capacity(
            query, key, value, valid_len, is_causal=is_causal, visible=visible, scale=scale
        )
    span = int(valid_len.max())
    columns = torch.arange(span, device=query.device)
    limit = valid_len[:, None, None].expand(-1, query.shape[2], 1)
    if is_causal:
        limit = limit - torch.arange(query.shape[2] - 1, -1, -1, device=query.device)[:, None]
    mask = (columns < limit).unsqueeze(1)  # [B, 1, N, span]
    if visible is not None:
        mask = mask & visible[..., :span]
    return functional.scaled_dot_product_attention(
        query,
        key[:, :, :span],
        value[:, :, :span],
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
