# SPDX-License-Identifier: Apache-2.0
"""Prompts of commands that answer many: a file of the user's, or the shipped ones."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_trt.errors import RequestError

if TYPE_CHECKING:
    from dspark_trt.runtime.text import TextCodec
    from dspark_trt.runtime.trace_collection import Prompt


def numbered_lines(file: Path) -> list[tuple[int, str]]:
    """Lines that are not blank, counted from 1.

    Raises:
        RequestError: the file cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompts file {file} cannot be read: {error}") from error
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def read_record(file: Path, number: int, line: str) -> tuple[str | list[int], str]:
    """Text or token ids of a JSON line, and its domain.

    Raises:
        RequestError: it is none, or holds neither.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{file}:{number} is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise RequestError(f"{file}:{number} is no JSON object")
    domain = str(record.get("domain", "all"))
    if isinstance(text := record.get("prompt"), str) and text.strip():
        return text, domain
    ids = record.get("prompt_ids")
    if isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids):
        return ids, domain
    raise RequestError(
        f'{file}:{number} has neither "prompt" (text) nor "prompt_ids" (numbers)'
    )


def encode_prompt(codec: "TextCodec", text: str, *, raw: bool = False) -> tuple[int, ...]:
    """Tokens of a question; as a chat where the model has one, unless ``raw``."""
    if raw or not codec.has_chat_template:
        return codec.encode(text)
    return codec.encode_chat([{"role": "user", "content": text}])


def shipped_prompts(codec: "TextCodec") -> "list[Prompt]":
    """The shipped ones, by domain."""
    from dspark_trt.runtime.shipped_prompts import PROMPTS
    from dspark_trt.runtime.trace_collection import Prompt

    return [
        Prompt(encode_prompt(codec, text), domain)
        for domain, texts in PROMPTS.items()
        for text in texts
    ]


def read_prompts(codec: "TextCodec", file: Path | None) -> "list[Prompt]":
    """One prompt a line of ``file``, or the shipped ones.

    Raises:
        RequestError: the file cannot be read or holds no prompt.
    """
    from dspark_trt.runtime.trace_collection import Prompt

    if file is None:
        return shipped_prompts(codec)
    lines = numbered_lines(file)
    if not lines:
        raise RequestError(f"prompts file {file} holds no prompt")
    return [Prompt(encode_prompt(codec, line)) for _, line in lines]
