# SPDX-License-Identifier: Apache-2.0
"""Tensors of models in a Triton repository. Of the engine's, the configuration and the backend read this table.

`text_input` and `text_output` are the names that the server's `/generate` endpoints look for.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelTensor:
    name: str
    data_type: str  # Triton's spelling
    dims: tuple[int, ...]  # -1: any
    is_optional: bool = False
    reshape: tuple[int, ...] | None = None  # what the model takes for `dims`; None: the same


@dataclass(frozen=True, slots=True)
class ModelState:
    """What the server keeps between two requests of a sequence, zeros at first."""

    input_name: str
    output_name: str
    data_type: str
    dims: tuple[int, ...]


# Input name -> field of SamplingParams.
SAMPLING = {
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop": "stop",
    "ignore_eos": "ignore_eos",
}
_TYPES = {
    "max_tokens": "TYPE_INT32",
    "top_k": "TYPE_INT32",
    "seed": "TYPE_UINT64",
    "stop": "TYPE_STRING",
    "ignore_eos": "TYPE_BOOL",
}

INPUTS = (
    ModelTensor("text_input", "TYPE_STRING", (1,), is_optional=True),
    ModelTensor(
        "messages", "TYPE_STRING", (1,), is_optional=True
    ),  # JSON, for the chat template
    ModelTensor("token_ids", "TYPE_INT32", (-1,), is_optional=True),
    *(
        ModelTensor(
            name,
            _TYPES.get(name, "TYPE_FP32"),
            (-1,) if name == "stop" else (1,),
            is_optional=True,
        )
        for name in SAMPLING
    ),
    ModelTensor("stream", "TYPE_BOOL", (1,), is_optional=True),
    ModelTensor("speculate", "TYPE_BOOL", (1,), is_optional=True),
)
OUTPUTS = (
    ModelTensor("text_output", "TYPE_STRING", (1,)),
    ModelTensor("output_ids", "TYPE_INT32", (-1,)),
    ModelTensor("token_kinds", "TYPE_STRING", (-1,)),  # drafted, bonus, corrected
    ModelTensor("finish_reason", "TYPE_STRING", (1,)),  # empty but with the last
)
