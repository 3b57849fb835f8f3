# SPDX-License-Identifier: Apache-2.0
"""Bodies of answers, for the OpenAPI description; `formats` writes them without a detour through these."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Strict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Strict):
    error: ErrorDetail


class Model(Strict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    dspark: dict[str, Any]


class ModelList(Strict):
    object: Literal["list"]
    data: list[Model]


class CachedTokens(Strict):
    cached_tokens: int


class Speculation(Strict):
    rounds: int
    accepted_length: float | None
    verified_drafts: int
    accepted_drafts: int


class Usage(Strict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    dspark: Speculation


class CommittedToken(Strict):
    id: int
    text: str
    kind: Literal["drafted", "corrected", "bonus"]


class Round(Strict):
    drafted: bool
    verified: int
    accepted: int
    survival: list[float] | None
    reason: str
    requests: int
    target_rows: int
    draft_seconds: float
    round_seconds: float
    tokens: list[CommittedToken]


class Rounds(Strict):
    rounds: list[Round]


class Choice(Strict):
    index: int
    finish_reason: Literal["stop", "length"] | None
    dspark: Rounds | None = None


class CompletionLogprobs(Strict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class ChatToken(Strict):
    token: str
    logprob: float
    bytes: list[int] | None


class ScoredChatToken(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(Strict):
    content: list[ScoredChatToken]
    refusal: None


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class _Answer(Strict):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Health(Strict):
    status: Literal["ok"]


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route."""
    return {status: {"model": ErrorBody} for status in statuses}
