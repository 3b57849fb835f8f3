# SPDX-License-Identifier: Apache-2.0
"""What `gpu_check` checks and measures. Imports torch, triton and numpy; models have random weights."""

import argparse
import logging
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn

from dspark_trt.config import (
    ConfidenceInput,
    DecoderConfig,
    DraftConfig,
    HeadType,
    RopeConfig,
    SlotSemantics,
    TargetConfig,
    TargetFamily,
)
from dspark_trt.models.drafter import Drafter
from dspark_trt.models.target import Target
from dspark_trt.plugins import specification
from dspark_trt.plugins.contract import VerifyMode, verify_bindings
from dspark_trt.runtime.backends.interface import DraftInputs
from dspark_trt.runtime.backends.torch_backend import DeviceParts
from dspark_trt.runtime.backends.torch_models import DeviceDraftModel, DeviceTargetModel
from dspark_trt.runtime.backends.torch_rounds import DeviceRounds
from dspark_trt.runtime.ragged import RaggedRows, ragged_rows

Report = dict[str, Any]
Module = TypeVar("Module", bound=nn.Module)
FLOAT32_PARTS = ("norm", "confidence_head")  # as bundles keep them


class CheckError(Exception):
    """A part found a difference."""


class Clock:
    """Seconds of a part that are left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def has(self, seconds: float = 0.0) -> bool:
        return time.monotonic() + seconds < self._end

    def rounds(self, most: int) -> Iterator[int]:
        """0, 1, .. until the time or `most` is reached; once at least."""
        for i in range(most):
            if i and not self.has():
                return
            yield i


def run_part(options: argparse.Namespace) -> Report:
    logging.basicConfig(level=logging.WARNING)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return {"state": "skipped", "reason": f"torch {torch.__version__} sees no CUDA device"}
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    part: Callable[..., Report] = PARTS[options.part]
    try:
        found = part(device, options, Clock(options.seconds))
    except CheckError as error:
        found = {"state": "failed", "reason": str(error)}
    return {"state": "passed", "machine": machine(device), **found}


def machine(device: torch.device) -> Report:
    import triton

    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "capability": torch.cuda.get_device_capability(device)
        if device.type == "cuda"
        else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


# Kernels against NumPy ------------------------------------------------------------------------------


def kernels(device: torch.device, options: argparse.Namespace, clock: Clock) -> Report:
    """Drawing and verifying: every decision equal to the specification's, over random ragged batches."""
    from dspark_trt.plugins.kernel_launch import Sampler, Verifier

    # Few sizes: each one is compiled anew. The last is the latency part's, the one before a multiple of nothing.
    sizes = ((90, 2),) if options.small else ((90, 3), (9001, 2), (151_936, 7))
    cases, decisions = 0, 0
    for i in clock.rounds(2 if options.small else 400):
        random = np.random.default_rng(i)
        (vocab, gamma), requests = sizes[i % len(sizes)], int(random.integers(1, 4))
        batch = verify_batch(random, requests, gamma, vocab)
        for mode in (VerifyMode.REJECTION, VerifyMode.COUPLED):
            names = verify_bindings(mode, gamma=gamma, vocab_size=vocab).input_names
            inputs = {name: batch[name] for name in names}
            check = getattr(specification, f"verify_{mode.value}")
            expected = check(**inputs)
            verifier = Verifier(
                mode, gamma=gamma, vocab_size=vocab, max_batch=requests, device=device
            )
            moved = {name: torch.from_numpy(a).to(device) for name, a in inputs.items()}
            accepted, tokens = verifier(moved)
            require_equal(f"{mode} accepted, case {i}", accepted, expected.accepted)
            require_equal(f"{mode} tokens, case {i}", tokens, expected.tokens)
            decisions += requests
        logits, uniforms = batch["draft_logits"][:, 0], batch["uniforms"][:, 0].copy()
        draws = Sampler(vocab_size=vocab, max_batch=requests, device=device)(
            *(torch.from_numpy(a).to(device) for a in (logits, batch["temperature"], uniforms))
        )
        wanted = specification.sample_draft(logits, batch["temperature"], uniforms)
        require_equal(f"draft tokens, case {i}", draws, wanted)
        cases += 1
    return {"cases": cases, "decisions": decisions}


