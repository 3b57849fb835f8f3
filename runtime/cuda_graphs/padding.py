# SPDX-License-Identifier: Apache-2.0
"""Ragged batches filled up to the shapes of a bucket, so that what is added harms nobody.

An added request sits in a cache row that may belong to somebody else: the last `scratch_rows` rows of every
cache belong to no request, and there it writes. An added flattened row belongs to no request and writes
nowhere. Places behind a request's own rows repeat its last row: a row with NaN stays with its request.
"""

import numpy as np
from numpy.typing import NDArray

from dspark_trt.runtime.cuda_graphs.buckets import GraphKey
from dspark_trt.runtime.ragged import RaggedRows

Ints = NDArray[np.int64]


def scratch_rows(gamma: int, block_slots: int) -> int:
    """Cache rows that one step of one request writes at most: a draft step packs γ+1 context rows and its
    block into one update, a target step writes γ+1.
    """
    return gamma + 1 + block_slots


def pad_ragged(
    rows: RaggedRows, key: GraphKey, *, padded: int, scratch_start: int
) -> RaggedRows:
    """The inputs of a target step in the shapes of a graph.

    Args:
        rows: T rows of B requests, none with more than `padded`.
        key: a bucket that holds them (`Buckets.find`).
        padded: places around attention L, one number for all graphs.
        scratch_start: first cache row of the scratch rows.
    """
    batch, total = rows.batch, len(rows.token_ids)
    added = np.arange(key.batch - batch)
    lengths = np.diff(rows.offsets)
    assert lengths.max() <= padded
    assert total + len(added) <= key.rows
    flat = np.zeros((2, key.rows), np.int64)  # token ids, positions
    flat[:, :total] = rows.token_ids, rows.positions
    flat[1, total : total + len(added)] = scratch_start
    place = np.minimum(np.arange(padded), lengths[:, None] - 1)
    pad_index = np.empty((key.batch, padded), np.int64)
    pad_index[:batch] = rows.offsets[:-1, None] + place
    pad_index[batch:] = total + added[:, None]
    request = np.repeat(np.arange(batch), lengths)
    unpad_index = np.zeros(key.rows, np.int64)
    unpad_index[:total] = request * padded + np.arange(total) - rows.offsets[request]
    unpad_index[total : total + len(added)] = (batch + added) * padded
    logit_rows = np.zeros(key.rows, np.int64)
    logit_rows[: len(rows.logit_rows)] = rows.logit_rows
    return RaggedRows(
        token_ids=flat[0],
        positions=flat[1],
        pad_index=pad_index,
        unpad_index=unpad_index,
        logit_rows=logit_rows,
        context_len=pad_to(rows.context_len, key.batch, scratch_start),
        offsets=pad_offsets(rows.offsets, key.batch),
    )


def own_pad_index(rows: RaggedRows) -> Ints:
    """`pad_index [B, L]` whose places behind a request's own rows repeat its last row."""
    lengths = np.diff(rows.offsets)
    place = np.minimum(np.arange(rows.pad_index.shape[1]), lengths[:, None] - 1)
    own: Ints = rows.offsets[:-1, None] + place
    return own


def pad_to(values: Ints, batch: int, filler: int) -> Ints:
    """`[B]` -> `[batch]`."""
    return np.concatenate((values, np.full(batch - len(values), filler, values.dtype)))


def pad_offsets(offsets: Ints, batch: int) -> Ints:
    """`[B+1]` -> `[batch+1]`: each added request has one row, behind those of the others."""
    added = np.arange(1, batch + 2 - len(offsets))
    return np.concatenate((offsets, offsets[-1] + added))
