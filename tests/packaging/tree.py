# SPDX-License-Identifier: Apache-2.0
"""The source tree as packages: which files there are, under which module names."""

from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

FOLDERS = {
    "dspark_trt": "dspark_trt",
    "dspark_trt.export": "export",
    "dspark_trt.plugins": "plugins",
    "dspark_trt.runtime": "runtime",
}


def python_files() -> Iterator[Path]:
    """Every module once, not again through the links."""
    for folder in FOLDERS.values():
        for file in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in file.parents):
                yield file


def module_name(file: Path) -> str:
    """`export/engines/build.py` -> `dspark_trt.export.engines.build`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    packages = {folder: package for package, folder in FOLDERS.items()}
    return ".".join([packages[parts[0]], *parts[1:]]).removesuffix(".__init__")