def verify_batch(
    random: np.random.Generator, requests: int, gamma: int, vocab: int
) -> dict[str, Any]:
    """A ragged batch with greedy and filtered requests, whose drafts are sometimes right."""
    lengths = random.integers(0, gamma + 1, requests)
    offsets = np.concatenate([[0], np.cumsum(1 + lengths)])
    target = random.normal(0, 2, (int(offsets[-1]), vocab)).astype(np.float32)
    rows = np.minimum(offsets[:-1, None] + np.arange(gamma), len(target) - 1)
    noise = random.normal(0, 1, (requests, gamma, vocab))
    draft = (target[rows] + noise).astype(np.float32)
    greedy = random.random(requests) < 0.3
    temperature = np.where(greedy, 0, random.uniform(0.4, 1.5, requests)).astype(np.float32)
    filtered = random.random(requests) < 0.5
    uniforms = random.random((requests, gamma + 1), np.float32)
    tokens = [
        specification.sample_draft(draft[:, k], temperature, uniforms[:, k])
        for k in range(gamma)
    ]
    return {
        "target_logits": target,
        "offsets": offsets,
        "draft_tokens": np.stack(tokens, 1),
        "draft_logits": draft,
        "draft_temperature": temperature,
        "temperature": temperature,
        "top_k": np.where(filtered, random.integers(1, vocab + 1, requests), 0),
        "top_p": np.where(filtered, random.uniform(0.3, 1, requests), 1).astype(np.float32),
        "min_p": np.where(filtered, 0.01, 0).astype(np.float32),
        "uniforms": random.random((requests, gamma + 1), np.float32),
        "seeds": random.integers(-(2**63), 2**63 - 1, requests),
        "positions": random.integers(0, 2**31, requests),
    }


def require_equal(what: str, found: torch.Tensor, expected: Any) -> None:
    if not np.array_equal(found.cpu().numpy(), expected):
        raise CheckError(f"{what}: {found.cpu().tolist()}, expected {expected.tolist()}")


# Models ---------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    draft: DraftConfig
    target: TargetConfig
    drafter: Drafter
    served: Target
    dtype: str


def toy_pair(
    device: torch.device, options: argparse.Namespace, dtype: str | None = None
) -> Pair:
    small = options.small
    decoder = DecoderConfig(
        hidden_size=64 if small else 512, intermediate_size=96 if small else 1408,
        num_layers=2 if small else 6, num_heads=4, num_kv_heads=2,
        head_dim=16 if small else 128, vocab_size=97 if small else 32_000, rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e5), max_positions=512, qk_norm=True,
    )  # fmt: skip
    draft = drafter_config(decoder, gamma=2 if small else 7, rank=8 if small else 64, taps=2)
    target = TargetConfig(family=TargetFamily.QWEN3, decoder=decoder, tie_word_embeddings=False)
    dtype = dtype or ("float16" if device.type == "cuda" else "float32")
    return Pair(
        draft,
        target,
        with_random_weights(lambda: Drafter(draft), dtype, device),
        with_random_weights(lambda: Target(target, draft.target_layer_ids), dtype, device),
        dtype,
    )


def drafter_config(decoder: DecoderConfig, *, gamma: int, rank: int, taps: int) -> DraftConfig:
    return DraftConfig(
        decoder=decoder, block_slots=gamma, slot_semantics=SlotSemantics.ANCHOR_FIRST,
        mask_token_id=decoder.vocab_size - 1, target_layer_ids=tuple(range(taps)),
        num_target_layers=max(taps, decoder.num_layers), target_hidden_size=decoder.hidden_size,
        head_type=HeadType.VANILLA, markov_rank=rank, confidence=ConfidenceInput.HIDDEN_MARKOV,
    )  # fmt: skip


def with_random_weights(
    build: Callable[[], Module], dtype: str, device: torch.device
) -> Module:
    with torch.device(device):
        module = build()
    for name, parameter in module.named_parameters():
        is_norm = name.rpartition(".")[0].endswith("norm")
        if not is_norm:
            nn.init.normal_(parameter, std=0.05)
        if not any(part in name for part in FLOAT32_PARTS):
            parameter.data = parameter.data.to(getattr(torch, dtype))
    return module.to(device).eval().requires_grad_(False)


