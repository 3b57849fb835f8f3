# SPDX-License-Identifier: Apache-2.0
"""What a caller asks of the engine, and what it gets back."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from dspark_trt.bundle import MOST_TOP_LOGPROBS
from dspark_trt.errors import RequestError

_NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_WHOLE = ("top_k", "max_new_tokens", "seed", "logprobs")
_OPTIONAL = ("seed", "logprobs")
_MOST_WHOLE = 2**63 - 1
_MOST = 1e30  # as good as infinite, and float32 holds sums of it

_MOST_REPETITION = 1e6  # it multiplies and divides: float32 holds products of both

# Given the output so far (tokens of this request, drafts under verification included), which tokens may
# follow: bool [V]. Called once for every target row of the request.
AllowedTokens = Callable[[Sequence[int]], NDArray[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is decoded. The output is distributed as the target alone would be under these."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off; over prompt and output, as in Hugging Face
    presence_penalty: float = 0.0  # over the output, as in OpenAI's API
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    seed: int | None = None  # None: a fresh one
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] | None = None  # None: those of the model
    stop: tuple[str, ...] = ()  # strings that end the text, themselves left out
    ignore_eos: bool = False  # never stop at a stop token
    logprobs: int | None = None  # log-probabilities of the tokens, and of so many alternatives

    def __post_init__(self) -> None:
        self._require_types()
        self._require("temperature", self.temperature >= 0, "finite and at least 0")
        self._require("top_k", self.top_k >= 0, "at least 0 (0: off)")
        self._require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._require("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        self._require(
            "repetition_penalty",
            1 / _MOST_REPETITION <= self.repetition_penalty <= _MOST_REPETITION,
            f"between {1 / _MOST_REPETITION:g} and {_MOST_REPETITION:g}",
        )
        self._require("presence_penalty", True, "finite")
        self._require("frequency_penalty", True, "finite")
        self._require("max_new_tokens", self.max_new_tokens >= 1, "at least 1")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_TOP_LOGPROBS:
            raise RequestError(
                f"logprobs must be between 0 and {MOST_TOP_LOGPROBS}, got {self.logprobs}"
            )
        if self.seed is not None and self.seed < 0:
            raise RequestError(f"seed must be at least 0, got {self.seed}")
        if any(not text for text in self.stop):
            raise RequestError("a stop string is empty")
        for token, bias in self.logit_bias:
            if token < 0 or not _is_usable(bias):
                raise RequestError(f"logit_bias of token {token} must be finite, got {bias}")

    def _require_types(self) -> None:
        """What is no number would fail in the middle of a round, and with it every other request."""
        for name in _NUMBERS:
            if not isinstance(value := getattr(self, name), Real):
                raise RequestError(f"{name} must be a number, got {value!r}")
        for name in _WHOLE:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, Integral):
                raise RequestError(f"{name} must be a whole number, got {value!r}")
            if name != "seed" and abs(int(value)) > _MOST_WHOLE:
                raise RequestError(f"{name} must be at most {_MOST_WHOLE}, got {value}")
        if not _are(str, self.stop):
            raise RequestError(f"stop must be a sequence of strings, got {self.stop!r}")
        if self.stop_token_ids is not None and not _are(Integral, self.stop_token_ids):
            raise RequestError(
                f"stop_token_ids must be a sequence of whole numbers, got {self.stop_token_ids!r}"
            )
        if not _are(Sequence, self.logit_bias) or not all(
            len(pair) == 2 and isinstance(pair[0], Integral) and isinstance(pair[1], Real)
            for pair in self.logit_bias
        ):
            raise RequestError(
                f"logit_bias must be pairs of a token and a number, got {self.logit_bias!r}"
            )

    def _require(self, name: str, is_fine: bool, expected: str) -> None:
        value = getattr(self, name)
        if not (is_fine and (name in _WHOLE or _is_usable(value))):
            raise RequestError(f"{name} must be {expected}, got {value}")

    @property
    def uses_processors(self) -> bool:
        """Whether plain temperature, top-k, top-p and min-p are not enough."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.logprobs is not None
        )


