# SPDX-License-Identifier: Apache-2.0
"""What a caller asks of the engine, and what it gets back."""

from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite

from dspark_trt.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is decoded. The output is distributed as the target alone would be under these."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int | None = None  # None: a fresh one
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] | None = None  # None: those of the model
    ignore_eos: bool = False  # never stop at a stop token

    def __post_init__(self) -> None:
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature must be finite and at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise RequestError(f"top_k must be at least 0 (0: off), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must be between 0 and 1, got {self.min_p}")
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token was committed
    LENGTH = "length"  # max_new_tokens reached
    CAPACITY = "capacity"  # the context is as long as the models allow
    ABORTED = "aborted"
    ERROR = "error"  # see Completion.error


class TokenKind(StrEnum):
    """Where a committed token comes from."""

    DRAFTED = "drafted"  # proposed by the drafter, accepted by the target
    CORRECTED = "corrected"  # the target's own, in place of a rejected draft
    BONUS = "bonus"  # the target's own, behind everything that was verified


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Tokens that one round committed for one request; `finish_reason` comes with the last."""

    request_id: int
    token_ids: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """Counts of one request. A round is one draft step and the target step that verifies it."""

    prompt_tokens: int
    output_tokens: int
    accepted_lengths: tuple[int, ...]  # per round: accepted drafts plus the target's own token
    verification_lengths: tuple[int, ...]  # per round: ℓ
    seconds: float  # from admission to the last token
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
    finish_reason: FinishReason
    stats: RequestStats
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to continue."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    speculate: bool = True

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise RequestError("the prompt is empty: at least one token is needed")
