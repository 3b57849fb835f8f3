# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of drafters and targets, whatever format they come in, read into one description.

Reading needs no torch; ``TensorRef.load`` does.
"""

from dspark_trt.checkpoint.dialects import is_target
from dspark_trt.checkpoint.draft import draft_shapes, read_draft
from dspark_trt.checkpoint.either import read_checkpoint, source_hash
from dspark_trt.checkpoint.pair import check_pair
from dspark_trt.checkpoint.records import (
    EMBEDDING,
    LM_HEAD,
    Decision,
    DraftCheckpoint,
    DraftOverrides,
    TargetCheckpoint,
)
from dspark_trt.checkpoint.target import read_target
from dspark_trt.checkpoint.tensors import TensorRef

__all__ = [
    "EMBEDDING",
    "LM_HEAD",
    "Decision",
    "DraftCheckpoint",
    "DraftOverrides",
    "TargetCheckpoint",
    "TensorRef",
    "check_pair",
    "draft_shapes",
    "is_target",
    "read_checkpoint",
    "read_draft",
    "read_target",
    "source_hash",
]
