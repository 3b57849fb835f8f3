# SPDX-License-Identifier: Apache-2.0
"""The application: routes over one engine. It runs under any ASGI server, alone or mounted in another."""

from fastapi import FastAPI

from dspark_trt.runtime.async_engine import AsyncEngine
from dspark_trt.runtime.serving.settings import ServerSettings


def create_app(engine: AsyncEngine, settings: ServerSettings | None = None) -> FastAPI:
    """OpenAI's endpoints over a running engine.

    Routes: POST /v1/completions, POST /v1/chat/completions, GET /v1/models, /health, /ready, /metrics, /ui.
    The engine stays the caller's: closing the application does not close it. `app.state.service` is the
    `Service` behind the routes: `begin_drain()` refuses new requests, `await drained(seconds)` waits for
    the running ones and aborts the rest.

    Args:
        engine: of a bundle with a tokenizer; one engine serves one application.
        settings: names, keys and limits.

    Raises:
        BundleError: the bundle has no tokenizer.
    """
    app = FastAPI(title="dspark-trt", docs_url=None, redoc_url=None)
    app.state.settings = settings or ServerSettings()
    return app
