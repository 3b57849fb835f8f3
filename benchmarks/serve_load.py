# SPDX-License-Identifier: Apache-2.0
"""Many streaming clients at once against a real server: errors, fairness, and the times clients feel.

    python benchmarks/serve_load.py BUNDLE --clients 64 --seconds 60 [--max-batch 16]

Clients ask for one streamed answer after the other until time is up, and finish the last. Printed: requests
and tokens, errors, Jain's fairness index over the clients' tokens ((Σx)² / (n Σx²): 1 is equal, 1/n is one
client served alone), time to first token and between tokens. Tokens of one event come together, so the time
between tokens is that between events, and each event's divided by its tokens is given as well. The clients
run in a process of their own. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from served import served

MODEL = "loaded"
WORDS = [
    "apples",
    "pens",
    "books",
    "coins",
    "stones",
    "eggs",
    "cards",
    "seeds",
    "lamps",
    "rings",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    args = parser.parse_args()
    options = ("--model-name", MODEL, "--no-access-log", "--max-batch", str(args.max_batch))
    with served(args.bundle, *options) as (url, _):
        report = asyncio.run(load(url, args.clients, args.seconds, args.tokens))
    print(f"{report['requests']} answers, {report['tokens_per_second']:.0f} tokens/s")
    print(json.dumps({**report, "max_batch": args.max_batch, "load": os.getloadavg()}))
    return 0 if report["errors"] == [] else 1


@dataclass(slots=True)
class Client:
    """What one client saw."""

    tokens: int = 0
    requests: int = 0
    first_token_s: list[float] = field(default_factory=list)
    between_events_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)  # of each event but the first
    errors: list[str] = field(default_factory=list)


async def load(url: str, clients: int, seconds: float, tokens: int) -> dict[str, Any]:
    """Drive a server for so many seconds."""
    seen = [Client() for _ in range(clients)]
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    started = time.perf_counter()
    deadline = started + seconds
    async with httpx.AsyncClient(
        base_url=url, limits=limits, timeout=120, verify=False
    ) as http:
        await asyncio.gather(
            *(serve_one(http, client, n, deadline, tokens) for n, client in enumerate(seen))
        )
        status = (await http.get("/status")).json()
    wall_s = time.perf_counter() - started
    counts = np.array([client.tokens for client in seen], np.float64)
    return {
        "clients": clients,
        "seconds": round(wall_s, 1),
        "requests": sum(client.requests for client in seen),
        "fewest_and_most_requests": [f(client.requests for client in seen) for f in (min, max)],
        "errors": [error for client in seen for error in client.errors],
        "tokens_per_second": round(counts.sum() / wall_s, 1),
        "fairness": round(float(counts.sum() ** 2 / (clients * (counts**2).sum())), 4),
        "first_token_ms": percentiles([t for c in seen for t in c.first_token_s]),
        "between_events_ms": percentiles([t for c in seen for t in c.between_events_s]),
        "between_tokens_ms": percentiles([t for c in seen for t in c.per_token_s]),
        "accepted_length": round(status["accepted_length"] or 0, 3),
        "left_behind": status["active"] + status["waiting"] + status["generating"],
    }


async def serve_one(
    http: httpx.AsyncClient, client: Client, number: int, deadline: float, tokens: int
) -> None:
    while time.perf_counter() < deadline:
        try:
            await one_answer(http, client, number, tokens)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            client.errors.append(f"{type(error).__name__}: {error}")


async def one_answer(http: httpx.AsyncClient, client: Client, number: int, tokens: int) -> None:
    """One stream from the first to the last event."""
    seed = 1000 * number + client.requests
    content = f"Sam has {seed} {WORDS[seed % 10]} and buys {number} more. How many?"
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": seed,
        "stream": True,
        "dspark": {"trace": True},  # says how many tokens an event has
    }
    asked = last = time.perf_counter()
    is_first, count, is_done = True, 0, False
    async with http.stream("POST", "/v1/chat/completions", json=body) as stream:
        stream.raise_for_status()
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                is_done = is_done or line == "data: [DONE]"
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "dspark" not in chunk["choices"][0]:
                continue
            now = time.perf_counter()
            came = len(chunk["choices"][0]["dspark"]["round"]["tokens"])
            if is_first:
                client.first_token_s.append(now - asked)
            else:
                client.between_events_s.append(now - last)
                client.per_token_s.append((now - last) / came)
            is_first, last, count = False, now, count + came
    if not is_done or count != tokens:
        raise ValueError(f"an answer of {count} tokens, {tokens} were asked for")
    client.tokens += count
    client.requests += 1


def percentiles(seconds: list[float]) -> dict[str, float]:
    values = np.percentile(np.array(seconds) * 1000, (50, 90, 99))
    named = zip(("p50", "p90", "p99"), values.tolist(), strict=True)
    return {
        **{name: round(value, 2) for name, value in named},
        "max": round(max(seconds) * 1000, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
