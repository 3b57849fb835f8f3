# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt serve`: a bundle behind OpenAI's HTTP API."""

import json as json_module
import logging
import os
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer

from dspark_trt.cli.extras import require_extra
from dspark_trt.cli.output import err_console, print_notes
from dspark_trt.cli.running import BackendName, DeviceName, Threads
from dspark_trt.errors import DSparkError, RequestError


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: a free one.", min=0, max=65535)] = 8000,
    model_name: Annotated[
        str | None,
        typer.Option(help="What clients call the model; default: the folder's name."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="One key a line; or DSPARK_API_KEYS, separated by commas."),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Sequences decoded at the same time.")] = 8,
    max_tokens_per_step: Annotated[
        int, typer.Option(help="Target rows a step: what a long prompt may delay others by.")
    ] = 512,
    max_waiting: Annotated[
        int, typer.Option(help="Sequences that wait; beyond it 503.", min=0)
    ] = 256,
    max_cached_tokens: Annotated[
        int | None, typer.Option(help="Positions of all active sequences together.")
    ] = None,
    prefix_cache_mib: Annotated[
        int, typer.Option(help="Memory for the beginnings of earlier prompts.", min=0)
    ] = 256,
    max_concurrent_requests: Annotated[
        int, typer.Option(help="HTTP requests that generate or wait; beyond it 503.")
    ] = 256,
    requests_per_minute: Annotated[
        float | None, typer.Option(help="Of each key, or address without keys; beyond it 429.")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Of a request; beyond it 413.")] = 1 << 20,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Default: what the context holds.")
    ] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option(help="Of each choice; default: what the context holds.")
    ] = None,
    max_choices: Annotated[
        int, typer.Option(help="Sequences of one request: prompts times n.")
    ] = 16,
    request_timeout_seconds: Annotated[
        float | None, typer.Option(help="From arrival to the last token.")
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(help="How long running answers may go on after SIGTERM.")
    ] = 30.0,
    access_log: Annotated[
        bool,
        typer.Option(
            "--access-log/--no-access-log",
            help="One JSON line a request on stderr.",
        ),
    ] = True,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Prompts in the access log.")
    ] = False,
    scheduler: Annotated[
        str, typer.Option(help="auto, fixed:K, threshold:C, algorithm1 or async.")
    ] = "auto",
    threads: Threads = None,
    backend: BackendName = "onnxruntime",
    device: DeviceName = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line to stdout when listening.")
    ] = False,
) -> None:
    """Serve a bundle over OpenAI's HTTP API; live page at /ui."""
    require_extra("serve", ("fastapi", "llguidance", "uvicorn"))
    from dspark_trt.runtime.async_engine import AsyncEngine
    from dspark_trt.runtime.backends.interface import BackendOptions
    from dspark_trt.runtime.engine import Engine, EngineOptions
    from dspark_trt.runtime.serving.app import create_app
    from dspark_trt.runtime.serving.server import listening_socket, run
    from dspark_trt.runtime.serving.settings import (
        KEYS_VARIABLE,
        ServerSettings,
        keys_of_environment,
    )

    settings = ServerSettings(
        model_name=model_name,
        api_keys=keys_of_environment() + _keys(api_key_file),
        max_body_bytes=max_body_bytes,
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=max_output_tokens,
        max_choices=max_choices,
        max_concurrent_requests=max_concurrent_requests,
        requests_per_minute=requests_per_minute,
        request_timeout_s=request_timeout_seconds,
        drain_s=drain_seconds,
        log_prompts=log_prompts,
        access_log=access_log,
    )
    options = EngineOptions(
        max_batch=max_batch,
        max_tokens_per_step=max_tokens_per_step,
        max_waiting=max_waiting,
        max_cached_tokens=max_cached_tokens,
        prefix_cache_bytes=prefix_cache_mib << 20,
    )
    with listening_socket(host, port) as socket:  # a port in use is said before a model loads
        engine = Engine.load(
            bundle,
            backend=backend,
            backend_options=BackendOptions(threads=threads, device=device),
            options=options,
            scheduler=scheduler,
        )
        notes = engine.status()["notes"]  # before the engine has a thread of its own
        with AsyncEngine(engine) as service:
            app = create_app(service, settings)
            _log_to_stderr()
            url = f"http://{_in_url(host)}:{socket.getsockname()[1]}"

            def announce() -> None:
                if not settings.api_keys and not _is_loopback(host):
                    err_console.print(
                        f"[bold yellow]warning:[/] {host} can be reached from other machines and there are no "
                        f"API keys: whoever reaches it may use it. Give --api-key-file or {KEYS_VARIABLE}.",
                        highlight=False,
                        soft_wrap=True,
                    )
                print_notes(notes)
                model = app.state.service.model_name
                if json:
                    line = json_module.dumps({"url": url, "model": model, "pid": os.getpid()})
                    sys.stdout.write(f"{line}\n")
                    sys.stdout.flush()
                err_console.print(
                    f"{model} at {url}/v1, live page at {url}/ui", highlight=False, markup=False
                )

            run(app, socket, when_listening=announce)


def _keys(file: Path | None) -> tuple[str, ...]:
    """Keys of the file; lines that begin with # are comments."""
    if file is None:
        return ()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DSparkError(f"API key file {file} cannot be read: {error}") from error
    keys = tuple(line.strip() for line in lines if not line.lstrip().startswith("#"))
    if not any(keys):
        raise RequestError(f"API key file {file} has no key: one a line is expected")
    return tuple(key for key in keys if key)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _log_to_stderr() -> None:
    """Access lines are JSON already; the rest gets its level and module."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    access = logging.getLogger("dspark_trt.access")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    access.propagate = False
