# SPDX-License-Identifier: Apache-2.0
"""Prompts of commands that answer many: a file of the user's, or the shipped ones."""

from pathlib import Path
from typing import TYPE_CHECKING

from dspark_trt.errors import RequestError

if TYPE_CHECKING:
    from dspark_trt.runtime.text import TextCodec
    from dspark_trt.runtime.trace_collection import Prompt


def read_prompts(codec: "TextCodec", file: Path | None) -> "list[Prompt]":
    """One prompt a line of ``file``, or the shipped ones by domain; as a chat where the model has one.

    Raises:
        RequestError: the file cannot be read or holds no prompt.
    """
    from dspark_trt.runtime.shipped_prompts import PROMPTS
    from dspark_trt.runtime.trace_collection import Prompt

    texts = [(text, domain) for domain, listed in PROMPTS.items() for text in listed]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"prompts file {file} cannot be read: {error}") from error
        texts = [(line, "all") for line in lines if line.strip()]
        if not texts:
            raise RequestError(f"prompts file {file} holds no prompt")

    def encode(text: str) -> tuple[int, ...]:
        if codec.has_chat_template:
            return codec.encode_chat([{"role": "user", "content": text}])
        return codec.encode(text)

    return [Prompt(encode(text), domain) for text, domain in texts]
