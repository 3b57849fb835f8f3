# SPDX-License-Identifier: Apache-2.0
"""Gemma4: a text configuration with settings of its own for full attention; drafters of DeepSpec have
no other.
"""

from collections.abc import Iterable
from typing import Any

from dspark_trt.checkpoint.fields import Fields, is_number
from dspark_trt.checkpoint.records import MAX_LAYERS, Notes
from dspark_trt.checkpoint.tensors import Shape
from dspark_trt.config import DecoderConfig, GemmaConfig, RopeConfig, SlidingSizes

_NEUTRAL = {  # setting -> the value that leaves the decoder as the modules compute it
    "hidden_activation": "gelu_pytorch_tanh",
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": None,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE_KEYS = frozenset({"rope_type", "rope_theta", "partial_rotary_factor", "factor"})


def is_gemma(tensors: Iterable[str]) -> bool:
    """Whether these are tensors of Gemma4 layers."""
    return any(
        name.endswith((".pre_feedforward_layernorm.weight", ".layer_scalar"))
        for name in tensors
    )


def gemma_draft_decoder(fields: Fields, notes: Notes) -> DecoderConfig:
    """The dimensions of a drafter, whose layers all have full attention: the global sizes.

    Raises:
        CheckpointError: a key is missing, has the wrong type, or asks for what the modules lack.
    """
    types = fields.texts("layer_types")
    if types is not None and (other := [kind for kind in types.value if kind != _FULL]):
        raise fields.error(
            f"{types.where} holds {other[0]!r}; Gemma4 drafters are supported with {_FULL!r} only",
            "layer_types",
        )
    shared, wide = fields.integer("num_kv_shared_layers"), fields.flag("use_double_wide_mlp")
    if shared and shared.value and wide and wide.value:
        raise fields.error(
            f"{wide.where} is true with {shared.where} {shared.value}: wide MLPs are not supported yet",
            "use_double_wide_mlp",
        )
    return _decoder(fields, notes, windows=(), sliding=None)


def gemma_target_decoder(fields: Fields, notes: Notes) -> DecoderConfig:
    """The dimensions of a text target: windowed layers beside layers of full attention.

    Raises:
        CheckpointError: as ``gemma_draft_decoder``.
    """
    shared = fields.integer("num_kv_shared_layers")
    if shared is not None and shared.value:
        raise fields.error(
            f"{shared.where} is {shared.value}: layers that share keys are not supported yet (only 0)",
            "num_kv_shared_layers",
        )
    count = fields.required_integer("num_hidden_layers", most=MAX_LAYERS)
    types = fields.require("layer_types", fields.texts("layer_types"))
    if len(types.value) != count or {*types.value} - {_FULL, _SLIDING}:
        raise fields.error(
            f"{types.where} must hold {count} of {_FULL!r} and {_SLIDING!r} (num_hidden_layers), "
            f"got {types.value}",
            "layer_types",
        )
    windows: tuple[int | None, ...] = ()
    sliding = None
    if _SLIDING in types.value:
        size = fields.required_integer("sliding_window")
        windows = tuple(size if kind == _SLIDING else None for kind in types.value)
        with fields.consistent():
            sliding = SlidingSizes(
                num_kv_heads=fields.required_integer("num_key_value_heads"),
                head_dim=fields.required_integer("head_dim"),
                rope=_rope(fields, _SLIDING),
            )
        notes.decide(
            "sliding_window", size, f"{types.where}: {types.value.count(_SLIDING)} layers"
        )
    return _decoder(fields, notes, windows=windows, sliding=sliding)


def _decoder(
    fields: Fields,
    notes: Notes,
    *,
    windows: tuple[int | None, ...],
    sliding: SlidingSizes | None,
) -> DecoderConfig:
    fields.require_neutral(_NEUTRAL)
    shares = fields.require("attention_k_eq_v", fields.flag("attention_k_eq_v"))
    heads = "num_global_key_value_heads" if shares.value else "num_key_value_heads"
    bias, cap = fields.flag("attention_bias"), fields.number("final_logit_softcapping")
    if cap is not None and cap.value <= 0:
        raise fields.error(
            f"{cap.where} is {cap.value}, expected a positive number", "final_logit_softcapping"
        )
    notes.decide(
        "architecture",
        {
            "layout": "gemma4",
            "key_is_value": shares.value,
            "logit_softcap": cap.value if cap else None,
        },
        "the tensors have layer_scalar and norms on both sides of attention and MLP",
    )
    with fields.consistent():
        return DecoderConfig(
            hidden_size=fields.required_integer("hidden_size"),
            intermediate_size=fields.required_integer("intermediate_size"),
            num_layers=fields.required_integer("num_hidden_layers", most=MAX_LAYERS),
            num_heads=fields.required_integer("num_attention_heads"),
            num_kv_heads=fields.required_integer(heads),
            head_dim=fields.required_integer("global_head_dim"),
            vocab_size=fields.required_integer("vocab_size"),
            rms_norm_eps=fields.required_number("rms_norm_eps"),
            rope=_rope(fields, _FULL),
            max_positions=fields.required_integer("max_position_embeddings"),
            qk_norm=True,
            attention_bias=bool(bias and bias.value),
            windows=windows,
            gemma=GemmaConfig(
                key_is_value=shares.value,
                logit_softcap=float(cap.value) if cap else None,
                sliding=sliding,
            ),
        )


def gemma_layer_shapes(decoder: DecoderConfig) -> dict[str, Shape]:
    """What a Gemma4 layer has beside the tensors of every layer."""
    hidden = (decoder.hidden_size,)
    return {
        "pre_feedforward_layernorm.weight": hidden,
        "post_feedforward_layernorm.weight": hidden,
        "layer_scalar": (1,),
    }


def _rope(fields: Fields, layer_type: str) -> RopeConfig:
    """Rotary settings of one kind of layer: plain, or proportional (only the fastest pairs turn)."""
    setting = fields.require("rope_parameters", fields.mapping("rope_parameters"))
    nested = setting.value.get(layer_type)
    where, rope = setting.where, setting.value
    if isinstance(nested, dict):
        where, rope = f"{where}.{layer_type}", nested
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "proportional"):
        raise fields.error(
            f"{where}.rope_type is {kind!r}; Gemma4 is supported with 'default' and 'proportional'",
            "rope_parameters",
        )
    if unknown := sorted(rope.keys() - _ROPE_KEYS):
        raise fields.error(
            f"{where} has settings this reader does not know: {', '.join(unknown)}",
            "rope_parameters",
        )
    theta = _number(fields, where, rope, "rope_theta")
    if kind == "default":
        return RopeConfig(theta=theta)
    return RopeConfig(
        theta=theta,
        rotary_fraction=_number(fields, where, rope, "partial_rotary_factor"),
        linear_factor=_number(fields, where, {"factor": 1.0} | rope, "factor"),
    )


def _number(fields: Fields, where: str, rope: dict[str, Any], key: str) -> float:
    value = rope.get(key)
    if value is None or not is_number(value):
        raise fields.error(f"{where}.{key} is {value!r}, expected a number", "rope_parameters")
    return float(value)
