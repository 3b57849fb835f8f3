# SPDX-License-Identifier: Apache-2.0
"""Whether a drafter and a target belong together."""

from dspark_trt.checkpoint.block import UNKNOWN_DEPTH, layer_id_fault
from dspark_trt.checkpoint.fields import override_flag
from dspark_trt.checkpoint.records import DraftCheckpoint, TargetCheckpoint
from dspark_trt.checkpoint.source import read_json
from dspark_trt.config import FINAL_NORM
from dspark_trt.errors import CheckpointError


def check_pair(draft: DraftCheckpoint, target: TargetCheckpoint) -> tuple[str, ...]:
    """Warnings about a pair that fits.

    Raises:
        CheckpointError: lists every setting that does not fit, with both values.
    """
    drafter, served = draft.config, target.config.decoder
    pairs = [
        ("target_hidden_size", drafter.target_hidden_size, "hidden_size", served.hidden_size),
        ("vocab_size", drafter.decoder.vocab_size, "vocab_size", served.vocab_size),
    ]
    if drafter.num_target_layers != UNKNOWN_DEPTH:
        layers = drafter.num_target_layers
        pairs.append(("num_target_layers", layers, "num_hidden_layers", served.num_layers))
    if draft.borrowed:
        hidden = drafter.decoder.hidden_size
        pairs.append(
            ("hidden_size (embedding borrowed)", hidden, "hidden_size", served.hidden_size)
        )
    faults = [
        f"{key} of the drafter is {ours}, but {other} of the target is {theirs}"
        + override_flag(key.partition(" ")[0])
        for key, ours, other, theirs in pairs
        if ours != theirs
    ]
    ids, taps_last = drafter.target_layer_ids, drafter.decoder.deepseek is not None
    fault = layer_id_fault(ids, served.num_layers, taps_last=taps_last)
    if fault and ids != (FINAL_NORM,):
        faults.append(
            f"target_layer_ids {list(ids)} {fault}" + override_flag("target_layer_ids")
        )
    if faults:
        raise CheckpointError(
            f"drafter {draft.path} and target {target.path} do not belong together: "
            + "; ".join(faults)
        )
    return tuple(_warnings(draft, target))


def _warnings(draft: DraftCheckpoint, target: TargetCheckpoint) -> list[str]:
    warnings = []
    limit, served = draft.config.decoder.max_positions, target.config.decoder.max_positions
    if limit < served:
        warnings.append(
            f"max_position_embeddings of the drafter is {limit}, of the target {served}: beyond "
            f"{limit} tokens the drafter is outside its range"
        )
    mask = _tokenizer_mask(target)
    if draft.config.chain is None and mask is not None and mask != draft.config.mask_token_id:
        warnings.append(
            f"mask_token_id of the drafter is {draft.config.mask_token_id}, but the target's "
            f"tokenizer has its mask token at {mask}: the drafter's is used"
        )
    return warnings


def _tokenizer_mask(target: TargetCheckpoint) -> int | None:
    """Id of the mask token that the target's tokenizer_config.json names, if it names one."""
    path = next(
        (path for path in target.tokenizer_files if path.name == "tokenizer_config.json"), None
    )
    if path is None:
        return None
    config = read_json(path)
    mask = config.get("mask_token")
    content = mask.get("content") if isinstance(mask, dict) else mask
    added = config.get("added_tokens_decoder")
    for token_id, token in added.items() if content and isinstance(added, dict) else ():
        if isinstance(token, dict) and token.get("content") == content:
            return int(token_id)
    return None
