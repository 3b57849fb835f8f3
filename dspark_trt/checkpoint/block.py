# SPDX-License-Identifier: Apache-2.0
"""The block and its context: how many slots, what each predicts, the mask token, the tapped layers.

These are the conventions in which formats differ silently (slot and layer shifts give an accepted
length of 1 and no error), so each is decided from the format, noted, and can be overridden.
"""

from dataclasses import dataclass
from itertools import pairwise

from dspark_trt.checkpoint.dialects import (
    DEEPSEEK_V4,
    MODEL_OPTIMIZER,
    SPECULATORS,
    ZLAB_DFLASH,
    Dialect,
)
from dspark_trt.checkpoint.fields import Fields
from dspark_trt.checkpoint.records import DraftOverrides, Notes
from dspark_trt.config import DecoderConfig, SlotSemantics

UNKNOWN_DEPTH = 0  # num_target_layers where the format does not record it; the target tells


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    slots: int
    semantics: SlotSemantics
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int


def read_block(
    fields: Fields,
    dialect: Dialect,
    decoder: DecoderConfig,
    overrides: DraftOverrides,
    notes: Notes,
) -> Block:
    """Everything about the block in one place.

    Raises:
        CheckpointError: a missing, contradictory or out-of-range setting.
    """
    semantics = _slot_semantics(fields, dialect, overrides, notes)
    slots = _slots(fields, semantics, overrides, notes)
    depth = _depth(fields, dialect, notes)
    return Block(
        slots=slots,
        semantics=semantics,
        mask_token_id=_mask_token(fields, decoder, overrides, notes),
        target_layer_ids=_target_layers(fields, dialect, decoder, depth, overrides, notes),
        num_target_layers=depth,
    )


def layer_id_fault(
    ids: tuple[int, ...], num_target_layers: int, *, taps_last: bool = False
) -> str | None:
    """What is wrong with tapped layers of a target this deep, or None.

    The last layer is refused unless ``taps_last`` (DeepSeek-V4): the reference's ``hidden_states[-1]`` is
    its output *after* the final norm, so no other drafter was trained on the plain one.
    """
    low, high = -1, num_target_layers - (1 if taps_last else 2)
    if not ids:
        return "is empty"
    if any(left >= right for left, right in pairwise(ids)):
        return "is not strictly increasing"
    if ids[-1] == num_target_layers - 1 and not taps_last:
        return f"taps the last of {num_target_layers} layers, whose output no drafter was trained on"
    if ids[0] < low or (num_target_layers != UNKNOWN_DEPTH and ids[-1] > high):
        return f"must lie in {low}..{high} for a target of {num_target_layers} layers (-1: embeddings)"
    return None


def _slot_semantics(
    fields: Fields, dialect: Dialect, overrides: DraftOverrides, notes: Notes
) -> SlotSemantics:
    semantics, reason = _slots_of_format(fields, dialect, notes)
    if overrides.slot_semantics is not None and overrides.slot_semantics is not semantics:
        notes.warn(
            f"slots are read as {overrides.slot_semantics} as asked; {reason} says {semantics}"
        )
        semantics, reason = (
            overrides.slot_semantics,
            f"asked for; {reason} says {semantics.value}",
        )
    notes.decide("slot_semantics", semantics.value, reason)
    return semantics


def _slots_of_format(
    fields: Fields, dialect: Dialect, notes: Notes
) -> tuple[SlotSemantics, str]:
    key = {SPECULATORS.name: "sample_from_anchor", MODEL_OPTIMIZER.name: "shift_label"}.get(
        dialect.name
    )
    if key is None:
        in_place = dialect is ZLAB_DFLASH
        default = SlotSemantics.IN_PLACE if in_place else SlotSemantics.ANCHOR_FIRST
        return (
            default,
            f"the {dialect.name} format trains {'masks only' if in_place else 'every slot'}",
        )
    setting = fields.flag(key)
    if setting is not None:
        first = SlotSemantics.ANCHOR_FIRST if setting.value else SlotSemantics.IN_PLACE
        return first, f"{setting.where} is {str(setting.value).lower()}"
    # Files written before the key existed: slot 0 untrained in speculators
    # (vllm-project/speculators#760); Model-Optimizer trains DSpark heads with shifted labels.
    dspark = fields.find("markov_rank") is not None
    anchor_first = dialect is MODEL_OPTIMIZER and dspark
    default = SlotSemantics.ANCHOR_FIRST if anchor_first else SlotSemantics.IN_PLACE
    if dspark:
        notes.warn(
            f"{key} is absent: slots are read as {default.value}; if the accepted length is 1, "
            f"read it again with --{'no-' * anchor_first}sample-from-anchor"
        )
    return default, f"{key} is absent; default of the {dialect.name} format"


def _slots(
    fields: Fields, semantics: SlotSemantics, overrides: DraftOverrides, notes: Notes
) -> int:
    """Backbone inputs a round. Files count slots, also where slot 0 proposes nothing."""
    block = fields.require("block_size", fields.integer("block_size"))
    discarded = int(semantics is SlotSemantics.IN_PLACE)
    trained = block.value - discarded
    if trained < 1:
        raise fields.error(
            f"{block.where} is {block.value}, which proposes no token", "block_size"
        )
    _compare_speculative_tokens(fields, trained, notes)
    gamma = trained if overrides.gamma is None else overrides.gamma
    if not 1 <= gamma <= trained:
        raise fields.error(
            f"gamma {gamma} was asked for, but {block.where} is {block.value}: this checkpoint "
            f"proposes 1 to {trained} tokens",
            None if overrides.gamma is not None else "block_size",
        )
    if gamma < trained:
        notes.warn(
            f"gamma is {gamma} instead of the trained {trained}: block slots see each other, so "
            "the proposals are not a prefix of the full ones"
        )
    asked = "" if gamma == trained else f", {gamma} asked for"
    notes.decide("gamma", gamma, f"{block.where} is {block.value}{asked}")
    notes.decide("block_slots", gamma + discarded, f"{discarded} of them discarded")
    return gamma + discarded


