# SPDX-License-Identifier: Apache-2.0
"""Sequential head and confidence head: what config.json says of them against what the tensors show."""

from collections.abc import Mapping

from dspark_trt.checkpoint.dialects import MODEL_OPTIMIZER, Dialect
from dspark_trt.checkpoint.fields import Fields
from dspark_trt.checkpoint.records import Notes
from dspark_trt.checkpoint.tensors import Shape, TensorRef
from dspark_trt.config import ConfidenceInput, DecoderConfig, DraftConfig, HeadType

_W1 = "markov_head.markov_w1.weight"
_CONFIDENCE = "confidence_head."


def head_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Tensors of the sequential head (DeepSpec names, paper section 3.1)."""
    head, rank, hidden = config.head_type, config.markov_rank, config.decoder.hidden_size
    if head is HeadType.NONE:
        return {}
    shapes: dict[str, Shape] = {
        _W1: (config.decoder.vocab_size, rank),
        "markov_head.markov_w2.weight": (config.head_vocab_size, rank),
    }
    if head is HeadType.GATED:
        shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if head is HeadType.RNN:
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    return shapes


def confidence_shapes(
    kind: ConfidenceInput, rank: int, decoder: DecoderConfig
) -> dict[str, Shape]:
    """Tensors of the confidence head."""
    if kind is ConfidenceInput.NONE:
        return {}
    width = decoder.hidden_size + (rank if kind is ConfidenceInput.HIDDEN_MARKOV else 0)
    return {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}


def read_head(
    fields: Fields, tensors: Mapping[str, TensorRef], notes: Notes
) -> tuple[HeadType, int]:
    """Type and rank of the sequential head.

    Raises:
        CheckpointError: config.json contradicts itself or the tensors.
    """
    shown, sign = _head_in_tensors(tensors)
    rank = _rank(fields, tensors, shown, notes)
    said = fields.text("markov_head_type")
    if rank == 0:
        if shown is not HeadType.NONE:
            raise fields.error(f"markov_rank is 0, but the files hold {sign}", "markov_rank")
        notes.decide("head_type", HeadType.NONE.value, "markov_rank is 0: plain DFlash")
        return HeadType.NONE, 0
    if said is None:
        notes.decide(
            "head_type", shown.value, f"markov_head_type is absent; the files hold {sign}"
        )
        return shown, rank
    if said.value not in (HeadType.VANILLA, HeadType.GATED, HeadType.RNN):
        raise fields.error(
            f"{said.where} is {said.value!r}, expected vanilla, gated or rnn",
            "markov_head_type",
        )
    if shown in (HeadType.GATED, HeadType.RNN) and shown != said.value:
        raise fields.error(
            f"{said.where} is {said.value!r}, but the tensors are of a {shown.value!r} head ({sign})",
            "markov_head_type",
        )
    notes.decide("head_type", said.value, said.where)
    return HeadType(said.value), rank


def _head_in_tensors(tensors: Mapping[str, TensorRef]) -> tuple[HeadType, str]:
    """The head that the tensor names show, and one of those names."""
    for part, head in (
        ("markov_head.gate_proj.", HeadType.GATED),
        ("markov_head.joint_proj.", HeadType.RNN),
        ("markov_head.", HeadType.VANILLA),
    ):
        if found := sorted(name for name in tensors if name.startswith(part)):
            return head, tensors[found[0]].key
    return HeadType.NONE, "no tensor of a sequential head"


def _rank(
    fields: Fields, tensors: Mapping[str, TensorRef], shown: HeadType, notes: Notes
) -> int:
    said = fields.integer("markov_rank")
    if said is not None:
        if said.value < 0:
            raise fields.error(
                f"{said.where} is {said.value}, expected 0 or more", "markov_rank"
            )
        notes.decide("markov_rank", said.value, said.where)
        return said.value
    if shown is HeadType.NONE:
        notes.decide("markov_rank", 0, "markov_rank is absent, and so are its tensors")
        return 0
    if _W1 not in tensors or len(tensors[_W1].shape) != 2:
        raise fields.error(
            "markov_rank is missing and cannot be read off the tensors", "markov_rank"
        )
    rank = tensors[_W1].shape[1]
    notes.decide("markov_rank", rank, f"markov_rank is absent; width of {tensors[_W1].key}")
    notes.warn(f"config.json does not name markov_rank: {rank} was read off {tensors[_W1].key}")
    return rank


def read_confidence(
    fields: Fields,
    dialect: Dialect,
    tensors: Mapping[str, TensorRef],
    decoder: DecoderConfig,
    rank: int,
    notes: Notes,
) -> ConfidenceInput:
    """What the confidence head reads.

    Raises:
        CheckpointError: config.json denies a head that is there or claims one that is not.
    """
    enabled = fields.flag("enable_confidence_head")
    found = sorted(ref.key for name, ref in tensors.items() if name.startswith(_CONFIDENCE))
    if enabled is not None and enabled.value and not found:
        raise fields.error(
            f"{enabled.where} is true, but the files hold no confidence head",
            "enable_confidence_head",
        )
    if enabled is not None and not enabled.value and found:
        raise fields.error(
            f"{enabled.where} is false, but the files hold {found[0]}", "enable_confidence_head"
        )
    if not found:
        reason = enabled.where if enabled else "no key and no tensor of one"
        notes.decide("confidence", ConfidenceInput.NONE.value, reason)
        return ConfidenceInput.NONE
    if enabled is None:
        notes.warn(
            f"config.json does not mention a confidence head, but {found[0]} is there: used"
        )
    kind, reason = _confidence_input(fields, dialect, tensors, decoder, rank)
    if kind is ConfidenceInput.HIDDEN_MARKOV and rank == 0:
        raise fields.error(
            f"{reason}: a confidence head with Markov features needs markov_rank > 0",
            "confidence_head_with_markov",
        )
    notes.decide("confidence", kind.value, reason)
    return kind


def _confidence_input(
    fields: Fields,
    dialect: Dialect,
    tensors: Mapping[str, TensorRef],
    decoder: DecoderConfig,
    rank: int,
) -> tuple[ConfidenceInput, str]:
    markov = fields.flag("confidence_head_with_markov")
    if markov is not None:
        kind = ConfidenceInput.HIDDEN_MARKOV if markov.value else ConfidenceInput.HIDDEN
        return kind, f"{markov.where} is {str(markov.value).lower()}"
    if dialect is MODEL_OPTIMIZER:
        return ConfidenceInput.HIDDEN_MARKOV, "Model-Optimizer knows no other form"
    weight = tensors.get(_CONFIDENCE + "proj.weight")
    width = weight.shape[-1] if weight and weight.shape else None
    plain = width == decoder.hidden_size or rank == 0
    kind = ConfidenceInput.HIDDEN if plain else ConfidenceInput.HIDDEN_MARKOV
    return kind, f"confidence_head_with_markov is absent; the head is {width} wide"
