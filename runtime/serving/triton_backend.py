# SPDX-License-Identifier: Apache-2.0
"""The engine as a decoupled model of Triton Inference Server's Python backend.

`1/model.py` of a repository that `dspark-trt triton-repo` wrote imports `TritonPythonModel` from here. Triton
hands over requests one by one; the engine batches them. Every response is what one round committed, or the
whole answer where `stream` is false. A client that cancels or leaves ends its request.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.errors import DSparkError, QueueFullError, RequestError
from dspark_trt.runtime.async_engine import AsyncEngine, RequestGroup
from dspark_trt.runtime.backends.interface import BackendOptions
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import (
    Completion,
    FinishReason,
    Request,
    SamplingParams,
    TokenEvent,
)
from dspark_trt.runtime.serving.triton_tensors import SAMPLING
from dspark_trt.runtime.text import TextCodec

_CANCEL_POLL_S = 0.1
_DRAIN_S = 30.0


class TritonPythonModel:
    """What the server calls: `initialize` once, `execute` for each request, `finalize` at the end."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the bundle beside `model.py`.

        Raises:
            DSparkError: the bundle does not load here.
        """
        import triton_python_backend_utils  # exists inside the server only

        self._server = triton_python_backend_utils
        config = json.loads(args["model_config"])
        options = {name: value["string_value"] for name, value in config["parameters"].items()}
        folder = Path(args["model_repository"]) / args["model_version"] / "bundle"
        threads = options.get("threads")
        self._engine = AsyncEngine(
            Engine.load(
                folder,
                backend=options["backend"],
                backend_options=BackendOptions(threads=int(threads) if threads else None),
                options=EngineOptions(
                    max_batch=int(options["max_batch"]),
                    prefix_cache_bytes=int(options["prefix_cache_mib"]) << 20,
                ),
                scheduler=options["scheduler"],
            )
        )
        bundle = self._engine.engine.bundle
        self._codec = TextCodec(bundle) if TextCodec.is_available(bundle) else None

    async def execute(self, requests: list[Any]) -> None:
        """Answer requests; returns when the last of them has its last response."""
        await asyncio.gather(*(self._answer(each) for each in requests))

    def finalize(self) -> None:
        self._engine.close(drain_s=_DRAIN_S)

    async def _answer(self, inference: Any) -> None:
        """Send every response. Once the final one is out, nothing may touch the sender: the server frees it."""
        sender = inference.get_response_sender()
        final = self._server.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            inputs = _inputs(inference)
            request = self._request(inputs)
            await self._generate(sender, request, is_streamed=bool(inputs.get("stream", True)))
        except Exception as error:
            sender.send(self._server.InferenceResponse([], self._error(error)), flags=final)
        else:
            sender.send(flags=final)

    def _error(self, error: Exception) -> Any:
        kinds = self._server.TritonError
        code = kinds.INTERNAL
        if isinstance(error, QueueFullError):
            code = kinds.UNAVAILABLE
        elif isinstance(error, RequestError):
            code = kinds.INVALID_ARG
        return kinds(str(error) if isinstance(error, DSparkError) else repr(error), code)

    async def _generate(self, sender: Any, request: Request, *, is_streamed: bool) -> None:
        with await self._engine.submit([request]) as group:  # leaving ends the request
            watching = asyncio.create_task(_until_cancelled(sender))
            reading = asyncio.create_task(self._send_events(sender, group, is_streamed))
            try:
                await asyncio.wait((watching, reading), return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    raise RequestError("the client cancelled the request")
                reading.result()
            finally:
                watching.cancel()
                reading.cancel()
                await asyncio.gather(watching, reading, return_exceptions=True)

    async def _send_events(self, sender: Any, group: RequestGroup, is_streamed: bool) -> None:
        async for event in group:
            if event.finish_reason is FinishReason.ERROR:
                raise DSparkError(f"generation failed: {event.error}")
            if event.finish_reason is FinishReason.ABORTED:
                raise DSparkError("the server stopped before the request was finished")
            if is_streamed:
                sender.send(self._response(event))
        if not is_streamed:
            sender.send(self._response(group.completions[group.request_ids[0]]))

    def _response(self, source: TokenEvent | Completion) -> Any:
        reason = "" if source.finish_reason is None else source.finish_reason.value
        outputs = {
            "text_output": _strings([source.text]),
            "output_ids": np.array(source.token_ids, np.int32),
            "token_kinds": _strings([kind.value for kind in source.kinds]),
            "finish_reason": _strings([reason]),
        }
        tensors = [self._server.Tensor(name, value) for name, value in outputs.items()]
        return self._server.InferenceResponse(tensors)

    def _request(self, inputs: dict[str, Any]) -> Request:
        given = [name for name in ("text_input", "messages", "token_ids") if name in inputs]
        if len(given) != 1:
            raise RequestError(f"give one of text_input, messages and token_ids, got {given}")
        sampling = {SAMPLING[name]: value for name, value in inputs.items() if name in SAMPLING}
        return Request(
            prompt_ids=self._prompt(given[0], inputs[given[0]]),
            params=SamplingParams(**sampling),
            speculate=bool(inputs.get("speculate", True)),
            detokenize=self._codec is not None,
        )

    def _prompt(self, kind: str, value: Any) -> tuple[int, ...]:
        if kind == "token_ids":
            return tuple(value)
        if self._codec is None:
            raise RequestError("this bundle has no tokenizer: give token_ids")
        if kind == "text_input":
            return self._codec.encode(value)
        try:
            return self._codec.encode_chat(json.loads(value))
        except (ValueError, TypeError) as error:
            raise RequestError(f"messages is no JSON list of messages: {error}") from error


async def _until_cancelled(sender: Any) -> None:
    while not sender.is_cancelled():
        await asyncio.sleep(_CANCEL_POLL_S)


def _inputs(inference: Any) -> dict[str, Any]:
    """Given inputs as Python values: lists for `token_ids` and `stop`, one value for the others."""
    values = {}
    for tensor in inference.inputs():
        name = tensor.name()
        flat = tensor.as_numpy().reshape(-1).tolist()
        found = [each.decode() if isinstance(each, bytes) else each for each in flat]
        if name not in ("token_ids", "stop") and len(found) != 1:
            raise RequestError(f"{name} takes one value, got {len(found)}")
        values[name] = tuple(found) if name in ("token_ids", "stop") else found[0]
    return values


def _strings(values: list[str]) -> NDArray[np.object_]:
    return np.array([value.encode() for value in values], dtype=object)
