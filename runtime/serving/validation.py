# SPDX-License-Identifier: Apache-2.0
"""One clear sentence for a body that does not validate."""

from typing import Any

from fastapi.exceptions import RequestValidationError

from dspark_trt.runtime.serving.errors import ApiError


def validation_error(error: RequestValidationError) -> ApiError:
    """Status 400, as OpenAI answers; names the first parameter that is wrong."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it does not parse")
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    place = _param(first["loc"])
    name = first.get("ctx", {}).get("name")  # of a parameter that is not taken
    param = ".".join(part for part in (place, name) if part) or None
    return ApiError(
        400, _sentence(first, error.errors(), param), param=param, code=_code(first)
    )


def _code(error: Any) -> str:
    kind = str(error["type"])
    if kind.endswith("_parameter"):
        return kind
    return "missing_parameter" if kind == "missing" else "invalid_value"


def _sentence(first: Any, errors: Any, param: str | None) -> str:
    if first["type"] == "unknown_parameter":
        return f"unknown parameter: {param}"
    if first["type"] == "unsupported_parameter":
        return str(first["msg"])
    if param is None and isinstance(first.get("input"), bytes):
        return "the body was not read as JSON: send it with the header Content-Type: application/json"
    if first["type"] == "value_error":  # a sentence of ours
        return str(first["ctx"]["error"])
    # The alternatives of a union report one by one.
    same = [each["msg"] for each in errors if _param(each["loc"]) == param]
    reasons = " or ".join(dict.fromkeys(message[0].lower() + message[1:] for message in same))
    return f"{param}: {reasons}" if param else f"the body: {reasons}"


def _param(place: tuple[int | str, ...]) -> str | None:
    """`messages.0.content`, without the names that the validation library gives to alternatives."""
    known = [
        str(part)
        for part in place
        if isinstance(part, int) or (part.isidentifier() and part not in _TYPE_NAMES)
    ]
    names = known[1:] if known[:1] == ["body"] else known
    return ".".join(names) or None


_TYPE_NAMES = frozenset({"str", "int", "float", "bool", "list", "dict"})
