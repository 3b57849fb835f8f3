# SPDX-License-Identifier: Apache-2.0
"""Toy DeepSeek-V4 checkpoints: the stages of the drafter in `mtp.*`, some of the target beside them.

Written from what is public about the layout; nothing here uses the reader under test.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.checkpoints import Weights, random_weights, write_json


@dataclass(frozen=True, kw_only=True)
class StageDims:
    """Sizes of a toy drafter that fit those of `checkpoints.Dims`' target."""

    hidden: int = 64
    vocab: int = 320
    max_positions: int = 512
    target_layers: int = 4
    target_layer_ids: tuple[int, ...] = (1, 3)
    stages: int = 2
    heads: int = 4
    head_dim: int = 48
    rotary: int = 16
    query_rank: int = 24
    groups: int = 2
    output_rank: int = 20
    experts: int = 5
    per_token: int = 2
    inner: int = 32
    streams: int = 3
    sinkhorn: int = 3
    window: int = 6
    gamma: int = 4
    rank: int = 16
    mask: int = 319

    def config_json(self) -> dict[str, Any]:
        return {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.target_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": 1,
            "head_dim": self.head_dim,
            "qk_rope_head_dim": self.rotary,
            "q_lora_rank": self.query_rank,
            "o_groups": self.groups,
            "o_lora_rank": self.output_rank,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "compress_rope_theta": 160000,
            "rope_scaling": {
                "type": "yarn", "factor": 16, "original_max_position_embeddings": 64,
            },
            "compress_ratios": [4] * self.target_layers + [0] * self.stages,
            "sliding_window": self.window,
            "hidden_act": "silu",
            "attention_bias": False,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.per_token,
            "moe_intermediate_size": self.inner,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 0.75,  # small enough to clip toy weights' products
            "num_hash_layers": 1,
            "num_nextn_predict_layers": 1,
            "hc_mult": self.streams,
            "hc_sinkhorn_iters": self.sinkhorn,
            "hc_eps": 1e-6,
            "dspark_block_size": self.gamma,
            "dspark_noise_token_id": self.mask,
            "dspark_target_layer_ids": list(self.target_layer_ids),
            "dspark_markov_rank": self.rank,
            "tie_word_embeddings": False,
        }  # fmt: skip


def write_deepseek_draft(
    path: Path,
    *,
    quantised: bool = False,
    with_target: bool = True,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    **dims: Any,
) -> Path:
    """Write a drafter and return ``path``.

    With ``quantised`` as released: FP8 matrices, FP4 experts, scales beside them. ``with_target`` puts
    embedding, head and one of the target's tensors into the same file.
    """
    sizes = StageDims(**dims)
    weights = deepseek_weights(sizes, seed=seed)
    if not with_target:
        for name in ("embed.weight", "head.weight"):
            del weights[name]
    else:
        weights["layers.0.attn.wkv.weight"] = torch.zeros(2, 2)
    stored = quantise(weights) if quantised else weights
    settings = sizes.config_json()
    if quantised:
        settings["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
        }  # fmt: skip
    write_json(path / "config.json", settings | (config or {}))
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    return path


def deepseek_weights(sizes: StageDims, *, seed: int = 0) -> Weights:
    """Random weights under the names of the files, float32."""
    return random_weights(deepseek_shapes(sizes), seed)


