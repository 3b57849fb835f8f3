# SPDX-License-Identifier: Apache-2.0
"""Builds one engine in a process of its own: `python -m dspark_trt.export.engines.worker`.

TensorRT ends the process on some inputs, and its memory is best measured alone. The job comes as JSON on
stdin; JSON lines go to the original stdout: progress, then one result or error. Everything the libraries
print goes to stderr.
"""

import json
import os
import sys
from typing import Any

from dspark_trt.errors import DSparkError
from dspark_trt.export.engines.engine_from_onnx import (
    Job,
    engine_from_onnx,
    engine_from_stripped,
)


def main() -> int:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as protocol:
        os.dup2(2, 1)  # libraries print wherever they like

        def send(message: dict[str, Any]) -> None:
            protocol.write(json.dumps(message) + "\n")
            protocol.flush()

        try:
            job = Job.from_json(sys.stdin.read())
            send(
                {
                    "result": engine_from_stripped(job)
                    if job.refit
                    else engine_from_onnx(job, send)
                }
            )
        except DSparkError as error:
            send({"error": str(error)})
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
