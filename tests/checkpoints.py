# SPDX-License-Identifier: Apache-2.0
"""Toy checkpoints with random weights in every layout, written from what is public about the formats.

The same seed gives the same weights in every layout, so readers can be compared with each other.
Nothing here uses the reader under test.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]

LAYOUTS = ("deepspec", "specforge", "sglang", "zlab-dflash", "speculators", "model-optimizer")
"""``sglang`` is specforge's content in top-level ``dspark_*`` keys."""

_BORROWING = ("specforge", "sglang", "zlab-dflash", "model-optimizer")
_FLAT_NAMES = {"markov_head.": "", "confidence_head.proj.": "confidence_proj."}


@dataclass(frozen=True, kw_only=True)
class Dims:
    """Sizes of a toy model; the drafter's and the target's defaults fit each other."""

    hidden: int = 64
    intermediate: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 320
    max_positions: int = 512
    # targets with experts only
    experts: int = 5
    expert_intermediate: int = 24
    # drafter only
    target_layers: int = 4
    target_hidden: int = 64
    target_layer_ids: tuple[int, ...] = (0, 2)
    gamma: int = 4
    rank: int = 16
    mask: int = 319

    def decoder_json(self) -> dict[str, Any]:
        return {
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "hidden_act": "silu",
            "layer_types": ["full_attention"] * self.layers,
            "tie_word_embeddings": False,
            "eos_token_id": 1,
        }


def write_draft(
    path: Path,
    *,
    layout: str = "deepspec",
    head: str = "vanilla",
    confidence: str = "hidden+markov",
    dtype: str = "float32",
    shards: int = 1,
    seed: int = 0,
    target: Path | None = None,
    in_place: bool = False,
    drafted: Sequence[int] | None = None,
    config: dict[str, Any] | None = None,
    **dims: Any,
) -> Path:
    """Write a drafter and return ``path``.

    Args:
        path: folder to make.
        layout: one of ``LAYOUTS``; ``zlab-dflash`` is in place and has no heads.
        head: ``none``, ``vanilla``, ``gated`` or ``rnn``.
        confidence: ``none``, ``hidden`` or ``hidden+markov``.
        dtype: of all weights, or ``mixed`` for a round of float32, bfloat16, float16.
        shards: number of safetensors files.
        seed: of the weights.
        target: folder of a target whose embedding and head a layout that holds copies copies.
        in_place: ``sample_from_anchor`` / ``shift_label`` false, where the layout has the key.
        drafted: tokens that can be drafted, ascending (speculators): heads keep those rows only.
        config: keys that replace or add to the top level of config.json.
        dims: fields of ``Dims``.
    """
    if layout == "zlab-dflash":
        head, confidence, in_place = "none", "none", True
    sizes = Dims(**dims)
    weights = draft_weights(sizes, head=head, confidence=confidence, seed=seed)
    if target is not None:
        served = _target_weights(target)
        weights["embed_tokens.weight"] = served["embed_tokens.weight"]
        weights["lm_head.weight"] = served.get("lm_head.weight", served["embed_tokens.weight"])
    settings = _draft_json(sizes, layout, head, confidence, in_place)
    stored = _in_layout(weights, layout)
    if drafted is not None:
        assert layout == "speculators"
        settings["draft_vocab_size"] = len(drafted)
        _reduce_vocabulary(stored, drafted)
    write_json(path / "config.json", settings | (config or {}))
    _write_weights(path, stored, dtype, shards)
    return path


def write_gemma_draft(
    path: Path,
    *,
    key_is_value: bool = True,
    softcap: float | None = 2.0,
    confidence: str = "hidden+markov",
    seed: int = 0,
    config: dict[str, Any] | None = None,
    **dims: Any,
) -> Path:
    """Write a Gemma4 drafter in DeepSpec's layout and return ``path``; ``kv_heads`` are the global ones."""
    sizes = Dims(**dims)
    settings = _draft_json(sizes, "deepspec", "vanilla", confidence, False)
    for key in ("rope_theta", "hidden_act"):
        del settings[key]
    settings |= {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "target_model_type": "gemma4",
        "target_text_model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": sizes.head_dim // 2,
        "global_head_dim": sizes.head_dim,
        "num_key_value_heads": sizes.kv_heads * (2 if key_is_value else 1),
        "num_global_key_value_heads": sizes.kv_heads,
        "attention_k_eq_v": key_is_value,
        "final_logit_softcapping": softcap,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
            },
        },
    }  # fmt: skip
    write_json(path / "config.json", settings | (config or {}))
    weights = gemma_weights(sizes, key_is_value=key_is_value, confidence=confidence, seed=seed)
    _write_weights(path, weights, "float32", 1)
    return path


