# SPDX-License-Identifier: Apache-2.0
"""Answers that follow a JSON schema: a mask of the tokens that the grammar allows at every place.

Drafts need no mask of their own: the target's distribution has one, behind each drafted prefix, so a draft
that breaks the grammar is rejected and the output is distributed as without drafts.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from dspark_trt.bundle import TOKENIZER, Bundle
from dspark_trt.errors import RequestError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_KEPT_GRAMMARS = 64
# Whitespace as people and libraries write it, but bounded: a model cannot fill its answer with it.
_LAYOUT: "JsonCompileOptions" = {
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n[ \t]{0,32}",
    "lenient": False,
}


class JsonGrammars:
    """Grammars of one bundle's tokenizer; those used last are kept compiled. May be called from any thread."""

    def __init__(self, bundle: Bundle) -> None:
        self._stop_ids = bundle.target.stop_token_ids if bundle.target else ()
        self._vocab = bundle.draft.decoder.vocab_size
        self._path = bundle.path / TOKENIZER / "tokenizer.json"
        self._tokenizer: LLTokenizer | None = None
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def allowed_tokens(self, schema: Mapping[str, Any]) -> "GrammarMask":
        """A mask for one sequence that has to be a JSON document of this schema.

        Raises:
            RequestError: the schema is malformed, uses what cannot be enforced, or is too large; or the
                model has no stop token, so that a document could not end.
        """
        if not self._stop_ids:
            raise RequestError("response_format needs a model with a stop token")
        text = json.dumps(schema)  # in its own order: answers have their properties in it
        with self._lock:
            matcher = self._matchers.pop(text, None) or self._compiled(text)
            self._matchers[text] = matcher
            if len(self._matchers) > _KEPT_GRAMMARS:
                self._matchers.popitem(last=False)
            return GrammarMask(matcher.deep_copy(), self._vocab, frozenset(self._stop_ids))

    def _compiled(self, schema: str) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                str(self._path), n_vocab=self._vocab, eos_token=list(self._stop_ids)
            )
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_LAYOUT)
        except ValueError as error:
            raise RequestError(f"the JSON schema cannot be used: {error}") from error
        limits = LLParserLimits(verbose_errors=False)  # long ones quote the whole schema
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(f"the JSON schema cannot be used: {_reason(matcher)}")
        return matcher


class GrammarMask:
    """`AllowedTokens` of one sequence. The engine asks place by place, drafts included, and goes back where
    a draft was rejected; so does the matcher.
    """

    def __init__(self, matcher: LLMatcher, vocab: int, stop_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._stop_ids = stop_ids
        self._consumed: list[int] = []

    def __call__(self, output: Sequence[int]) -> NDArray[np.bool_]:  # -> [V]
        if not self._stop_ids.isdisjoint(output):
            return np.ones(self._vocab, np.bool_)  # behind the end: never committed
        self._move_to(list(output))
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._vocab, bitorder="little").view(np.bool_)

    def _move_to(self, output: list[int]) -> None:
        kept = min(len(self._consumed), len(output))
        while self._consumed[:kept] != output[:kept]:  # at most a round's drafts
            kept -= 1
        if back := len(self._consumed) - kept:
            self._matcher.rollback(back)
        self._matcher.consume_tokens(output[kept:])
        self._consumed = output
        if self._matcher.is_error():
            raise RequestError(f"the grammar stopped: {_reason(self._matcher)}")


def _reason(matcher: LLMatcher) -> str:
    """In one line: errors of regular expressions draw pictures."""
    return " ".join(matcher.get_error().split())
