# SPDX-License-Identifier: Apache-2.0
"""Read an Eagle3 drafter: DeepSpec's layout, that of the authors (`midlayer`), that of speculators.

They differ in names, in how tapped layers are counted, and in what the residual is; the mathematics of
a step is the same.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from dspark_trt.checkpoint.accounting import account_for, rename
from dspark_trt.checkpoint.block import UNKNOWN_DEPTH, layer_id_fault, stated_layers
from dspark_trt.checkpoint.decoder import decoder_from_fields, decoder_shapes
from dspark_trt.checkpoint.fields import Fields
from dspark_trt.checkpoint.records import (
    EMBEDDING,
    LM_HEAD,
    DraftCheckpoint,
    DraftOverrides,
    Notes,
)
from dspark_trt.checkpoint.tensors import Shape, TensorRef
from dspark_trt.checkpoint.vocabulary import MAPS, read_vocabulary
from dspark_trt.config import (
    ChainConfig,
    ConfidenceInput,
    DecoderConfig,
    DraftConfig,
    HeadType,
    SlotSemantics,
)

_UNUSED = frozenset({"verifier_lm_head.weight", "verifier_norm.weight", "t2d_mask"})


def eagle3_sign(fields: Fields, keys: Iterable[str]) -> str | None:
    """What shows an Eagle3 drafter: a key that no other kind has, or a tensor's name."""
    kind = fields.text("speculators_model_type")
    if kind is not None and kind.value == "eagle3":
        return f"{kind.where} is eagle3"
    if (steps := fields.find("ttt_length")) is not None:
        return f"config.json has {steps.where}"
    signs = [
        key
        for key in keys
        if key.startswith("midlayer.")
        or (key.startswith("layers.") and key.endswith(".hidden_norm.weight"))
    ]
    return f"the files hold {min(signs)}" if signs else None


def read_eagle3(
    folder: Path,
    fields: Fields,
    files: Mapping[str, TensorRef],
    sign: str,
    overrides: DraftOverrides,
) -> DraftCheckpoint:
    """Read the drafter whose files and settings these are.

    Raises:
        CheckpointError: as ``read_draft``.
    """
    notes = Notes()
    name = _format(fields, files)
    notes.decide("format", name, sign)
    tensors = rename(files, _canonical, folder, notes, unused=_UNUSED)
    decoder = _decoder(fields, tensors, notes)
    vocabulary = read_vocabulary(fields, tensors, notes)
    plain = {key: ref for key, ref in tensors.items() if key not in MAPS}
    config = _config(fields, name, decoder, vocabulary.size, overrides, notes)
    borrowed = _borrowed(plain, config, notes)
    expected = {key: s for key, s in eagle3_shapes(config).items() if key not in borrowed}
    account_for(plain, expected, folder, override=fields.flag_for("KEY"))
    notes.note_numbers(fields, decoder, plain.values())
    return DraftCheckpoint(
        path=folder,
        format=name,
        config=config,
        tensors={**plain, **vocabulary.maps},
        decisions=tuple(notes.decisions),
        warnings=tuple(notes.warnings),
        borrowed=borrowed,
    )


