# SPDX-License-Identifier: Apache-2.0
"""A drafter's config.json in each dialect that can be written, and what each cannot say."""

from collections.abc import Callable, Mapping
from typing import Any

from dspark_trt.checkpoint.block import UNKNOWN_DEPTH
from dspark_trt.checkpoint.dialects import DEEPSPEC, MODEL_OPTIMIZER, SPECFORGE, SPECULATORS
from dspark_trt.config import (
    ConfidenceInput,
    DraftConfig,
    HeadType,
    SlotSemantics,
    WindowRule,
)

WRITABLE = (DEEPSPEC, SPECULATORS, SPECFORGE, MODEL_OPTIMIZER)
OWNS_EMBEDDING = (DEEPSPEC, SPECULATORS)  # the others take embedding and head from the target

Json = dict[str, Any]

_NESTED = ("dflash_config", "dspark_config", "text_config", "transformer_layer_config")
# Keys that this module writes anew, in whatever place and spelling they were.
_REWRITTEN = frozenset({
    "architectures", "auto_map", "projector_type", "block_size", "mask_token_id", "noise_token_id",
    "target_layer_ids", "aux_hidden_state_layer_ids", "num_target_layers", "target_hidden_size",
    "markov_rank", "markov_head_type", "enable_confidence_head", "use_confidence_head",
    "confidence_head_with_markov", "shift_label", "sample_from_anchor", "draft_vocab_size",
    "use_swa", "swa_window_size", "causal", "sliding_window", "use_sliding_window", "max_window_layers",
    "sliding_window_non_causal", "speculators_model_type", "speculators_version", "speculators_config",
    "quantization_config",  # inherited from the target; the tensors are dense
})  # fmt: skip


def inexpressible(config: DraftConfig, dialect_name: str) -> list[str]:
    """What this drafter has and the dialect has no words for."""
    faults = []
    if config.chain is not None:
        name = "Eagle3" if config.chain.mtp is None else "MTP layers"
        faults.append(f"{name} (a chain instead of a block)")
    if config.decoder.deepseek is not None:
        faults.append("DeepSeek-V4 stages")
    in_place = config.slot_semantics is SlotSemantics.IN_PLACE
    if dialect_name in (DEEPSPEC.name, SPECFORGE.name) and in_place:
        faults.append("slots in place (its slot 0 always predicts)")
    unknown = config.num_target_layers == UNKNOWN_DEPTH
    if dialect_name in (DEEPSPEC.name, SPECFORGE.name) and unknown:
        faults.append("a target of unknown depth (give it with --target)")
    if dialect_name != DEEPSPEC.name and config.decoder.gemma is not None:
        faults.append("Gemma4 layers")
    if dialect_name != SPECULATORS.name:
        if config.draft_vocab_size is not None:
            faults.append(f"a draft vocabulary of {config.draft_vocab_size} tokens")
        if any(config.decoder.windows) and config.window_rule is not WindowRule.SLOT:
            faults.append("windows counted from the anchor")
    elif any(config.decoder.windows) and config.window_rule is WindowRule.SLOT:
        faults.append("windows counted from each slot")
    if dialect_name == MODEL_OPTIMIZER.name:
        if config.markov_rank == 0:
            faults.append("a drafter without sequential head (markov_rank 0)")
        if config.confidence is ConfidenceInput.HIDDEN:
            faults.append("a confidence head without Markov features")
    return faults


def config_in(dialect_name: str, config: DraftConfig, source: Mapping[str, Any]) -> Json:
    """config.json of ``config``; facts of ``source`` that no dialect renames are kept."""
    writers: dict[str, Callable[[DraftConfig, Json], Json]] = {
        DEEPSPEC.name: _deepspec,
        SPECULATORS.name: _speculators,
        SPECFORGE.name: _specforge,
        MODEL_OPTIMIZER.name: _model_optimizer,
    }
    return writers[dialect_name](config, _kept(config, source))


