# SPDX-License-Identifier: Apache-2.0
"""What the server costs: streams over HTTP against the same requests in this process, in turns.

    python benchmarks/serve_overhead.py BUNDLE [--streams 8] [--tokens 128] [--repeats 9] [--threads 1]

Both arms run the same requests (seeded, so the same tokens) in batches of `--streams` on an engine with the
same options; the server is a process of its own with its client in another. An arm's figure is its median
over turns; the overhead is the median over turns of the ratio of a server turn to the engine turn beside
it. On a busy machine take `--threads 1` and read `cpu_overhead`: the CPU time of the server's process over
that of the engine here, which other processes do not change. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from served import served

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout, installed or not

from dspark_trt.bundle import load_bundle
from dspark_trt.runtime.backends.interface import BackendOptions
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.text import TextCodec

MODEL = "measured"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    bodies = [body_of(number, args.tokens) for number in range(args.streams)]
    bundle = load_bundle(args.bundle, verify_hashes=False)
    codec, every_draft = TextCodec(bundle), f"fixed:{bundle.draft.gamma}"
    requests = [request_of(codec, body) for body in bodies]
    options = EngineOptions(max_batch=args.streams)
    threads = BackendOptions(threads=args.threads)
    flags = ["--model-name", MODEL, "--max-batch", str(args.streams), "--prefix-cache-mib", "0"]
    flags += ["--scheduler", every_draft]
    if args.threads is not None:
        flags += ["--threads", str(args.threads)]
    alone, over_http = [], []
    with (
        Engine.load(
            args.bundle, backend_options=threads, options=options, scheduler=every_draft
        ) as engine,
        served(args.bundle, *flags, stderr=subprocess.DEVNULL) as (url, pid),
        asyncio.Runner() as loop,
    ):
        http = httpx.AsyncClient(base_url=url, timeout=120, verify=False)
        for turn in range(args.repeats + 1):  # the first warms up
            arms = {
                "engine": lambda: spent(time.process_time, lambda: by_engine(engine, requests)),
                "server": lambda: spent(
                    lambda: cpu_s(pid), lambda: loop.run(by_server(http, bodies))
                ),
            }
            order = ("engine", "server") if turn % 2 else ("server", "engine")
            spending = {name: arms[name]() for name in order}
            alone.append(spending["engine"])
            over_http.append(spending["server"])
        loop.run(http.aclose())
    walls, cpus = (
        sorted(
            round(theirs[i] / ours[i], 3)
            for ours, theirs in zip(alone[1:], over_http[1:], strict=True)
        )
        for i in (0, 1)
    )
    report: dict[str, Any] = {
        "streams": args.streams,
        "tokens": args.tokens,
        "threads": args.threads,
        "engine_s": round(statistics.median(wall for wall, _ in alone[1:]), 4),
        "server_s": round(statistics.median(wall for wall, _ in over_http[1:]), 4),
        "overhead": round(statistics.median(walls) - 1, 4),
        "cpu_overhead": round(statistics.median(cpus) - 1, 4),
        "ratios": walls,
        "cpu_ratios": cpus,
        "load": os.getloadavg(),
    }
    print(json.dumps(report))


def body_of(number: int, tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": f"Sam has {number} apples and buys {number + 2} more. How many apples does Sam have?",
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": number,
        "temperature": 0,
        "stream": True,
    }


def request_of(codec: TextCodec, body: dict[str, Any]) -> Request:
    params = SamplingParams(
        max_new_tokens=body["max_tokens"], seed=body["seed"], ignore_eos=True
    )
    return Request(prompt_ids=codec.encode(body["prompt"]), params=params, detokenize=True)


def spent(cpu: Callable[[], float], run: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a run: wall, and CPU by the given clock."""
    wall_before, cpu_before = time.perf_counter(), cpu()
    run()
    return time.perf_counter() - wall_before, cpu() - cpu_before


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, in steps of a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def by_engine(engine: Engine, requests: list[Request]) -> None:
    engine.generate(requests)


async def by_server(http: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> None:
    async def read(body: dict[str, Any]) -> None:
        async with http.stream("POST", "/v1/completions", json=body) as stream:
            stream.raise_for_status()
            async for _ in stream.aiter_bytes():
                pass

    await asyncio.gather(*(read(body) for body in bodies))


if __name__ == "__main__":
    main()
