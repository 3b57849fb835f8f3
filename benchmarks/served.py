# SPDX-License-Identifier: Apache-2.0
"""`dspark-trt serve` as a process of its own, for the benchmarks that drive one."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(bundle: Path, *options: str, stderr: int | None = None) -> Iterator[tuple[str, int]]:
    """URL and process id of a server on a free port; it has to end by itself when asked to."""
    command = [
        sys.executable,
        "-m",
        "dspark_trt",
        "serve",
        str(bundle),
        "--port",
        "0",
        "--json",
    ]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=stderr, text=True
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process.pid
    finally:
        process.terminate()
        code = process.wait(60)
    assert code == 0, f"the server ended with {code}"
