# SPDX-License-Identifier: Apache-2.0
"""What commands print: JSON alone on stdout, tables and progress for people."""

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console

# What is printed stands as it is: by default rich takes ":-1:" of a value or an answer for an emoji.
console = Console(emoji=False)
err_console = Console(stderr=True, emoji=False)


def print_json(value: Any) -> None:
    """Write one JSON document to stdout, nothing else."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def print_notes(notes: Iterable[str]) -> None:
    """An engine's notes, on stderr: what is missing or switched off, and the command that mends it."""
    for note in notes:
        err_console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)
