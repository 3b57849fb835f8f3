# SPDX-License-Identifier: Apache-2.0
"""Seconds and peak memory of exporting a drafter of the Qwen3-4B drafter's size.

    python benchmarks/export_scale.py [--folder DIR] [--dtype bfloat16]

Writes a random checkpoint of 1.39 B parameters (2.8 GB; the bundle takes as much again), exports it with
the command line in a process of its own, and removes both. The last line is JSON; exit code 1 if the peak
is above 1.5 times the checkpoint.
"""

import argparse
import json
import math
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

MOST_PEAK = 1.5  # times the checkpoint's bytes

Config = dict[str, Any]

PUBLISHED: dict[str, Config] = json.loads(
    (Path(__file__).parent / "published_configs.json").read_text()
)
_PLACES = ("dflash_config", "dspark_config")  # where some formats keep the block's settings


def shallow(name: str, experts: int = 32) -> Config:
    """A published configuration with one layer; where it has experts, which are most of a layer, with so many
    (at least those that a token takes).
    """
    config = PUBLISHED[name]
    return config | (
        {"n_routed_experts": experts} if "hc_mult" in config else {"num_hidden_layers": 1}
    )


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of a DSpark drafter, embedding and head included, in DeepSpec's names; of DeepSeek-V4, one
    stage in its own.
    """
    if "hc_mult" in config:
        return _deepseek_shapes(config)
    flat = {
        key: value for place in _PLACES for key, value in config.get(place, {}).items()
    } | config
    hidden, vocab, rank = flat["hidden_size"], flat["vocab_size"], flat["markov_rank"]
    inner, is_gemma = flat["intermediate_size"], "global_head_dim" in flat
    head_dim = flat["global_head_dim" if is_gemma else "head_dim"]
    queries = flat["num_attention_heads"] * head_dim
    kv_heads = flat["num_global_key_value_heads" if is_gemma else "num_key_value_heads"]
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if is_gemma:  # keys are values
        del layer["self_attn.v_proj.weight"]
        layer |= {f"{side}_feedforward_layernorm.weight": (hidden,) for side in ("pre", "post")}
        layer["layer_scalar"] = (1,)
    return {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "fc.weight": (hidden, len(flat["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (vocab, rank),
        "confidence_head.proj.weight": (1, hidden + rank),
        "confidence_head.proj.bias": (1,),
        **{
            f"layers.{index}.{name}": shape
            for index in range(flat["num_hidden_layers"])
            for name, shape in layer.items()
        },
    }


def _deepseek_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, vocab, rank = (
        config["hidden_size"],
        config["vocab_size"],
        config["dspark_markov_rank"],
    )
    streams, inner = config["hc_mult"], config["moe_intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    outputs = config["o_groups"] * config["o_lora_rank"]
    experts = range(config["n_routed_experts"])
    stage = {
        "main_proj.weight": (hidden, len(config["dspark_target_layer_ids"]) * hidden),
        "main_norm.weight": (hidden,),
        "attn_norm.weight": (hidden,),
        "attn.wq_a.weight": (config["q_lora_rank"], hidden),
        "attn.q_norm.weight": (config["q_lora_rank"],),
        "attn.wq_b.weight": (queries, config["q_lora_rank"]),
        "attn.wkv.weight": (config["head_dim"], hidden),
        "attn.kv_norm.weight": (config["head_dim"],),
        "attn.attn_sink": (config["num_attention_heads"],),
        "attn.wo_a.weight": (outputs, queries // config["o_groups"]),
        "attn.wo_b.weight": (hidden, outputs),
        "ffn_norm.weight": (hidden,),
        "ffn.gate.weight": (len(experts), hidden),
        "ffn.gate.bias": (len(experts),),
        "norm.weight": (hidden,),
        "hc_head_fn": (streams, streams * hidden),
        "hc_head_base": (streams,),
        "hc_head_scale": (1,),
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (vocab, rank),
        "confidence_head.proj.weight": (1, hidden + rank),
    }
    for block in ("attn", "ffn"):
        stage[f"hc_{block}_fn"] = ((2 + streams) * streams, streams * hidden)
        stage[f"hc_{block}_base"] = ((2 + streams) * streams,)
        stage[f"hc_{block}_scale"] = (3,)
    for owner in ("shared_experts", *(f"experts.{index}" for index in experts)):
        stage[f"ffn.{owner}.w1.weight"] = stage[f"ffn.{owner}.w3.weight"] = (inner, hidden)
        stage[f"ffn.{owner}.w2.weight"] = (hidden, inner)
    return {
        "embed.weight": (vocab, hidden),
        "head.weight": (vocab, hidden),
        **{f"mtp.0.{name}": shape for name, shape in stage.items()},
    }


def write_checkpoint(folder: Path, config: Config = PUBLISHED["qwen3-4b"]) -> int:
    """A random bfloat16 checkpoint; returns its bytes. One block of noise is repeated, starting elsewhere
    in each tensor, so that no two are equal and writing costs no more than the disk does.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    named = shapes(config)
    header: dict[str, object] = {}
    end = 0
    for name, shape in named.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    noise = np.random.default_rng(0).standard_normal(1 << 23, np.float32) * 0.02
    block = (noise.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    file = folder / "model.safetensors"
    with file.open("wb") as stream:
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors start aligned
        stream.write(len(text).to_bytes(8, "little") + text)
        for index, shape in enumerate(named.values()):
            left, start = 2 * math.prod(shape), 4096 * index % len(block)
            while left:
                left -= stream.write(block[start : start + left])
                start = 0
    return file.stat().st_size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, help="where to write; default: the temporary folder"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"]
    )
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="export-scale-", dir=arguments.folder))
    try:
        checkpoint_bytes = write_checkpoint(work / "drafter")
        export = [
            sys.executable, "-m", "dspark_trt", "export", "--draft", str(work / "drafter"),
            "-o", str(work / "bundle"), "--dtype", arguments.dtype, "--json",
        ]  # fmt: skip
        started = time.perf_counter()
        done = subprocess.run(export, check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        bundle_bytes = json.loads(done.stdout)["bytes"]
    finally:
        shutil.rmtree(work)
    peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    ratio = peak_bytes / checkpoint_bytes
    parameters = sum(map(math.prod, shapes(PUBLISHED["qwen3-4b"]).values()))
    print(
        f"{parameters / 1e9:.2f} B parameters, {checkpoint_bytes / 1e9:.2f} GB -> "
        f"{bundle_bytes / 1e9:.2f} GB {arguments.dtype} in {seconds:.1f} s, peak {peak_bytes / 1e9:.2f} GB "
        f"({ratio:.2f} x the checkpoint, at most {MOST_PEAK})"
    )
    print(
        json.dumps(
            {
                "parameters": parameters,
                "checkpoint_bytes": checkpoint_bytes,
                "bundle_bytes": bundle_bytes,
                "dtype": arguments.dtype,
                "seconds": round(seconds, 1),
                "peak_bytes": peak_bytes,
                "peak_over_checkpoint": round(ratio, 3),
            }
        )
    )
    return 0 if ratio <= MOST_PEAK else 1


if __name__ == "__main__":
    sys.exit(main())