def _kept(config: DraftConfig, source: Mapping[str, Any]) -> Json:
    """Everything else the source says, flat, and the windows in the plainest spelling."""
    flat: Json = {}
    for place in (source, *(source.get(name) for name in _NESTED)):
        for key, value in (place or {}).items():
            if key not in _NESTED and key.removeprefix("dspark_") not in _REWRITTEN:
                flat[key] = value
    windows = config.decoder.windows
    if any(windows):
        flat["sliding_window"] = next(window for window in windows if window)
        flat["use_sliding_window"] = True
        kinds = ("full_attention", "sliding_attention")
        flat["layer_types"] = [kinds[window is not None] for window in windows]
    elif "layer_types" in flat:
        flat["layer_types"] = ["full_attention"] * config.decoder.num_layers
    return flat


def _block(config: DraftConfig) -> Json:
    return {
        "block_size": config.block_slots,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }


def _heads(config: DraftConfig, *, enabled: str = "enable_confidence_head") -> Json:
    has_confidence = config.confidence is not ConfidenceInput.NONE
    heads: Json = {"markov_rank": config.markov_rank, enabled: has_confidence}
    if config.head_type is not HeadType.NONE:
        heads["markov_head_type"] = config.head_type.value
    if has_confidence:
        with_markov = config.confidence is ConfidenceInput.HIDDEN_MARKOV
        heads["confidence_head_with_markov"] = with_markov
    return heads


def _depth_and_width(config: DraftConfig) -> Json:
    facts: Json = {"target_hidden_size": config.target_hidden_size}
    if config.num_target_layers != UNKNOWN_DEPTH:
        facts["num_target_layers"] = config.num_target_layers
    return facts


def _deepspec(config: DraftConfig, kept: Json) -> Json:
    return {
        "architectures": [f"{'Gemma4' if config.decoder.gemma else 'Qwen3'}DSparkModel"],
        **kept,
        **_depth_and_width(config),
        **_block(config),
        **_heads(config),
        "tie_word_embeddings": False,
    }


def _nested_windows(config: DraftConfig, kept: Json) -> Json:
    if not any(config.decoder.windows):
        return {}
    return {"use_swa": True, "swa_window_size": kept["sliding_window"], "causal": False}


def _specforge(config: DraftConfig, kept: Json) -> Json:
    nested = {"projector_type": "dspark", **_block(config), **_heads(config)}
    return {
        "architectures": ["DSparkDraftModel"],
        **kept,
        **_depth_and_width(config),
        "dflash_config": nested | _nested_windows(config, kept),
    }


def _model_optimizer(config: DraftConfig, kept: Json) -> Json:
    heads = _heads(config, enabled="use_confidence_head")
    heads.pop("confidence_head_with_markov", None)  # it knows no other form
    nested = {
        "projector_type": "dspark",
        "shift_label": config.slot_semantics is SlotSemantics.ANCHOR_FIRST,
        **_block(config),
        **heads,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        **kept,
        **_depth_and_width(config),
        "dflash_config": nested | _nested_windows(config, kept),
    }


def _speculators(config: DraftConfig, kept: Json) -> Json:
    kind = "dflash" if config.head_type is HeadType.NONE else "dspark"
    inner = dict(kept)
    if config.num_target_layers != UNKNOWN_DEPTH:
        inner["num_target_layers"] = config.num_target_layers  # no key of the format's own
    top: Json = {
        "architectures": [f"{'DFlash' if kind == 'dflash' else 'DSpark'}Speculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": inner,
        "draft_vocab_size": config.head_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "block_size": config.block_slots,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "sample_from_anchor": config.slot_semantics is SlotSemantics.ANCHOR_FIRST,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.gamma}
            ],
        },
        **_heads(config),
    }
    if any(config.decoder.windows):
        top["sliding_window_non_causal"] = config.window_rule is WindowRule.ANCHOR
    return top
