# SPDX-License-Identifier: Apache-2.0
"""A toy target whose next token follows from the last one alone, so that drafts can be judged by a table."""

from pathlib import Path

import torch

from dspark_trt.checkpoint import TargetCheckpoint, read_target
from dspark_trt.models.loading import load_target
from tests.checkpoints import Weights, edit_tensors, write_target


def bigram_target(path: Path) -> TargetCheckpoint:
    """A target whose layers add nothing to the embedding."""

    def silence(weights: Weights) -> None:
        for name, tensor in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()

    edit_tensors(write_target(path, tied=False), silence)
    return read_target(path)


def successors(target: TargetCheckpoint) -> list[int]:
    """The greedy next token of every token."""
    module = load_target(target, (0,))
    with torch.inference_mode():
        hidden = module.norm(module.embed_tokens.weight.float())
        tokens: list[int] = module.lm_head(hidden).argmax(-1).tolist()
    return tokens
