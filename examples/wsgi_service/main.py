# SPDX-License-Identifier: Apache-2.0
"""A plain WSGI application, as Flask, Django or Bottle make one: no event loop anywhere.

Requests that a server's threads bring at the same time share the engine's rounds. Servers that fork after
loading need `make_app` in each worker (gunicorn: no --preload).

    python examples/wsgi_service/main.py BUNDLE --port 8000
    curl localhost:8000 -d 'Explain what a stack is.'
"""

import argparse
import json
from collections.abc import Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer, make_server

from dspark_trt.errors import EngineClosedError, QueueFullError, RequestError
from dspark_trt.runtime.async_engine import AsyncEngine
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.text import TextCodec

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

MOST_BYTES = 4096


def make_app(engine: AsyncEngine) -> "WSGIApplication":
    codec = TextCodec(engine.engine.bundle)

    def app(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        length = min(int(environ.get("CONTENT_LENGTH") or 0), MOST_BYTES)
        question = environ["wsgi.input"].read(length).decode(errors="replace")
        status, body = "200 OK", {}
        try:
            prompt = codec.encode_chat([{"role": "user", "content": question}])
            params = SamplingParams(max_new_tokens=48)
            done = engine.generate(Request(prompt_ids=prompt, params=params), timeout_s=60)
            body = {"text": codec.decode(done.token_ids), "reason": done.finish_reason}
        except (QueueFullError, EngineClosedError) as error:
            status, body = "503 Service Unavailable", {"error": str(error)}
        except TimeoutError as error:
            status, body = "504 Gateway Timeout", {"error": str(error)}
        except RequestError as error:
            status, body = "400 Bad Request", {"error": str(error)}
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps(body).encode()]

    return app


class ThreadingServer(ThreadingMixIn, WSGIServer):
    """A thread a request, from the standard library."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    options = EngineOptions(max_batch=4)
    with (
        AsyncEngine(Engine.load(arguments.bundle, options=options)) as engine,
        make_server(
            "127.0.0.1", arguments.port, make_app(engine), server_class=ThreadingServer
        ) as server,
        suppress(KeyboardInterrupt),
    ):
        server.serve_forever()


if __name__ == "__main__":
    main()