def gemma_weights(
    sizes: Dims,
    *,
    key_is_value: bool = True,
    confidence: str = "hidden+markov",
    seed: int = 0,
) -> Weights:
    """Random weights of a Gemma4 drafter under DeepSpec's names, float32."""
    weights = draft_weights(sizes, confidence=confidence, seed=seed)
    extra: dict[str, tuple[int, ...]] = {}
    for layer in range(sizes.layers):
        if key_is_value:
            del weights[f"layers.{layer}.self_attn.v_proj.weight"]
        for side in ("pre", "post"):
            extra[f"layers.{layer}.{side}_feedforward_layernorm.weight"] = (sizes.hidden,)
    weights |= random_weights(extra, seed)
    for layer in range(sizes.layers):
        weights[f"layers.{layer}.layer_scalar"] = torch.tensor([0.6 + 0.25 * layer])
    return weights


EAGLE3_LAYOUTS = ("deepspec", "authors", "speculators")


def write_eagle3_draft(
    path: Path,
    *,
    layout: str = "deepspec",
    qk_norm: bool = True,
    owns_embedding: bool = True,
    drafted: Sequence[int] | None = None,
    normed_residual: bool = False,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    **dims: Any,
) -> Path:
    """Write an Eagle3 drafter of one layer in one of ``EAGLE3_LAYOUTS``; ``gamma`` steps were trained."""
    sizes = Dims(**{"layers": 1, **dims})
    weights = eagle3_weights(sizes, qk_norm=qk_norm, seed=seed)
    if not owns_embedding:
        del weights["embed_tokens.weight"]
    aux = [layer + 1 for layer in sizes.target_layer_ids]
    match layout:
        case "deepspec":
            settings = sizes.decoder_json() | {
                "architectures": ["Qwen3Eagle3Model"],
                "num_target_layers": sizes.target_layers,
                "target_layer_ids": list(sizes.target_layer_ids),
                "ttt_length": sizes.gamma,
            }
        case "authors":
            settings = sizes.decoder_json() | {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "llama",
                "draft_vocab_size": sizes.vocab,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": aux},
            }
            weights = {n.replace("layers.0.", "midlayer."): t for n, t in weights.items()}
        case "speculators":
            settings = {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "transformer_layer_config": sizes.decoder_json(),
                "draft_vocab_size": sizes.vocab,
                "norm_before_residual": normed_residual,
                "eagle_aux_hidden_state_layer_ids": aux,
                "speculators_config": {
                    "algorithm": "eagle3",
                    "proposal_methods": [{"speculative_tokens": sizes.gamma}],
                },
            }
        case _:
            raise ValueError(layout)
    if layout != "deepspec":
        weights["t2d"] = torch.ones(sizes.vocab, dtype=torch.bool)
        weights["d2t"] = torch.zeros(sizes.vocab, dtype=torch.int64)
    if drafted is not None:
        settings["draft_vocab_size"] = len(drafted)
        _reduce_vocabulary(weights, drafted)
    write_json(path / "config.json", settings | (config or {}))
    _write_weights(path, weights, "float32", 1)
    return path


def eagle3_weights(sizes: Dims, *, qk_norm: bool = True, seed: int = 0) -> Weights:
    """Random weights of an Eagle3 drafter under DeepSpec's names, float32."""
    shapes = _decoder_weights(sizes, qk_norm=qk_norm, bias=False)
    for name in "qkv":
        rows, columns = shapes[f"layers.0.self_attn.{name}_proj.weight"]
        shapes[f"layers.0.self_attn.{name}_proj.weight"] = (rows, 2 * columns)
    shapes |= {
        "embed_tokens.weight": (sizes.vocab, sizes.hidden),
        "lm_head.weight": (sizes.vocab, sizes.hidden),
        "fc.weight": (sizes.hidden, len(sizes.target_layer_ids) * sizes.target_hidden),
        "layers.0.hidden_norm.weight": (sizes.hidden,),
    }
    return random_weights(shapes, seed)


