# SPDX-License-Identifier: Apache-2.0
"""OpenAI's endpoints."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from dspark_trt.runtime.serving import responses
from dspark_trt.runtime.serving.answer import answer
from dspark_trt.runtime.serving.formats import ChatFormat, CompletionFormat
from dspark_trt.runtime.serving.responses import documented
from dspark_trt.runtime.serving.schema import ChatRequest, CompletionRequest
from dspark_trt.runtime.serving.service import Service

# Of a stream: each event's data is a chunk as JSON, an error as JSON, or [DONE].
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}


def api_routes(service: Service) -> APIRouter:
    """Completions, chat completions and models."""
    router = APIRouter(tags=["OpenAI"])
    generates = documented(400, 401, 404, 413, 429, 500, 503)
    event_stream = {"text/event-stream": {"schema": _EVENT}}

    @router.post(
        "/v1/completions",
        response_model=responses.Completion,
        responses={**generates, 200: {"content": event_stream}},
    )
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Continue prompts: text, token ids, or several of either."""
        translate = service.translator
        return await answer(
            service, http, body, lambda: translate.completion(body), CompletionFormat()
        )

    @router.post(
        "/v1/chat/completions",
        response_model=responses.ChatCompletion,
        responses={**generates, 200: {"content": event_stream}},
    )
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        """Answer a conversation, with the chat template of the bundle's tokenizer."""
        return await answer(
            service, http, body, lambda: service.translator.chat(body), ChatFormat()
        )

    @router.get(
        "/v1/models",
        response_model=responses.ModelList,
        responses=documented(401),
    )
    async def models() -> Response:
        """The one model of this server."""
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @router.get(
        "/v1/models/{model:path}",
        response_model=responses.Model,
        responses=documented(401, 404),
    )
    async def model(model: str) -> Response:
        """The model of this name."""
        service.check_model(model)
        return JSONResponse(_model(service))

    return router


def _model(service: Service) -> dict[str, Any]:
    bundle = service.engine.engine.bundle
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "dspark-trt",
        "dspark": {
            "fingerprint": service.fingerprint,
            "max_context_tokens": bundle.max_context_tokens,
            "vocabulary": bundle.draft.decoder.vocab_size,
            "gamma": bundle.draft.gamma,
            "dtype": bundle.dtype,
            "chat": service.translator.codec.has_chat_template,
        },
    }
