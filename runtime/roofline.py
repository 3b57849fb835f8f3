# SPDX-License-Identifier: Apache-2.0
"""A cost table from data sheets: what a step would take on a GPU that is not here.

A step over B tokens reads every weight once (of a mixture of experts: those of the experts that B
tokens reach) and does two operations a weight and token; reading and computing overlap in part. Added to
it are context reads, the draft step and a constant for launches. Sizes are padded to captured graphs.

The model knows no kernels: it is for comparing policies on one curve, not for predicting a machine.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import RequestError
from dspark_trt.runtime.cost_table import CostTable

Floats = NDArray[np.float64]

GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, 8193, 64))


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Peak figures of a data sheet and the shares of them that inference reaches."""

    name: str
    bytes_per_second: float
    flops: float  # dense bfloat16
    memory_share: float = 0.8
    compute_share: float = 0.7
    overlap: float = 0.8  # of the shorter of reading and computing, hidden behind the longer
    launch_seconds: float = 2e-4  # a step, beyond its kernels


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a decoding step of a target and its drafter touches; bytes are of stored weights."""

    name: str
    weight_bytes: (
        float  # read by every step: all of a dense model, all but the experts of others
    )
    flops_per_token: float
    context_row_bytes: float  # keys and values of one position over all layers
    draft_bytes: float  # read once a draft step
    draft_flops_per_token: float
    sequential_bytes: float  # read once a drafted token by the sequential head
    gamma: int
    experts: int = 0
    experts_per_token: int = 0
    expert_bytes: float = 0.0  # one expert, over all layers


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="h100-sxm", bytes_per_second=3.35e12, flops=989e12),
        Gpu(name="h200", bytes_per_second=4.8e12, flops=989e12),
        Gpu(name="a100-80gb", bytes_per_second=2.04e12, flops=312e12),
        Gpu(name="b200", bytes_per_second=8.0e12, flops=2250e12),
        Gpu(name="l40s", bytes_per_second=0.864e12, flops=362e12),
    )
}


def dense_shape(
    name: str,
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    draft_layers: int = 5,
    taps: int = 5,
    markov_rank: int = 256,
    gamma: int = 7,
    weight_bytes: float = 2.0,
) -> ModelShape:
    """Count a dense gated-MLP target and a DSpark drafter of its width (``DESIGN``, section 1)."""
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * intermediate
    target = layers * layer + hidden * vocab  # the embedding is looked up, the head is read
    draft = draft_layers * layer + hidden * vocab + taps * hidden * hidden
    return ModelShape(
        name=name,
        weight_bytes=weight_bytes * target,
        flops_per_token=2.0 * target,
        context_row_bytes=2.0 * 2 * layers * kv_heads * head_dim,
        draft_bytes=weight_bytes * draft,
        draft_flops_per_token=2.0 * draft,
        sequential_bytes=weight_bytes * vocab * markov_rank,
        gamma=gamma,
    )


MODELS = {
    shape.name: shape
    for shape in (
        dense_shape(
            "qwen3-4b", hidden=2560, intermediate=9728, layers=36, heads=32, kv_heads=8,
            head_dim=128, vocab=151936,
        ),
        dense_shape(
            "qwen3-8b", hidden=4096, intermediate=12288, layers=36, heads=32, kv_heads=8,
            head_dim=128, vocab=151936,
        ),
        dense_shape(
            "qwen3-14b", hidden=5120, intermediate=17408, layers=40, heads=40, kv_heads=8,
            head_dim=128, vocab=151936,
        ),
    )
}  # fmt: skip


def roofline_table(gpu: Gpu, model: ModelShape) -> CostTable:
    """The cost table of ``model`` on ``gpu``, draft step and context reads apart."""
    tokens = np.array(GRAPH_SIZES)
    drafting = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
    rows = drafting * model.gamma
    draft = _seconds(
        gpu, np.full(rows.size, model.draft_bytes), rows * model.draft_flops_per_token
    )
    draft += model.gamma * model.sequential_bytes / (gpu.bytes_per_second * gpu.memory_share)
    step = _seconds(gpu, _weights_read(model, tokens), tokens * model.flops_per_token)
    return CostTable(
        tokens,
        1.0 / (step + gpu.launch_seconds),
        requests=drafting,
        draft_seconds=draft + gpu.launch_seconds,
        context_seconds=model.context_row_bytes / (gpu.bytes_per_second * gpu.memory_share),
        origin={"machine": f"roofline of {gpu.name}", "model": model.name},
    )


def named_table(gpu: str, model: str) -> CostTable:
    """``roofline_table`` by name; RequestError lists the names there are."""
    if gpu not in GPUS or model not in MODELS:
        raise RequestError(
            f"no roofline for {gpu!r} and {model!r}; GPUs: {', '.join(GPUS)}; models: "
            f"{', '.join(MODELS)}"
        )
    return roofline_table(GPUS[gpu], MODELS[model])


def _seconds(gpu: Gpu, bytes_read: Floats, flops: Floats) -> Floats:
    reading = bytes_read / (gpu.bytes_per_second * gpu.memory_share)
    computing = flops / (gpu.flops * gpu.compute_share)
    hidden = gpu.overlap * np.minimum(reading, computing)
    return np.asarray(reading + computing - hidden)


def _weights_read(model: ModelShape, tokens: NDArray[np.int64]) -> Floats:
    if not model.experts:
        return np.full(tokens.size, model.weight_bytes)
    reached = 1.0 - (1.0 - model.experts_per_token / model.experts) ** tokens
    return np.asarray(model.weight_bytes + model.experts * model.expert_bytes * reached)