def write_target(
    path: Path,
    *,
    family: str = "qwen3",
    tied: bool = True,
    dtype: str = "float32",
    shards: int = 1,
    seed: int = 0,
    attention_bias: bool = False,
    stop_token_ids: Iterable[int] = (1, 2),
    config: dict[str, Any] | None = None,
    **dims: Any,
) -> Path:
    """Write a target and return ``path``; arguments as in ``write_draft``. No tokenizer."""
    sizes = Dims(**{"layers": 4, **dims})
    settings = sizes.decoder_json() | {
        "model_type": family,
        "architectures": [f"{family.title().replace('_M', 'M')}ForCausalLM"],
        "tie_word_embeddings": tied,
        "attention_bias": attention_bias,
    }
    if family == "qwen2":
        del settings["attention_bias"]  # it has biases, and no key that says so
        attention_bias = True
    weights = _decoder_weights(sizes, qk_norm=family.startswith("qwen3"), bias=attention_bias)
    if family == "qwen2":
        weights = {n: shape for n, shape in weights.items() if not n.endswith("o_proj.bias")}
    if family == "qwen3_moe":
        settings |= {
            "num_experts": sizes.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": sizes.expert_intermediate,
            "norm_topk_prob": True,
            "mlp_only_layers": [sizes.layers - 1],
        }
        for layer in range(sizes.layers - 1):
            _make_sparse(weights, f"layers.{layer}.mlp.", sizes)
    weights = {f"model.{name}": shape for name, shape in weights.items()}
    weights["model.embed_tokens.weight"] = (sizes.vocab, sizes.hidden)
    if not tied:
        weights["lm_head.weight"] = (sizes.vocab, sizes.hidden)
    write_json(path / "config.json", settings | (config or {}))
    write_json(path / "generation_config.json", {"eos_token_id": list(stop_token_ids)})
    _write_weights(path, random_weights(weights, seed + 1000), dtype, shards)
    return path


def write_gemma_target(
    path: Path,
    *,
    key_is_value: bool = True,
    nested: bool = False,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    **dims: Any,
) -> Path:
    """Write a Gemma4 text target: windowed layers of half the head size, then one of full attention.

    With ``nested``, as the multimodal files are: a text configuration inside, a vision tensor beside.
    """
    sizes = Dims(**{"layers": 3, **dims})
    settings = sizes.decoder_json() | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": sizes.head_dim // 2,
        "global_head_dim": sizes.head_dim,
        "num_key_value_heads": sizes.kv_heads,
        "num_global_key_value_heads": sizes.kv_heads // 2 if key_is_value else None,
        "attention_k_eq_v": key_is_value,
        "final_logit_softcapping": 5.0,
        "sliding_window": 6,
        "layer_types": ["sliding_attention"] * (sizes.layers - 1) + ["full_attention"],
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
            },
        },
    } | (config or {})  # fmt: skip
    del settings["rope_theta"], settings["hidden_act"]
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (sizes.hidden,)}
    for layer in range(sizes.layers):
        full = layer == sizes.layers - 1
        own = replace(
            sizes,
            layers=1,
            head_dim=sizes.head_dim if full else sizes.head_dim // 2,
            kv_heads=sizes.kv_heads // 2 if full and key_is_value else sizes.kv_heads,
        )
        for name, shape in _decoder_weights(own, qk_norm=True, bias=False).items():
            if not (full and key_is_value and "v_proj" in name):
                shapes[name.replace("layers.0.", f"layers.{layer}.")] = shape
        for side in ("pre", "post"):
            shapes[f"layers.{layer}.{side}_feedforward_layernorm.weight"] = (sizes.hidden,)
        shapes[f"layers.{layer}.layer_scalar"] = (1,)
    shapes["embed_tokens.weight"] = (sizes.vocab, sizes.hidden)
    stem = "model.language_model." if nested else "model."
    weights = {
        stem + name: tensor for name, tensor in random_weights(shapes, seed + 1000).items()
    }
    if nested:
        weights["model.vision_tower.patch_embedder.weight"] = torch.zeros(2, 2)
        settings = {
            "model_type": "gemma4",
            "text_config": settings,
            "tie_word_embeddings": True,
        }
    write_json(path / "config.json", settings)
    write_json(path / "generation_config.json", {"eos_token_id": [1, 2]})
    _write_weights(path, weights, "float32", 1)
    return path


