# SPDX-License-Identifier: Apache-2.0
"""What the pages tell a reader to type, and what they say will be printed."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "examples").glob("*/README.md"))

SHELL = ("sh", "bash", "console")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """A command line, or a Python program."""

    text: str
    is_python: bool = False
    shown: tuple[str, ...] = ()  # lines of stdout; … stands for anything

    @property
    def name(self) -> str:
        """The command; the program's first line."""
        return self.text.splitlines()[0]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and content of each fenced block."""
    return _BLOCK.findall(page.read_text())


def prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


def steps(page: Path) -> list[Step]:
    """In the order of the page; included files (`--8<--`) are no steps."""
    found: list[Step] = []
    for language, content in blocks(page):
        if language in SHELL:
            found += _typed(content.replace("\\\n", " "), has_prompts=language == "console")
        elif language == "python" and "--8<--" not in content:
            found.append(Step(content, is_python=True))
    return found


def _typed(content: str, *, has_prompts: bool) -> Iterator[Step]:
    """Lines with a prompt are commands and the others their output; without prompts all are commands."""
    parts = (
        re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]
        if has_prompts
        else content.splitlines()
    )
    for part in filter(str.strip, parts):
        line, *shown = part.splitlines()
        yield Step(re.sub(r"\s+# .*", "", line).strip(), shown=tuple(filter(None, shown)))
