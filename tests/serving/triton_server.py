# SPDX-License-Identifier: Apache-2.0
"""A real Triton Inference Server, from the wheel of nvidia-pytriton.

That server (2.51) is built for NumPy 1 and has the Python backend alone: it runs in an environment with an
older NumPy.
"""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ROOT

NUMPY_1 = Path(sys.prefix) / "numpy-1"  # `make triton-server` puts it there
HAS_SERVER = bool(find_spec("pytriton") and find_spec("tritonclient") and NUMPY_1.is_dir())
NEEDS_SERVER = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        not HAS_SERVER, reason="no Triton server here: make triton-server installs one"
    ),
]

# The server waits for open connections before it ends.
HTTP = httpx.Client(verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


@dataclass(frozen=True)
class Server:
    grpc: str
    http: str
    process: "subprocess.Popen[str]"


@dataclass(frozen=True)
class Installation:
    """The wheel's server, with the interpreter of a new environment: the Python backend asks the PATH."""

    program: Path
    backends: Path
    environment: Mapping[str, str]

    @contextmanager
    def serving(self, *options: str) -> Iterator[Server]:
        """Until the block ends, then SIGTERM, and code 0."""
        http, grpc = free_ports(2)
        addresses = {
            "http-address": "127.0.0.1",
            "http-port": http,
            "grpc-address": "127.0.0.1",
            "grpc-port": grpc,
            "allow-metrics": "false",
            "backend-directory": self.backends,
        }
        process = subprocess.Popen(
            [
                self.program,
                *options,
                *(f"--{name}={value}" for name, value in addresses.items()),
            ],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            server = Server(f"127.0.0.1:{grpc}", f"http://127.0.0.1:{http}", process)
            await_ready(server)
            yield server
        finally:
            process.terminate()
            said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said[-3000:]


def install(folder: Path) -> Installation:
    """With its one backend, for Python."""
    spec = find_spec("pytriton")
    assert spec is not None
    assert spec.submodule_search_locations
    wheel = Path(spec.submodule_search_locations[0]) / "tritonserver"
    backend = folder / "backends" / "python"
    shutil.copytree(wheel / "backends" / "python", backend)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(
        wheel / "python_backend_stubs" / version / "triton_python_backend_stub", backend
    )
    (backend / "triton_python_backend_stub").chmod(0o755)
    home = folder / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    borrowed = [NUMPY_1, sysconfig.get_path("purelib"), ROOT]
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    program = folder / "tritonserver"
    shutil.copy(wheel / "bin" / "tritonserver", program)
    program.chmod(0o755)
    libraries = [sysconfig.get_config_var("LIBDIR"), wheel.parents[1] / "nvidia_pytriton.libs"]
    environment = {
        **os.environ,
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
    }
    return Installation(program, backend.parent, environment)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def await_ready(server: Server) -> None:
    """Every model is ready that the server was to load; at once where it fails, as the server then ends."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            pytest.fail(server.process.communicate()[0][-3000:])
        with suppress(httpx.TransportError):
            if HTTP.get(f"{server.http}/v2/health/ready").is_success:
                return
        time.sleep(0.05)
    pytest.fail("the server does not get ready")


def tensor(name: str, value: Any) -> Any:
    from tritonclient.grpc import InferInput
    from tritonclient.utils import np_to_triton_dtype

    made = InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
    made.set_data_from_numpy(value)
    return made
