# SPDX-License-Identifier: Apache-2.0
"""From a request body to the engine's requests."""

from dataclasses import dataclass
from typing import Any

from dspark_trt.bundle import Bundle
from dspark_trt.errors import BundleError, CapacityError, RequestError
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.serving.grammar import JsonGrammars
from dspark_trt.runtime.serving.round_trace import TracedRequest
from dspark_trt.runtime.serving.schema import (
    ChatRequest,
    CompletionRequest,
    JsonObject,
    JsonSchema,
    Sampling,
)
from dspark_trt.runtime.serving.settings import ServerSettings
from dspark_trt.runtime.text import TextCodec

COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
# Where float32 ends: colder than this only the best token is left, and a smaller top_p keeps no more than it.
_GREEDY_BELOW = 1e-5
_TOP_P_OF_ONE = 1e-6
Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request as sequences: choice i of prompt p is number p * n + i."""

    requests: tuple[Request, ...]
    prompts: tuple[Prompt, ...]
    top_logprobs: int | None  # None: no log-probabilities
    is_traced: bool


class Translator:
    """Knows the bundle: its tokenizer, template and limits.

    Raises:
        BundleError: the bundle has no tokenizer.
    """

    def __init__(self, bundle: Bundle, settings: ServerSettings) -> None:
        if not TextCodec.is_available(bundle):
            raise BundleError(
                f"{bundle.path} has no tokenizer.json, which a server needs. "
                "Put the file beside the target's weights and export again."
            )
        self.codec = TextCodec(bundle)
        self._context = bundle.max_context_tokens
        self._vocab = bundle.draft.decoder.vocab_size
        self._settings = settings
        self._grammars = JsonGrammars(bundle)

    def completion(self, body: CompletionRequest) -> Job:
        """The sequences of a completion.

        Raises:
            RequestError: something asked for cannot be done here.
            CapacityError: a prompt or its answer is too long.
        """
        texts = _listed(body.prompt)
        self._check_count(len(texts), body.n or 1)
        prompts = tuple(self._encode(text) for text in texts)
        asked = body.max_tokens or min(COMPLETION_TOKENS, self._most_output)
        return self._job(body, prompts, asked, None, body.logprobs)

    def chat(self, body: ChatRequest) -> Job:
        """The sequences of a chat completion; without a limit an answer takes what the context has left.

        Raises:
            RequestError: something asked for cannot be done here.
            CapacityError: the conversation or its answer is too long.
        """
        if not self.codec.has_chat_template:
            raise RequestError("this model has no chat template: use /v1/completions")
        messages = [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": message.text,
            }
            for message in body.messages
        ]
        _require_text(*(message["content"] for message in messages))
        self._check_count(1, body.n or 1)
        prompt = self.codec.encode_chat(messages)
        room = max(self._context - len(prompt), 1)
        asked = body.max_completion_tokens or body.max_tokens or min(room, self._most_output)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return self._job(body, (prompt,), asked, _schema(body), logprobs)

    @property
    def _most_output(self) -> int:
        return self._settings.max_output_tokens or self._context

    def _encode(self, prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, list):
            return tuple(prompt)
        _require_text(prompt)
        return self.codec.encode(prompt)

    def _job(
        self,
        body: Sampling,
        prompts: tuple[Prompt, ...],
        max_new_tokens: int,
        schema: dict[str, Any] | None,
        logprobs: int | None,
    ) -> Job:
        self._check_lengths(prompts, max_new_tokens)
        extensions = body.dspark
        is_traced = bool(extensions and extensions.trace)
        make = TracedRequest if is_traced else Request
        requests = tuple(
            make(
                prompt_ids=prompt,
                params=self._params(body, choice, max_new_tokens, logprobs),
                speculate=not (extensions and extensions.speculate is False),
                detokenize=True,
                allowed_tokens=None
                if schema is None
                else self._grammars.allowed_tokens(schema),
                timeout_s=self._settings.request_timeout_s,
            )
            for prompt in prompts
            for choice in range(body.n or 1)
        )
        return Job(requests, prompts, logprobs, is_traced)

    def _check_count(self, prompts: int, choices: int) -> None:
        """Before anything is encoded."""
        if prompts * choices > self._settings.max_choices:
            raise RequestError(
                f"{prompts} prompts times n = {choices} are more sequences than the "
                f"{self._settings.max_choices} this server takes in one request"
            )

    def _check_lengths(self, prompts: tuple[Prompt, ...], max_new_tokens: int) -> None:
        most = self._settings.max_prompt_tokens
        for prompt in prompts:
            if most is not None and len(prompt) > most:
                raise CapacityError(
                    f"the prompt has {len(prompt)} tokens; this server takes {most}"
                )
            if len(prompt) + max_new_tokens > self._context:
                raise CapacityError(
                    f"the prompt has {len(prompt)} tokens and the answer may have {max_new_tokens}; "
                    f"this model's context holds {self._context} in all"
                )
        if max_new_tokens > self._most_output:
            raise RequestError(
                f"max_tokens is {max_new_tokens}; this server gives {self._most_output}"
            )

    def _params(
        self, body: Sampling, choice: int, max_new_tokens: int, logprobs: int | None
    ) -> SamplingParams:
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        _require_text(*stop)
        temperature = _or(body.temperature, 1.0)
        return SamplingParams(
            temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
            top_k=min(body.top_k or 0, self._vocab),
            top_p=max(_or(body.top_p, 1.0), _TOP_P_OF_ONE),
            min_p=_or(body.min_p, 0.0),
            repetition_penalty=_or(body.repetition_penalty, 1.0),
            presence_penalty=_or(body.presence_penalty, 0.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            logit_bias=tuple((int(t), b) for t, b in (body.logit_bias or {}).items()),
            # The generator takes no negative seeds; OpenAI's API does.
            seed=None if body.seed is None else (body.seed + choice) % (1 << 64),
            max_new_tokens=max_new_tokens,
            stop=tuple(stop),
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _listed(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def _schema(body: ChatRequest) -> dict[str, Any] | None:
    asked = body.response_format
    if isinstance(asked, JsonObject):
        return {"type": "object"}
    if isinstance(asked, JsonSchema):
        return asked.json_schema.json_schema or {}
    return None


def _require_text(*texts: str) -> None:
    """JSON can write half of a surrogate pair; no tokenizer takes it."""
    for text in texts:
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise RequestError("text has a lone surrogate, which is no character")
