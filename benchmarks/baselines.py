# SPDX-License-Identifier: Apache-2.0
"""The engine against what one would do otherwise: the same prompts, one request at a time, in one run.

    python benchmarks/baselines.py [--bundle B --draft D --target T] [--compile] [--gguf FILE]

Arms: the engine (plain, every draft, adaptive), an eager loop over the reference modules (plain, every draft: what the
official evaluation does), the same compiled with torch.compile, Hugging Face `generate` (plain, and assisted by
n-gram lookup in the prompt: its assisted mode wants a causal language model as assistant, which a drafter that
reads the target's hidden states is not), and llama.cpp where llama-cpp-python is installed. Arms take turns within
every prompt; reading the prompt counts. Float32, but for llama.cpp, which runs the GGUF as it is.
Default models: the shipped example. The last line is JSON.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout, installed or not

import torch
import transformers
from eager import EagerPair, choose_threads

from dspark_trt.bundle import Bundle, load_bundle
from dspark_trt.checkpoint import read_draft, read_target
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.backends.interface import BackendOptions
from dspark_trt.runtime.bench_models import CallTimes, SharedModels
from dspark_trt.runtime.bench_turns import clock_for
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.machine import machine_name, usable_cpus
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.shipped_prompts import PROMPTS
from dspark_trt.runtime.text import TextCodec

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny"
REFERENCE = "generate"  # what the others are divided by

Ids = tuple[int, ...]
Generate = Callable[[Ids, float], list[int]]  # prompt, temperature -> new tokens


@dataclass
class Arm:
    generate: Generate
    speeds: list[float] = field(default_factory=list)  # tokens a second, a prompt each
    outputs: list[list[int]] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--draft", type=Path, default=EXAMPLE / "drafter")
    parser.add_argument("--target", type=Path, default=EXAMPLE / "target")
    parser.add_argument("--count", type=int, default=3, help="prompts of each domain")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument(
        "--threads", type=int, help="1 also leaves other processes out of the times"
    )
    parser.add_argument(
        "--compile", action="store_true", help="also with torch.compile: minutes"
    )
    parser.add_argument("--gguf", type=Path, help="for llama.cpp")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bundle = load_bundle(args.bundle, verify_hashes=False) if args.bundle else None
        report = compare(bundle or exported(args, Path(scratch) / "bundle"), args)
    print(json.dumps(report))


def exported(args: argparse.Namespace, path: Path) -> Bundle:
    from dspark_trt.export.bundle_from_checkpoints import export_bundle

    return export_bundle(read_draft(args.draft), read_target(args.target), path)


def compare(bundle: Bundle, args: argparse.Namespace) -> dict[str, object]:
    codec = TextCodec(bundle)
    listed = [
        codec.encode_chat([{"role": "user", "content": text}])
        for texts in zip(*(own[: args.count] for own in PROMPTS.values()), strict=True)
        for text in texts
    ]
    rows: list[dict[str, object]] = []
    missing: dict[str, str] = {}
    arms, threads = build_arms(bundle, args, missing)
    clock = clock_for(1 if args.threads == 1 else None)
    for temperature in map(float, args.temperatures.split(",")):
        for name, arm in list(arms.items()):
            try:
                arm.generate(listed[0], temperature)  # warms up; compiles
            except Exception as error:  # a baseline that does not run is reported, not fatal
                missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
                del arms[name]
                continue
            arm.speeds, arm.outputs = [], []
        order = np.random.default_rng(0)
        for prompt in listed:
            for name in order.permutation(list(arms)).tolist():
                started = clock()
                tokens = arms[name].generate(prompt, temperature)
                arms[name].speeds.append(len(tokens) / (clock() - started))
                arms[name].outputs.append(tokens)
        rows += report_rows(arms, temperature, args.new_tokens)
    for name, why in missing.items():
        print(f"not measured: {name}: {why}")
    return {
        "rows": rows,
        "missing": missing,
        "prompts": len(listed),
        "new_tokens": args.new_tokens,
        "threads": threads,
        "clock": "CPU time" if args.threads == 1 else "wall clock",
        "machine": machine_name(),
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "bundle": bundle.fingerprint(),
    }


def build_arms(
    bundle: Bundle, args: argparse.Namespace, missing: dict[str, str]
) -> tuple[dict[str, Arm], dict[str, int | None]]:
    """Every arm that can be tried here, and the threads of each side."""
    draft, target = read_draft(args.draft), read_target(args.target)
    gamma, most = bundle.draft.gamma, args.threads or usable_cpus()
    backend = open_backend("onnxruntime", bundle, BackendOptions(threads=args.threads))
    shared = SharedModels(backend, 1, CallTimes(clock_for(None)))
    arms = {
        f"engine {name}": Arm(engine_arm(shared, name, args.new_tokens))
        for name in ("fixed:0", f"fixed:{gamma}", "auto")
    }
    pair = EagerPair.load(draft, target, capacity=1024)
    threads = choose_threads(lambda: pair.target_step([5], 64), most)
    arms["eager plain"] = Arm(eager_arm(pair, 0, args.new_tokens))
    arms[f"eager fixed:{gamma}"] = Arm(eager_arm(pair, gamma, args.new_tokens))
    if args.compile:
        compiled = EagerPair.load(draft, target, capacity=1024)
        compiled.target.forward = torch.compile(compiled.target.forward, dynamic=True)
        compiled.drafter.backbone.forward = torch.compile(
            compiled.drafter.backbone.forward, dynamic=True
        )
        arms["compiled plain"] = Arm(eager_arm(compiled, 0, args.new_tokens))
        arms[f"compiled fixed:{gamma}"] = Arm(eager_arm(compiled, gamma, args.new_tokens))
    model = transformers.AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    arms[REFERENCE] = Arm(transformers_arm(model, args.new_tokens))
    arms["generate, n-gram lookup"] = Arm(
        transformers_arm(model, args.new_tokens, prompt_lookup_num_tokens=gamma)
    )
    if args.gguf:
        try:
            arms["llama.cpp"] = Arm(llama_arm(args.gguf, args.new_tokens, most))
        except ImportError:
            missing["llama.cpp"] = "llama-cpp-python is not installed"
    return arms, {"engine": backend.options.threads, "torch": threads}


def engine_arm(shared: SharedModels, scheduler: str, new_tokens: int) -> Generate:
    engine = Engine(shared, EngineOptions(max_batch=1), scheduler=scheduler)
    for note in engine.status()["notes"]:
        print(f"engine {scheduler}: {note}")

    def generate(prompt: Ids, temperature: float) -> list[int]:
        params = SamplingParams(
            temperature=temperature, max_new_tokens=new_tokens, seed=0, ignore_eos=True
        )
        (done,) = engine.generate([Request(prompt_ids=prompt, params=params)])
        return list(done.token_ids)

    return generate


def eager_arm(pair: EagerPair, length: int, new_tokens: int) -> Generate:
    return lambda prompt, temperature: pair.generate(
        prompt, new_tokens, temperature=temperature, length=length
    )[0]


def transformers_arm(
    model: transformers.PreTrainedModel, new_tokens: int, **options: int
) -> Generate:
    model.generation_config.eos_token_id = -1  # none: all arms go on behind stop tokens

    def generate(prompt: Ids, temperature: float) -> list[int]:
        ids = torch.tensor([prompt])
        sampling: dict[str, object] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            pad_token_id=0,
            **sampling,
            **options,
        )
        return output[0, len(prompt) :].tolist()

    return generate


def llama_arm(file: Path, new_tokens: int, threads: int) -> Generate:
    from llama_cpp import Llama

    model = Llama(str(file), n_ctx=1024, n_threads=threads, verbose=False)

    def generate(prompt: Ids, temperature: float) -> list[int]:
        model.reset()
        stream = model.generate(list(prompt), temp=temperature, top_k=0, top_p=1.0, min_p=0.0)
        return [token for token, _ in zip(stream, range(new_tokens), strict=False)]

    return generate


def report_rows(
    arms: dict[str, Arm], temperature: float, new_tokens: int
) -> list[dict[str, object]]:
    """Median speeds; ratios are medians over prompts, within which arms took turns."""
    print(f"T = {temperature:g}{'':>20} tokens/s  / {REFERENCE}  / eager plain")
    rows = []
    for name, arm in arms.items():
        over = {
            other: median(a / b for a, b in zip(arm.speeds, arms[other].speeds, strict=True))
            for other in (REFERENCE, "eager plain")
        }
        row: dict[str, object] = {
            "arm": name,
            "temperature": temperature,
            "tokens_per_second": round(median(arm.speeds), 1),
            **{f"over {other}": round(ratio, 2) for other, ratio in over.items()},
        }
        note = ""
        if temperature == 0:
            same = sum(
                own[:new_tokens] == reference[:new_tokens]
                for own, reference in zip(arm.outputs, arms[REFERENCE].outputs, strict=True)
            )
            row["outputs_equal"] = f"{same} of {len(arm.outputs)}"
            note = f"  same tokens: {same} of {len(arm.outputs)}"
        rows.append(row)
        print(
            f"{name:>26} {median(arm.speeds):8.1f} {over[REFERENCE]:11.2f} "
            f"{over['eager plain']:14.2f}{note}",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
