# SPDX-License-Identifier: Apache-2.0
"""Names, types and shapes of every tensor of the verification graphs, for builders and runtimes alike.

Dimensions: T target rows, B requests, K = γ drafted tokens a request can have, V vocabulary,
N alternatives whose log-probability is asked for.
"""

from enum import StrEnum
from typing import NamedTuple

DOMAIN = "dspark"
OPSET = 24


class VerifyMode(StrEnum):
    """How draft tokens are checked; GREEDY is the small graph for batches without sampling."""

    REJECTION = "rejection"
    COUPLED = "coupled"
    GREEDY = "greedy"


class TensorSpec(NamedTuple):
    """One graph input or output; a string dimension is dynamic, ``K``, ``V`` and ``N`` become numbers."""

    name: str
    dtype: str  # NumPy spelling
    shape: tuple[str, ...]


_TARGET = (
    TensorSpec("target_logits", "float32", ("T", "V")),
    TensorSpec("offsets", "int64", ("B+1",)),  # request r owns rows offsets[r] .. offsets[r+1]-1
    TensorSpec("draft_tokens", "int64", ("B", "K")),  # anything beyond request r's ℓ_r
)
_SAMPLING = (
    TensorSpec("temperature", "float32", ("B",)),
    TensorSpec("top_k", "int64", ("B",)),
    TensorSpec("top_p", "float32", ("B",)),
    TensorSpec("min_p", "float32", ("B",)),
)
_DRAFT = (
    TensorSpec("draft_logits", "float32", ("B", "K", "V")),  # what the drafter sampled from
    TensorSpec("draft_temperature", "float32", ("B",)),
)
_UNIFORMS = TensorSpec("uniforms", "float32", ("B", "K+1"))
_NOISE = (
    TensorSpec("seeds", "int64", ("B",)),
    TensorSpec("positions", "int64", ("B",)),  # absolute position of the first drafted token
)
_PROCESSORS = (
    TensorSpec("logit_bias", "float32", ("B", "V")),
    TensorSpec("repetition_penalty", "float32", ("B",)),
    TensorSpec("presence_penalty", "float32", ("B",)),
    TensorSpec("frequency_penalty", "float32", ("B",)),
    TensorSpec("prompt_mask", "bool", ("B", "V")),  # the token occurs in the prompt
    TensorSpec("output_counts", "int32", ("B", "V")),  # occurrences among committed output tokens
    TensorSpec("allowed", "bool", ("T", "V")),
)

_OUTPUTS = (
    TensorSpec("accepted", "int64", ("B",)),
    TensorSpec("tokens", "int64", ("B", "K+1")),
)
_LOGPROBS = (
    TensorSpec("logprobs", "float32", ("B", "K+1")),
    TensorSpec("top_tokens", "int64", ("B", "K+1", "N")),
    TensorSpec("top_logprobs", "float32", ("B", "K+1", "N")),
)


def verify_inputs(mode: VerifyMode, *, processors: bool = False) -> tuple[TensorSpec, ...]:
    """Inputs of ``verify.onnx`` in graph order."""
    own = {
        VerifyMode.REJECTION: (*_DRAFT, *_SAMPLING, _UNIFORMS),
        VerifyMode.COUPLED: (*_SAMPLING, *_NOISE),
        VerifyMode.GREEDY: (),
    }[mode]
    return (*_TARGET, *own, *(_PROCESSORS if processors else ()))


def verify_outputs(*, logprobs: bool = False) -> tuple[TensorSpec, ...]:
    """Outputs of ``verify.onnx`` in graph order; unused places hold -1 (tokens) or 0 (log-probabilities)."""
    return (*_OUTPUTS, *(_LOGPROBS if logprobs else ()))
