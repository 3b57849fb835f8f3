# SPDX-License-Identifier: Apache-2.0
"""Ragged target steps as index arrays: pure NumPy, no backend."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class RaggedRows(NamedTuple):
    """Inputs of `target.onnx` for one step. Every request of the batch has at least one row."""

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    pad_index: Ints  # [B, L]
    unpad_index: Ints  # [T]
    logit_rows: Ints  # [R]
    context_len: Ints  # [B]
    offsets: Ints  # [B+1]: flattened rows of each request

    @property
    def batch(self) -> int:
        return len(self.context_len)


def ragged_rows(
    tokens: Sequence[Sequence[int] | Ints],
    context_len: Ints,
    wants_all_logits: NDArray[np.bool_],
) -> RaggedRows:
    """Flatten per-request tokens that continue caches of `context_len [B]` rows.

    Logits are asked for every row where `wants_all_logits [B]`, else for the request's last row only.
    """
    shape = _shape(tuple(len(own) for own in tokens), tuple(wants_all_logits.tolist()))
    flattened = np.concatenate([np.asarray(own, np.int64) for own in tokens])
    return _continuing(context_len, flattened, shape)


def block_rows(blocks: Ints, lengths: Ints, context_len: Ints) -> RaggedRows:
    """The rows of requests that all decode: of each block `[B, K+1]` the anchor and `lengths [B]` drafts, with
    logits for every row.
    """
    places, shape = _blocks(tuple(lengths.tolist()), blocks.shape[1])
    return _continuing(context_len, blocks.take(places), shape)


@lru_cache(maxsize=256)
def _blocks(lengths: tuple[int, ...], slots: int) -> tuple[Ints, "_Shape"]:
    """Where an anchor and so many drafts of each request are, in all slots one behind another."""
    shape = _shape(tuple(1 + length for length in lengths), (True,) * len(lengths))
    places = shape.request * slots + shape.within
    places.setflags(write=False)
    return places, shape


class _Shape(NamedTuple):
    """What depends on the numbers of rows only. Read-only: it is shared by many steps."""

    request: Ints  # [T]
    within: Ints  # [T]: place inside the request
    pad_index: Ints
    unpad_index: Ints
    logit_rows: Ints
    offsets: Ints


def _continuing(context_len: Ints, token_ids: Ints, shape: _Shape) -> RaggedRows:
    if len(context_len) == 1:
        start = context_len.item()
        positions = np.arange(start, start + len(token_ids))
    else:
        positions = context_len.take(shape.request) + shape.within
    return RaggedRows(
        token_ids=token_ids,
        positions=positions,
        pad_index=shape.pad_index,
        unpad_index=shape.unpad_index,
        logit_rows=shape.logit_rows,
        context_len=context_len,
        offsets=shape.offsets,
    )


@lru_cache(maxsize=256)
def _shape(rows: tuple[int, ...], wants_all: tuple[bool, ...]) -> _Shape:
    lengths = np.array(rows, np.int64)
    batch, padded, total = len(rows), max(rows), sum(rows)
    assert min(rows) > 0
    offsets = np.zeros(batch + 1, np.int64)
    np.add.accumulate(lengths, out=offsets[1:])
    every = np.arange(total)
    request = np.repeat(np.arange(batch), lengths)
    within = every - offsets[request]
    unpad_index = request * padded + within
    pad_index = np.zeros(batch * padded, np.int64)
    pad_index[unpad_index] = every
    logit_rows = every
    if not all(wants_all):
        is_last = within == lengths[request] - 1
        logit_rows = np.flatnonzero(np.array(wants_all)[request] | is_last)
    made = _Shape(
        request,
        within,
        pad_index.reshape(batch, padded),
        unpad_index,
        logit_rows,
        offsets,
    )
    for array in made:
        array.setflags(write=False)
    return made
