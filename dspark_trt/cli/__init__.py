# SPDX-License-Identifier: Apache-2.0
"""Command line: one command a file; upper layers are imported inside the command functions."""

import sys
from typing import Annotated, NoReturn

import typer
from rich.markup import escape

from dspark_trt import __version__
from dspark_trt.cli.output import err_console
from dspark_trt.errors import DSparkError

# Command name -> module of dspark_trt.cli; modules stay light so that --help is quick.
_COMMANDS = {
    "inspect": "inspect",
    "convert": "convert",
    "export": "export",
    "check": "check",
    "generate": "generate",
    "bench": "bench",
    "compare": "compare",
    "profile": "profile",
    "calibrate": "calibrate",
    "simulate": "simulate",
    "attach-verify": "attach_verify",
    "build": "build",
    "chat": "chat",
    "serve": "serve",
    "triton-repo": "triton_repo",
}


def build_app() -> typer.Typer:
    from importlib import import_module

    app = typer.Typer(
        name="dspark-trt",
        help="Deploy DSpark speculative decoding: export, check, run.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich's tables cut names of options to fit 80 columns
    )
    app.callback()(_root)
    for name, module in _COMMANDS.items():
        app.command(name)(import_module(f"dspark_trt.cli.{module}").command)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dspark-trt {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Deploy DSpark speculative decoding: export, check, run."""


def main() -> None:
    """Entry point: exit code 0 done, 1 a check failed, 2 bad input."""
    try:
        build_app()()
    except DSparkError as error:
        _refuse(str(error))
    except MemoryError as error:
        _refuse(
            f"not enough memory{f' ({error})' if str(error) else ''}: take fewer requests at a time "
            "(--max-batch), a smaller model or a larger machine"
        )
    except BrokenPipeError:
        sys.exit(1)


def _refuse(text: str) -> NoReturn:
    err_console.print(f"[bold red]error:[/] {escape(text)}", highlight=False, soft_wrap=True)
    sys.exit(2)