def deepseek_shapes(sizes: StageDims) -> dict[str, tuple[int, ...]]:
    hidden, mixes = sizes.hidden, (2 + sizes.streams) * sizes.streams
    queries, outputs = sizes.heads * sizes.head_dim, sizes.groups * sizes.output_rank
    stage: dict[str, tuple[int, ...]] = {
        "attn.wq_a.weight": (sizes.query_rank, hidden),
        "attn.q_norm.weight": (sizes.query_rank,),
        "attn.wq_b.weight": (queries, sizes.query_rank),
        "attn.wkv.weight": (sizes.head_dim, hidden),
        "attn.kv_norm.weight": (sizes.head_dim,),
        "attn.attn_sink": (sizes.heads,),
        "attn.wo_a.weight": (outputs, queries // sizes.groups),
        "attn.wo_b.weight": (hidden, outputs),
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "ffn.gate.weight": (sizes.experts, hidden),
        "ffn.gate.bias": (sizes.experts,),
    }
    for block in ("attn", "ffn"):
        stage[f"hc_{block}_fn"] = (mixes, sizes.streams * hidden)
        stage[f"hc_{block}_base"] = (mixes,)
        stage[f"hc_{block}_scale"] = (3,)
    for owner in ("shared_experts", *(f"experts.{index}" for index in range(sizes.experts))):
        stage[f"ffn.{owner}.w1.weight"] = (sizes.inner, hidden)
        stage[f"ffn.{owner}.w2.weight"] = (hidden, sizes.inner)
        stage[f"ffn.{owner}.w3.weight"] = (sizes.inner, hidden)
    shapes = {
        f"mtp.{index}.{name}": shape
        for index in range(sizes.stages)
        for name, shape in stage.items()
    }
    last = f"mtp.{sizes.stages - 1}."
    return shapes | {
        "embed.weight": (sizes.vocab, hidden),
        "head.weight": (sizes.vocab, hidden),
        "mtp.0.main_proj.weight": (hidden, len(sizes.target_layer_ids) * hidden),
        "mtp.0.main_norm.weight": (hidden,),
        last + "norm.weight": (hidden,),
        last + "hc_head_fn": (sizes.streams, sizes.streams * hidden),
        last + "hc_head_base": (sizes.streams,),
        last + "hc_head_scale": (1,),
        last + "markov_head.markov_w1.weight": (sizes.vocab, sizes.rank),
        last + "markov_head.markov_w2.weight": (sizes.vocab, sizes.rank),
        last + "confidence_head.proj.weight": (1, hidden + sizes.rank),
    }


_EXPERT_WEIGHTS = ".experts."
_FP8_WEIGHTS = (
    ".wq_a.", ".wq_b.", ".wkv.", ".wo_a.", ".wo_b.", ".main_proj.", ".shared_experts.",
)  # fmt: skip


def quantise(weights: Weights) -> Weights:
    """The matrices of a drafter as released: rounded to FP8 or FP4 beside power-of-two scales."""
    stored: Weights = {}
    for name, tensor in weights.items():
        if not name.startswith("mtp.") or tensor.ndim != 2:
            stored[name] = tensor
        elif _EXPERT_WEIGHTS in name:
            _store(stored, name, *_fp4(tensor))
        elif any(part in name for part in _FP8_WEIGHTS):
            _store(stored, name, *_fp8(tensor))
        else:
            stored[name] = tensor
    return stored


def _store(stored: Weights, name: str, values: torch.Tensor, exponents: torch.Tensor) -> None:
    stored[name] = values
    scales = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    stored[name.removesuffix("weight") + "scale"] = scales


def _fp8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = (-(-size // 128) for size in matrix.shape)
    # Scales differ from block to block, so that a mistaken one shows.
    exponents = 118 + torch.arange(rows * columns).view(rows, columns) % 3
    scale = _spread(exponents, (128, 128), matrix)
    return (matrix / scale).clamp(-448, 448).to(torch.float8_e4m3fn), exponents


def _fp4(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = matrix.shape
    exponents = 123 + torch.arange(rows * columns // 32).view(rows, -1) % 3
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    steps = matrix / _spread(exponents, (1, 32), matrix)
    codes = (steps.abs().unsqueeze(-1) - levels).abs().argmin(-1) + 8 * (steps < 0)
    packed = codes[:, ::2] + 16 * codes[:, 1::2]
    return packed.to(torch.uint8).view(torch.int8), exponents


def _spread(
    exponents: torch.Tensor, block: tuple[int, int], matrix: torch.Tensor
) -> torch.Tensor:
    scale = torch.exp2(exponents.float() - 127)
    for axis, size in enumerate(block):
        scale = scale.repeat_interleave(size, axis).narrow(axis, 0, matrix.shape[axis])
    return scale


def write_released_sizes(path: Path) -> int:
    """A file without data that has the sizes and dtypes of DeepSeek-V4-Flash-DSpark; returns how many
    tensors are in `mtp.*`.
    """
    sizes = StageDims(
        hidden=4096, vocab=129280, max_positions=1 << 20, target_layers=43,
        target_layer_ids=(40, 41, 42), stages=3, heads=64, head_dim=512, rotary=64, query_rank=1024,
        groups=8, output_rank=1024, experts=256, per_token=6, inner=2048, streams=4, sinkhorn=20,
        window=128, gamma=5, rank=256, mask=128799,
    )  # fmt: skip
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}  # dtype, shape, bytes an element
    for name, shape in deepseek_shapes(sizes).items():
        scale = name.removesuffix("weight") + "scale"
        if _EXPERT_WEIGHTS in name:
            tensors[name] = ("I8", (shape[0], shape[1] // 2), 1)
            tensors[scale] = ("F8_E8M0", (shape[0], shape[1] // 32), 1)
        elif any(part in name for part in _FP8_WEIGHTS):
            tensors[name] = ("F8_E4M3", shape, 1)
            tensors[scale] = ("F8_E8M0", tuple(-(-size // 128) for size in shape), 1)
        else:
            tensors[name] = ("F32", shape, 4) if "hc_" in name else ("BF16", shape, 2)
    header, end = {}, 0
    for name, (dtype, dims, size) in tensors.items():
        begin, end = end, end + math.prod(dims) * size
        header[name] = {"dtype": dtype, "shape": dims, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    write_json(path / "config.json", sizes.config_json() | {"swiglu_limit": 10.0})
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    return sum(name.startswith("mtp.") for name in tensors)
