# SPDX-License-Identifier: Apache-2.0
"""The application: routes over one engine. It runs under any ASGI server, alone or mounted in another."""

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from dspark_trt.errors import DSparkError, RequestError
from dspark_trt.runtime.async_engine import AsyncEngine
from dspark_trt.runtime.serving.access_log import AccessLog, record_of
from dspark_trt.runtime.serving.api import api_routes
from dspark_trt.runtime.serving.errors import ApiError, api_error
from dspark_trt.runtime.serving.limits import ApiKeys, Doorkeeper, RateLimit
from dspark_trt.runtime.serving.operations import probe_routes, status_routes
from dspark_trt.runtime.serving.page import page_routes
from dspark_trt.runtime.serving.service import Service
from dspark_trt.runtime.serving.settings import ServerSettings
from dspark_trt.runtime.serving.validation import validation_error


def create_app(engine: AsyncEngine, settings: ServerSettings | None = None) -> FastAPI:
    """OpenAI's endpoints over a running engine.

    Routes: POST /v1/completions, POST /v1/chat/completions, GET /v1/models, /health, /ready, /metrics,
    /status, /ui. The engine stays the caller's: closing the application does not close it.
    `app.state.service` is the `Service` behind the routes: `begin_drain()` refuses new requests,
    `await drained(seconds)` waits for the running ones and aborts the rest.

    Args:
        engine: of a bundle with a tokenizer; one engine serves one application.
        settings: names, keys and limits.

    Raises:
        BundleError: the bundle has no tokenizer.
        RequestError: an `Engine`, which one thread at a time may use.
    """
    if not isinstance(engine, AsyncEngine):
        raise RequestError(
            f"create_app serves an AsyncEngine, got a {type(engine).__name__}: wrap it, AsyncEngine(engine)"
        )
    settings = settings or ServerSettings()
    service = Service(engine, settings)
    keys = ApiKeys(settings.api_keys)
    app = FastAPI(title="dspark-trt", version="1", docs_url=None, redoc_url=None)
    app.state.service = service
    _add_error_handlers(app)
    # The door is `Doorkeeper`; this only tells readers of /openapi.json that there is one.
    security = [Depends(HTTPBearer(auto_error=False))] if keys else []
    app.include_router(api_routes(service), dependencies=security)
    app.include_router(status_routes(service), dependencies=security)
    app.include_router(probe_routes(service))
    app.include_router(page_routes())
    _forget_422(app)
    rate = settings.requests_per_minute
    app.add_middleware(
        Doorkeeper,
        keys=keys,
        rate=None if rate is None else RateLimit(rate),
        max_body_bytes=settings.max_body_bytes,
    )
    app.add_middleware(AccessLog, metrics=service.metrics, is_logged=settings.access_log)
    return app


def _forget_422(app: FastAPI) -> None:
    """The framework describes its own answer to invalid bodies; ours is a 400."""
    for path in app.openapi()["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)


def _add_error_handlers(app: FastAPI) -> None:
    """Every answer but success has OpenAI's shape."""

    def respond(http: Request, error: ApiError) -> Response:
        record_of(http.scope).error = error.code or str(error.status)
        return error.response()

    @app.exception_handler(ApiError)
    async def refused(http: Request, error: ApiError) -> Response:
        return respond(http, error)

    @app.exception_handler(DSparkError)
    async def failed(http: Request, error: DSparkError) -> Response:
        return respond(http, api_error(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(http: Request, error: RequestValidationError) -> Response:
        return respond(http, validation_error(error))

    @app.exception_handler(HTTPException)
    async def refused_by_framework(http: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
        mine = ApiError(error.status_code, str(error.detail), code=code.get(error.status_code))
        response = respond(http, mine)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def broken(http: Request, error: Exception) -> Response:
        return respond(http, ApiError(500, "internal error", code="internal_error"))
