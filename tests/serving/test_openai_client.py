# SPDX-License-Identifier: Apache-2.0
"""The `openai` client against a real server: equal to the engine in this process, token for token."""

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import openai
import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.runtime.request import Completion, Request, SamplingParams
from dspark_trt.runtime.text import TextCodec
from tests.serving.conftest import MODEL, PROMPT, Running

Alone = Callable[[Request], Completion]

TRACE = {"dspark": {"trace": True}}
MESSAGES: Any = [{"role": "user", "content": "Tom has 5 pens and loses 2. How many are left?"}]


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def codec(tiny_bundle: Bundle) -> TextCodec:
    return TextCodec(tiny_bundle)


def tokens_of(choice: Any) -> tuple[int, ...]:
    """Token ids of a choice, from its trace."""
    return tuple(token["id"] for each in choice.dspark["rounds"] for token in each["tokens"])


def params(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "seed": seed,
            "temperature": 0.9,
            "max_new_tokens": 40,
            "ignore_eos": True,
            **changes,
        }
    )


# Equal to the engine ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("seed", [0, 11])
def test_a_completion_is_the_engines(
    client: openai.OpenAI, alone: Alone, codec: TextCodec, seed: int, temperature: float
) -> None:
    expected = alone(
        Request(
            prompt_ids=codec.encode(PROMPT),
            params=params(seed, temperature=temperature, top_p=0.95),
            detokenize=True,
        )
    )
    done = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        seed=seed,
        temperature=temperature,
        top_p=0.95,
        max_tokens=40,
        extra_body={**TRACE, "ignore_eos": True},
    )
    (choice,) = done.choices
    assert tokens_of(choice) == expected.token_ids
    assert choice.text == expected.text
    assert choice.finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 40
    assert done.usage.prompt_tokens == len(expected.prompt_ids)
    assert done.usage.dspark["rounds"] == expected.stats.rounds  # type: ignore[attr-defined]
    assert done.usage.dspark["accepted_length"] == expected.stats.accepted_length  # type: ignore[attr-defined]


def test_sixteen_streams_at_once_are_each_the_engines(
    server: Running, alone: Alone, codec: TextCodec
) -> None:
    """Twice as many as decode at the same time."""
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)

    async def read(seed: int) -> tuple[str, list[int]]:
        text, tokens = "", []
        stream: Any = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            seed=seed,
            temperature=0.9,
            max_tokens=40,
            stream=True,
            extra_body={**TRACE, "ignore_eos": True},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                if extension := getattr(choice, "dspark", None):
                    tokens += [each["id"] for each in extension["round"]["tokens"]]
        return text, tokens

    async def all_of_them() -> list[tuple[str, list[int]]]:
        return await asyncio.gather(*(read(seed) for seed in range(16)))

    results = asyncio.run(all_of_them())
    prompt = codec.encode_chat(MESSAGES)
    for seed, (text, tokens) in enumerate(results):
        expected = alone(Request(prompt_ids=prompt, params=params(seed), detokenize=True))
        assert tuple(tokens) == expected.token_ids
        assert text == expected.text
    server.wait_until_idle()


def test_choices_are_drawn_with_the_seeds_behind_the_first(
    client: openai.OpenAI, alone: Alone, codec: TextCodec
) -> None:
    prompts = [PROMPT, "def add(a, b):"]
    done = client.completions.create(
        model=MODEL,
        prompt=prompts,
        n=3,
        seed=7,
        temperature=0.9,
        max_tokens=40,
        extra_body={**TRACE, "ignore_eos": True},
    )
    assert [choice.index for choice in done.choices] == list(range(6))
    for number, choice in enumerate(done.choices):
        prompt = codec.encode(prompts[number // 3])
        expected = alone(Request(prompt_ids=prompt, params=params(7 + number % 3)))
        assert tokens_of(choice) == expected.token_ids
    assert done.usage is not None
    assert done.usage.prompt_tokens == sum(len(codec.encode(p)) for p in prompts)


def test_negative_seeds_repeat(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        done = client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            seed=seed,
            max_tokens=30,
            extra_body={"ignore_eos": True},
        )
        return done.choices[0].text

    assert draw(-5) == draw(-5) != draw(-6)


def test_token_ids_are_prompts(client: openai.OpenAI, codec: TextCodec) -> None:
    def greedy(prompt: Any) -> list[str]:
        done = client.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=20
        )
        return [choice.text for choice in done.choices]

    ids = list(codec.encode(PROMPT))
    assert greedy(ids) == greedy(PROMPT) == greedy([ids])
    assert greedy([ids, [5, 6]])[0] == greedy(PROMPT)[0]


def test_penalties_bias_and_filters_are_the_engines(
    client: openai.OpenAI, alone: Alone, codec: TextCodec
) -> None:
    expected = alone(
        Request(
            prompt_ids=codec.encode(PROMPT),
            params=params(
                3,
                presence_penalty=0.5,
                frequency_penalty=0.25,
                repetition_penalty=1.1,
                top_k=40,
                min_p=0.01,
                logit_bias=((260, -5.0), (300, 2.5)),
            ),
        )
    )
    done = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        seed=3,
        temperature=0.9,
        max_tokens=40,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={"260": -5, "300": 2.5},  # type: ignore[dict-item]
        extra_body={
            **TRACE,
            "ignore_eos": True,
            "top_k": 40,
            "min_p": 0.01,
            "repetition_penalty": 1.1,
        },
    )
    assert tokens_of(done.choices[0]) == expected.token_ids


