# SPDX-License-Identifier: Apache-2.0
"""Vocabulary maps of speculators files: ``t2d`` (mask over the target's tokens) and ``d2t`` (offsets).

Only the full vocabulary is supported: the maps must then be the identity, which is checked.
"""

from collections.abc import Mapping

from dspark_trt.checkpoint.fields import Fields
from dspark_trt.checkpoint.records import Notes
from dspark_trt.checkpoint.tensors import TensorRef

_IDENTITY_BYTE = {"t2d": b"\x01", "d2t": b"\x00"}  # every token kept; every offset 0


def drop_identity_maps(
    fields: Fields, tensors: Mapping[str, TensorRef], notes: Notes
) -> dict[str, TensorRef]:
    """``tensors`` without the maps.

    Raises:
        CheckpointError: a reduced draft vocabulary, or maps that are not the identity.
    """
    vocab = fields.required_integer("vocab_size")
    draft_vocab = fields.integer("draft_vocab_size")
    if draft_vocab is not None and draft_vocab.value != vocab:
        raise fields.error(
            f"{draft_vocab.where} is {draft_vocab.value} of {vocab}: a reduced draft vocabulary is "
            "not supported yet"
        )
    maps = [name for name in _IDENTITY_BYTE if name in tensors]
    for name in maps:
        if tensors[name].shape != (vocab,) or not _is_filled(
            tensors[name], _IDENTITY_BYTE[name]
        ):
            raise fields.error(
                f"{name} {tensors[name].shape} maps a reduced vocabulary, but config.json says all "
                f"{vocab} tokens are drafted"
            )
    if maps:
        notes.decide("vocabulary", "full", f"{' and '.join(maps)} are the identity")
    return {name: ref for name, ref in tensors.items() if name not in maps}


def _is_filled(ref: TensorRef, byte: bytes) -> bool:
    return all(chunk.count(byte) == len(chunk) for chunk in ref.chunks())
