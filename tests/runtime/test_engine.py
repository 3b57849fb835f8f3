# SPDX-License-Identifier: Apache-2.0
"""The engine against the target alone and against the official loop."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.errors import CapacityError, RequestError
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import FinishReason, Request, SamplingParams, TokenKind
from tests.conftest import DRAFTERS, ExportBundle
from tests.runtime.golden import golden_json

GREEDY = golden_json("greedy_outputs")
OFFICIAL = golden_json("official_tau")
STOP = (2, 0)


def request(prompt_ids: list[int], *, speculate: bool = True, **params: object) -> Request:
    return Request(
        prompt_ids=tuple(prompt_ids),
        params=SamplingParams(**{"stop_token_ids": STOP, "max_new_tokens": 64, **params}),  # type: ignore[arg-type]
        speculate=speculate,
    )


@pytest.fixture(scope="module")
def engine(tiny_bundle: Bundle) -> Engine:
    return Engine.load(tiny_bundle, options=EngineOptions(max_batch=8))


@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_greedy_text_is_the_targets_own(drafter: str, fixture_bundle: ExportBundle) -> None:
    engine = Engine.load(fixture_bundle(drafter), options=EngineOptions(max_batch=8))
    done = engine.generate([request(item["prompt_ids"]) for item in GREEDY["items"]])
    for completion, item in zip(done, GREEDY["items"], strict=True):
        assert list(completion.token_ids) == item["output_ids"]
        assert completion.finish_reason == ("stop" if item["stopped"] else "length")
    assert len(done) == 24


def test_the_target_alone_gives_the_same(engine: Engine) -> None:
    items = GREEDY["items"][:8]
    done = engine.generate([request(item["prompt_ids"], speculate=False) for item in items])
    assert [list(c.token_ids) for c in done] == [item["output_ids"] for item in items]
    assert all(c.stats.rounds == 0 and c.stats.accepted_length is None for c in done)


@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_accepted_lengths_are_the_official_ones(
    drafter: str, fixture_bundle: ExportBundle
) -> None:
    """Round by round at temperature 0.

    The official loop runs one more round where a request's last round fills `max_new_tokens` exactly;
    its tokens are thrown away. We stop there.
    """
    engine = Engine.load(fixture_bundle(drafter), options=EngineOptions(max_batch=8))
    official = OFFICIAL["drafters"][drafter]["T=0"]["requests"]
    limit = OFFICIAL["max_new_tokens"]
    done = engine.generate(
        [request(p["prompt_ids"], max_new_tokens=limit) for p in OFFICIAL["prompts"]]
    )
    redundant = 0
    for completion, theirs in zip(done, official, strict=True):
        assert list(completion.token_ids) == theirs["output_ids"]
        lengths = list(completion.stats.accepted_lengths)
        wanted = theirs["acceptance_lengths"]
        if lengths != wanted:
            assert lengths == wanted[:-1]
            assert 1 + sum(lengths) == limit
            redundant += 1
    assert redundant < len(done) / 2


@pytest.mark.slow
@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_accepted_length_at_temperature_one(
    drafter: str, fixture_bundle: ExportBundle, record_property: Callable[[str, object], None]
) -> None:
    """τ over all rounds against the official one, within both standard errors over requests."""
    engine = Engine.load(fixture_bundle(drafter), options=EngineOptions(max_batch=16))
    limit = OFFICIAL["max_new_tokens"]
    done = engine.generate(
        [
            request(p["prompt_ids"], max_new_tokens=limit, temperature=1.0, seed=1000 * n + i)
            for n in range(2)
            for i, p in enumerate(OFFICIAL["prompts"])
        ]
    )
    ours = [c.stats.accepted_lengths for c in done]
    theirs = [r["acceptance_lengths"] for r in OFFICIAL["drafters"][drafter]["T=1"]["requests"]]
    (mean, error), (wanted, wanted_error) = _tau(ours), _tau(theirs)
    record_property(
        "accepted_length", f"{mean:.3f} ± {1.96 * error:.3f}, official {wanted:.3f}"
    )
    assert abs(mean - wanted) < 3 * math.hypot(error, wanted_error)


def _tau(requests: list[tuple[int, ...]] | list[list[int]]) -> tuple[float, float]:
    """Mean over rounds and its bootstrap error over requests (rounds of one request are correlated)."""
    random = np.random.default_rng(0)
    sums = np.array([sum(lengths) for lengths in requests])
    rounds = np.array([len(lengths) for lengths in requests])
    picks = random.integers(0, len(requests), (2000, len(requests)))
    draws = sums[picks].sum(axis=1) / rounds[picks].sum(axis=1)
    return float(sums.sum() / rounds.sum()), float(draws.std())


def test_a_batch_equals_single_runs(tiny_bundle: Bundle) -> None:
    """Greedy and seeded sampling side by side, more requests than rows, prompts prefilled in chunks."""
    requests = [
        request(
            item["prompt_ids"],
            temperature=[0.0, 0.8, 1.0][i % 3],
            seed=i,
            top_k=[0, 40][i % 2],
            top_p=[1.0, 0.9][i % 2],
            max_new_tokens=10 + 3 * i,
        )
        for i, item in enumerate(GREEDY["items"][:12])
    ]
    together = Engine.load(
        tiny_bundle, options=EngineOptions(max_batch=5, max_tokens_per_step=70)
    ).generate(requests)
    alone = Engine.load(tiny_bundle, options=EngineOptions(max_batch=1))
    for one, expected in zip(together, (alone.generate([r])[0] for r in requests), strict=True):
        assert one.token_ids == expected.token_ids
        assert one.stats.accepted_lengths == expected.stats.accepted_lengths


def test_who_does_not_draft_stands_behind_who_does(tiny_bundle: Bundle) -> None:
    """A draft step runs every row before the last that drafts."""
    requests = [
        Request(
            prompt_ids=tuple(GREEDY["items"][n]["prompt_ids"]),
            params=SamplingParams(max_new_tokens=24),
            speculate=n not in (0, 2),
        )
        for n in range(5)
    ]
    rows: list[list[bool]] = []
    with Engine.load(tiny_bundle, options=EngineOptions(max_batch=5)) as engine:
        engine.observers.append(lambda report: rows.append(report.drafted.tolist()))
        done = engine.generate(requests)
    assert [True, True, True, False, False] in rows
    assert all(row == sorted(row, reverse=True) for row in rows)
    for request, answer in zip(GREEDY["items"], done, strict=False):
        assert list(answer.token_ids) == request["output_ids"][: len(answer.token_ids)]


def test_a_stop_token_inside_an_accepted_block_ends_the_text(engine: Engine) -> None:
    prompt = GREEDY["items"][0]["prompt_ids"]
    free = engine.generate([request(prompt, max_new_tokens=40, ignore_eos=True)])[0]
    drafted = [i for i, kind in enumerate(free.kinds) if kind is TokenKind.DRAFTED]
    new = [i for i in drafted if free.token_ids[i] not in free.token_ids[:i]]
    at = new[-1]
    stop = free.token_ids[at]
    for stops in ((stop,), (stop, 2047), (2047, stop)):
        cut = engine.generate([request(prompt, max_new_tokens=40, stop_token_ids=stops)])[0]
        assert cut.token_ids == free.token_ids[: at + 1]
        assert cut.finish_reason is FinishReason.STOP
        assert (
            sum(cut.stats.accepted_lengths) == at
        )  # all but the first token, none behind the stop
    ignored = request(prompt, max_new_tokens=40, stop_token_ids=(stop,), ignore_eos=True)
    assert engine.generate([ignored])[0].token_ids == free.token_ids


@pytest.mark.parametrize("limit", range(1, 12))
def test_max_new_tokens_inside_a_block(engine: Engine, limit: int) -> None:
    item = GREEDY["items"][0]
    done = engine.generate([request(item["prompt_ids"], max_new_tokens=limit)])[0]
    assert list(done.token_ids) == item["output_ids"][:limit]
    assert len(done.kinds) == limit
    assert done.finish_reason is FinishReason.LENGTH


def test_streaming_yields_the_same_tokens(engine: Engine) -> None:
    asked = request(GREEDY["items"][1]["prompt_ids"], temperature=0.9, seed=5)
    events = list(engine.stream(asked))
    streamed = [token for event in events for token in event.token_ids]
    assert [e.finish_reason is not None for e in events] == [False] * (len(events) - 1) + [True]
    assert len(events) > 3
    whole = engine.take(events[0].request_id)
    assert streamed == list(whole.token_ids) == list(engine.generate([asked])[0].token_ids)


def test_closing_a_stream_aborts_the_request(engine: Engine) -> None:
    stream = engine.stream(request(GREEDY["items"][1]["prompt_ids"]))
    event = next(stream)
    stream.close()
    done = engine.take(event.request_id)
    assert done.finish_reason is FinishReason.ABORTED
    assert done.token_ids[: len(event.token_ids)] == event.token_ids
    assert not engine.has_work


def test_aborting_any_time_leaves_the_others_alone(tiny_bundle: Bundle) -> None:
    engine = Engine.load(tiny_bundle, options=EngineOptions(max_batch=3))
    items = GREEDY["items"][:6]
    ids = [engine.submit(request(item["prompt_ids"])) for item in items]
    engine.step()
    engine.abort(ids[0])  # active
    engine.abort(ids[4])  # waiting
    engine.abort(99)  # unknown
    while engine.has_work:
        engine.step()
    for number, (request_id, item) in enumerate(zip(ids, items, strict=True)):
        done = engine.take(request_id)
        if number in (0, 4):
            assert done.finish_reason is FinishReason.ABORTED
        else:
            assert list(done.token_ids) == item["output_ids"]


def test_kinds_say_where_tokens_come_from(engine: Engine) -> None:
    asked = request(GREEDY["items"][2]["prompt_ids"], max_new_tokens=50, ignore_eos=True)
    done = engine.generate([asked])[0]
    position = 1  # the first token comes from the prompt
    assert done.kinds[0] is TokenKind.BONUS
    for accepted, verified in zip(
        done.stats.accepted_lengths, done.stats.verification_lengths, strict=True
    ):
        own = TokenKind.BONUS if accepted - 1 == verified else TokenKind.CORRECTED
        expected = [TokenKind.DRAFTED] * (accepted - 1) + [own]
        assert list(done.kinds[position : position + accepted]) == expected[: 50 - position]
        position += accepted


def test_the_context_ends_where_the_models_end(engine: Engine) -> None:
    prompt = (GREEDY["items"][0]["prompt_ids"] * 40)[:1000]
    done = engine.generate([request(prompt, max_new_tokens=100, ignore_eos=True)])[0]
    alone = request(prompt, max_new_tokens=100, ignore_eos=True, speculate=False)
    assert done.finish_reason is FinishReason.CAPACITY
    assert len(done.prompt_ids) + len(done.token_ids) == 1024
    assert engine.generate([alone])[0].token_ids == done.token_ids


def test_refusals(engine: Engine) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        request([])
    with pytest.raises(
        CapacityError, match="the prompt has 1024 tokens; this bundle holds 1024"
    ):
        engine.submit(request([5] * 1024))
    with pytest.raises(
        RequestError, match="prompt token 2048 is outside the vocabulary of 2048"
    ):
        engine.submit(request([5, 2048]))
    with pytest.raises(RequestError, match="stop token -1 is outside the vocabulary of 2048"):
        engine.submit(request([5], stop_token_ids=(-1,)))
    with pytest.raises(RequestError, match="expected a Request, got 'hi'; text becomes"):
        engine.submit("hi")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="max_new_tokens must be at least 1, got 0"):
        request([5], max_new_tokens=0)
    with pytest.raises(RequestError, match=r"top_p must be above 0 and at most 1, got 1\.5"):
        request([5], top_p=1.5)
    with pytest.raises(
        RequestError, match="temperature must be finite and at least 0, got nan"
    ):
        request([5], temperature=math.nan)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"max_new_tokens": 1.5}, r"max_new_tokens must be a whole number, got 1\.5"),
        ({"max_new_tokens": None}, "max_new_tokens must be a whole number, got None"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 0.5}, r"seed must be a whole number, got 0\.5"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"temperature": 1e308}, "temperature must be finite"),
        ({"logit_bias": ((5, 1e308),)}, "logit_bias of token 5 must be finite"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty must be between 1e-06 and 1e[+]06"),
        ({"repetition_penalty": 0}, "repetition_penalty must be between .*, got 0"),
        ({"stop": "end"}, "stop must be a sequence of strings, got 'end'"),
        ({"stop": None}, "stop must be a sequence of strings, got None"),
        ({"top_k": 10**30}, "top_k must be at most 9223372036854775807, got 10000"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a sequence of whole numbers, got 5"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be .*, got 'ab'"),
        ({"stop_token_ids": (2.5,)}, r"stop_token_ids must be .*, got \(2\.5,\)"),
        (
            {"logit_bias": {5: 1.0}},
            r"logit_bias must be pairs of a token and a number, got \{5",
        ),
        ({"logit_bias": ((3.5, 1.0),)}, r"logit_bias must be pairs .*, got \(\(3\.5"),
        ({"logit_bias": ((3, "x"),)}, "logit_bias must be pairs"),
        ({"logit_bias": (3,)}, "logit_bias must be pairs"),
    ],
)
def test_what_would_fail_amid_a_round_is_refused(params: dict[str, Any], text: str) -> None:
    """A length of 1.5 tokens used to stop the engine, and every other request with it."""
    with pytest.raises(RequestError, match=text):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_batch": 2.5}, r"max_batch must be a whole number of at least 1, got 2\.5"),
        ({"max_batch": 0}, "max_batch must be a whole number of at least 1, got 0"),
        ({"max_waiting": -1}, "max_waiting must be a whole number of at least 0, got -1"),
        ({"prefix_cache_bytes": -1}, "prefix_cache_bytes must be .* of at least 0, got -1"),
        (
            {"max_cached_tokens": "many"},
            "max_cached_tokens must be .* of at least 1, got 'many'",
        ),
        ({"drafter_rebase_tokens": 1}, "drafter_rebase_tokens must be .* at least 2, got 1"),
        ({"max_batch": 1 << 20}, "max_batch must be at most 65536, got 1048576"),
    ],
)
def test_limits_that_are_none_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        EngineOptions(**options)


def test_prompts_of_other_types() -> None:
    with pytest.raises(RequestError, match="prompt_ids must be whole numbers, got a float"):
        Request(prompt_ids=(1, 2.5))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"priority must be a whole number, got '1'"):
        Request(prompt_ids=(1,), priority="1")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"params must be SamplingParams, got \{'seed': 1\}"):
        Request(prompt_ids=(1,), params={"seed": 1})  # type: ignore[arg-type]
    for timeout in ("x", 0, float("nan")):
        with pytest.raises(RequestError, match="timeout_s must be a number above 0, got"):
            Request(prompt_ids=(1,), timeout_s=timeout)  # type: ignore[arg-type]
    for prompt in (b"x", "x", None, 5, {1: 2}):
        with pytest.raises(RequestError, match="prompt_ids must be a tuple of whole numbers"):
            Request(prompt_ids=prompt)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"allowed_tokens must be a function .*, got 'a'"):
        Request(prompt_ids=(1,), allowed_tokens="a")  # type: ignore[arg-type]
    for ids in (np.arange(1, 4), [1, 2, 3]):
        assert Request(prompt_ids=ids).prompt_ids == (1, 2, 3)  # type: ignore[arg-type]
