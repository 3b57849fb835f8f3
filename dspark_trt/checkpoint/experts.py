# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in the Qwen3-MoE spelling: what config.json says, and the tensors it implies."""

from dspark_trt.checkpoint.fields import Fields
from dspark_trt.checkpoint.tensors import Shape
from dspark_trt.config import DecoderConfig, ExpertsConfig

MAX_EXPERTS = 100_000  # a corrupt count must not make the list of expected tensors endless


def read_experts(fields: Fields, num_layers: int) -> ExpertsConfig | None:
    """The experts, if the model has any.

    Raises:
        CheckpointError: a setting is missing, or the settings contradict each other.
    """
    count = fields.integer("num_experts") or fields.integer("num_local_experts")
    if count is None or count.value == 0:
        return None
    if count.value * num_layers > MAX_EXPERTS:
        raise fields.error(
            f"{count.where} is {count.value}, beyond {MAX_EXPERTS} in all layers",
            "num_experts",
        )
    dense, step = fields.integers("mlp_only_layers"), fields.integer("decoder_sparse_step")
    every = step.value if step else 1
    if every < 1:
        raise fields.error(
            f"decoder_sparse_step is {every}, expected at least 1", "decoder_sparse_step"
        )
    layers = tuple(
        layer
        for layer in range(num_layers)
        if (layer + 1) % every == 0 and layer not in (dense.value if dense else ())
    )
    return experts_in(fields, layers, count=count.value)


def experts_in(fields: Fields, layers: tuple[int, ...], *, count: int) -> ExpertsConfig:
    """So many experts in these layers, their sizes in the spelling that model families share.

    Raises:
        CheckpointError: a setting is missing, or the settings contradict each other.
    """
    normalised = fields.flag("norm_topk_prob")
    with fields.consistent():
        return ExpertsConfig(
            count=count,
            per_token=fields.required_integer("num_experts_per_tok"),
            intermediate_size=fields.required_integer("moe_intermediate_size"),
            normalised=bool(normalised and normalised.value),
            layers=layers,
        )


def expert_shapes(decoder: DecoderConfig, experts: ExpertsConfig) -> dict[str, Shape]:
    """Router and experts of one layer, by canonical name inside the layer."""
    hidden, inner = decoder.hidden_size, experts.intermediate_size
    shapes: dict[str, Shape] = {"mlp.gate.weight": (experts.count, hidden)}
    for index in range(experts.count):
        stem = f"mlp.experts.{index}."
        shapes[stem + "gate_proj.weight"] = (inner, hidden)
        shapes[stem + "up_proj.weight"] = (inner, hidden)
        shapes[stem + "down_proj.weight"] = (hidden, inner)
    return shapes