def test_without_speculation_greedy_text_is_the_same(client: openai.OpenAI) -> None:
    def answer(speculate: bool) -> Any:
        return client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            max_tokens=40,
            extra_body={"dspark": {"speculate": speculate}},
        )

    drafted, plain = answer(True), answer(False)
    assert drafted.choices[0].message.content == plain.choices[0].message.content
    assert plain.usage.dspark["rounds"] == 0
    assert plain.usage.dspark["accepted_length"] is None


# Shapes -------------------------------------------------------------------------------------------


def test_a_chat_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 30}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    first, *middle, last = chunks
    assert first.choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in (first, *middle))
    assert text == whole.choices[0].message.content
    finishes = [chunk.choices[0].finish_reason for chunk in (first, *middle)]
    assert finishes == [None] * len(middle) + [whole.choices[0].finish_reason]
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(chunk.usage is None for chunk in (first, *middle))
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_of_several_choices(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": [PROMPT, "x = 1"], "n": 2, "seed": 5}
    whole = client.completions.create(**asked, max_tokens=24)
    texts = [""] * 4
    for chunk in client.completions.create(**asked, max_tokens=24, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_stop_strings_end_the_text_before_them(
    client: openai.OpenAI, alone: Alone, codec: TextCodec
) -> None:
    free = alone(
        Request(
            prompt_ids=codec.encode_chat(MESSAGES),
            params=SamplingParams(max_new_tokens=40),
            detokenize=True,
        )
    ).text
    stop = free[10:13]
    asked: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    done = client.chat.completions.create(**asked, stop=stop)
    assert done.choices[0].message.content == free[: free.index(stop)]
    assert done.choices[0].finish_reason == "stop"
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**asked, stop=[stop, "never"], stream=True)
    )
    assert streamed == free[: free.index(stop)]


def test_logprobs_are_the_engines(
    client: openai.OpenAI, alone: Alone, codec: TextCodec
) -> None:
    def expected(prompt: tuple[int, ...]) -> Completion:
        sampling = SamplingParams(max_new_tokens=12, logprobs=3)
        return alone(Request(prompt_ids=prompt, params=sampling))

    done = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        max_tokens=12,
        logprobs=True,
        top_logprobs=3,
    )
    scored = done.choices[0].logprobs
    assert scored is not None
    assert scored.content is not None
    reference = expected(codec.encode_chat(MESSAGES))
    assert [t.token for t in scored.content] == [codec.piece(t) for t in reference.token_ids]
    for mine, theirs in zip(scored.content, reference.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [t.token for t in mine.top_logprobs] == [codec.piece(t) for t, _ in theirs.top]
        if mine.bytes is not None:
            assert bytes(mine.bytes).decode() == mine.token

    legacy: Any = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**legacy, logprobs=2).choices[0].logprobs
    assert whole is not None
    reference = expected(codec.encode(PROMPT))
    assert whole.token_logprobs == pytest.approx(
        [each.logprob for each in reference.logprobs], abs=1e-4
    )
    assert whole.top_logprobs is not None
    assert all(len(each) == 2 for each in whole.top_logprobs)
    streamed = [
        choice.logprobs
        for chunk in client.completions.create(**legacy, logprobs=2, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
    ]
    for name in ("tokens", "text_offset"):
        parts = [part for each in streamed for part in getattr(each, name)]
        assert parts == getattr(whole, name)


def test_the_trace_tells_what_every_round_did(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        temperature=0,
        max_tokens=40,
        extra_body={**TRACE, "ignore_eos": True},
    )
    rounds = done.choices[0].dspark["rounds"]  # type: ignore[attr-defined]
    assert "".join(t["text"] for each in rounds for t in each["tokens"]) == done.choices[0].text
    drafted = [each for each in rounds if each["drafted"]]
    assert len(drafted) == done.usage.dspark["rounds"] > 3  # type: ignore[union-attr]
    for each in drafted[:-1]:
        kinds = [token["kind"] for token in each["tokens"]]
        own = "bonus" if each["accepted"] == each["verified"] else "corrected"
        assert kinds == ["drafted"] * each["accepted"] + [own]
        survival = each["survival"]
        assert len(survival) == 7
        assert all(a >= b for a, b in pairwise(survival))
        assert 0 <= survival[-1] <= survival[0] <= 1
    assert all(each["survival"] is None for each in rounds if not each["drafted"])


# Structured output --------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["fruit", "tool"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "count", "kind", "tags"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}


def check_schema(value: Any) -> None:
    assert list(value) == ["name", "count", "kind", "tags"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 12
    assert 0 <= value["count"] <= 99
    assert value["kind"] in ("fruit", "tool")
    assert len(value["tags"]) <= 3
    assert all(isinstance(tag, bool) for tag in value["tags"])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_answers_follow_a_schema_with_speculation(
    client: openai.OpenAI, temperature: float
) -> None:
    """A toy model knows no JSON: only the grammar keeps it on the way."""
    done = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=temperature,
        seed=1,
        n=6 if temperature else 1,
        max_tokens=400,
        response_format=FORMAT,
    )
    for choice in done.choices:
        assert choice.finish_reason == "stop"
        check_schema(json.loads(choice.message.content or ""))
    assert done.usage is not None
    assert done.usage.dspark["accepted_drafts"] > 0  # type: ignore[attr-defined]


def test_a_grammar_changes_with_speculation_nothing_but_the_speed(
    client: openai.OpenAI,
) -> None:
    def greedy(speculate: bool) -> str | None:
        done = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=0,
            max_tokens=200,
            response_format=FORMAT,
            extra_body={"dspark": {"speculate": speculate}},
        )
        return done.choices[0].message.content

    assert greedy(True) == greedy(False)


