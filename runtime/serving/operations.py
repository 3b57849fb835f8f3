# SPDX-License-Identifier: Apache-2.0
"""What operators and their tools ask."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from dspark_trt.runtime.serving import responses
from dspark_trt.runtime.serving.errors import not_ready
from dspark_trt.runtime.serving.responses import documented
from dspark_trt.runtime.serving.service import Service


def probe_routes(service: Service) -> APIRouter:
    """Health and readiness, open to everyone: what probes ask has no key."""
    router = APIRouter(tags=["operations"])

    @router.get(
        "/health",
        response_model=responses.Health,
        responses=documented(503),
    )
    async def health() -> Response:
        """Whether the process is worth keeping."""
        if service.engine.failure is not None:
            raise not_ready(f"the engine failed: {service.engine.failure}")
        return JSONResponse({"status": "ok"})

    @router.get(
        "/ready",
        response_model=responses.Health,
        responses=documented(503),
    )
    async def ready() -> Response:
        """Whether new requests should be sent here."""
        if reason := service.why_not_ready():
            raise not_ready(reason)
        return JSONResponse({"status": "ok"})

    return router


def status_routes(service: Service) -> APIRouter:
    """Metrics and status."""
    router = APIRouter(tags=["operations"])

    @router.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
            **documented(401, 503),
        },
    )
    async def metrics() -> Response:
        """Prometheus text: the engine's metrics and the server's."""
        media_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(await service.metrics_text(), media_type=media_type)

    @router.get("/status", responses=documented(401, 503))
    async def status() -> JSONResponse:
        """What `Engine.status` says: load, acceptance by position, calibration, notes."""
        return JSONResponse({**await service.status(), "generating": service.generating})

    return router
