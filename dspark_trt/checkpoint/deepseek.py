# SPDX-License-Identifier: Apache-2.0
"""Read the drafter inside a DeepSeek-V4 checkpoint: stages `mtp.0` to the last, of the target's own kind.

Its settings are the target's, with `dspark_*` beside them; embedding and head are the target's tensors in
the same files. What else lies there is not read.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from dspark_trt.checkpoint.accounting import account_for
from dspark_trt.checkpoint.block import read_block
from dspark_trt.checkpoint.dialects import DEEPSEEK_V4
from dspark_trt.checkpoint.experts import MAX_EXPERTS
from dspark_trt.checkpoint.fields import Fields
from dspark_trt.checkpoint.quantised import pair_scales
from dspark_trt.checkpoint.records import (
    EMBEDDING,
    LM_HEAD,
    DraftCheckpoint,
    DraftOverrides,
    Notes,
)
from dspark_trt.checkpoint.tensors import Shape, TensorRef
from dspark_trt.config import (
    ConfidenceInput,
    DecoderConfig,
    DeepseekConfig,
    DraftConfig,
    ExpertsConfig,
    HeadType,
    RopeConfig,
    WindowRule,
)

_STAGE = re.compile(r"mtp\.(\d+)\.(.+)")
_SHARED = {"embed.weight": EMBEDDING, "head.weight": LM_HEAD}
_ENTRY = {"main_proj.weight": "fc.weight", "main_norm.weight": "hidden_norm.weight"}
_EXIT = {
    "norm.weight": "lm_head.norm.weight",
    **{f"hc_head_{part}": f"hc_head.{part}" for part in ("fn", "base", "scale")},
    **{
        name: name
        for name in (
            "markov_head.markov_w1.weight",
            "markov_head.markov_w2.weight",
            "confidence_head.proj.weight",
        )
    },
}
_PARTS = (  # of a stage, as they are named in the file and by the modules
    (r"^hc_(attn|ffn)_(fn|base|scale)$", r"hc_\1.\2"),
    (r"^attn_norm\.", "input_layernorm."),
    (r"^ffn_norm\.", "post_attention_layernorm."),
    (r"^attn\.", "self_attn."),
    (r"^ffn\.", "mlp."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
)
_MAX_SINKHORN = 100  # unrolled in the graph; released drafters take 20

_NEUTRAL = {  # setting -> the one value that the modules compute
    "hidden_act": "silu",
    "attention_bias": False,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}


def deepseek_sign(keys: Iterable[str]) -> str | None:
    """A tensor that shows a drafter in `mtp.*` stages."""
    return min((key for key in keys if _STAGE.fullmatch(key)), default=None)


def read_deepseek(
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
    own = {key: ref for key, ref in files.items() if _STAGE.fullmatch(key) or key in _SHARED}
    stages = _stages(fields, own)
    _refuse_relatives(fields, own)
    notes.decide("format", DEEPSEEK_V4.name, f"the files hold {sign}")
    notes.decide("stages", stages, f"mtp.0 to mtp.{stages - 1} in the files")
    if others := len(files) - len(own):
        notes.decide("unused_tensors", others, "outside mtp.*: the target's")
    tensors = pair_scales(own)
    config = _config(fields, _decoder(fields, stages, notes), overrides, notes)
    borrowed = _borrowed(tensors, notes)
    expected = {
        key: shape
        for key, shape in stored_shapes(config).items()
        if _SHARED.get(key) not in borrowed
    }
    account_for(tensors, expected, folder, override=fields.flag_for("KEY"))
    notes.note_storage(tensors.values())
    named = {_canonical(key, stages): ref for key, ref in tensors.items()}
    return DraftCheckpoint(
        path=folder,
        format=DEEPSEEK_V4.name,
        config=config,
        tensors={name: replace(ref, name=name) for name, ref in named.items()},
        decisions=tuple(notes.decisions),
        warnings=tuple(notes.warnings),
        borrowed=borrowed,
    )


def stored_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Every tensor by its name in the files, quantised ones in the shape of what they stand for."""
    decoder, deepseek = config.decoder, config.decoder.deepseek
    assert deepseek is not None
    hidden, vocab, rank = decoder.hidden_size, decoder.vocab_size, config.markov_rank
    width = deepseek.streams * hidden
    shapes: dict[str, Shape] = {
        "embed.weight": (vocab, hidden),
        "head.weight": (vocab, hidden),
        "mtp.0.main_proj.weight": (hidden, config.tap_size),
        "mtp.0.main_norm.weight": (hidden,),
    }
    stage = _stage_shapes(decoder, deepseek)
    for index in range(decoder.num_layers):
        shapes |= {f"mtp.{index}.{name}": shape for name, shape in stage.items()}
    last: dict[str, Shape] = {
        "norm.weight": (hidden,),
        "hc_head_fn": (deepseek.streams, width),
        "hc_head_base": (deepseek.streams,),
        "hc_head_scale": (1,),
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (vocab, rank),
        "confidence_head.proj.weight": (1, hidden + rank),
    }
    return shapes | {f"mtp.{decoder.num_layers - 1}.{name}": s for name, s in last.items()}


