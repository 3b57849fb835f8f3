# SPDX-License-Identifier: Apache-2.0
"""The decoder that drafters and targets share: its dimensions from config.json, its tensors from them.

Settings that would change the mathematics and that the modules lack are refused here by name.
"""

from dspark_trt.checkpoint.experts import expert_shapes, read_experts
from dspark_trt.checkpoint.fields import Fields
from dspark_trt.checkpoint.gemma import gemma_layer_shapes
from dspark_trt.checkpoint.records import MAX_LAYERS, Notes
from dspark_trt.checkpoint.rope import rope_from_fields
from dspark_trt.checkpoint.tensors import Shape
from dspark_trt.checkpoint.windows import read_windows
from dspark_trt.config import DecoderConfig

_NEUTRAL = {  # setting -> the value that leaves the decoder as the modules compute it
    "hidden_act": "silu",
    "mlp_bias": False,
    "partial_rotary_factor": 1,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_mode": "gqa",
    "causal": False,  # a drafter's block is bidirectional
}


def decoder_from_fields(
    fields: Fields,
    notes: Notes,
    *,
    qk_norm: bool,
    attention_bias: bool = False,
    output_bias: bool = True,
    has_experts: bool = False,
) -> DecoderConfig:
    """The dimensions in a config.json.

    Args:
        fields: the config.json.
        notes: where the decision on sliding windows goes.
        qk_norm: whether the architecture normalises queries and keys.
        attention_bias: what an absent ``attention_bias`` means.
        output_bias: whether ``attention_bias`` covers ``o_proj``.
        has_experts: whether the architecture may have experts.

    Raises:
        CheckpointError: a key is missing, has the wrong type, or asks for what the modules lack.
    """
    fields.require_neutral(_NEUTRAL)
    hidden = fields.required_integer("hidden_size")
    heads = fields.required_integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads")
    head_dim = fields.integer("head_dim")
    layers = fields.required_integer("num_hidden_layers", most=MAX_LAYERS)
    bias = fields.flag("attention_bias")
    max_positions = fields.required_integer("max_position_embeddings")
    if head_dim is None and hidden % heads:
        raise fields.error(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is missing",
            "head_dim",
        )
    with fields.consistent():
        return DecoderConfig(
            hidden_size=hidden,
            intermediate_size=fields.required_integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads.value if kv_heads else heads,
            head_dim=head_dim.value if head_dim else hidden // heads,
            vocab_size=fields.required_integer("vocab_size"),
            rms_norm_eps=fields.required_number("rms_norm_eps"),
            rope=rope_from_fields(fields),
            max_positions=max_positions,
            qk_norm=qk_norm,
            attention_bias=attention_bias if bias is None else bias.value,
            output_bias=output_bias,
            windows=read_windows(fields, layers, max_positions, notes),
            experts=read_experts(fields, layers) if has_experts else None,
        )


def decoder_shapes(decoder: DecoderConfig) -> dict[str, Shape]:
    """Every tensor of the layers and the final norm, by canonical name."""
    shapes: dict[str, Shape] = {"norm.weight": (decoder.hidden_size,)}
    for index in range(decoder.num_layers):
        experts = decoder.experts
        sparse = experts is not None and index in experts.layers
        own = decoder.of_layer(index)
        layer = _attention_shapes(own) | (
            expert_shapes(decoder, experts) if experts and sparse else _mlp_shapes(decoder)
        )
        if decoder.gemma is not None:
            layer |= gemma_layer_shapes(decoder)
            if own.gemma is not None and own.gemma.key_is_value:
                layer = {n: s for n, s in layer.items() if not n.startswith("self_attn.v_proj")}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention_shapes(decoder: DecoderConfig) -> dict[str, Shape]:
    hidden, head = decoder.hidden_size, decoder.head_dim
    queries, keys = decoder.num_heads * head, decoder.num_kv_heads * head
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    if decoder.qk_norm:
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    if decoder.attention_bias:
        layer |= {f"self_attn.{name}_proj.bias": (keys,) for name in "kv"}
        layer["self_attn.q_proj.bias"] = (queries,)
        if decoder.output_bias:
            layer["self_attn.o_proj.bias"] = (hidden,)
    return layer


def _mlp_shapes(decoder: DecoderConfig) -> dict[str, Shape]:
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    return {
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
