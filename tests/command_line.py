# SPDX-License-Identifier: Apache-2.0
"""The program in this process: its arguments, what it prints, its exit code.

An unexpected exception is the test's. As a process of its own it is run by tests/e2e/test_pages.py.
"""

import io
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from dspark_trt.cli import main


class Ran(NamedTuple):
    code: int
    stdout: str
    stderr: str


def dspark(*arguments: str | Path | float) -> Ran:
    out, err, code = io.StringIO(), io.StringIO(), 0
    before, handler = sys.argv, signal.getsignal(signal.SIGTERM)
    sys.argv = ["dspark-trt", *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = before
        signal.signal(signal.SIGTERM, handler)  # `export` and `serve` have their own
    return Ran(code, out.getvalue(), err.getvalue())