def test_json_objects_and_plain_text(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "seed": 3, "max_tokens": 300}
    done = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    text = done.choices[0].message.content or ""
    assert text.startswith("{")
    if done.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    plain = client.chat.completions.create(**asked, response_format={"type": "text"})
    free = client.chat.completions.create(**asked)
    assert plain.choices[0].message.content == free.choices[0].message.content


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "foo"}, "Invalid type"),
        ({"type": "string", "pattern": "^a(?=b)"}, "look-around"),
        ({"$ref": "http://127.0.0.1:9/x"}, "does not fetch"),
        ({"type": "object", "if": {"type": "string"}}, "if"),
        ({"type": "object", "properties": {"a": {"multipleOf": 0}}}, "multiple of"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(
    client: openai.OpenAI, schema: Any, reason: str
) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=f"JSON schema cannot be used.*{reason}"):
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=5, response_format=wanted
        )


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"echo": True}, "echo is not supported"),
        ({"best_of": 3}, "best_of is not supported"),
        ({"suffix": "x"}, "suffix is not supported"),
        ({"user": "me"}, "user is not supported"),
        ({"bogus": 1}, "unknown parameter: bogus"),
        ({"messages": []}, "unknown parameter: messages"),
        ({"temperature": 3}, "temperature: .*less than or equal to 2"),
        ({"temperature": "1"}, "temperature: .*valid number"),
        ({"top_p": 0}, "top_p: .*greater than 0"),
        ({"n": 0}, "n: .*greater than or equal to 1"),
        ({"n": 17}, "more sequences than the 16"),
        ({"max_tokens": 0}, "max_tokens: .*greater than or equal to 1"),
        ({"max_tokens": 5000}, "context holds 1024"),
        ({"stop": ""}, "stop: .*at least 1 character"),
        ({"logprobs": 21}, "logprobs: .*less than or equal to 20"),
        ({"logit_bias": {"5000": 1}}, "outside the vocabulary"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream"),
        ({"prompt": [5000]}, "outside the vocabulary"),
        ({"prompt": ""}, "at least 1 character"),
        ({"prompt": []}, "prompt: .*at least 1 item"),
        ({"prompt": "a" * 20_000}, "context holds 1024"),
        ({"dspark": {"tracing": True}}, "unknown parameter: dspark.tracing"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    client: openai.OpenAI, extra: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=sentence) as refused:
        client.completions.create(model=MODEL, prompt="x", extra_body=extra)
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools is not supported",
        ),
        ({"reasoning_effort": "low"}, "reasoning_effort is not supported"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "give one"),
        ({"messages": []}, "messages: .*at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\.0\.role"),
        ({"messages": [{"role": "user"}]}, r"messages\.0\.content: field required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"messages\.0\.content",
        ),
    ],
)
def test_chat_refuses_by_name(
    client: openai.OpenAI, extra: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=sentence):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=extra)


def test_values_that_ask_for_nothing_are_accepted(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model=MODEL,
        prompt="x",
        max_tokens=2,
        extra_body={"echo": False, "best_of": 1, "suffix": None, "user": None, "n": None},
    )
    assert len(done.choices) == 1


def test_parts_and_developer_messages(client: openai.OpenAI) -> None:
    def answer(messages: Any) -> str | None:
        done = client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=20
        )
        return done.choices[0].message.content

    parts = [{"type": "text", "text": "Add 2"}, {"type": "text", "text": " and 3."}]
    assert answer(
        [{"role": "developer", "content": "Count."}, {"role": "user", "content": parts}]
    ) == answer(
        [
            {"role": "system", "content": "Count."},
            {"role": "user", "content": "Add 2 and 3."},
        ]
    )


def test_models(client: openai.OpenAI, tiny_bundle: Bundle) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).dspark["fingerprint"] == tiny_bundle.fingerprint()  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match=r"'gpt-4' does not exist.*'tiny'"):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError, match="'gpt-4' does not exist"):
        client.completions.create(model="gpt-4", prompt="x")