class Models(NamedTuple):
    parts: DeviceParts
    draft: DeviceDraftModel
    target: DeviceTargetModel


def open_models(pair: Pair, device: torch.device, *, requests: int, max_graphs: int) -> Models:
    parts = DeviceParts(
        pair.draft, pair.target, dtype=pair.dtype, requests=requests, device=device,
        max_graphs=max_graphs, top_logprobs=1,
    )  # fmt: skip
    steps = parts.module_steps(pair.drafter, pair.served)
    return Models(parts, parts.draft_model(steps), parts.target_model(steps))


# Graphs against eager steps -------------------------------------------------------------------------


class Simulated:
    """The same requests on two sets of models; every output has to be equal bit for bit."""

    def __init__(self, pair: Pair, one: Models, other: Models, requests: int) -> None:
        self._pair, self._both = pair, (one, other)
        self._context = np.zeros(requests, np.int64)
        self.compared = 0

    def round(self, random: np.random.Generator, batch: int) -> None:
        """Draft and target of the first `batch` requests, with rows and taps of unequal number."""
        gamma = self._pair.draft.gamma
        self._begin_or_replace(random, batch)
        lengths = random.integers(1, gamma + 2, batch)
        context = self._context[:batch].copy()
        new_len = np.minimum(random.integers(0, gamma + 2, batch), context)
        inputs = DraftInputs(
            anchor_ids=random.integers(0, self._vocab, batch),
            new_taps=random.normal(0, 1, (batch, gamma + 1, self._pair.draft.tap_size)).astype(
                np.float32
            ),
            new_len=new_len,
            context_len=context - new_len,
            temperature=random.choice([0.0, 0.8], batch).astype(np.float32),
            uniforms=random.random((batch, gamma), np.float32),
        )
        rows = self._rows(random, lengths, context)
        outputs = []
        for models in self._both:
            drafted = models.draft.draft(inputs)
            found = [drafted.tokens.copy(), drafted.logits.copy()]
            target = models.target.step(rows)
            outputs.append([*found, np.array(target.logits), np.array(target.taps)])
        for name, one, other in zip(
            ("tokens", "draft logits", "logits", "taps"), *outputs, strict=True
        ):
            if one.tobytes() != other.tobytes():
                raise CheckError(
                    f"{name} of {batch} requests with {lengths.tolist()} rows differ from the eager step"
                )
        self._context[:batch] += random.integers(1, lengths + 1)
        self.compared += 1

    @property
    def _vocab(self) -> int:
        return self._pair.target.decoder.vocab_size

    def _rows(self, random: np.random.Generator, lengths: Any, context: Any) -> RaggedRows:
        tokens = [random.integers(0, self._vocab, n) for n in lengths]
        return ragged_rows(tokens, context, np.ones(len(lengths), np.bool_))

    def _begin_or_replace(self, random: np.random.Generator, batch: int) -> None:
        """Slots are reused: a new prompt where a request is long enough, or none has begun."""
        limit = self._pair.target.decoder.max_positions // 4
        for row in range(batch):
            if 0 < self._context[row] < limit and random.random() > 0.05:
                continue
            length = int(random.integers(2, 20))
            taps = random.normal(0, 1, (length, self._pair.draft.tap_size)).astype(np.float32)
            lengths, context = np.ones(row + 1, np.int64), self._context[: row + 1].copy()
            lengths[row], context[row] = (
                length,
                0,
            )  # the others write a row that they never commit
            rows = self._rows(random, lengths, context)
            for models in self._both:
                models.draft.append(row, taps, 0)
                models.target.step(rows)
            self._context[row] = length
        if batch > 1 and random.random() < 0.2:
            first, second = random.choice(batch, 2, replace=False)
            for models in self._both:
                models.draft.swap_rows(first, second)
                models.target.swap_rows(first, second)
            self._context[[first, second]] = self._context[[second, first]]