def _stage_shapes(decoder: DecoderConfig, deepseek: DeepseekConfig) -> dict[str, Shape]:
    experts = decoder.experts
    assert experts is not None
    hidden, queries = decoder.hidden_size, decoder.num_heads * decoder.head_dim
    outputs = deepseek.output_groups * deepseek.output_rank
    mixes = (2 + deepseek.streams) * deepseek.streams
    shapes: dict[str, Shape] = {
        "attn.wq_a.weight": (deepseek.query_rank, hidden),
        "attn.q_norm.weight": (deepseek.query_rank,),
        "attn.wq_b.weight": (queries, deepseek.query_rank),
        "attn.wkv.weight": (decoder.head_dim, hidden),
        "attn.kv_norm.weight": (decoder.head_dim,),
        "attn.attn_sink": (decoder.num_heads,),
        "attn.wo_a.weight": (outputs, queries // deepseek.output_groups),
        "attn.wo_b.weight": (hidden, outputs),
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "ffn.gate.weight": (experts.count, hidden),
        "ffn.gate.bias": (experts.count,),
    }
    for block in ("attn", "ffn"):
        shapes[f"hc_{block}_fn"] = (mixes, deepseek.streams * hidden)
        shapes[f"hc_{block}_base"] = (mixes,)
        shapes[f"hc_{block}_scale"] = (3,)
    for owner in ("shared_experts", *(f"experts.{index}" for index in range(experts.count))):
        shapes[f"ffn.{owner}.w1.weight"] = (experts.intermediate_size, hidden)
        shapes[f"ffn.{owner}.w2.weight"] = (hidden, experts.intermediate_size)
        shapes[f"ffn.{owner}.w3.weight"] = (experts.intermediate_size, hidden)
    return shapes


def _canonical(key: str, stages: int) -> str:
    """The modules' name of a tensor that has been accounted for."""
    if (match := _STAGE.fullmatch(key)) is None:
        return _SHARED[key]
    stage, name = int(match[1]), match[2]
    ends = _ENTRY if stage == 0 else {}
    ends = ends | _EXIT if stage == stages - 1 else ends
    if name in ends:
        return ends[name]
    for pattern, replacement in _PARTS:
        name = re.sub(pattern, replacement, name)
    return f"layers.{stage}.{name}"


def _stages(fields: Fields, keys: Iterable[str]) -> int:
    found = {int(match[1]) for key in keys if (match := _STAGE.fullmatch(key))}
    if found != set(range(len(found))):
        raise fields.error(
            f"the files hold stages {sorted(found)} of mtp.*, expected 0, 1, ..."
        )
    return len(found)


def _refuse_relatives(fields: Fields, keys: Iterable[str]) -> None:
    """Layouts under the same prefix with other mathematics."""
    signs = [key for key in keys if key.endswith((".bias_vl", "markov_head.embed.weight"))]
    signs += [key for key in fields.places[""] if key == "dspark_n_routed_experts"]
    if signs:
        raise fields.error(f"DeepSeek-V4.1 mtp layout not supported yet (it has {signs[0]})")
    if "mtp.0.main_proj.weight" not in keys:
        raise fields.error(
            "the layers in mtp.* are no DSpark drafter (mtp.0.main_proj.weight is missing): a "
            "DeepSeek-V4 MTP layer reads hyper-connection streams of its target, which taps do not carry"
        )


def _decoder(fields: Fields, stages: int, notes: Notes) -> DecoderConfig:
    fields.require_neutral(_NEUTRAL)
    experts = fields.required_integer("n_routed_experts")
    if experts * stages > MAX_EXPERTS:
        raise fields.error(
            f"n_routed_experts is {experts}, beyond {MAX_EXPERTS} in all stages",
            "n_routed_experts",
        )
    window = fields.required_integer("sliding_window")
    notes.decide("sliding_window", window, "sliding_window; every stage")
    inner = fields.required_integer("moe_intermediate_size")
    limit = fields.number("swiglu_limit")
    with fields.consistent():
        return DecoderConfig(
            hidden_size=fields.required_integer("hidden_size"),
            intermediate_size=inner,
            num_layers=stages,
            num_heads=fields.required_integer("num_attention_heads"),
            num_kv_heads=1,
            head_dim=fields.required_integer("head_dim"),
            vocab_size=fields.required_integer("vocab_size"),
            rms_norm_eps=fields.required_number("rms_norm_eps"),
            rope=_rope(fields, stages, notes),
            max_positions=fields.required_integer("max_position_embeddings"),
            qk_norm=True,
            windows=(window,) * stages,
            keys_are_values=True,
            experts=ExpertsConfig(
                count=experts,
                per_token=fields.required_integer("num_experts_per_tok"),
                intermediate_size=inner,
                normalised=True,
                layers=tuple(range(stages)),
            ),
            deepseek=DeepseekConfig(
                rotary_size=fields.required_integer("qk_rope_head_dim"),
                query_rank=fields.required_integer("q_lora_rank"),
                output_groups=fields.required_integer("o_groups"),
                output_rank=fields.required_integer("o_lora_rank"),
                streams=fields.required_integer("hc_mult"),
                sinkhorn_steps=fields.required_integer("hc_sinkhorn_iters", most=_MAX_SINKHORN),
                stream_eps=fields.required_number("hc_eps"),
                routed_scale=fields.required_number("routed_scaling_factor"),
                swiglu_limit=None if limit is None or limit.value == 0 else float(limit.value),
            ),
        )


def _rope(fields: Fields, stages: int, notes: Notes) -> RopeConfig:
    """Layers that compress nothing turn by the plain angles: `rope_scaling` is for the others."""
    ratios = fields.integers("compress_ratios")
    depth = fields.required_integer("num_hidden_layers")
    if ratios is not None and any(own := ratios.value[depth : depth + stages]):
        raise fields.error(
            f"{ratios.where} of the stages is {own}, expected zeros: drafters whose attention compresses "
            "are not supported",
            "compress_ratios",
        )
    theta = fields.required_number("rope_theta")
    notes.decide(
        "rope", {"theta": theta}, "rope_theta; rope_scaling is for layers that compress"
    )
    return RopeConfig(theta=theta)


def _config(
    fields: Fields, decoder: DecoderConfig, overrides: DraftOverrides, notes: Notes
) -> DraftConfig:
    block = read_block(fields, DEEPSEEK_V4, decoder, overrides, notes)
    rank = fields.required_integer("markov_rank")
    notes.decide("markov_rank", rank, "dspark_markov_rank")
    notes.decide("head_type", HeadType.VANILLA.value, "the format knows no other")
    notes.decide(
        "confidence",
        ConfidenceInput.HIDDEN_MARKOV.value,
        "the format knows no other; it reads hidden states before the final norm",
    )
    notes.decide("window_rule", WindowRule.ANCHOR.value, "the format trains one window a block")
    with fields.consistent():
        return DraftConfig(
            decoder=decoder,
            block_slots=block.slots,
            slot_semantics=block.semantics,
            mask_token_id=block.mask_token_id,
            target_layer_ids=block.target_layer_ids,
            num_target_layers=block.num_target_layers,
            target_hidden_size=decoder.hidden_size,
            head_type=HeadType.VANILLA,
            markov_rank=rank,
            confidence=ConfidenceInput.HIDDEN_MARKOV,
            confidence_bias=False,
            window_rule=WindowRule.ANCHOR,
        )


def _borrowed(tensors: Mapping[str, TensorRef], notes: Notes) -> frozenset[str]:
    """Both of embedding and head lie beside the stages, or none: one alone is a lost tensor."""
    if _SHARED.keys() & tensors.keys():
        notes.decide(
            "borrowed", [], "the target's embed.weight and head.weight are in the files"
        )
        return frozenset()
    both = frozenset(_SHARED.values())
    notes.decide(
        "borrowed", sorted(both), "the files hold neither embed.weight nor head.weight"
    )
    return both
