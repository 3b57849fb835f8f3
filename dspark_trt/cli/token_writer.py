# SPDX-License-Identifier: Apache-2.0
"""Prints tokens as they come, coloured by where they come from."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from dspark_trt.runtime.request import TokenKind
    from dspark_trt.runtime.text import TextCodec

STYLES = {"drafted": "green", "bonus": "bold cyan", "corrected": "yellow"}


class TokenWriter:
    """One answer on a console; token ids where there is no tokenizer."""

    def __init__(
        self, console: Console, codec: "TextCodec | None", *, is_coloured: bool
    ) -> None:
        from dspark_trt.runtime.text import TextStream

        self._console = console
        self._is_coloured = is_coloured
        self._stream = TextStream(codec) if codec else None

    def write(self, token_ids: Sequence[int], kinds: "Sequence[TokenKind]") -> None:
        for token, kind in zip(token_ids, kinds, strict=True):
            text = self._stream.push([token]) if self._stream else f"{token} "
            self._print(text, STYLES[kind] if self._is_coloured else "")

    def end(self) -> None:
        self._print((self._stream.flush() if self._stream else "") + "\n", "")

    def _print(self, text: str, style: str) -> None:
        self._console.print(
            text, style=style, end="", markup=False, highlight=False, soft_wrap=True
        )
