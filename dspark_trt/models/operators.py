# SPDX-License-Identifier: Apache-2.0
"""The few operators that torch and ONNX must agree on: an eager form, and the ONNX node it exports as.

Everything else in the modules is plain torch that the exporter translates. Caches are updated in place
in eager mode and functionally while exporting, where the runtime aliases `TensorScatter` instead.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import SymInt, Tensor
from torch.nn import functional

from dspark_trt.models.fixed_shapes import attention_over_capacity, current_sampler

_OPSET = 24


def _node(
    op_type: str,
    inputs: Sequence[Tensor | None],
    attrs: Mapping[str, int | float | list[int]],
    *,
    dtype: torch.dtype,
    shape: Sequence[int | SymInt],
) -> Tensor:
    node: Tensor = torch.onnx.ops.symbolic(
        op_type, inputs, dict(attrs), dtype=dtype, shape=shape, version=_OPSET
    )
    return node


def rms_norm(
    x: Tensor, weight: Tensor, eps: float
) -> Tensor:  # [.., D], [D] -> float32 [.., D]
    """ONNX `RMSNormalization`, in float32 whatever the model's precision: squares of 4e2 overflow float16."""
    x, weight = x.float(), weight.float()
    if torch.compiler.is_exporting():
        attrs = {"axis": -1, "epsilon": eps, "stash_type": 1}
        return _node("RMSNormalization", (x, weight), attrs, dtype=x.dtype, shape=x.shape)
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """ONNX `RotaryEmbedding`: float32 `[B, heads, N, D]` by `[B, N, D/2]` tables. Pairs are (i, i + D/2), or
    neighbours where `interleaved`.
    """
    if torch.compiler.is_exporting():
        attrs = {"interleaved": 1} if interleaved else {}
        return _node("RotaryEmbedding", (x, cos, sin), attrs, dtype=x.dtype, shape=x.shape)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if interleaved:
        first, second = x[..., ::2], x[..., 1::2]
        pairs = (first * cos - second * sin, second * cos + first * sin)
        return torch.stack(pairs, -1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def scatter_rows(cache: Tensor, update: Tensor, write_indices: Tensor) -> Tensor:
    """ONNX `TensorScatter`: write `update [B, Hkv, N, D]` into `cache [B, Hkv, S, D]` from row
    `write_indices [B]` on.
    """
    if torch.compiler.is_exporting():
        inputs = (cache, update, write_indices)
        return _node("TensorScatter", inputs, {"axis": 2}, dtype=cache.dtype, shape=cache.shape)
    rows = write_indices[:, None] + torch.arange(update.shape[2], device=update.device)
    batch = torch.arange(cache.shape[0], device=cache.device)[:, None]
    cache.transpose(1, 2)[batch, rows] = update.transpose(1, 2)
    return cache


def cached_attention(
    query: Tensor, key: Tensor, value: Tensor, valid_len: Tensor, *, is_causal: bool
) -> Tensor:
    """ONNX `Attention` with `nonpad_kv_seqlen`: `query [B, Hq, N, D]` over the first `valid_len [B]` rows
    of caches `[B, Hkv, S, D]`.

    Causal masks are aligned bottom-right (onnx/onnx#8068): query i sees rows j <= i + valid_len - N.
    """
    if torch.compiler.is_exporting():
        # Without a mask the queries of one key head are rows like any others: fewer and taller products.
        folded = query if is_causal else _folded(query, key.shape[1])
        mixed = _node(
            "Attention",
            (folded, key, value, None, None, None, valid_len),
            {"is_causal": int(is_causal), "softmax_precision": 1},
            dtype=query.dtype,
            shape=folded.shape,
        )
        return mixed if is_causal else _folded(mixed, query.shape[1])
    if current_sampler() is not None:
        return attention_over_capacity(query, key, value, valid_len, is_causal=is_causal)
    span = int(valid_len.max())
    columns = torch.arange(span, device=query.device)
    limit = valid_len[:, None, None].expand(-1, query.shape[2], 1)
    if is_causal:
        limit = limit - torch.arange(query.shape[2] - 1, -1, -1, device=query.device)[:, None]
    visible = (columns < limit).unsqueeze(1)  # [B, 1, N, span]
    return functional.scaled_dot_product_attention(
        query, key[:, :, :span], value[:, :, :span], attn_mask=visible, enable_gqa=True
    )


def _folded(queries: Tensor, heads: int | SymInt) -> Tensor:
    """`[B, Hq, N, D]` as so many heads: those of a group are neighbours, so nothing moves."""
    if queries.shape[1] == heads:
        return queries
    return queries.reshape(queries.shape[0], heads, -1, queries.shape[3])


def sample_draft(logits: Tensor, temperature: Tensor, uniforms: Tensor, slot: int) -> Tensor:
    """`dspark::SampleDraft`: draw the tokens of one slot of K from float32 `[B, 1, V]`, `[B]`, `[B, K]` ->
    int64 `[B, 1]`.

    Temperature 0 takes the first maximum; the semantics are `plugins.specification.sample_draft`.
    """
    if torch.compiler.is_exporting():
        inputs, shape = (logits, temperature, uniforms), (uniforms.shape[0], 1)
        return _node(
            "dspark::SampleDraft", inputs, {"slot": [slot]}, dtype=torch.int64, shape=shape
        )
    rows, own = logits.squeeze(1), uniforms[:, slot]
    if (sampler := current_sampler()) is not None:
        return sampler(rows, temperature, own).unsqueeze(1)
    from dspark_trt.plugins.specification import sample_draft as specification

    drawn = specification(rows.cpu().numpy(), temperature.cpu().numpy(), own.cpu().numpy())
    return torch.from_numpy(drawn).to(logits.device).unsqueeze(1)