def draft_weights(
    sizes: Dims, *, head: str = "vanilla", confidence: str = "hidden+markov", seed: int = 0
) -> Weights:
    """Random weights of a drafter under DeepSpec's names, float32."""
    hidden, rank = sizes.hidden, sizes.rank
    shapes = _decoder_weights(sizes, qk_norm=True, bias=False) | {
        "embed_tokens.weight": (sizes.vocab, hidden),
        "lm_head.weight": (sizes.vocab, hidden),
        "fc.weight": (hidden, len(sizes.target_layer_ids) * sizes.target_hidden),
        "hidden_norm.weight": (hidden,),
    }
    if head != "none":
        shapes["markov_head.markov_w1.weight"] = (sizes.vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (sizes.vocab, rank)
    if head == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if head == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if confidence != "none":
        width = hidden + (rank if confidence == "hidden+markov" else 0)
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes["confidence_head.proj.bias"] = (1,)
    return random_weights(shapes, seed)


def edit_config(
    path: Path,
    changes: dict[str, Any] | None = None,
    *,
    drop: Iterable[str] = (),
    nested: str | None = None,
) -> None:
    """Change keys of a checkpoint's config.json, at the top level or inside ``nested``."""
    config = json.loads((path / "config.json").read_text())
    place = config[nested] if nested else config
    place.update(changes or {})
    for key in drop:
        del place[key]
    write_json(path / "config.json", config)


def edit_tensors(path: Path, edit: Callable[[Weights], object]) -> None:
    """Let ``edit`` change the tensors of a checkpoint of one shard in place."""
    file = path / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    file.unlink()
    save_file(weights, file, metadata={"format": "pt"})


def _decoder_weights(sizes: Dims, *, qk_norm: bool, bias: bool) -> dict[str, tuple[int, ...]]:
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (sizes.hidden,)}
    for index in range(sizes.layers):
        layer = f"layers.{index}."
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, sizes.hidden)
            if bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        shapes[layer + "self_attn.o_proj.weight"] = (sizes.hidden, queries)
        if bias:
            shapes[layer + "self_attn.o_proj.bias"] = (sizes.hidden,)
        if qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (sizes.head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (sizes.head_dim,)
        shapes[layer + "mlp.gate_proj.weight"] = (sizes.intermediate, sizes.hidden)
        shapes[layer + "mlp.up_proj.weight"] = (sizes.intermediate, sizes.hidden)
        shapes[layer + "mlp.down_proj.weight"] = (sizes.hidden, sizes.intermediate)
        shapes[layer + "input_layernorm.weight"] = (sizes.hidden,)
        shapes[layer + "post_attention_layernorm.weight"] = (sizes.hidden,)
    return shapes


def _make_sparse(weights: dict[str, tuple[int, ...]], mlp: str, sizes: Dims) -> None:
    for name in ("gate", "up", "down"):
        del weights[f"{mlp}{name}_proj.weight"]
    weights[f"{mlp}gate.weight"] = (sizes.experts, sizes.hidden)
    for index in range(sizes.experts):
        stem, inner = f"{mlp}experts.{index}.", sizes.expert_intermediate
        weights[stem + "gate_proj.weight"] = (inner, sizes.hidden)
        weights[stem + "up_proj.weight"] = (inner, sizes.hidden)
        weights[stem + "down_proj.weight"] = (sizes.hidden, inner)


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> Weights:
    weights = {}
    for name, shape in shapes.items():
        # Seeded by name: a tensor does not depend on which others a layout or head has.
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.1 * noise
        elif name.endswith("bias"):
            weights[name] = 0.1 * noise
        else:
            weights[name] = noise / shape[-1] ** 0.5
    return weights


def _draft_json(
    sizes: Dims, layout: str, head: str, confidence: str, in_place: bool
) -> dict[str, Any]:
    block = {
        "block_size": sizes.gamma + in_place,
        "mask_token_id": sizes.mask,
        "target_layer_ids": list(sizes.target_layer_ids),
    }
    enabled = "use_confidence_head" if layout == "model-optimizer" else "enable_confidence_head"
    heads: dict[str, Any] = {"markov_rank": 0 if head == "none" else sizes.rank}
    if head != "none":
        heads["markov_head_type"] = head
    heads[enabled] = confidence != "none"
    if confidence != "none" and layout != "model-optimizer":
        heads["confidence_head_with_markov"] = confidence == "hidden+markov"
    top = sizes.decoder_json() | {"num_target_layers": sizes.target_layers}
    match layout:
        case "deepspec":
            return (
                top
                | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
                | block
                | heads
            )
        case "specforge":
            nested = {"projector_type": "dspark", "attention_mode": "gqa"} | block | heads
            return top | {"architectures": ["DSparkDraftModel"], "dflash_config": nested}
        case "sglang":
            prefixed = {f"dspark_{key}": value for key, value in (block | heads).items()}
            return top | {"architectures": ["DSparkDraftModel"]} | prefixed
        case "zlab-dflash":
            top |= {
                "architectures": ["DFlashDraftModel"],
                "block_size": block.pop("block_size"),
            }
            return top | {"dflash_config": block}
        case "model-optimizer":
            nested = {"projector_type": "dspark", "shift_label": not in_place} | block | heads
            return top | {"architectures": ["DFlashDraftModel"], "dflash_config": nested}
        case "speculators":
            return _speculators_json(sizes, block, heads, in_place)
    raise ValueError(layout)


def _speculators_json(
    sizes: Dims, block: dict[str, Any], heads: dict[str, Any], in_place: bool
) -> dict[str, Any]:
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": sizes.decoder_json(),
        "draft_vocab_size": sizes.vocab,
        "target_hidden_size": None,
        "block_size": block["block_size"],
        "mask_token_id": block["mask_token_id"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in sizes.target_layer_ids],
        "sample_from_anchor": not in_place,
        "speculators_config": {
            "algorithm": "dspark",
            "proposal_methods": [{"speculative_tokens": sizes.gamma}],
            "verifier": {"name_or_path": "toy"},
        },
        **heads,
    }


