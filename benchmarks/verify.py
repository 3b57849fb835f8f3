# SPDX-License-Identifier: Apache-2.0
"""Speed of verification, and how much each mode accepts.

    python benchmarks/verify.py                              # ONNX function against plain torch on the CPU
    python benchmarks/verify.py --device cuda                # Triton kernels against the copy bandwidth
    python benchmarks/verify.py --acceptance golden/*.npz    # rejection beside coupled on logits of a drafter

The last line of stdout is JSON.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]


def make_inputs(batch: int, gamma: int, vocab_size: int, seed: int) -> Tensors:
    """Sampling requests with full blocks and drafters that are right now and then."""
    generator = torch.Generator().manual_seed(seed)
    rows = gamma + 1
    target = 3 * torch.randn(batch, rows, vocab_size, generator=generator)
    draft = target[:, :-1] + torch.randn(batch, gamma, vocab_size, generator=generator)
    draft_temperature = 0.5 + torch.rand(batch, generator=generator)
    q = torch.softmax(draft / draft_temperature[:, None, None], -1)
    tokens = torch.multinomial(q.view(-1, vocab_size), 1, generator=generator).view(
        batch, gamma
    )
    return {
        "target_logits": target.view(-1, vocab_size),
        "offsets": torch.arange(batch + 1) * rows,
        "draft_tokens": tokens,
        "draft_logits": draft,
        "draft_temperature": draft_temperature,
        "temperature": 0.5 + torch.rand(batch, generator=generator),
        "top_k": torch.zeros(batch, dtype=torch.int64),
        "top_p": torch.ones(batch),
        "min_p": torch.zeros(batch),
        "uniforms": torch.rand(batch, rows, generator=generator),
    }


def plain_torch(x: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """What one writes first: softmax, gather, cumulative sums, all vectorised; full blocks only."""
    batch, gamma = x["draft_tokens"].shape
    target = x["target_logits"].view(batch, gamma + 1, -1)
    p = torch.softmax(target / x["temperature"][:, None, None], -1)
    q = torch.softmax(x["draft_logits"] / x["draft_temperature"][:, None, None], -1)
    ids = x["draft_tokens"][..., None]
    p_ids, q_ids = p[:, :-1].gather(2, ids)[..., 0], q.gather(2, ids)[..., 0]
    accepted = (x["uniforms"][:, :-1] * q_ids < p_ids).long().cumprod(1).sum(1)
    requests = torch.arange(batch)
    q_last = q[requests, accepted.clamp(max=gamma - 1)] * (accepted < gamma)[:, None]
    mass = (p[requests, accepted] - q_last).clamp_min(0).cumsum(-1)
    last = torch.searchsorted(mass, x["uniforms"][:, -1:] * mass[:, -1:])
    return accepted, last


def measure_ms(candidates: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Medians of interleaved runs: what else the machine does hits all candidates alike."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in range(repeats + 2):
        for name, candidate in candidates.items():
            start = time.perf_counter()
            candidate()
            if run >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def bench_cpu(
    batch: int, gamma: int, vocab_size: int, repeats: int, threads: int
) -> dict[str, Any]:
    import onnxruntime as ort

    from dspark_trt.plugins.contract import VerifyMode, verify_bindings
    from dspark_trt.plugins.verify_model import verify_model

    torch.set_num_threads(threads)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    sessions = {
        mode: ort.InferenceSession(
            verify_model(mode=mode, gamma=gamma, vocab_size=vocab_size).SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
        )
        for mode in (VerifyMode.REJECTION, VerifyMode.GREEDY)
    }
    inputs = make_inputs(batch, gamma, vocab_size, seed=0)
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    names = verify_bindings(VerifyMode.GREEDY, gamma=gamma, vocab_size=vocab_size).input_names
    ragged = {name: arrays[name] for name in names}
    filters = {
        "top_k 50": {"top_k": np.full(batch, 50)},
        "top_p 0.9": {"top_p": np.full(batch, 0.9, np.float32)},
    }

    def run(**changed: Any) -> Callable[[], Any]:
        return lambda: sessions[VerifyMode.REJECTION].run(None, arrays | changed)

    ours = run()
    assert ours()[0].tolist() == plain_torch(inputs)[0].tolist(), "the two do not accept alike"
    medians = measure_ms(
        {
            "plain torch": lambda: plain_torch(inputs),
            "onnx rejection": ours,
            "onnx greedy": lambda: sessions[VerifyMode.GREEDY].run(None, ragged),
            **{f"onnx rejection, {name}": run(**changed) for name, changed in filters.items()},
        },
        repeats,
    )
    return {
        "batch": batch,
        "gamma": gamma,
        "vocab_size": vocab_size,
        "threads": threads,
        "median_ms": {name: round(value, 2) for name, value in medians.items()},
        "speedup": round(medians["plain torch"] / medians["onnx rejection"], 2),
    }


def bench_gpu(gamma: int, vocab_size: int, repeats: int) -> dict[str, Any]:
    """Captured verifications in bfloat16, next to a copy of as many bytes as the target's logits have."""
    from dspark_trt.plugins.contract import VerifyMode
    from dspark_trt.plugins.kernel_launch import Verifier

    device = torch.device("cuda")
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    copy_us = captured_us(lambda: sink.copy_(source), repeats)
    copy_bytes_per_s = 2 * source.numel() / (copy_us * 1e-6)  # read and written
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(device),
        "copy_gb_per_s": round(copy_bytes_per_s / 1e9, 1),
    }
    for batch in (1, 64):
        inputs = {n: t.to(device) for n, t in make_inputs(batch, gamma, vocab_size, 0).items()}
        for name in ("target_logits", "draft_logits"):
            inputs[name] = inputs[name].bfloat16()
        verifier = Verifier(
            VerifyMode.REJECTION,
            gamma=gamma,
            vocab_size=vocab_size,
            max_batch=batch,
            device=device,
        )
        names = ("draft_logits", "offsets", "temperature", "draft_temperature")
        read = {name: inputs[name] for name in names}
        drafts_us = captured_us(lambda v=verifier, r=read: v.summarise_drafts(r), repeats)
        verify_us = captured_us(
            lambda v=verifier, x=inputs: v(x, drafts_summarised=True), repeats
        )
        target_bytes = inputs["target_logits"].numel() * 2
        report[f"batch {batch}"] = {
            "verify_us": round(verify_us, 1),
            "summarise_drafts_us": round(drafts_us, 1),
            "share_of_copy_bandwidth": round(
                target_bytes / (verify_us * 1e-6) / copy_bytes_per_s, 3
            ),
        }
    return report