def eagle3_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Every tensor, embedding and head included, by canonical name."""
    decoder = config.decoder
    hidden = decoder.hidden_size
    shapes = decoder_shapes(decoder)
    for name in "qkv":  # attention reads pairs
        key = f"layers.0.self_attn.{name}_proj.weight"
        shapes[key] = (shapes[key][0], 2 * hidden)
    return shapes | {
        EMBEDDING: (decoder.vocab_size, hidden),
        LM_HEAD: (config.head_vocab_size, hidden),
        "fc.weight": (hidden, config.tap_size),
        "layers.0.hidden_norm.weight": (hidden,),
    }


def _canonical(key: str) -> str:
    return key.replace("midlayer.", "layers.0.", 1) if key.startswith("midlayer.") else key


def _format(fields: Fields, files: Mapping[str, TensorRef]) -> str:
    if fields.find("speculators_model_type") or fields.find("transformer_layer_config"):
        return "speculators-eagle3"
    if any(key.startswith("midlayer.") for key in files):
        return "eagle3"
    return "deepspec-eagle3"


def _decoder(fields: Fields, tensors: Mapping[str, TensorRef], notes: Notes) -> DecoderConfig:
    qk_norm = any(name.endswith("self_attn.q_norm.weight") for name in tensors)
    decoder = decoder_from_fields(fields, notes, qk_norm=qk_norm)
    if decoder.num_layers != 1:
        raise fields.error(
            f"num_hidden_layers is {decoder.num_layers}: Eagle3 drafters are supported with 1 layer",
            "num_hidden_layers",
        )
    if any(decoder.windows):
        raise fields.error(
            f"sliding_window is {max(window or 0 for window in decoder.windows)}: Eagle3 drafters are "
            "supported without windows",
            "layer_types",
        )
    return decoder


def _config(
    fields: Fields,
    name: str,
    decoder: DecoderConfig,
    draft_vocab_size: int | None,
    overrides: DraftOverrides,
    notes: Notes,
) -> DraftConfig:
    depth = fields.integer("num_target_layers")
    if depth is not None and depth.value < 1:
        raise fields.error(
            f"{depth.where} is {depth.value}, expected at least 1", "num_target_layers"
        )
    normed = fields.flag("norm_before_residual")
    is_normed = bool(normed and normed.value)
    notes.decide(
        "residual",
        "normed" if is_normed else "plain",
        normed.where if normed else "norm_before_residual is absent",
    )
    gamma = _gamma(fields, overrides, notes)
    target_hidden = fields.integer("target_hidden_size")
    with fields.consistent():
        return DraftConfig(
            decoder=decoder,
            block_slots=gamma,
            slot_semantics=SlotSemantics.ANCHOR_FIRST,
            mask_token_id=0,  # a chain has no masks
            target_layer_ids=_target_layers(
                fields, name, depth.value if depth else UNKNOWN_DEPTH, overrides, notes
            ),
            num_target_layers=depth.value if depth else UNKNOWN_DEPTH,
            target_hidden_size=target_hidden.value if target_hidden else decoder.hidden_size,
            head_type=HeadType.NONE,
            markov_rank=0,
            confidence=ConfidenceInput.NONE,
            draft_vocab_size=draft_vocab_size,
            chain=ChainConfig(normed_residual=is_normed),
        )


def _gamma(fields: Fields, overrides: DraftOverrides, notes: Notes) -> int:
    """Steps to unroll: as many as asked for, or as in training."""
    trained = fields.integer("ttt_length") or fields.integer("ttt_steps")
    if overrides.gamma is not None:
        gamma, where = overrides.gamma, "asked for"
        if trained and gamma > trained.value:
            notes.warn(
                f"gamma is {gamma}, but {trained.where} is {trained.value}: steps beyond it were never "
                "trained"
            )
    elif trained is not None:
        gamma, where = trained.value, trained.where
    else:
        proposed = _speculative_tokens(fields)
        if proposed is None:
            raise fields.error(
                "ttt_length, the number of tokens to draft, is missing: give it with --gamma"
            )
        gamma, where = proposed, "speculative_tokens of speculators_config"
    if gamma < 1:
        raise fields.error(
            f"gamma is {gamma} ({where}), expected at least 1; give it with --gamma"
        )
    notes.decide("gamma", gamma, where)
    return gamma


def _speculative_tokens(fields: Fields) -> int | None:
    setting = fields.mapping("speculators_config")
    proposals = setting.value.get("proposal_methods") if setting else None
    for proposal in proposals if isinstance(proposals, list) else ():
        tokens = proposal.get("speculative_tokens") if isinstance(proposal, dict) else None
        if isinstance(tokens, int) and not isinstance(tokens, bool):
            return tokens
    return None


def _target_layers(
    fields: Fields, name: str, depth: int, overrides: DraftOverrides, notes: Notes
) -> tuple[int, ...]:
    """DeepSpec names layers whose output is tapped; the others count hidden states, one higher."""
    shift = int(name != "deepspec-eagle3")
    key = "eagle_aux_hidden_state_layer_ids" if shift else "target_layer_ids"
    stated = stated_layers(fields, key, overrides, depth, notes)
    if stated is not None:
        return stated
    setting = fields.integers(key)
    if setting is None:
        usual = (
            ": without it the reference taps 2, N/2 and N-3 of N target layers, which the flag, counting outputs "
            "from 0, calls 1, N/2-1 and N-4"
        )
        raise fields.error(f"{key} is missing{usual * shift}", key)
    ids = tuple(layer - shift for layer in setting.value)
    if fault := layer_id_fault(ids, depth):
        raise fields.error(f"{setting.where} {setting.value} {fault}", key)
    notes.decide(
        "target_layer_ids", list(ids), f"{setting.where} {setting.value}{' less 1' * shift}; id i is the output of "
        "decoder layer i",
    )  # fmt: skip
    return ids


def _borrowed(
    tensors: Mapping[str, TensorRef], config: DraftConfig, notes: Notes
) -> frozenset[str]:
    """The embedding is often left to the target; a head of its own is what Eagle3 trains."""
    missing = frozenset({EMBEDDING, LM_HEAD} - tensors.keys())
    if LM_HEAD in missing and config.draft_vocab_size is not None:
        missing -= {LM_HEAD}  # the target's head cannot stand for it: accounting will miss it
    notes.decide("borrowed", sorted(missing), "not in the files" if missing else "in the files")
    return missing