def _in_layout(weights: Weights, layout: str) -> Weights:
    if layout in _BORROWING:
        borrowed = ("embed_tokens.weight", "lm_head.weight")
        weights = {name: tensor for name, tensor in weights.items() if name not in borrowed}
    if layout == "model-optimizer":
        return {_flat(name): tensor for name, tensor in weights.items()}
    if layout == "speculators":
        vocab = weights["embed_tokens.weight"].shape[0]
        return weights | {
            "t2d": torch.ones(vocab, dtype=torch.bool),
            "d2t": torch.zeros(vocab, dtype=torch.int64),
            "verifier_lm_head.weight": weights["lm_head.weight"].clone(),
            "verifier_norm.weight": weights["norm.weight"].clone(),
        }
    return weights


def _reduce_vocabulary(weights: Weights, drafted: Sequence[int]) -> None:
    kept = torch.tensor(drafted)
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in weights:
            weights[name] = weights[name][kept]
    weights["d2t"] = kept - torch.arange(len(kept))
    weights["t2d"] = torch.zeros_like(weights["t2d"])
    weights["t2d"][kept] = True


def _flat(name: str) -> str:
    for prefix, flat in _FLAT_NAMES.items():
        if name.startswith(prefix):
            return flat + name.removeprefix(prefix)
    return name


def _target_weights(path: Path) -> Weights:
    weights: Weights = {}
    for file in path.glob("*.safetensors"):
        weights |= load_file(file)
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2))


def _write_weights(path: Path, weights: Weights, dtype: str, shards: int) -> None:
    cycle = ("float32", "bfloat16", "float16") if dtype == "mixed" else (dtype,)
    stored = {}
    for index, (name, tensor) in enumerate(sorted(weights.items())):
        wanted = getattr(torch, cycle[index % len(cycle)])
        stored[name] = tensor.to(wanted if tensor.is_floating_point() else tensor.dtype).clone()
    if shards == 1:
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{part + 1:05d}-of-{shards:05d}.safetensors" for part in range(shards)]
    weight_map = {name: files[index % shards] for index, name in enumerate(stored)}
    for file in files:
        part = {name: stored[name] for name in stored if weight_map[name] == file}
        save_file(part, path / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in stored.values())
    write_json(
        path / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )
