# SPDX-License-Identifier: Apache-2.0
"""docs/serving.md says what there is: flags, parameters, routes, series. Its programs run in e2e/test_pages."""

import re

import httpx
from typer.main import get_command

from dspark_trt.cli import build_app
from dspark_trt.runtime.serving.schema import ChatRequest, CompletionRequest
from tests.conftest import ROOT
from tests.serving.conftest import HTTP, Running

TEXT = (ROOT / "docs" / "serving.md").read_text()


def test_every_flag_is_documented_and_no_other() -> None:
    serve = get_command(build_app()).commands["serve"]  # type: ignore[attr-defined]
    names = {name for param in serve.params for name in (*param.opts, *param.secondary_opts)}
    flags = {name for name in names if name.startswith("--")}
    mentioned = set(re.findall(r"--[a-z][a-z-]+", TEXT)) - {"--json"}  # curl has one as well
    assert mentioned <= flags
    assert flags - mentioned == {"--json", "--access-log"}


def test_every_parameter_is_documented() -> None:
    for name in CompletionRequest.model_fields | ChatRequest.model_fields:
        assert f"`{name}" in TEXT or f'"{name}"' in TEXT, name


def test_every_route_is_documented(server: Running) -> None:
    paths = HTTP.get(f"{server.url}/openapi.json").json()["paths"]
    for path in paths:
        assert path.replace("{model}", "NAME") in TEXT


def test_every_series_of_the_server_is_documented(server: Running) -> None:
    names = re.findall(
        r"# TYPE (dspark_http\w+|dspark_first_token\w+|dspark_seconds\w+) ", _metrics(server)
    )
    assert len(names) >= 6
    for name in names:
        if not name.endswith("_created"):
            assert f"`{name}" in TEXT, name


def _metrics(server: Running) -> str:
    answer: httpx.Response = HTTP.get(f"{server.url}/metrics")
    return answer.text
