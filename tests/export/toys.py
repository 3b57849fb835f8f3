# SPDX-License-Identifier: Apache-2.0
"""Inputs for modules and graphs, and edits of toy checkpoints that make a mistake visible."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark_trt.config import DecoderConfig
from tests.checkpoints import Weights

CAPACITY = 64


def empty_caches(
    decoder: DecoderConfig, batch: int, *, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [
        torch.zeros((batch, heads, CAPACITY, size), dtype=dtype)
        for heads, size in decoder.cache_sizes
    ]


def ragged_inputs(
    prompts: Sequence[Sequence[int]], context_len: Sequence[int] | None = None
) -> tuple[Tensor, ...]:
    """The target's inputs before its caches; all rows' logits are asked for."""
    starts = context_len or [0] * len(prompts)
    longest = max(map(len, prompts))
    pad_index: list[list[int]] = []
    unpad_index: list[int] = []
    positions: list[int] = []
    for request, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        first, length = len(positions), len(prompt)
        # Padding may point anywhere: here at row 0, which belongs to another request.
        pad_index.append([*range(first, first + length), *[0] * (longest - length)])
        unpad_index += range(request * longest, request * longest + length)
        positions += range(start, start + length)
    tokens = [token for prompt in prompts for token in prompt]
    return tuple(
        map(
            torch.tensor,
            (tokens, positions, pad_index, unpad_index, list(range(len(tokens))), list(starts)),
        )
    )


def make_sums_visible(weights: Weights) -> None:
    """Layer i of a Llama target with attention biases adds 2^i to every element, exactly."""
    embedding = weights["model.embed_tokens.weight"]
    embedding.copy_((embedding * 64).round() / 64)  # sums of such numbers are exact
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("o_proj.bias"):
            tensor.fill_(2.0 ** int(name.split(".")[2]))