def _compare_speculative_tokens(fields: Fields, trained: int, notes: Notes) -> None:
    """The speculators format also records how many tokens to propose: a second witness."""
    setting = fields.mapping("speculators_config")
    proposals = setting.value.get("proposal_methods") if setting else None
    for proposal in proposals if isinstance(proposals, list) else ():
        tokens = proposal.get("speculative_tokens") if isinstance(proposal, dict) else None
        if tokens not in (None, trained):
            notes.warn(
                f"speculative_tokens is {tokens}, but the slots as read propose {trained}"
            )


def _mask_token(
    fields: Fields, decoder: DecoderConfig, overrides: DraftOverrides, notes: Notes
) -> int:
    if overrides.mask_token_id is not None:
        mask, where = overrides.mask_token_id, "asked for"
        for said in fields.said("mask_token_id"):
            if said.value != mask:
                notes.warn(f"mask token {mask} as asked; {said.where} says {said.value}")
    elif (found := fields.integer("mask_token_id")) is not None:
        mask, where = found.value, found.where
    else:
        raise fields.error("mask_token_id is missing", "mask_token_id")
    if not 0 <= mask < decoder.vocab_size:
        raise fields.error(
            f"mask_token_id {mask} ({where}) is outside the embedding of {decoder.vocab_size} rows",
            "mask_token_id",
        )
    notes.decide("mask_token_id", mask, where)
    return mask


def _depth(fields: Fields, dialect: Dialect, notes: Notes) -> int:
    # A DeepSeek-V4 drafter shares its target's config.json.
    own = dialect is DEEPSEEK_V4
    depth_key = "num_hidden_layers" if own else "num_target_layers"
    depth = fields.integer(depth_key)
    if depth is not None:
        if depth.value < 1:
            raise fields.error(
                f"{depth.where} is {depth.value}, expected at least 1", depth_key
            )
        notes.decide("num_target_layers", depth.value, depth.where)
        return depth.value
    if dialect not in (SPECULATORS, MODEL_OPTIMIZER):
        raise fields.error("num_target_layers is missing", depth_key)
    notes.decide("num_target_layers", None, "not recorded; the target's depth will be taken")
    return UNKNOWN_DEPTH


def stated_layers(
    fields: Fields,
    key: str,
    overrides: DraftOverrides,
    depth: int,
    notes: Notes,
    *,
    taps_last: bool = False,
) -> tuple[int, ...] | None:
    """The tapped layers that were asked for, noted beside what ``key`` of the file says; None: the file decides.

    Raises:
        CheckpointError: no such layers in a target of ``depth``.
    """
    ids = overrides.target_layer_ids
    if ids is None:
        return None
    said = fields.said(key)
    if fault := layer_id_fault(ids, depth, taps_last=taps_last):
        raise fields.error(
            f"target_layer_ids {list(ids)} (asked for) {fault}", "target_layer_ids"
        )
    for setting in said:
        notes.warn(f"tapped layers {list(ids)} as asked; {setting.where} says {setting.value}")
    reason = f"{said[0].where} says {said[0].value}" if said else f"{key} is absent"
    notes.decide("target_layer_ids", list(ids), f"asked for; {reason}")
    return ids


def _target_layers(
    fields: Fields,
    dialect: Dialect,
    decoder: DecoderConfig,
    depth: int,
    overrides: DraftOverrides,
    notes: Notes,
) -> tuple[int, ...]:
    key = "aux_hidden_state_layer_ids" if dialect is SPECULATORS else "target_layer_ids"
    taps_last = dialect is DEEPSEEK_V4
    stated = stated_layers(fields, key, overrides, depth, notes, taps_last=taps_last)
    if stated is not None:
        return stated
    setting = fields.integers(key)
    if setting is None and dialect is ZLAB_DFLASH:
        ids = _evenly_spaced(decoder.num_layers, depth)
        notes.decide(
            "target_layer_ids", list(ids), "target_layer_ids is absent; the format's default"
        )
        return ids
    setting = fields.require(key, setting)
    # speculators counts hidden states, of which number 0 is the embedding output.
    shift = int(dialect is SPECULATORS)
    ids = tuple(layer - shift for layer in setting.value)
    if fault := layer_id_fault(ids, depth, taps_last=taps_last):
        raise fields.error(f"{setting.where} {setting.value} {fault}", key)
    if dialect is MODEL_OPTIMIZER and ids[0] == -1:
        # NVIDIA/Model-Optimizer#2149: negative ids were exported; a Python index cannot be told apart.
        notes.warn(f"{setting.where} {setting.value}: -1 is read as the embedding output")
    reason = f"{setting.where} {setting.value} less 1" if shift else setting.where
    mean = ", the mean over its streams" if dialect is DEEPSEEK_V4 else ""
    notes.decide(
        "target_layer_ids", list(ids), f"{reason}; id i is the output of decoder layer i{mean}"
    )
    return ids


def _evenly_spaced(num_draft_layers: int, depth: int) -> tuple[int, ...]:
    """z-lab's default taps: as many as draft layers, evenly over target layers 1 to depth - 3."""
    if num_draft_layers == 1:
        return (depth // 2,)
    step = (depth - 4) / (num_draft_layers - 1)
    return tuple(round(1 + index * step) for index in range(num_draft_layers))
