# SPDX-License-Identifier: Apache-2.0
"""mkdocs hook: the page `reference/cli.md`, made from the commands themselves."""

from collections.abc import Iterator
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.main import get_command

from dspark_trt.cli import build_app

PAGE = "reference/cli.md"
INTRODUCTION = """# Command line

Exit codes: 0 done, 1 a check failed, 2 bad input, with one sentence on stderr. With `--json` stdout carries
one document and nothing else. `dspark-trt --version` prints the version.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, PAGE, content=page()))
    return files


def page() -> str:
    """Markdown of all commands, in the order of the help."""
    root: Any = get_command(build_app())
    sections = ["\n".join(_section(*each)) for each in root.commands.items()]
    return "\n\n".join([INTRODUCTION, *sections]) + "\n"


def _section(name: str, command: Any) -> Iterator[str]:
    types = get_type_hints(command.callback)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(["dspark-trt", name, *(a.name.upper() for a in arguments), "[OPTIONS]"])
    yield f"## {name}\n\n{command.help}\n\n```text\n{usage}\n```\n"
    for argument in arguments:
        yield f"`{argument.name.upper()}`: {_text(argument)}\n"
    yield "| option | | default |\n|---|---|---|"
    for option in options:
        yield f"| {_names(option, types)} | {_text(option)} | {_default(option)} |"


def _names(option: Any, types: dict[str, Any]) -> str:
    value = "" if option.is_flag else f" {_value(types[option.name])}"
    return ", ".join(f"`{name}{value}`" for name in [*option.opts, *option.secondary_opts])


def _value(annotation: Any) -> str:
    """`list[int] | None` -> `INT ...`."""
    if get_origin(annotation) is list:
        return f"{_value(get_args(annotation)[0])} ..."
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    return _value(kinds[0]) if kinds else annotation.__name__.upper()


def _text(parameter: Any) -> str:
    return (parameter.help or "").replace("|", "\\|").replace("\n", " ")


def _default(option: Any) -> str:
    if option.required:
        return "required"
    if option.secondary_opts and isinstance(option.default, bool):
        return f"`{(option.opts if option.default else option.secondary_opts)[0]}`"
    is_shown = option.default is not None and option.show_default and not option.is_flag
    return f"`{option.default}`" if is_shown else ""
