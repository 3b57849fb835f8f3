# SPDX-License-Identifier: Apache-2.0
"""The live page: three static files and a policy that lets them load nothing else."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response

_UI = Path(__file__).parent / "ui"
_UI_FILES = {
    "/ui": ("page.html", "text/html; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
}
_UI_HEADERS = {
    # Nothing from elsewhere, nothing inline: what a model writes stays text.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """Open to everyone: the page has nothing of its own and asks for a key where there is one."""
    router = APIRouter()
    for path, (name, media_type) in _UI_FILES.items():
        file = _file((_UI / name).read_bytes(), media_type)
        router.add_api_route(path, file, methods=["GET"], include_in_schema=False)
    router.add_api_route("/", _to_page, methods=["GET"], include_in_schema=False)
    return router


async def _to_page() -> Response:
    """What a browser asks for first. Relative: a proxy may have put the server under a path of its own."""
    return RedirectResponse("ui")


def _file(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def file() -> Response:  # without parameters: those would be the query's to set
        return Response(content, media_type=media_type, headers=_UI_HEADERS)

    return file
