# SPDX-License-Identifier: Apache-2.0
"""What the server costs: streams over HTTP against the same requests in this process, in turns.

    python benchmarks/serve_overhead.py BUNDLE [--streams 8] [--tokens 128] [--repeats 9]

Both arms run the same requests (seeded, so the same tokens) in batches of `--streams` on an engine with the
same options; the server is a process of its own with its client in another. An arm's figure is its median
over turns; the overhead is the median over turns of the ratio of a server turn to the engine turn beside
it. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout, installed or not

from dspark_trt.bundle import load_bundle
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
    args = parser.parse_args()
    bodies = [body_of(number, args.tokens) for number in range(args.streams)]
    bundle = load_bundle(args.bundle, verify_hashes=False)
    codec, every_draft = TextCodec(bundle), f"fixed:{bundle.draft.gamma}"
    requests = [request_of(codec, body) for body in bodies]
    options = EngineOptions(max_batch=args.streams)
    turns: list[tuple[float, float]] = []
    with (
        Engine.load(args.bundle, options=options, scheduler=every_draft) as engine,
        server(args.bundle, args.streams, every_draft) as url,
    ):
        for turn in range(args.repeats + 1):  # the first warms up
            arms = {
                "engine": lambda: by_engine(engine, requests),
                "server": lambda: by_server(url, bodies),
            }
            order = ("engine", "server") if turn % 2 else ("server", "engine")
            seconds = {name: timed(arms[name]) for name in order}
            turns.append((seconds["engine"], seconds["server"]))
    ratios = [served / alone for alone, served in turns[1:]]
    report: dict[str, Any] = {
        "streams": args.streams,
        "tokens": args.tokens,
        "engine_s": round(statistics.median(alone for alone, _ in turns[1:]), 4),
        "server_s": round(statistics.median(served for _, served in turns[1:]), 4),
        "overhead": round(statistics.median(ratios) - 1, 4),
        "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
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


@contextmanager
def server(bundle: Path, streams: int, scheduler: str) -> Iterator[str]:
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
    options = ["--model-name", MODEL, "--max-batch", str(streams), "--prefix-cache-mib", "0"]
    process = subprocess.Popen(
        [*command, *options, "--scheduler", scheduler],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait(60)


def timed(run: Any) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def by_engine(engine: Engine, requests: list[Request]) -> None:
    engine.generate(requests)


def by_server(url: str, bodies: list[dict[str, Any]]) -> None:
    async def read(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with http.stream("POST", "/v1/completions", json=body) as stream:
            stream.raise_for_status()
            async for _ in stream.aiter_bytes():
                pass

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as http:
            await asyncio.gather(*(read(http, body) for body in bodies))

    asyncio.run(all_of_them())


if __name__ == "__main__":
    main()