def captured_us(launch: Callable[[], Any], repeats: int) -> float:
    """Median time of a CUDA graph of the launches."""
    launch()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[3:])


def acceptance(paths: list[Path]) -> dict[str, Any]:
    """Probability that a draft is accepted, of both modes, on recorded pairs of logits.

    Files hold ``*_corrected_logits [K, V]`` of a drafter and ``*_target_logits [K+1, V]`` on its tokens.
    """
    report = {}
    for path in paths:
        data = np.load(path)
        prefixes = [name.removesuffix("_corrected_logits") for name in data if name.endswith("_corrected_logits")]  # fmt: skip
        pairs = [
            (softmax(target), softmax(draft))
            for prefix in prefixes
            for target, draft in zip(
                data[f"{prefix}_target_logits"],
                data[f"{prefix}_corrected_logits"],
                strict=False,
            )
        ]
        report[path.stem] = {
            "pairs": len(pairs),
            "rejection": round(float(np.mean([np.minimum(p, q).sum() for p, q in pairs])), 3),
            "coupled": round(float(np.mean([coupled_match(p, q) for p, q in pairs])), 3),
        }
    return report


def softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(weights / weights.sum())


def coupled_match(p: np.ndarray[Any, Any], q: np.ndarray[Any, Any]) -> float:
    """P(both take token x) = 1 / sum_y max(p_y / p_x, q_y / q_x), summed over x (Gumbel coupling)."""
    likely = np.flatnonzero((p > 1e-9) & (q > 1e-9))
    ratios = np.maximum(p[None, :] / p[likely, None], q[None, :] / q[likely, None])
    return float((1 / ratios.sum(axis=1)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--acceptance", type=Path, nargs="+", metavar="NPZ")
    arguments = parser.parse_args()
    if arguments.acceptance:
        report = acceptance(arguments.acceptance)
    elif arguments.device == "cuda":
        report = bench_gpu(arguments.gamma, arguments.vocab_size, arguments.repeats)
    else:
        report = bench_cpu(
            arguments.batch,
            arguments.gamma,
            arguments.vocab_size,
            arguments.repeats,
            arguments.threads,
        )
    versions = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps({**report, **versions}))


if __name__ == "__main__":
    main()
