# SPDX-License-Identifier: Apache-2.0
"""Seconds and peak memory of building TensorRT-RTX engines of a drafter of the Qwen3-4B drafter's size.

    python benchmarks/engine_build.py [--folder DIR] [--dtype float16] [--all]

Writes a random checkpoint of 1.39 B parameters, exports it, builds the engines of the bundle on the CPU,
and removes all of it (about 6 GB at a time). With --all also those of the drafter's parts, which write the
weights a second time. The last line is JSON; exit code 1 if the engines together take more than 60 seconds,
or any of them more than 3 times the weights' bytes of memory.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from export_scale import write_checkpoint

MOST_SECONDS = 60.0
MOST_PEAK = 3.0  # times the bytes of the bundle's weights


def run(*arguments: str) -> dict[str, object]:
    """One command of the command line, with --json."""
    command = [sys.executable, "-m", "dspark_trt", *arguments, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def children_seconds() -> float:
    """Processor time of all commands so far: what else runs on the machine does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, help="where to write; default: the temporary folder"
    )
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--all", action="store_true", help="the drafter's parts too")
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="engine-build-", dir=arguments.folder))
    bundle = work / "bundle"
    try:
        write_checkpoint(work / "drafter")
        run(
            "export",
            "--draft",
            str(work / "drafter"),
            "-o",
            str(bundle),
            "--dtype",
            arguments.dtype,
        )
        shutil.rmtree(work / "drafter")
        weight_bytes = (bundle / "weights.bin").stat().st_size
        graphs = ("--graph", "all") if arguments.all else ()
        before = children_seconds()
        built = run("build", str(bundle), "--backend", "tensorrt-rtx", *graphs)
        cpu_seconds = children_seconds() - before
    finally:
        shutil.rmtree(work)
    engines = built["engines"]
    seconds = sum(engine["seconds"] for engine in engines)
    peak = max(engine["peak_bytes"] for engine in engines) / weight_bytes
    for engine in engines:
        print(
            f"{engine['graph']:16} {engine['seconds']:6.1f} s  {engine['bytes'] / 1e9:5.2f} GB  "
            f"peak {engine['peak_bytes'] / 1e9:5.2f} GB, {engine['peak_bytes'] / weight_bytes:.2f} x the weights"
        )
    print(
        f"all: {seconds:.1f} s (at most {MOST_SECONDS:.0f}), peak {peak:.2f} x {weight_bytes / 1e9:.2f} GB "
        f"of {arguments.dtype} weights (at most {MOST_PEAK:.0f})"
    )
    print(
        json.dumps(
            {
                "backend": built["backend"],
                "version": built["version"],
                "dtype": arguments.dtype,
                "weight_bytes": weight_bytes,
                "seconds": round(seconds, 1),
                "cpu_seconds": round(cpu_seconds, 1),
                "peak_over_weights": round(peak, 3),
                "engines": engines,
            }
        )
    )
    return 0 if seconds <= MOST_SECONDS and peak <= MOST_PEAK else 1


if __name__ == "__main__":
    sys.exit(main())
