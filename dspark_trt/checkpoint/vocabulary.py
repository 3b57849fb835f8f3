# SPDX-License-Identifier: Apache-2.0
"""Draft vocabularies of speculators files: ``d2t`` and ``t2d``.

``d2t`` holds offsets, not ids: draft token i is target token i + d2t[i]. ``t2d`` says which tokens of
the target can be drafted. Files with the full vocabulary may hold both as the identity.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from dspark_trt.checkpoint.fields import Fields
from dspark_trt.checkpoint.records import Notes
from dspark_trt.checkpoint.tensors import TensorRef

D2T = "d2t"
MAPS = (D2T, "t2d")

_CODES = {"int64": "q", "int32": "i"}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens that can be drafted: ``size`` None for all of the target's, else ``maps`` has ``d2t``."""

    size: int | None = None
    maps: Mapping[str, TensorRef] = field(default_factory=dict)


def read_vocabulary(
    fields: Fields, tensors: Mapping[str, TensorRef], notes: Notes
) -> Vocabulary:
    """The draft vocabulary, its maps checked against each other.

    Raises:
        CheckpointError: maps that are missing, misshapen, absolute instead of offsets, or contradictory.
    """
    vocab = fields.required_integer("vocab_size")
    said = fields.integer("draft_vocab_size")
    size = said.value if said else vocab
    if not 1 <= size <= vocab:
        raise fields.error(
            f"draft_vocab_size is {size}, expected 1 to vocab_size {vocab}", "draft_vocab_size"
        )
    if D2T not in tensors:
        if size != vocab:
            raise fields.error(
                f"draft_vocab_size is {size} of {vocab}, but the files hold no {D2T}, which says "
                "which tokens those are",
                "draft_vocab_size",
            )
        return Vocabulary()
    ids = _target_ids(fields, tensors[D2T], size, vocab)
    if "t2d" in tensors:
        _compare(fields, tensors["t2d"], ids, vocab)
    if size == vocab:
        notes.decide("vocabulary", "full", "the maps are the identity")
        return Vocabulary()
    notes.decide(
        "vocabulary",
        size,
        f"draft_vocab_size of {vocab}; {D2T} holds offsets: token i is i + d2t[i]",
    )
    return Vocabulary(size, {D2T: tensors[D2T]})


def target_tokens(d2t: TensorRef) -> list[int]:
    """The target's token of each draft token."""
    offsets = array(_CODES[d2t.dtype])
    offsets.frombytes(b"".join(d2t.chunks()))
    return [index + offset for index, offset in enumerate(offsets)]


def _target_ids(fields: Fields, d2t: TensorRef, size: int, vocab: int) -> list[int]:
    if d2t.shape != (size,) or d2t.dtype not in _CODES:
        raise fields.error(
            f"{d2t.key} is {d2t.dtype} {d2t.shape}, expected int64 ({size},) (draft_vocab_size)",
            "draft_vocab_size",
        )
    ids = target_tokens(d2t)
    if all(left < right for left, right in pairwise(ids)) and ids[0] >= 0 and ids[-1] < vocab:
        return ids
    offsets = [token - index for index, token in enumerate(ids)]
    absolute = all(left < right for left, right in pairwise(offsets)) and offsets[-1] < vocab
    hint = "; it looks like absolute ids: subtract the index" if absolute else ""
    raise fields.error(
        f"{d2t.key} must hold offsets that give increasing tokens below {vocab}, but it gives "
        f"{ids[0]} to {max(ids)}{hint}"
    )


def _compare(fields: Fields, t2d: TensorRef, ids: list[int], vocab: int) -> None:
    if t2d.shape != (vocab,) or t2d.dtype != "bool":
        raise fields.error(f"{t2d.key} is {t2d.dtype} {t2d.shape}, expected bool ({vocab},)")
    kept = [token for token, byte in enumerate(b"".join(t2d.chunks())) if byte]
    if kept != ids:
        other = next((token for token in sorted({*kept} ^ {*ids})), None)
        raise fields.error(
            f"{t2d.key} keeps {len(kept)} tokens and {D2T} names {len(ids)}; they differ at token "
            f"{other}: the maps come from different files"
        )
