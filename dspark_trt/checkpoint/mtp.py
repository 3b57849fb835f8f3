# SPDX-License-Identifier: Apache-2.0
"""Read the layer for multi-token prediction inside a DeepSeek-V3 checkpoint: `model.layers.N` behind the
last of N layers, told by its `eh_proj`.

It drafts one token. Embedding and head are its own copies, or the target's in the same files, or borrowed.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from dspark_trt.checkpoint.accounting import account_for
from dspark_trt.checkpoint.experts import MAX_EXPERTS, experts_in
from dspark_trt.checkpoint.fields import Fields, is_number
from dspark_trt.checkpoint.quantised import pair_scales
from dspark_trt.checkpoint.records import (
    EMBEDDING,
    LM_HEAD,
    DraftCheckpoint,
    DraftOverrides,
    Notes,
)
from dspark_trt.checkpoint.rope import rope_from_fields
from dspark_trt.checkpoint.tensors import Shape, TensorRef
from dspark_trt.config import (
    FINAL_NORM,
    ChainConfig,
    ConfidenceInput,
    DecoderConfig,
    DraftConfig,
    ExpertsConfig,
    HeadType,
    MtpConfig,
    SlotSemantics,
)

FORMAT = "mtp"


_SIGN = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")
_PLACES = {  # canonical name -> where it may lie, beside the layer's own copy
    EMBEDDING: ("embed_tokens.weight", "model.embed_tokens.weight"),
    LM_HEAD: ("shared_head.head.weight", "lm_head.weight"),
}
_RENAMED = {
    "shared_head.norm.weight": "norm.weight",
    "mlp.gate.e_score_correction_bias": "mlp.gate.bias",
}
_NEUTRAL = {  # setting -> the one value that the modules compute
    "hidden_act": "silu",
    "attention_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_interleave": True,
    "moe_layer_freq": 1,
}


def mtp_sign(keys: Iterable[str]) -> str | None:
    """A tensor that shows a layer for multi-token prediction."""
    return min((key for key in keys if _SIGN.fullmatch(key)), default=None)


def read_mtp(
    folder: Path,
    fields: Fields,
    files: Mapping[str, TensorRef],
    sign: str,
    overrides: DraftOverrides,
) -> DraftCheckpoint:
    """Read the layer whose files and settings these are.

    Raises:
        CheckpointError: as ``read_draft``.
    """
    notes = Notes()
    notes.decide("format", FORMAT, f"the files hold {sign}")
    depth = _layer(fields, files, notes)
    prefix = f"model.layers.{depth}."
    config = _config(fields, depth, overrides, notes)
    layer = pair_scales({k: ref for k, ref in files.items() if k.startswith(prefix)})
    shared = _shared(prefix, files, notes)
    own_copies = {prefix + places[0] for places in _PLACES.values()}
    stored = {key: ref for key, ref in layer.items() if key not in own_copies}
    expected = {f"{prefix}{name}": shape for name, shape in layer_shapes(config).items()}
    vocabulary = (config.decoder.vocab_size, config.decoder.hidden_size)
    account_for(
        {**stored, **{ref.key: ref for ref in shared.values()}},
        {**expected, **{ref.key: vocabulary for ref in shared.values()}},
        folder,
        override=fields.flag_for("KEY"),
    )
    used = {ref.key for ref in shared.values()}
    if others := sum(not key.startswith(prefix) and key not in used for key in files):
        notes.decide("unused_tensors", others, f"outside {prefix}*: the target's")
    named = {_canonical(key.removeprefix(prefix)): ref for key, ref in stored.items()} | shared
    notes.note_storage(named.values())
    return DraftCheckpoint(
        path=folder,
        format=FORMAT,
        config=config,
        tensors={name: replace(ref, name=name) for name, ref in named.items()},
        decisions=tuple(notes.decisions),
        warnings=tuple(notes.warnings),
        borrowed=frozenset(_PLACES.keys() - shared.keys()),
    )


def layer_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Every tensor of the layer by its name in the files, less the copies of embedding and head."""
    decoder, chain = config.decoder, config.chain
    assert chain is not None
    assert chain.mtp is not None
    mtp, hidden, heads = chain.mtp, decoder.hidden_size, decoder.num_heads
    queries = heads * (mtp.plain_size + mtp.rotary_size)
    shapes: dict[str, Shape] = {
        **{f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")},
        "eh_proj.weight": (hidden, 2 * hidden),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.kv_a_proj_with_mqa.weight": (mtp.latent_rank + mtp.rotary_size, hidden),
        "self_attn.kv_a_layernorm.weight": (mtp.latent_rank,),
        "self_attn.kv_b_proj.weight": (
            heads * (mtp.plain_size + mtp.value_size),
            mtp.latent_rank,
        ),
        "self_attn.o_proj.weight": (hidden, heads * mtp.value_size),
    }
    if mtp.query_rank is None:
        shapes["self_attn.q_proj.weight"] = (queries, hidden)
    else:
        shapes["self_attn.q_a_proj.weight"] = (mtp.query_rank, hidden)
        shapes["self_attn.q_a_layernorm.weight"] = (mtp.query_rank,)
        shapes["self_attn.q_b_proj.weight"] = (queries, mtp.query_rank)
    experts = decoder.experts
    if experts is None:
        return shapes | _mlp_shapes("mlp.", hidden, decoder.intermediate_size)
    shapes["mlp.gate.weight"] = (experts.count, hidden)
    shapes["mlp.gate.e_score_correction_bias"] = (experts.count,)
    shapes |= _mlp_shapes("mlp.shared_experts.", hidden, mtp.shared_size)
    for index in range(experts.count):
        shapes |= _mlp_shapes(f"mlp.experts.{index}.", hidden, experts.intermediate_size)
    return shapes


def _mlp_shapes(stem: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{stem}gate_proj.weight": (inner, hidden),
        f"{stem}up_proj.weight": (inner, hidden),
        f"{stem}down_proj.weight": (hidden, inner),
    }


def _canonical(name: str) -> str:
    return _RENAMED.get(name, name)


def _layer(fields: Fields, keys: Iterable[str], notes: Notes) -> int:
    """Index of the layer: that of the first behind the target's last."""
    depth = fields.required_integer("num_hidden_layers")
    found = sorted(int(match[1]) for key in keys if (match := _SIGN.fullmatch(key)))
    if depth not in found:
        raise fields.error(
            f"num_hidden_layers is {depth}, so the layer for multi-token prediction is expected at "
            f"model.layers.{depth}, but eh_proj is in layers {found}",
            "num_hidden_layers",
        )
    others = f"; {len(found) - 1} more are not used" if len(found) > 1 else ""
    notes.decide("layer", depth, f"num_hidden_layers{others}")
    return depth


def _shared(prefix: str, files: Mapping[str, TensorRef], notes: Notes) -> dict[str, TensorRef]:
    """Embedding and head by canonical name, those that are in the files."""
    shared: dict[str, TensorRef] = {}
    for name, (own, target) in _PLACES.items():
        if (ref := files.get(prefix + own, files.get(target))) is not None:
            shared[name] = ref
    notes.decide(
        "borrowed",
        sorted(_PLACES.keys() - shared.keys()),
        f"in the files: {', '.join(ref.key for ref in shared.values()) or 'neither'}",
    )
    return shared


def _config(fields: Fields, depth: int, overrides: DraftOverrides, notes: Notes) -> DraftConfig:
    if overrides.gamma not in (None, 1):
        raise fields.error(
            f"gamma {overrides.gamma} was asked for, but an MTP layer drafts 1 token"
        )
    if overrides.target_layer_ids is not None:
        raise fields.error(
            "an MTP layer reads its target's final norm: leave out target_layer_ids"
        )
    fields.require_neutral(_NEUTRAL)
    notes.decide("gamma", 1, "an MTP layer drafts the token after next")
    notes.decide("target_layer_ids", [FINAL_NORM], "the format: the target's final norm")
    mtp = _mtp(fields, notes)
    experts = _experts(fields, depth, notes)
    if experts is not None and experts.count % mtp.groups:
        raise fields.error(
            f"{experts.count} experts cannot be split into {mtp.groups} groups", "n_group"
        )
    if experts is not None and mtp.groups > 1 and experts.count == mtp.groups:
        raise fields.error(
            "groups of one expert are not supported: they go by their best two", "n_group"
        )
    with fields.consistent():
        return DraftConfig(
            decoder=_decoder(fields, mtp, experts, notes),
            block_slots=1,
            slot_semantics=SlotSemantics.ANCHOR_FIRST,
            mask_token_id=0,  # a chain has no masks
            target_layer_ids=(FINAL_NORM,),
            num_target_layers=depth,
            target_hidden_size=fields.required_integer("hidden_size"),
            head_type=HeadType.NONE,
            markov_rank=0,
            confidence=ConfidenceInput.NONE,
            chain=ChainConfig(mtp=mtp),
        )


def _decoder(
    fields: Fields, mtp: MtpConfig, experts: ExpertsConfig | None, notes: Notes
) -> DecoderConfig:
    rope = rope_from_fields(fields)
    notes.note_rope(rope)
    return DecoderConfig(
        hidden_size=fields.required_integer("hidden_size"),
        intermediate_size=fields.required_integer("intermediate_size"),
        num_layers=1,
        num_heads=fields.required_integer("num_attention_heads"),
        num_kv_heads=1,
        head_dim=mtp.latent_rank + mtp.rotary_size,
        vocab_size=fields.required_integer("vocab_size"),
        rms_norm_eps=fields.required_number("rms_norm_eps"),
        rope=rope,
        max_positions=fields.required_integer("max_position_embeddings"),
        qk_norm=False,
        experts=experts,
        keys_are_values=True,
    )


def _experts(fields: Fields, depth: int, notes: Notes) -> ExpertsConfig | None:
    """The layer's experts; a layer before `first_k_dense_replace`, or of a dense model, has none."""
    count, dense = fields.integer("n_routed_experts"), fields.integer("first_k_dense_replace")
    if count is None or (dense is not None and depth < dense.value):
        reason = "n_routed_experts is absent" if count is None else "first_k_dense_replace"
        notes.decide("experts", None, reason)
        return None
    if not 1 <= count.value <= MAX_EXPERTS:
        raise fields.error(
            f"{count.where} is {count.value}, expected 1 to {MAX_EXPERTS}", count.where
        )
    return experts_in(fields, (0,), count=count.value)


def _mtp(fields: Fields, notes: Notes) -> MtpConfig:
    rank = fields.integer("q_lora_rank")
    plain = fields.required_integer("qk_nope_head_dim")
    rotary = fields.required_integer("qk_rope_head_dim")
    inner, shared = fields.integer("moe_intermediate_size"), fields.integer("n_shared_experts")
    groups, taken = fields.integer("n_group"), fields.integer("topk_group")
    scale = fields.number("routed_scaling_factor")
    with fields.consistent():
        return MtpConfig(
            query_rank=None if rank is None else rank.value,
            latent_rank=fields.required_integer("kv_lora_rank"),
            plain_size=plain,
            rotary_size=rotary,
            value_size=fields.required_integer("v_head_dim"),
            attention_scale=_attention_scale(fields, plain + rotary, notes),
            shared_size=(inner.value if inner else 1) * (shared.value if shared else 1),
            groups=groups.value if groups else 1,
            groups_taken=taken.value if taken else 1,
            routed_scale=float(scale.value) if scale else 1.0,
        )


def _attention_scale(fields: Fields, size: int, notes: Notes) -> float:
    """1/sqrt of a head's size, times the square of YaRN's scale where `mscale_all_dim` asks for it."""
    scaling = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    settings = scaling.value if scaling else {}
    factor, mscale = settings.get("factor"), settings.get("mscale_all_dim")
    stretch = 1.0
    if is_number(factor) and is_number(mscale) and factor > 1:
        stretch = 0.1 * mscale * math.log(factor) + 1
    scale = stretch * stretch / math.sqrt(size)
    reason = "" if stretch == 1 else f", YaRN's {stretch:.4f} squared"
    notes.decide("attention_scale", round(scale, 6), f"1/sqrt({size}){reason}")
    return scale
