# SPDX-License-Identifier: Apache-2.0
"""Prompts of commands that answer many: a file of the user's, or the shipped ones."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_trt.errors import RequestError

if TYPE_CHECKING:
    from dspark_trt.bundle import Bundle
    from dspark_trt.runtime.text import TextCodec
    from dspark_trt.runtime.trace_collection import Prompt

PROMPTS_HELP = 'One prompt a line, or JSON lines with "prompt" or "prompt_ids", and "domain"'


def numbered_lines(file: Path) -> list[tuple[int, str]]:
    """Lines that are not blank, counted from 1; ended by line feeds alone, as JSON lines are.

    Raises:
        RequestError: the file cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
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
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{file}:{number} is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise RequestError(f"{file}:{number} is no JSON object")
    domain = str(record.get("domain", "all"))
    if isinstance(text := record.get("prompt"), str) and text.strip():
        return text, domain
    ids = record.get("prompt_ids")
    if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
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


def read_line(file: Path, number: int, line: str) -> tuple[str | list[int], str]:
    """A prompt and its domain: of a JSON object (see `read_record`), else the line as it is."""
    if line.lstrip().startswith("{"):
        return read_record(file, number, line)
    return line, "all"


def read_prompts(bundle: "Bundle", file: Path | None) -> "list[Prompt]":
    """One prompt a line of ``file``, text or JSON; or the shipped ones.

    Raises:
        RequestError: the file cannot be read or holds no prompt, or there is text and no tokenizer.
    """
    from dspark_trt.runtime.text import TextCodec
    from dspark_trt.runtime.trace_collection import Prompt

    codec = TextCodec(bundle) if TextCodec.is_available(bundle) else None
    if file is None:
        return shipped_prompts(_required(codec))
    found = []
    for number, line in numbered_lines(file):
        prompt, domain = read_line(file, number, line)
        if isinstance(prompt, str):
            prompt = list(encode_prompt(_required(codec), prompt))
        found.append(Prompt(tuple(prompt), domain))
    if not found:
        raise RequestError(f"prompts file {file} holds no prompt")
    return found


def _required(codec: "TextCodec | None") -> "TextCodec":
    if codec is None:
        raise RequestError(
            'this bundle has no tokenizer: give --prompts FILE with "prompt_ids" instead of text'
        )
    return codec
