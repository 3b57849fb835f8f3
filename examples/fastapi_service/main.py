# SPDX-License-Identifier: Apache-2.0
"""An existing FastAPI application that gets answers of its own and OpenAI's endpoints beside them.

python examples/fastapi_service/main.py BUNDLE --port 8000
curl localhost:8000/ask --json '{"question": "Explain what a stack is."}'
curl localhost:8000/llm/v1/models
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import Body, FastAPI, HTTPException
from fastapi.responses import StreamingResponse

from dspark_trt.errors import EngineClosedError, QueueFullError, RequestError
from dspark_trt.runtime.async_engine import AsyncEngine, RequestGroup
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.serving.app import create_app
from dspark_trt.runtime.text import TextCodec


def your_app(bundle: str) -> FastAPI:
    """The application as it was, with an engine for as long as it runs."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with AsyncEngine(Engine.load(bundle, options=EngineOptions(max_batch=4))) as engine:
            app.state.engine = engine
            app.state.codec = TextCodec(engine.engine.bundle)
            openai = create_app(engine)
            app.mount("/llm", openai)
            yield
            openai.state.service.begin_drain()

    app = FastAPI(lifespan=lifespan)

    @app.get("/")
    async def home() -> dict[str, str]:
        return {"service": "yours"}

    @app.post("/ask")
    async def ask(question: str = Body(embed=True)) -> StreamingResponse:
        """Plain text, as it is written. A client that leaves ends its request."""
        prompt = app.state.codec.encode_chat([{"role": "user", "content": question}])
        params = SamplingParams(max_new_tokens=48)
        request = Request(prompt_ids=prompt, params=params, detokenize=True)
        try:  # before the answer begins with its status: 200
            group = await app.state.engine.submit([request])
        except (QueueFullError, EngineClosedError) as error:
            raise HTTPException(503, str(error)) from error
        except RequestError as error:
            raise HTTPException(400, str(error)) from error
        return StreamingResponse(_text(group), media_type="text/plain")

    return app


async def _text(group: RequestGroup) -> AsyncIterator[str]:
    with group:
        async for event in group:
            yield event.text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    uvicorn.run(your_app(arguments.bundle), port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