def _are(kind: type, values: object) -> bool:
    """Whether it is a collection of them, and no text or mapping, which can be gone through as well."""
    if not isinstance(values, Collection) or isinstance(values, str | bytes | Mapping):
        return False
    return all(isinstance(value, kind) for value in values)


def _is_usable(value: float) -> bool:
    return abs(value) <= _MOST  # not so of NaN


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token or string
    LENGTH = "length"  # max_new_tokens reached
    CAPACITY = "capacity"  # the context is as long as the models allow
    ABORTED = "aborted"
    TIMEOUT = "timeout"  # the request's own deadline passed
    ERROR = "error"  # see Completion.error


class TokenKind(StrEnum):
    """Where a committed token comes from."""

    DRAFTED = "drafted"  # proposed by the drafter, accepted by the target
    CORRECTED = "corrected"  # the target's own, in place of a rejected draft
    BONUS = "bonus"  # the target's own, behind everything that was verified


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities under the target's raw logits."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # most likely tokens, best first


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Tokens that one round committed for one request; `finish_reason` comes with the last."""

    request_id: int
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    text: str = ""  # with `detokenize`: text that is certain by now
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """Counts of one request. A round is one draft step and the target step that verifies it."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, taken from the prefix cache
    output_tokens: int
    accepted_lengths: tuple[int, ...]  # per round: accepted drafts plus the target's own token
    verification_lengths: tuple[int, ...]  # per round: ℓ
    reasons: Mapping[str, int]  # rounds, those without drafts included, by why ℓ was chosen
    seconds: float  # from submission to the last token
    first_token_seconds: float  # from submission to the first token
    decode_seconds: float  # from the first token to the last

    @property
    def rounds(self) -> int:
        return len(self.accepted_lengths)

    @property
    def accepted_length(self) -> float | None:
        """τ, the mean over rounds; None before the first round."""
        return sum(self.accepted_lengths) / self.rounds if self.rounds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed: tokens after the first over the time they took."""
        if self.output_tokens < 2 or self.decode_seconds <= 0:
            return None
        return (self.output_tokens - 1) / self.decode_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    request_id: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    text: str  # with `detokenize`
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stats: RequestStats
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to continue."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    speculate: bool = True
    detokenize: bool = False  # fill the text of events; stop strings imply it
    allowed_tokens: AllowedTokens | None = None  # a grammar's mask
    priority: int = 0  # higher is admitted first; equal ones in order of arrival
    timeout_s: float | None = None  # from submission to the last token

    def __post_init__(self) -> None:
        if not isinstance(self.params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {self.params!r}")
        ids = self.prompt_ids
        if isinstance(ids, np.ndarray):
            object.__setattr__(self, "prompt_ids", tuple(ids.tolist()))
        elif isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise RequestError(
                f"prompt_ids must be a tuple of whole numbers, got a {type(ids).__name__}"
            )
        elif not isinstance(ids, tuple):
            object.__setattr__(self, "prompt_ids", tuple(ids))
        if not len(self.prompt_ids):
            raise RequestError("the prompt is empty: at least one token is needed")
        strange = [
            kind for kind in {*map(type, self.prompt_ids)} if not issubclass(kind, Integral)
        ]
        if strange:
            raise RequestError(f"prompt_ids must be whole numbers, got a {strange[0].__name__}")
        if self.allowed_tokens is not None and not callable(self.allowed_tokens):
            raise RequestError(
                f"allowed_tokens must be a function of the output so far, got {self.allowed_tokens!r}"
            )
        if not isinstance(self.priority, Integral):
            raise RequestError(f"priority must be a whole number, got {self.priority!r}")
        if self.timeout_s is not None and not (
            isinstance(self.timeout_s, Real) and self.timeout_s > 0
        ):
            raise RequestError(f"timeout_s must be a number above 0, got {self.timeout_s!r}")

    @property
    def wants_text(self) -> bool:
        return self.detokenize or bool(self.params.stop)

    @property
    def uses_processors(self) -> bool:
        return self.allowed_tokens is not None or self.params.uses_processors
