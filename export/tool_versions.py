# SPDX-License-Identifier: Apache-2.0
"""Versions of the libraries that made something, for its manifest."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def tool_versions(tools: Iterable[str]) -> dict[str, str]:
    found = {}
    for tool in tools:
        try:
            found[tool] = version(tool)
        except PackageNotFoundError:  # a vendored or renamed build
            found[tool] = "unknown"
    return found
