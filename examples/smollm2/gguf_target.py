# SPDX-License-Identifier: Apache-2.0
"""A Llama model in one GGUF file -> a folder in the Hugging Face layout, weights in bfloat16."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_PARTS = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}


def folder_from_gguf(
    gguf: Path, folder: Path, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write config, weights, tokenizer and chat template of `gguf` into `folder`.

    Args:
        gguf: a model of architecture `llama` with a byte-level BPE tokenizer and tied embeddings.
        folder: exists already.
        on_progress: called with tensors done and tensors in all.

    Raises:
        KeyError: a field or tensor that such a model has is missing, or one is unknown.
    """
    reader = GGUFReader(gguf)
    config = _config(reader)
    _write(folder / "config.json", config)
    _write(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _save_tokenizer(reader, folder)
    tensors = {}
    for done, tensor in enumerate(reader.tensors):
        on_progress(done, len(reader.tensors))
        weight = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = _half_rotated(weight, config["head_dim"])
        tensors[_name(tensor.name)] = weight.astype(ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _config(reader: GGUFReader) -> dict[str, Any]:
    heads = _field(reader, "llama.attention.head_count")
    hidden = _field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": _decimal(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def _save_tokenizer(reader: GGUFReader, folder: Path) -> None:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # `smollm` in llama.cpp's list
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": _field(reader, "llama.context_length"),
            "bos_token": tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
            "eos_token": tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
            "pad_token": tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
        },
    )
    (folder / "chat_template.jinja").write_text(
        _field(reader, "tokenizer.chat_template"), encoding="utf-8"
    )


def _name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        return f"model.layers.{layer[1]}.{_LAYER_PARTS[layer[2]]}.weight"
    return f"model.{_OUTER_PARTS[name]}"


def _half_rotated(weight: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Rows of a query or key projection for the rotation of halves: llama.cpp stores pairs that are
    rotated together side by side.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(-1, head_dim // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise KeyError(f"{key} is missing")
    return field.contents()


def _decimal(value: float) -> float:
    """The number a float32 stands for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
