# SPDX-License-Identifier: Apache-2.0
"""Drafters and targets with random weights, opened as the torch backend opens a bundle's."""

import argparse
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from dspark_trt.config import (
    ConfidenceInput,
    DecoderConfig,
    DraftConfig,
    HeadType,
    RopeConfig,
    SlotSemantics,
    TargetConfig,
    TargetFamily,
)
from dspark_trt.models.drafter import Drafter
from dspark_trt.models.target import Target
from dspark_trt.runtime.backends.torch_backend import DeviceParts
from dspark_trt.runtime.backends.torch_models import DeviceDraftModel, DeviceTargetModel

Module = TypeVar("Module", bound=nn.Module)
FLOAT32_PARTS = ("norm", "confidence_head")  # as bundles keep them


class Pair(NamedTuple):
    draft: DraftConfig
    target: TargetConfig
    drafter: Drafter
    served: Target
    dtype: str


def toy_pair(
    device: torch.device, options: argparse.Namespace, dtype: str | None = None
) -> Pair:
    small = options.small
    decoder = DecoderConfig(
        hidden_size=64 if small else 512, intermediate_size=96 if small else 1408,
        num_layers=2 if small else 6, num_heads=4, num_kv_heads=2,
        head_dim=16 if small else 128, vocab_size=97 if small else 32_000, rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e5), max_positions=512, qk_norm=True,
    )  # fmt: skip
    draft = drafter_config(decoder, gamma=2 if small else 7, rank=8 if small else 64, taps=2)
    target = TargetConfig(family=TargetFamily.QWEN3, decoder=decoder, tie_word_embeddings=False)
    dtype = dtype or ("float16" if device.type == "cuda" else "float32")
    return Pair(
        draft,
        target,
        with_random_weights(lambda: Drafter(draft), dtype, device),
        with_random_weights(lambda: Target(target, draft.target_layer_ids), dtype, device),
        dtype,
    )


def drafter_config(decoder: DecoderConfig, *, gamma: int, rank: int, taps: int) -> DraftConfig:
    return DraftConfig(
        decoder=decoder, block_slots=gamma, slot_semantics=SlotSemantics.ANCHOR_FIRST,
        mask_token_id=decoder.vocab_size - 1, target_layer_ids=tuple(range(taps)),
        num_target_layers=max(taps, decoder.num_layers), target_hidden_size=decoder.hidden_size,
        head_type=HeadType.VANILLA, markov_rank=rank, confidence=ConfidenceInput.HIDDEN_MARKOV,
    )  # fmt: skip


def with_random_weights(
    build: Callable[[], Module], dtype: str, device: torch.device
) -> Module:
    with torch.device(device):
        module = build()
    for name, parameter in module.named_parameters():
        is_norm = name.rpartition(".")[0].endswith("norm")
        if not is_norm:
            nn.init.normal_(parameter, std=0.05)
        if not any(part in name for part in FLOAT32_PARTS):
            parameter.data = parameter.data.to(getattr(torch, dtype))
    return module.to(device).eval().requires_grad_(False)


class Models(NamedTuple):
    parts: DeviceParts
    draft: DeviceDraftModel
    target: DeviceTargetModel


def open_models(pair: Pair, device: torch.device, *, requests: int, max_graphs: int) -> Models:
    parts = DeviceParts(
        pair.draft, pair.target, dtype=pair.dtype, requests=requests, device=device,
        max_graphs=max_graphs, top_logprobs=1,
    )  # fmt: skip
    steps = parts.module_steps(pair.drafter, pair.served)
    return Models(parts, parts.draft_model(steps), parts.target_model(steps))