def graphs(device: torch.device, options: argparse.Namespace, clock: Clock) -> Report:
    """Replays against eager steps, bit for bit, over ragged batches and reused slots."""
    pair, requests = toy_pair(device, options), 3 if options.small else 8
    random = np.random.default_rng(1)
    captured = open_models(pair, device, requests=requests, max_graphs=64)
    eager = open_models(pair, device, requests=requests, max_graphs=0)
    simulated = Simulated(pair, captured, eager, requests)
    for i in clock.rounds(3 if options.small else 300):
        simulated.round(random, 1 + i % requests)
    return {"rounds": simulated.compared, **graph_report(device, captured)}


def shapes(device: torch.device, options: argparse.Namespace, clock: Clock) -> Report:
    """A thousand steps, no two in a row of one batch; then some with room for three graphs only."""
    pair, requests = toy_pair(device, options), 3 if options.small else 8
    found: Report = {}
    for name, max_graphs, steps in (("many graphs", 64, 1000), ("three graphs", 3, 60)):
        captured = open_models(pair, device, requests=requests, max_graphs=max_graphs)
        eager = open_models(pair, device, requests=requests, max_graphs=0)
        for models in (
            captured,
            eager,
        ):  # a growing cache drops all graphs: not what is checked here
            models.draft.reserve(pair.target.decoder.max_positions // 2)
            models.target.reserve(pair.target.decoder.max_positions // 2)
        simulated, random = Simulated(pair, captured, eager, requests), np.random.default_rng(2)
        batch, allocated = 1, list[int]()
        for _ in clock.rounds(
            2 if options.small else steps // 2
        ):  # a draft and a target step each
            batch = int(random.choice([b for b in range(1, requests + 1) if b != batch]))
            simulated.round(random, batch)
            if device.type == "cuda":
                allocated.append(torch.cuda.memory_allocated(device))
        found[name] = {"steps": 2 * simulated.compared, **graph_report(device, captured)}
        if allocated:
            middle = len(allocated) // 2
            growth = max(allocated[middle:]) - max(allocated[: max(middle, 1)])
            found[name]["memory_growth_bytes"] = growth
    return found


def graph_report(device: torch.device, models: Models) -> Report:
    both = (models.draft.graphs, models.target.graphs)
    refused = [g.refusal for g in both if g.refusal is not None]
    if refused:
        raise CheckError(f"graphs were refused: {refused[0]}")
    if device.type == "cuda" and not all(g.replayed for g in both):
        raise CheckError("no graph was replayed")
    return {
        "captured": sum(g.captured for g in both),
        "replayed": sum(g.replayed for g in both),
    }


# Rounds on the device -------------------------------------------------------------------------------


def rounds(device: torch.device, options: argparse.Namespace, clock: Clock) -> Report:
    """Greedy device rounds commit what one row at a time decides; what launching a round costs the host."""
    pair = toy_pair(device, options, "float32")
    requests, tokens = 2 if options.small else 4, 6 if options.small else 64
    prompts = [tuple(range(3 + r, 12 + 2 * r)) for r in range(requests)]
    models = open_models(pair, device, requests=requests, max_graphs=16)
    device_rounds, outputs = begin(pair, models, prompts)
    gamma, way = pair.draft.gamma, None
    for i in range(tokens):
        launched = device_rounds.launch(requests, (i % 3) * gamma)
        if way is not None:
            take(way.read(), outputs)  # one round late, while the next one runs
        way = launched
    assert way is not None
    take(way.read(), outputs)
    alone = open_models(pair, device, requests=1, max_graphs=16)
    for prompt, own in zip(prompts, outputs, strict=True):
        expected = decode(alone.target, prompt, min(len(own), tokens))
        if own[: len(expected)] != expected:
            raise CheckError(f"a round committed {own[: len(expected)]}, alone {expected}")
    refusals = [device_rounds.draft_graphs.refusal, device_rounds.round_graphs.refusal]
    if any(refusals):
        raise CheckError(f"graphs were refused: {refusals}")
    launch_us, round_us = [], []
    for _ in clock.rounds(3 if options.small else 200):
        synchronise(device)
        start = time.perf_counter()
        launched = device_rounds.launch(requests, requests * gamma)
        launch_us.append(1e6 * (time.perf_counter() - start))
        launched.read()
        round_us.append(1e6 * (time.perf_counter() - start))
    return {
        "tokens": sum(map(len, outputs)),
        "launch_us": round(statistics.median(launch_us), 1),
        "launch_target_us": 50,
        "round_us": round(statistics.median(round_us), 1),
    }


def begin(
    pair: Pair, models: Models, prompts: list[tuple[int, ...]]
) -> tuple[DeviceRounds, list[list[int]]]:
    requests = len(prompts)
    rows = ragged_rows(prompts, np.zeros(requests, np.int64), np.zeros(requests, np.bool_))
    output = models.target.step(rows)
    first = np.asarray(output.logits).argmax(1).tolist()
    made = DeviceRounds(models.parts, models.parts.module_steps(pair.drafter, pair.served))
    for r, prompt in enumerate(prompts):
        models.draft.append(r, output.taps[rows.offsets[r] : rows.offsets[r + 1]], 0)
        made.begin(r, anchor=first[r], target_len=len(prompt), draft_len=len(prompt))
    return made, [[token] for token in first]


def take(committed: Any, outputs: list[list[int]]) -> None:
    for row, accepted in enumerate(committed.accepted):
        outputs[row] += committed.tokens[row, : accepted + 1].tolist()


def decode(target: DeviceTargetModel, prompt: tuple[int, ...], tokens: int) -> list[int]:
    context, own, made = 0, list(prompt), list[int]()
    for _ in range(tokens):
        step = ragged_rows([own], np.array([context]), np.zeros(1, np.bool_))
        context += len(own)
        own = [int(np.asarray(target.step(step).logits)[0].argmax())]
        made += own
    return made


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Latency --------------------------------------------------------------------------------------------


def latency(device: torch.device, options: argparse.Namespace, clock: Clock) -> Report:
    """Draft step and verification at the Qwen3-4B drafter's size against the time to read weights once."""
    small = options.small
    decoder = DecoderConfig(
        hidden_size=64 if small else 2560, intermediate_size=96 if small else 9728,
        num_layers=1 if small else 5, num_heads=4 if small else 32,
        num_kv_heads=2 if small else 8, head_dim=16 if small else 128,
        vocab_size=97 if small else 151_936, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6),
        max_positions=4096, qk_norm=True,
    )  # fmt: skip
    config = drafter_config(decoder, gamma=2 if small else 7, rank=8 if small else 256, taps=5)
    drafter = with_random_weights(
        lambda: Drafter(config), "float16" if not small else "float32", device
    )
    bandwidth = copy_bandwidth(device, 1 << (20 if small else 30))
    weights = sum(
        p.numel() * p.element_size()
        for n, p in drafter.named_parameters()
        if "embed_tokens" not in n and "markov_w1" not in n
    )  # looked up, not read
    found: Report = {
        "weight_bytes": weights,
        "bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "floor_ms": round(1e3 * weights / bandwidth, 4),
        "draft_target_ratio": 1.35,
    }
    for batch in (1,) if small else (1, 8):
        for temperature in (0.0,) if small else (0.0, 1.0):
            if found.get("draft") and not clock.has(5):
                return found
            drafted, verified = step_times(drafter, config, device, options, batch, temperature)
            name = f"batch {batch}, temperature {temperature:g}"
            ratio = drafted * bandwidth / (1e3 * weights)
            found.setdefault("draft", {})[name] = {"ms": drafted, "ratio": round(ratio, 3)}
            rows = batch * (2 * config.gamma + 1)
            floor = 1e3 * rows * decoder.vocab_size * 4 / bandwidth  # each row of logits once
            found.setdefault("verify", {})[name] = {"ms": verified, "floor_ms": round(floor, 4)}
    return found


def step_times(
    drafter: Drafter,
    config: DraftConfig,
    device: torch.device,
    options: argparse.Namespace,
    batch: int,
    temperature: float,
) -> tuple[float, float]:
    """Milliseconds of a draft step behind 1,000 context rows, and of verifying γ drafts a request."""
    dtype = "float32" if options.small else "float16"
    parts = DeviceParts(
        config, None, dtype=dtype, requests=batch, device=device, max_graphs=4, top_logprobs=1
    )
    steps = parts.module_steps(drafter, None)
    model, verifier = parts.draft_model(steps), parts.verifier(steps)
    context = 20 if options.small else 1000
    model.reserve(context + 8)
    random, gamma = np.random.default_rng(0), config.gamma
    inputs = DraftInputs(
        anchor_ids=random.integers(0, 90, batch),
        new_taps=np.ones((batch, gamma + 1, config.tap_size), np.float32),
        new_len=np.full(batch, 3),
        context_len=np.full(batch, context),
        temperature=np.full(batch, temperature, np.float32),
        uniforms=random.random((batch, gamma), np.float32),
    )
    model.draft(inputs)
    key, buffers = parts.buckets.require(batch, batch), parts.buffers
    drafted = launch_ms(device, lambda: model.graphs.run(key, model.caches.version), options)
    rows = batch * (gamma + 1)
    place = buffers["verify.target_logits"][:rows].view(batch, gamma + 1, -1)
    place[:, :gamma] = buffers["draft.logits"][:batch]  # drafts that are often accepted
    buffers["verify.offsets"][: batch + 1] = torch.arange(0, rows + 1, gamma + 1, device=device)
    buffers["verify.draft_tokens"][:batch] = buffers["draft.tokens"][:batch]
    buffers["verify.temperature"][:batch] = temperature
    buffers["verify.top_p"][:batch] = 1
    verify_key = parts.buckets.require(batch, rows)
    verified = launch_ms(device, lambda: verifier.graphs.run(verify_key), options)
    for each in (model.graphs, verifier.graphs):
        if each.refusal is not None:
            raise CheckError(f"graphs were refused: {each.refusal}")
    model.close()
    return round(drafted, 4), round(verified, 4)


def launch_ms(
    device: torch.device, launch: Callable[[], None], options: argparse.Namespace
) -> float:
    """Median time on the device, between events around single launches."""
    repeats = 2 if options.small else 100
    launch()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begun = time.perf_counter()
            launch()
            times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


def copy_bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes a second of a large copy, read and write counted: what reading weights is held against."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    place = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        synchronise(device)
        start = time.perf_counter()
        place.copy_(source)
        synchronise(device)
        best = max(best, 2 * nbytes / (time.perf_counter() - start))
    return best


# Engines --------------------------------------------------------------------------------------------


def engines(device: torch.device, options: argparse.Namespace, clock: Clock) -> Report:
    """Engines of a bundle, built here and run in device rounds: tokens compared with the torch backend's."""
    from importlib.util import find_spec

    if options.bundle is None:
        return {"state": "skipped", "reason": "no --bundle to build engines from"}
    if device.type != "cuda":
        return {"state": "skipped", "reason": "engines run on a GPU"}
    libraries = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
    here = [backend for backend, module in libraries.items() if find_spec(module)]
    if not here:
        return {"state": "skipped", "reason": "neither tensorrt nor tensorrt_rtx is installed"}
    return {backend: engine_tokens(backend, options, clock) for backend in here}


def engine_tokens(backend: str, options: argparse.Namespace, clock: Clock) -> Report:
    import subprocess
    import sys

    from dspark_trt.bundle import load_bundle
    from dspark_trt.engine_manifest import MANIFEST
    from dspark_trt.runtime.backends import open_backend

    bundle = load_bundle(options.bundle)
    started = time.monotonic()
    if not list(bundle.path.glob(f"engines/{backend}-*/{MANIFEST}")):
        command = [sys.executable, "-m", "dspark_trt", "build", str(bundle.path)]
        done = subprocess.run(
            [*command, "--backend", backend], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CheckError(f"{backend}: building failed: {done.stderr.strip()[-400:]}")
    built_s = round(time.monotonic() - started, 1)
    prompts = [(1, *range(20, 29 + r)) for r in range(3)]
    made = {}
    for name in ("torch", backend):
        opened = open_backend(name, bundle)
        target = opened.target_model(1)
        made[name] = [decode(target, prompt, 24) for prompt in prompts]
        target.close()
    same = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        for one, other in zip(made["torch"], made[backend], strict=True)
    ]
    if min(same) < 8:
        raise CheckError(f"{backend}: tokens differ from torch's after {same} tokens")
    return {"built_s": built_s, "equal_tokens": same, "of": 24, "left": clock.has()}


PARTS: dict[str, Callable[..., Report]] = {
    "kernels": kernels,
    "graphs": graphs,
    "shapes": shapes,
    "rounds": rounds,
    "latency": latency,
    "engines": engines,
}
