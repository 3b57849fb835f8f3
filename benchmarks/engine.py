# SPDX-License-Identifier: Apache-2.0
"""Aggregate throughput of the engine: one request at a time, 8 and 32 at once, with and without drafts.

    python benchmarks/engine.py BUNDLE [--prompts FILE]

All arms run in turn in one process, several times over; medians and ratios are printed, the last line is
JSON. Prompts are JSON lines with "prompt_ids"; the default is the shipped example's.
"""

import argparse
import json
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path

from dspark_trt.bundle import Bundle, load_bundle
from dspark_trt.runtime.backends.interface import BackendOptions
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.text import TextCodec

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    bundle = load_bundle(args.bundle)
    prompts = _prompts(bundle, args.prompts)
    arms = {
        (concurrent, speculate): Engine.load(
            bundle,
            backend_options=BackendOptions(threads=args.threads),
            options=EngineOptions(max_batch=concurrent),
        )
        for concurrent in (1, 8, 32)
        for speculate in (True, False)
    }
    speeds: dict[tuple[int, bool], list[float]] = {arm: [] for arm in arms}
    accepted: dict[tuple[int, bool], float | None] = {}
    for repeat in range(args.repeats + 1):
        for (concurrent, speculate), engine in arms.items():
            requests = [
                Request(
                    prompt_ids=prompts[n % len(prompts)],
                    params=SamplingParams(
                        max_new_tokens=args.new_tokens,
                        temperature=args.temperature,
                        seed=n,
                        ignore_eos=True,
                    ),
                    speculate=speculate,
                )
                for n in range(concurrent if concurrent > 1 else 4)
            ]
            started = time.perf_counter()
            done = engine.generate(requests)
            seconds = time.perf_counter() - started
            if repeat:  # the first is warm-up
                tokens = sum(len(each.token_ids) for each in done)
                speeds[concurrent, speculate].append(tokens / seconds)
            accepted[concurrent, speculate] = engine.status()["accepted_length"]
    _report(speeds, accepted, args)


def _prompts(bundle: Bundle, file: Path | None) -> list[tuple[int, ...]]:
    if file is not None:
        return [tuple(json.loads(line)["prompt_ids"]) for line in file.read_text().splitlines()]
    codec = TextCodec(bundle)
    lines = (EXAMPLE / "prompts.txt").read_text().splitlines()
    return [codec.encode_chat([{"role": "user", "content": line}]) for line in lines]


def _report(
    speeds: dict[tuple[int, bool], list[float]],
    accepted: dict[tuple[int, bool], float | None],
    args: argparse.Namespace,
) -> None:
    medians = {arm: statistics.median(values) for arm, values in speeds.items()}
    print(f"{'requests':>9} {'drafts':>7} {'tokens/s':>9} {'x one':>6} {'x plain':>8} {'accepted':>9}")
    rows = []
    for (concurrent, speculate), speed in medians.items():
        row = {
            "requests": concurrent,
            "speculation": speculate,
            "tokens_per_second": round(speed, 1),
            "over_one_at_a_time": round(speed / medians[1, speculate], 2),
            "over_plain": round(speed / medians[concurrent, False], 2),
            "accepted_length": accepted[concurrent, speculate],
        }
        rows.append(row)
        length = row["accepted_length"]
        print(
            f"{concurrent:9d} {'yes' if speculate else 'no':>7} {speed:9.0f} "
            f"{row['over_one_at_a_time']:6.2f} {row['over_plain']:8.2f} "
            f"{'' if length is None else f'{length:9.2f}'}"
        )
    print(
        json.dumps(
            {
                "rows": rows,
                "new_tokens": args.new_tokens,
                "temperature": args.temperature,
                "threads": args.threads,
                "machine": platform.processor() or platform.machine(),
                "onnxruntime": version("onnxruntime"),
            }
        )
    )


if __name__ == "__main__":
    main()
