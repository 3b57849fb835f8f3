# SPDX-License-Identifier: Apache-2.0
"""Text in, text out: the bundle's tokenizer and chat template, and decoding piece by piece."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dspark_trt.bundle import TOKENIZER, Bundle
from dspark_trt.errors import BundleError, RequestError

_LONG_TEXT = (
    4096  # characters; from here on other threads must go on meanwhile, which a batch allows
)
_REPLACEMENT = "\ufffd"  # what a decoder writes for an unfinished character


class TextCodec:
    """Encodes prompts and decodes tokens with the target's own tokenizer."""

    def __init__(self, bundle: Bundle) -> None:
        folder = bundle.path / TOKENIZER
        if not self.is_available(bundle):
            raise BundleError(
                f"{bundle.path} has no tokenizer.json, so it takes token ids only (--prompt-ids). "
                "Put the file beside the target's weights and export again."
            )
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = folder / "tokenizer_config.json"
        self._config: dict[str, Any] = (
            json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
        )
        template = folder / "chat_template.jinja"
        self._template: str | None = (
            template.read_text(encoding="utf-8")
            if template.is_file()
            else self._config.get("chat_template")
        )

    @staticmethod
    def is_available(bundle: Bundle) -> bool:
        """Whether the bundle carries a tokenizer."""
        return (bundle.path / TOKENIZER / "tokenizer.json").is_file()

    @property
    def has_chat_template(self) -> bool:
        return isinstance(self._template, str)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        if len(text) < _LONG_TEXT:
            return tuple(
                self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            )
        (found,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return tuple(found.ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Tokens of a conversation, ready for the assistant's answer.

        Raises:
            RequestError: the tokenizer has no chat template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestError("this bundle's tokenizer has no chat template; pass --raw")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        special = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in self._config.items()
            if name.endswith("_token") and token is not None
        }
        try:
            text = environment.from_string(self._template or "").render(
                messages=list(messages), add_generation_prompt=True, **special
            )
        except TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def piece(self, token_id: int) -> str:
        """One token by itself, special ones by their name; bytes of a part of a character as U+FFFD."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))


def _refuse(message: str) -> None:
    """Chat templates call this on messages they cannot render."""
    raise RequestError(f"the chat template refuses these messages: {message}")


class TextStream:
    """Turns tokens into text as they come, holding back bytes of unfinished characters.

    Decoding a window that starts a few tokens back keeps spacing right without decoding everything again.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        self._window = 0  # first token of the window
        self._sent = 0  # tokens whose text is out

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens."""
        self._tokens += token_ids
        before = self._codec.decode(self._tokens[self._window : self._sent])
        after = self._codec.decode(self._tokens[self._window :])
        if after.endswith(_REPLACEMENT) or len(after) <= len(before):
            return ""
        self._window, self._sent = self._sent, len(self._tokens)
        return after[len(before) :]

    def flush(self) -> str:
        """What is left when no more tokens come, unfinished characters included."""
        before = self._codec.decode(self._tokens[self._window : self._sent])
        after = self._codec.decode(self._tokens[self._window :])
        self._window = self._sent = len(self._tokens)
        return after[len(before) :]


class StopScanner:
    """Finds stop strings in text that comes in pieces, holding back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string was found (text ends before it)."""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
