# SPDX-License-Identifier: Apache-2.0
"""Answers one HTTP request that generates: whole or as a stream, with everything it holds let go at the end."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from dspark_trt.errors import DSparkError
from dspark_trt.runtime.async_engine import RequestGroup
from dspark_trt.runtime.request import Completion, TokenEvent
from dspark_trt.runtime.serving.access_log import AccessRecord, record_of
from dspark_trt.runtime.serving.errors import api_error, failure_of
from dspark_trt.runtime.serving.event_stream import DONE, EventStream, event, unless_gone
from dspark_trt.runtime.serving.formats import (
    Format,
    Json,
    finish_reason,
    round_json,
    token_scores,
    usage,
)
from dspark_trt.runtime.serving.round_trace import TracedRequest
from dspark_trt.runtime.serving.schema import Sampling
from dspark_trt.runtime.serving.service import Service
from dspark_trt.runtime.serving.translate import Job
from dspark_trt.runtime.text import TextStream

CLIENT_GONE = 499  # nobody reads it; the access log does
_QUICK_BODY_BYTES = 4096  # translated on the event loop: faster than handing it to a thread


async def answer(
    service: Service,
    http: HttpRequest,
    body: Sampling,
    translate: Callable[[], Job],
    spelling: Format,
) -> Response:
    """Generate what the body asks for.

    Raises:
        ApiError: refused or failed. Failures behind the first byte of a stream are its last event instead.
    """
    service.check_model(body.model)
    record = record_of(http.scope)
    record.stream = bool(body.stream)
    with ExitStack() as held:
        held.enter_context(service.place())
        job = await _translated(http, body, translate)
        group = await service.submit(job.requests)
        held.callback(service.leave, group)
        writer = Writer(service, job, group, spelling, body)
        held.callback(writer.note, record)
        if body.stream:
            return EventStream(writer.stream(), held.pop_all())
        whole = await unless_gone(writer.whole(), http.receive)
        if whole is None:
            record.disconnected = True
            return Response(status_code=CLIENT_GONE)
        return JSONResponse(whole)


async def _translated(http: HttpRequest, body: Sampling, translate: Callable[[], Job]) -> Job:
    is_quick = int(http.headers.get("content-length", _QUICK_BODY_BYTES)) < _QUICK_BODY_BYTES
    is_quick = is_quick and getattr(body, "response_format", None) is None
    try:
        return translate() if is_quick else await asyncio.to_thread(translate)
    except DSparkError as error:
        raise api_error(error) from error


class Writer:
    """Turns the events of a group into one endpoint's JSON."""

    def __init__(
        self,
        service: Service,
        job: Job,
        group: RequestGroup,
        spelling: Format,
        body: Sampling,
    ) -> None:
        self._service, self._job, self._group = service, job, group
        self._spelling = spelling
        self._choices = body.n or 1
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._index_of = {request_id: i for i, request_id in enumerate(group.request_ids)}
        self._offsets = [0] * len(job.requests)  # characters of each choice's tokens so far
        self._texts = [
            TextStream(service.translator.codec) for _ in job.requests
        ]  # traced ones
        self._head = {
            "id": f"{spelling.prefix}-{uuid4().hex}",
            "object": spelling.part_object if body.stream else spelling.whole_object,
            "created": int(time.time()),
            "model": service.model_name,
            "system_fingerprint": service.fingerprint,
        }

    async def whole(self) -> Json:
        """The complete answer.

        Raises:
            ApiError: a sequence failed.
        """
        rounds: list[list[Json]] = [[] for _ in self._job.requests]
        async for each in self._group:
            if self._job.is_traced and each.token_ids:
                index = self._index_of[each.request_id]
                rounds[index].append(self._round(index, each))
        completions = self._completions()
        if failure := failure_of(completions):
            raise failure
        choices = [
            self._spelling.whole(
                index, done.text, self._logprobs(index, done), finish_reason(done.finish_reason)
            )
            for index, done in enumerate(completions)
        ]
        if self._job.is_traced:
            for choice, own in zip(choices, rounds, strict=True):
                choice["dspark"] = {"rounds": own}
        return {**self._head, "choices": choices, "usage": usage(completions, self._choices)}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events, ended by `[DONE]` or by an error."""
        usage_so_far: Json = {"usage": None} if self._with_usage else {}
        for index in range(len(self._job.requests)):
            if opening := self._spelling.opening(index):
                yield event({**self._head, "choices": [opening], **usage_so_far})
        async for each in self._group:
            if each.finish_reason is not None:
                done = self._group.completions[each.request_id]
                if failure := failure_of([done]):
                    yield event(failure.body())
                    return
            if part := self._part(each):
                yield event({**self._head, "choices": [part], **usage_so_far})
        if self._with_usage:
            total = usage(self._completions(), self._choices)
            yield event({**self._head, "choices": [], "usage": total})
        yield DONE

    def note(self, record: AccessRecord) -> None:
        """What the access log says."""
        finished = list(self._group.completions.values())
        record.choices = len(self._job.requests)
        record.prompt_tokens = sum(len(prompt) for prompt in self._job.prompts)
        record.output_tokens = sum(done.stats.output_tokens for done in finished)
        record.finish_reasons = tuple(done.finish_reason.value for done in finished)
        if finished:
            total = usage(finished, 1)
            record.cached_tokens = total["prompt_tokens_details"]["cached_tokens"]
            record.accepted_length = total["dspark"]["accepted_length"]
            record.first_token_seconds = min(d.stats.first_token_seconds for d in finished)
        if self._service.settings.log_prompts:
            codec = self._service.translator.codec
            record.prompt = [codec.decode(prompt) for prompt in self._job.prompts]

    def _part(self, each: TokenEvent) -> Json | None:
        """None: nothing to show yet."""
        index = self._index_of[each.request_id]
        logprobs = self._logprobs(index, each) if each.token_ids else None
        is_silent = not each.text and logprobs is None and each.finish_reason is None
        if is_silent and not self._job.is_traced:
            return None
        finish = finish_reason(each.finish_reason)
        part = self._spelling.part(index, each.text, logprobs, finish)
        if self._job.is_traced and each.token_ids:
            part["dspark"] = {"round": self._round(index, each)}
        return part

    def _logprobs(self, index: int, source: TokenEvent | Completion) -> Json | None:
        if self._job.top_logprobs is None:
            return None
        codec = self._service.translator.codec
        scores = token_scores(codec, source.token_ids, source)
        written = self._spelling.logprobs(scores, self._offsets[index])
        self._offsets[index] += sum(len(score.text) for score in scores)
        return written

    def _round(self, index: int, each: TokenEvent) -> Json:
        request = self._job.requests[index]
        assert isinstance(request, TracedRequest)
        texts = self._texts[index]
        pieces = [texts.push([token]) for token in each.token_ids]
        return round_json(request.rounds.popleft(), each, pieces)

    def _completions(self) -> list[Completion]:
        return [self._group.completions[i] for i in self._group.request_ids]
