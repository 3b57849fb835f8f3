# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at best: bytes and float32 operations a second, with the engine's threads and its
matrix kernels. A matrix product is measured, since nothing in a step could be faster.
"""

from dataclasses import dataclass

import numpy as np

from dspark_trt.errors import BackendError
from dspark_trt.runtime.bench_turns import clock_for

# `g (float[m,k] a, float[k,n] b) => (float[m,n] c) { c = MatMul(a, b) }`, opset 21, serialised: the runtime
# cannot write ONNX. A test writes it again and compares.
MATMUL = bytes.fromhex(
    "080a3a5d0a130a01610a016212016322064d61744d756c3a001201675a150a016112100a0e080112"
    "0a0a0312016d0a0312016b5a150a016212100a0e0801120a0a0312016b0a0312016e62150a016312"
    "100a0e0801120a0a0312016d0a0312016e42040a001015"
)
_SIDE = 1024
_CALLS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    bytes_per_second: float  # reading what one round reads, again and again
    flops: float  # float32 operations a second; a multiplication and an addition are two
    threads: int


def measure_limits(threads: int, working_set_bytes: int) -> MachineLimits:
    """The best of several calls: limits are not what happens while others work.

    Args:
        threads: of one operator.
        working_set_bytes: what a round reads; small ones stay in a processor's caches.

    Raises:
        BackendError: onnxruntime is not installed.
    """
    multiply = _Product(threads)
    square = multiply.seconds(_SIDE, _SIDE, _SIDE)
    width = min(max(working_set_bytes, 1 << 20), 1 << 29) // (4 * _SIDE)
    row = multiply.seconds(1, _SIDE, width)
    return MachineLimits(
        bytes_per_second=4 * _SIDE * width / row, flops=2 * _SIDE**3 / square, threads=threads
    )


class _Product:
    """[m, k] by [k, n] in onnxruntime, nothing allocated by a call."""

    def __init__(self, threads: int) -> None:
        try:
            import onnxruntime as ort
        except ImportError as error:
            raise BackendError(
                "onnxruntime is not installed. Install it with: pip install 'dspark-trt[cpu]'"
            ) from error
        self._clock = clock_for(threads)
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = threads
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = ort.InferenceSession(
            MATMUL, settings, providers=["CPUExecutionProvider"]
        )

    def seconds(self, m: int, k: int, n: int) -> float:
        random = np.random.default_rng(0)
        arrays = {
            "a": random.random((m, k), np.float32),
            "b": random.random((k, n), np.float32),
            "c": np.empty((m, n), np.float32),
        }
        binding = self._session.io_binding()
        for name, array in arrays.items():
            bind = binding.bind_output if name == "c" else binding.bind_input
            bind(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        best = float("inf")
        for _ in range(_CALLS):
            started = self._clock()
            self._session.run_with_iobinding(binding)
            best = min(best, self._clock() - started)
        return best
