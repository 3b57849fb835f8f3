# SPDX-License-Identifier: Apache-2.0
"""Toy checkpoints with a layer for multi-token prediction behind the target's last, as DeepSeek-V3 has it.

Written from what is public about the layout; nothing here uses the reader under test.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.checkpoints import Weights, random_weights, write_json


@dataclass(frozen=True, kw_only=True)
class MtpDims:
    """Sizes of a toy layer that fit those of `checkpoints.Dims`' target."""

    hidden: int = 64
    vocab: int = 320
    max_positions: int = 512
    target_layers: int = 4
    heads: int = 4
    query_rank: int | None = 24
    latent: int = 32
    plain: int = 16
    rotary: int = 8
    value: int = 20
    intermediate: int = 96
    experts: int | None = 8
    per_token: int = 3
    inner: int = 16
    shared: int = 2
    groups: int = 4
    groups_taken: int = 2

    def config_json(self) -> dict[str, Any]:
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.target_layers,
            "num_nextn_predict_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.latent,
            "qk_nope_head_dim": self.plain,
            "qk_rope_head_dim": self.rotary,
            "v_head_dim": self.value,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "rope_scaling": {
                "type": "yarn", "factor": 40, "original_max_position_embeddings": 64,
                "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            },
            "hidden_act": "silu",
            "attention_bias": False,
            "n_routed_experts": self.experts,
            "n_shared_experts": self.shared,
            "num_experts_per_tok": self.per_token,
            "moe_intermediate_size": self.inner,
            "moe_layer_freq": 1,
            "first_k_dense_replace": 1,
            "n_group": self.groups,
            "topk_group": self.groups_taken,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "tie_word_embeddings": False,
        }  # fmt: skip


COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def write_mtp(
    path: Path,
    *,
    owns_vocabulary: bool = True,
    quantised: bool = False,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    **dims: Any,
) -> Path:
    """Write a layer behind `target_layers`, with one tensor of the target, and return ``path``.

    ``owns_vocabulary`` keeps its copies of embedding and head; ``quantised`` stores matrices in FP8.
    """
    sizes = MtpDims(**dims)
    weights = mtp_weights(sizes, seed=seed)
    if not owns_vocabulary:
        weights = {name: w for name, w in weights.items() if name not in COPIES}
    if quantised:
        weights = _fp8(weights)
    stem = f"model.layers.{sizes.target_layers}."
    stored = {stem + name: tensor for name, tensor in weights.items()}
    stored["model.layers.0.input_layernorm.weight"] = torch.ones(2)
    write_json(path / "config.json", sizes.config_json() | (config or {}))
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    return path


def mtp_weights(sizes: MtpDims, *, seed: int = 0) -> Weights:
    """Random weights of the layer under its own names, float32."""
    hidden, queries = sizes.hidden, sizes.heads * (sizes.plain + sizes.rotary)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (sizes.vocab, hidden),
        "shared_head.head.weight": (sizes.vocab, hidden),
        "shared_head.norm.weight": (hidden,),
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.kv_a_proj_with_mqa.weight": (sizes.latent + sizes.rotary, hidden),
        "self_attn.kv_a_layernorm.weight": (sizes.latent,),
        "self_attn.kv_b_proj.weight": (sizes.heads * (sizes.plain + sizes.value), sizes.latent),
        "self_attn.o_proj.weight": (hidden, sizes.heads * sizes.value),
    }
    if sizes.query_rank is None:
        shapes["self_attn.q_proj.weight"] = (queries, hidden)
    else:
        shapes["self_attn.q_a_proj.weight"] = (sizes.query_rank, hidden)
        shapes["self_attn.q_a_layernorm.weight"] = (sizes.query_rank,)
        shapes["self_attn.q_b_proj.weight"] = (queries, sizes.query_rank)
    mlps = {"mlp.": sizes.intermediate}
    if sizes.experts is not None:
        shapes["mlp.gate.weight"] = (sizes.experts, hidden)
        shapes["mlp.gate.e_score_correction_bias"] = (sizes.experts,)
        mlps = {f"mlp.experts.{index}.": sizes.inner for index in range(sizes.experts)}
        mlps["mlp.shared_experts."] = sizes.shared * sizes.inner
    for stem, inner in mlps.items():
        shapes[stem + "gate_proj.weight"] = (inner, hidden)
        shapes[stem + "up_proj.weight"] = (inner, hidden)
        shapes[stem + "down_proj.weight"] = (hidden, inner)
    return random_weights(shapes, seed)


def _fp8(weights: Weights) -> Weights:
    """As DeepSeek-V3 is released: matrices of the layers in FP8, one float32 scale a block."""
    stored: Weights = {}
    for name, tensor in weights.items():
        plain = name in COPIES or name.startswith(("eh_proj", "mlp.gate."))
        if plain or tensor.ndim != 2:
            stored[name] = tensor
            continue
        stored[name] = (tensor * 100).to(torch.float8_e4m3fn)
        blocks = [-(-size // 128) for size in tensor.shape]
        stored[name + "_scale_inv"] = torch.full(blocks, 0.01)
    return stored
