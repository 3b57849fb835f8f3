# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests. What is not listed here is refused by name: nothing is silently ignored.

Null means absent, as in OpenAI's API. Types are strict: "1" is no number. Validation ends at the first fault
of a list or object: a body of a megabyte can hold a million of them, and a report of all takes seconds.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from dspark_trt.bundle import MOST_TOP_LOGPROBS

_MOST_STOPS = 16
_MOST_BIASES = 1024
_SHOWN_NAME = 100
_INT64 = 1 << 63

# What OpenAI's API has and this server has not: values that ask for nothing are accepted.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # without tools there is nothing to call
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "user": (),
    "verbosity": (),
    "web_search_options": (),
}


def _few_biases(value: Any) -> Any:
    """Before the entries are looked at; a bound of the type would come after them."""
    if isinstance(value, dict) and len(value) > _MOST_BIASES:
        raise ValueError(
            f"logit_bias has {len(value)} entries, at most {_MOST_BIASES} are taken"
        )
    return value


Text = Annotated[str, Field(min_length=1)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    dict[TokenName, Bias], BeforeValidator(_few_biases), Field(max_length=_MOST_BIASES)
]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _know_every_name(cls, body: Any) -> Any:
        if isinstance(body, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for name in body:
                if name not in known:
                    # Made up by a client: may be long, and half of a surrogate pair.
                    shown = str(name)[:_SHOWN_NAME].encode("utf-8", "replace").decode()
                    raise PydanticCustomError(
                        "unknown_parameter", "unknown parameter: {name}", {"name": shown}
                    )
        return body


class StreamOptions(Strict):
    include_usage: bool | None = None


class Extensions(Strict):
    """This server's own."""

    trace: bool | None = Field(None, description="Add each round's drafts, survival and tokens")
    speculate: bool | None = Field(None, description="false: the target decodes alone")


class Sampling(Strict):
    """What both endpoints take."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128)
    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS)] | None = None
    seed: int | None = Field(
        None, ge=-_INT64, lt=_INT64, description="Choice i is drawn with seed + i"
    )
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Biases | None = None
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    # Extensions that other servers have too.
    top_k: int | None = Field(None, ge=0, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    ignore_eos: bool | None = None
    dspark: Extensions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        kept = dict(body)
        for name in body.keys() & _UNSUPPORTED.keys() - cls.model_fields.keys():
            if body[name] is not None and not any(
                body[name] == idle and type(body[name]) is type(idle)
                for idle in _UNSUPPORTED[name]
            ):
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "{name} is not supported by this server",
                    {"name": name},
                )
            del kept[name]
        return kept

    @model_validator(mode="after")
    def _options_belong_to_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self


class CompletionRequest(Sampling):
    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class PlainText(Strict):
    type: Literal["text"]


class JsonObject(Strict):
    type: Literal["json_object"]


class NamedSchema(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="The answer always follows the schema")


class JsonSchema(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens mean the same: give one")
        if self.ignore_eos and not isinstance(self.response_format, PlainText | None):
            raise ValueError(
                "ignore_eos never ends, so it cannot be used with this response_format"
            )
        return self
