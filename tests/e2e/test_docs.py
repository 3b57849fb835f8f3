# SPDX-License-Identifier: Apache-2.0
"""The documentation against the program: commands, files, metrics and messages that it names exist."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dspark_trt.bundle import Bundle
from dspark_trt.cli import build_app
from tests.conftest import ROOT
from tests.packaging.tree import python_files

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "examples").glob("*/README.md"))
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SHELL = {"sh", "bash", "console", ""}
_LINE = re.compile(r"^(?:\$ )?(?:\S*/)?dspark-trt (.*?)(?: \||$)", re.MULTILINE)


def commands() -> list[tuple[Path, list[str], bool]]:
    """Page, words behind the program's name, and whether it is a whole command line."""
    found = []
    for page in PAGES:
        for language, content in _BLOCK.findall(page.read_text()):
            if language in _SHELL:
                lines = _LINE.findall(content.replace("\\\n", " ").replace(" && ", "\n"))
                found += [(page, shlex.split(line, comments=True), True) for line in lines]
        mentioned = re.findall(r"`dspark-trt ([^`]+)`", _BLOCK.sub("", page.read_text()))
        found += [(page, shlex.split(text.split("…")[0]), False) for text in mentioned]
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


@pytest.mark.slow
def test_the_quick_start_runs(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """What the README has not: its own lines are run by test_readme."""
    shutil.copytree(tiny_bundle.path, tmp_path / "bundle")
    bash = [
        content for language, content in _BLOCK.findall(_page("index.md")) if language == "bash"
    ]
    lines = [line for line in "".join(bash).splitlines() if line not in PAGES[0].read_text()]
    assert len(lines) >= 3
    for line in lines:
        command = [sys.executable, "-m", "dspark_trt", *shlex.split(line)[1:]]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert (tmp_path / "bundle" / "sps.json").exists()
    assert (tmp_path / "bundle" / "calibration.json").exists()


def test_python_in_pages_runs() -> None:
    """What needs no server; the README's runs in test_readme, examples in test_examples."""
    programs = [
        content
        for page in PAGES[1:]
        for language, content in _BLOCK.findall(page.read_text())
        if language == "python" and page.name not in ("serving.md", "ray.md", "triton.md")
    ]
    programs = [program for program in programs if "--8<--" not in program]
    assert programs
    for program in programs:
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


@pytest.mark.slow
def test_commands_for_the_server_run(tiny_bundle: Bundle) -> None:
    """Every curl of OpenAI's API and every program of serving.md; those for Ray and Triton run in tests/serving."""
    command = [sys.executable, "-m", "dspark_trt", "serve", str(tiny_bundle.path)]
    options = ["--model-name", "bundle", "--port", "0", "--json", "--no-access-log"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = json.loads(server.stdout.readline())["url"].removeprefix("http://")
            shell = [
                c
                for page in PAGES
                for lang, c in _BLOCK.findall(page.read_text())
                if lang in _SHELL
            ]
            lines = re.findall(
                r"^(?:\$ )?(curl .*/v1/.*)$", "".join(shell).replace("\\\n", " "), re.MULTILINE
            )
            programs = [
                c for lang, c in _BLOCK.findall(_page("serving.md")) if lang == "python"
            ]
            assert len(lines) >= 2
            assert len(programs) >= 2
            for line in lines:
                there = re.sub(r"(localhost|127\.0\.0\.1):8000", address, line).replace(
                    "NAME", "bundle"
                )
                subprocess.run(
                    ["bash", "-c", there.replace("curl", "curl -sSf", 1)],
                    check=True,
                    timeout=60,
                )
            for program in programs:
                there = f"bundle = {str(tiny_bundle.path)!r}\n{program.replace('127.0.0.1:8000', address)}"
                subprocess.run([sys.executable, "-c", there], check=True, timeout=60)
        finally:
            server.terminate()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_and_targets_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"(?:`|python |\()((?:docs|examples|tests|benchmarks)/[\w./-]+)", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^\$ |`)make ([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


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
    assert "ThreadPoolExecutor" in (tmp_path / "embedding" / "in-process.html").read_text()
