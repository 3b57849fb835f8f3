# SPDX-License-Identifier: Apache-2.0
"""The README's commands and code, run as written."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the shell blocks ran, in order."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "examples").symlink_to(ROOT / "examples")
    for line in "".join(_blocks("bash")).splitlines():
        program, *arguments = shlex.split(line)
        assert program == "dspark-trt"
        command = [sys.executable, "-m", "dspark_trt", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert done.stdout
    return folder


@pytest.mark.parametrize("number", range(len(_blocks("python"))))
def test_python_blocks_run(number: int, folder: Path) -> None:
    command = [sys.executable, "-c", _blocks("python")[number]]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_two_commands_exist() -> None:
    targets = (ROOT / "Makefile").read_text()
    for name in re.findall(r"\$ make (\w+)", README):
        assert re.search(rf"^{name}:", targets, re.MULTILINE)
