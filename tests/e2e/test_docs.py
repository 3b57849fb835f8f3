# SPDX-License-Identifier: Apache-2.0
"""The documentation against the program: commands, files, metrics and messages that it names exist.

That its commands work is seen in test_pages.
"""

import ast
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dspark_trt.bundle import Bundle
from dspark_trt.cli import build_app
from dspark_trt.runtime.engine import Engine
from tests.conftest import ROOT
from tests.e2e.pages import PAGES, README, blocks, name_of, prose, steps
from tests.packaging.tree import python_files

_LINE = re.compile(r"^(?:\S*/)?dspark-trt (.*?)(?: \||$)", re.MULTILINE)


def commands() -> list[tuple[Path, list[str], bool]]:
    """Page, words behind the program's name, and whether it is a whole command line."""
    found = []
    for page in PAGES:
        lines = "\n".join(step.text for step in steps(page) if not step.is_python)
        whole = _LINE.findall(lines.replace(" && ", "\n"))
        found += [(page, shlex.split(line), True) for line in whole]
        mentioned = re.findall(r"`dspark-trt ([^`]+)`", prose(page))
        # The first page's table is typed as it stands: what a command cannot do without is there.
        found += [(page, shlex.split(text.split("…")[0]), page == README) for text in mentioned]
    return found


COMMANDS = commands()


@pytest.mark.parametrize(
    ("page", "words", "is_whole"), COMMANDS, ids=[" ".join(words) for _, words, _ in COMMANDS]
)
def test_commands_can_be_parsed(page: Path, words: list[str], is_whole: bool) -> None:
    """As the command line parses them, short of running them; mentions may leave arguments out."""
    root: Any = get_command(build_app())
    command = root.commands[words[0]]
    if is_whole:
        command.make_context(words[0], list(words[1:]))
    else:
        known = {name for p in command.params for name in [*p.opts, *p.secondary_opts]}
        used = {word.split("=")[0] for word in words if word.startswith("-")}
        assert used <= known, page


def test_the_check_of_commands_can_fail() -> None:
    root: Any = get_command(build_app())
    for wrong in (["bundle", "--no-such-option"], [], ["bundle", "--max-batch", "many"]):
        with pytest.raises(Exception, match=r"No such option|Missing parameter|valid integer"):
            root.commands["generate"].make_context("generate", wrong)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page: Path) -> None:
    named = re.findall(
        r"(?:`|python |\()((?:docs|examples|tests|benchmarks)/[\w./-]+)", page.read_text()
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_named_targets_can_be_made() -> None:
    """`make -n` says what each would do; the site is built below."""
    text = "".join(page.read_text() for page in [*PAGES, ROOT / "CONTRIBUTING.md"])
    targets = set(re.findall(r"(?:^\$ |`)make ([\w-]+)", text, re.MULTILINE))
    assert {"demo", "test", "docs"} <= targets
    for target in targets:
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_messages_are_those_of_the_program() -> None:
    """Each piece between … of a message in troubleshooting.md is in some string of the sources."""
    strings = "\0".join(
        node.value
        for file in python_files()
        for node in ast.walk(_joined(ast.parse(file.read_text())))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    rows = re.findall(r"^\| `([^`]+)` \|", _page("troubleshooting.md"), re.MULTILINE)
    assert len(rows) > 20
    pieces = [piece.strip() for message in rows for piece in message.split("…")]
    unknown = [piece for piece in pieces if piece not in strings]
    assert unknown == []


def _joined(tree: ast.AST) -> Any:
    """The tree with f-strings as plain ones, so that a piece of a message lies in one constant."""

    class Join(ast.NodeTransformer):
        def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
            constants = [part for part in node.values if isinstance(part, ast.Constant)]
            gaps = "\1" if len(constants) < len(node.values) else ""
            return ast.Constant(gaps.join(str(part.value) for part in constants))

    return Join().visit(tree)


def test_metrics_are_those_of_the_engine() -> None:
    source = (ROOT / "runtime" / "metrics.py").read_text()
    names = set(re.findall(r"`(dspark_\w+)`", _page("operations.md")))
    assert len(names) > 5
    assert [n for n in names if f'"{n.removesuffix("_total")}"' not in source] == []


def test_every_key_of_the_status_is_explained(tiny_bundle: Bundle) -> None:
    _, table = _page("operations.md").split("| status | says |")
    rows = re.findall(r"^\| (`.*?`) \|", table.split("\n\n")[0], re.MULTILINE)
    with Engine.load(tiny_bundle) as engine:
        assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(engine.status())


def test_the_listing_of_a_bundle_is_its_content(tiny_bundle: Bundle) -> None:
    """Every file is listed; what is listed is there, or comes with another command or option."""
    listing = next(
        content
        for language, content in blocks(ROOT / "docs" / "bundle.md")
        if language == "text"
    )
    listed = dict(line.split(maxsplit=1) for line in listing.splitlines())
    names = [
        f"{path.name}/" if path.is_dir() else path.name for path in tiny_bundle.path.iterdir()
    ]
    assert [n for n in names if not any(fnmatch(n, pattern) for pattern in listed)] == []
    absent = {pattern for pattern in listed if not any(fnmatch(n, pattern) for n in names)}
    assert absent == {"target_verify.onnx", "calibration.json", "sps.json", "engines/"}


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_the_site_builds(tmp_path: Path) -> None:
    """Strictly: every page in the navigation, every link, anchor and documented object found."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    command_line = (tmp_path / "reference" / "cli.html").read_text()
    root: Any = get_command(build_app())
    assert [name for name in root.commands if f'id="{name}"' not in command_line] == []
    python = (tmp_path / "reference" / "api.html").read_text()
    assert 'id="dspark_trt.runtime.engine.Engine.submit"' in python
    for field in ("engine.EngineOptions.max_batch", "request.SamplingParams.seed"):
        assert f'id="dspark_trt.runtime.{field}"' in python, "the comment behind it is shown"
    diagrams = (tmp_path / "concepts.html").read_text().count('<pre class="mermaid">')
    assert diagrams == (ROOT / "docs" / "concepts.md").read_text().count("```mermaid") == 4
    assert "ThreadPoolExecutor" in (tmp_path / "embedding" / "in-process.html").read_text()
