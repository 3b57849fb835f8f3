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

import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2560, 5, 32, 8, 128
INTERMEDIATE, VOCAB, RANK, TAPS, GAMMA = 9728, 151_936, 256, (1, 9, 17, 25, 33), 7
MOST_PEAK = 1.5  # times the checkpoint's bytes

CONFIG = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "num_target_layers": 36,
    "block_size": GAMMA,
    "mask_token_id": 151_669,
    "target_layer_ids": list(TAPS),
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the drafter, in DeepSpec's names."""
    layer = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    top = {
        "embed_tokens": (VOCAB, HIDDEN),
        "lm_head": (VOCAB, HIDDEN),
        "fc": (HIDDEN, len(TAPS) * HIDDEN),
        "hidden_norm": (HIDDEN,),
        "norm": (HIDDEN,),
        "markov_head.markov_w1": (VOCAB, RANK),
        "markov_head.markov_w2": (VOCAB, RANK),
        "confidence_head.proj": (1, HIDDEN + RANK),
    }
    named = top | {
        f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()
    }
    return {f"{name}.weight": shape for name, shape in named.items()} | {
        "confidence_head.proj.bias": (1,)
    }


def write_checkpoint(folder: Path) -> int:
    """A random bfloat16 checkpoint; returns its bytes. One block of noise is repeated, starting elsewhere
    in each tensor, so that no two are equal and writing costs no more than the disk does.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes().items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    noise = np.random.default_rng(0).standard_normal(1 << 23, np.float32) * 0.02
    block = (noise.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    file = folder / "model.safetensors"
    with file.open("wb") as stream:
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors start aligned
        stream.write(len(text).to_bytes(8, "little") + text)
        for index, shape in enumerate(shapes().values()):
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
    parameters = sum(map(math.prod, shapes().values()))
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
