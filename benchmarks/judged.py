# SPDX-License-Identifier: Apache-2.0
"""The speeds this project promises, measured and compared with what was promised.

    python benchmarks/judged.py [--only draft,target,...] [--folder DIR]

Groups: draft, target, generation, speculation, host, roofline, context, int8, start. Both sides of a ratio take
turns in one run and medians are divided; torch runs with 1 or all threads, whichever is faster for it, the
engine with the number it chooses. Bundles are exported to DIR and used again from there. The last line is JSON.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from statistics import mean, median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout, installed or not

import torch
from eager import EagerPair, choose_threads

from dspark_trt import verified_files
from dspark_trt.bundle import CALIBRATION, WEIGHTS, Bundle, load_bundle
from dspark_trt.checkpoint import DraftCheckpoint, TargetCheckpoint, read_draft, read_target
from dspark_trt.runtime.backends import Backend, open_backend
from dspark_trt.runtime.backends.interface import BackendOptions, DraftInputs, VerifyInputs
from dspark_trt.runtime.bench import BenchPlan, interval_of_mean, run_bench
from dspark_trt.runtime.bench_limits import measure_limits
from dspark_trt.runtime.bench_turns import clock_for, medians, seconds_by_turns
from dspark_trt.runtime.bench_work import Work, draft_work, target_work, verify_work
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.machine import machine_name, usable_cpus
from dspark_trt.runtime.ragged import RaggedRows, ragged_rows
from dspark_trt.runtime.request import Completion, Request, SamplingParams
from dspark_trt.runtime.round_report import RoundReport
from dspark_trt.runtime.shipped_prompts import PROMPTS
from dspark_trt.runtime.text import TextCodec
from dspark_trt.runtime.trace_collection import Prompt

ROOT = Path(__file__).parents[1]
CONTEXT = 256  # tokens before every measured step
NEW_ROWS = 4  # accepted the round before
NEW_TOKENS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One promise. `measured` None: it could not be measured here, `detail` says why."""

    group: str
    name: str
    measured: float | None
    bound: float
    is_floor: bool = False  # at least the bound, instead of at most
    detail: str = ""

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        kept = self.measured >= self.bound if self.is_floor else self.measured <= self.bound
        return "met" if kept else "MISSED"


@dataclass(frozen=True, slots=True)
class Models:
    """A drafter and its target: checkpoints, and the bundle made of them."""

    name: str
    draft: DraftCheckpoint
    target: TargetCheckpoint
    bundle: Bundle

    def eager(self, *, batch: int = 1, capacity: int = 2 * CONTEXT) -> EagerPair:
        return EagerPair.load(self.draft, self.target, batch=batch, capacity=capacity)

    def backend(self, bench: "Bench") -> Backend:
        return open_backend("onnxruntime", self.bundle, bench.options)


@dataclass
class Bench:
    """Models to measure on, exported when first asked for."""

    folder: Path
    seconds: float  # of each comparison
    threads: int  # for torch at most
    options: BackendOptions  # for the engine

    def compare(
        self, arms: Mapping[str, Callable[[], object]], threads: int | None
    ) -> dict[str, float]:
        """Median seconds of each arm."""
        clock = clock_for(threads)
        return medians(seconds_by_turns(arms, seconds=self.seconds, calls=3, clock=clock))

    @cached_property
    def tiny(self) -> Models:
        example = ROOT / "examples" / "tiny"
        return self._exported("tiny", example / "drafter", example / "target")

    @cached_property
    def wide(self) -> Models:
        """Hidden 1024, five layers, vocabulary 32,000, random weights; a target of six such layers."""
        return self._exported("wide", *wide_checkpoints(self.folder))

    def quantised(self, models: Models) -> Models:
        """The same with weights of eight bits."""
        return self._exported(
            f"{models.name}-int8", models.draft.path, models.target.path, weights="int8"
        )

    def _exported(self, name: str, draft: Path, target: Path, **options: str) -> Models:
        from dspark_trt.export.bundle_from_checkpoints import export_bundle

        checkpoints = read_draft(draft), read_target(target)
        path = self.folder / name
        if not path.exists():
            print(f"exporting {name}", file=sys.stderr)
            export_bundle(*checkpoints, path, **options)
        return Models(name, *checkpoints, load_bundle(path, verify_hashes=False))


def wide_checkpoints(folder: Path) -> tuple[Path, Path]:
    from tests.checkpoints import write_draft, write_target

    target, drafter = folder / "wide-target", folder / "wide-drafter"
    sizes = {
        "hidden": 1024, "intermediate": 3072, "heads": 16, "kv_heads": 8, "head_dim": 64,
        "vocab": 32_000, "max_positions": 4096,
    }  # fmt: skip
    if not target.exists():
        write_target(target, layers=6, **sizes)
    if not drafter.exists():
        write_draft(
            drafter, layout="specforge", layers=5, target_layers=6, target_hidden=1024, gamma=7,
            rank=256, mask=31_999, target_layer_ids=(0, 1, 2, 3, 4), **sizes,
        )  # fmt: skip
    return drafter, target


# Draft and target steps ----------------------------------------------------------------------------


def draft_inputs(
    bundle: Bundle, batch: int, temperature: float, context: int = CONTEXT
) -> DraftInputs:
    config, random = bundle.draft, np.random.default_rng(0)
    shape = (batch, config.gamma + 1, config.tap_size)
    return DraftInputs(
        anchor_ids=random.integers(4, config.decoder.vocab_size, batch),
        new_taps=random.standard_normal(shape, np.float32),
        new_len=np.full(batch, NEW_ROWS),
        context_len=np.full(batch, context),
        temperature=np.full(batch, temperature, np.float32),
        uniforms=random.random((batch, config.gamma), np.float32),
    )


def draft_arm(backend: Backend, batch: int, temperature: float) -> Callable[[], object]:
    """One draft step through the backend; repeating it changes nothing."""
    model = backend.draft_model(batch)
    inputs = draft_inputs(backend.bundle, batch, temperature)
    return lambda: model.draft(inputs)


def eager_draft_arm(models: Models, batch: int, temperature: float) -> Callable[[], object]:
    pair = models.eager(batch=batch)
    inputs = draft_inputs(models.bundle, batch, temperature)
    arguments = [
        torch.from_numpy(each)
        for each in (
            inputs.anchor_ids,
            inputs.new_taps[:, :NEW_ROWS],
            inputs.new_len,
            inputs.context_len,
        )
    ]
    return lambda: pair.draft(*arguments, temperature)


def step_rows(bundle: Bundle, batch: int, rows: int, context: int = CONTEXT) -> RaggedRows:
    tokens = np.arange(4, 4 + rows) % bundle.draft.decoder.vocab_size
    return ragged_rows([tokens] * batch, np.full(batch, context), np.full(batch, True))


def against_eager(
    bench: Bench, models: Models, ours: Callable[[], object], eager: Callable[[], object]
) -> tuple[float, str]:
    """Ratio of medians, and both in words."""
    own = models.backend(bench).options.threads
    threads = choose_threads(eager, bench.threads)
    taken = bench.compare({"ours": ours, "eager": eager}, max(own or 0, threads))
    detail = f"{1e3 * taken['ours']:.2f} ms, eager {1e3 * taken['eager']:.2f}; threads {own}, {threads}"
    return taken["ours"] / taken["eager"], detail


def draft(bench: Bench) -> Iterator[Figure]:
    bounds = {  # model, batch, temperature -> promised ratio
        ("tiny", 1, 1.0): 0.20,
        ("tiny", 1, 0.0): 0.30,
        ("wide", 1, 1.0): 0.60,
        ("wide", 1, 0.0): 0.60,
        **{("tiny", batch, heat): 1.0 for batch in (2, 4, 8, 16, 32) for heat in (1.0, 0.0)},
        **{("wide", batch, heat): 1.0 for batch in (8, 32) for heat in (1.0, 0.0)},
    }
    for (model, batch, temperature), bound in bounds.items():
        models: Models = getattr(bench, model)
        ratio, detail = against_eager(
            bench,
            models,
            draft_arm(models.backend(bench), batch, temperature),
            eager_draft_arm(models, batch, temperature),
        )
        name = f"draft step / eager, {model}, batch {batch}, T = {temperature:g}"
        yield Figure(group="draft", name=name, measured=ratio, bound=bound, detail=detail)


def target(bench: Bench) -> Iterator[Figure]:
    for models in (bench.tiny, bench.wide):
        name = models.name
        backend = models.backend(bench)
        model, pair = backend.target_model(1), models.eager()
        inputs = {rows: step_rows(models.bundle, 1, rows) for rows in (1, 8)}
        if models is bench.tiny:
            for rows, bound in ((1, 0.30), (8, 0.35)):
                ratio, detail = against_eager(
                    bench,
                    models,
                    partial(model.step, inputs[rows]),
                    partial(pair.target_step, list(range(4, 4 + rows)), CONTEXT),
                )
                title = f"target step / eager, {name}, rows {rows}"
                yield Figure(
                    group="target", name=title, measured=ratio, bound=bound, detail=detail
                )
        arms = {str(rows): partial(model.step, own) for rows, own in inputs.items()}
        taken = bench.compare(arms, backend.options.threads)
        yield Figure(
            group="target",
            name=f"target 8 rows / 1 row, {name}",
            measured=taken["8"] / taken["1"],
            bound=1.5,
            detail=f"{1e3 * taken['8']:.2f} ms against {1e3 * taken['1']:.2f}",
        )


# Whole generations ---------------------------------------------------------------------------------


def prompts(bundle: Bundle, count: int) -> dict[str, list[tuple[int, ...]]]:
    codec = TextCodec(bundle)
    return {
        domain: [
            codec.encode_chat([{"role": "user", "content": text}]) for text in texts[:count]
        ]
        for domain, texts in PROMPTS.items()
    }


def ask(engine: Engine, ids: tuple[int, ...], temperature: float, seed: int) -> Completion:
    params = SamplingParams(
        temperature=temperature, max_new_tokens=NEW_TOKENS, seed=seed, ignore_eos=True
    )
    return engine.generate([Request(prompt_ids=ids, params=params)])[0]


def generation(bench: Bench) -> Iterator[Figure]:
    """At T = 1 either side draws tokens of its own, so their seconds count by the round (the prompt as one); both
    accept as many drafts a round, apart from chance.
    """
    bundle = bench.tiny.bundle
    gamma = bundle.draft.gamma
    listed = [ids for own in prompts(bundle, 2).values() for ids in own]
    pair = bench.tiny.eager(capacity=1024)
    for temperature in (0.0, 1.0):
        engine = Engine.load(
            bundle,
            backend_options=bench.options,
            options=EngineOptions(max_batch=1),
            scheduler=f"fixed:{gamma}",
        )
        spent: dict[str, list[float]] = {"ours": [], "eager": []}
        tokens: list[float] = []  # a round
        threads = choose_threads(
            lambda: pair.generate(listed[0], 32, temperature=temperature, length=gamma),  # noqa: B023
            bench.threads,
        )
        clock = clock_for(max(threads, bench.tiny.backend(bench).options.threads or 0))
        for turn in range(4):
            for ids in listed:
                started = clock()
                ours = ask(engine, ids, temperature, turn)
                middle = clock()
                eager, rounds = pair.generate(
                    ids, NEW_TOKENS, temperature=temperature, length=gamma
                )
                ended = clock()
                if temperature == 0 and list(ours.token_ids) != eager[:NEW_TOKENS]:
                    print("greedy tokens differ from the eager loop's", file=sys.stderr)
                if turn:
                    spent["ours"].append((middle - started) / (ours.stats.rounds + 1))
                    spent["eager"].append((ended - middle) / (rounds + 1))
                    tokens.append((len(eager) - 1) / rounds)
        speed = {name: mean(tokens) / median(values) for name, values in spent.items()}
        yield Figure(
            group="generation",
            name=f"tokens/s / eager loop of the same rounds, tiny, T = {temperature:g}",
            measured=speed["ours"] / speed["eager"],
            bound=3.5,
            is_floor=True,
            detail=f"{speed['ours']:.0f} against {speed['eager']:.0f} tokens/s",
        )


# Host share ----------------------------------------------------------------------------------------


class CallClock:
    """Seconds inside onnxruntime, of all sessions of this process. By the wall clock: asking for a thread's own time takes
    a microsecond, which would be a twentieth of what is measured; the medians leave out what others interrupt.
    """

    def __init__(self) -> None:
        import onnxruntime

        self.seconds = 0.0
        run = onnxruntime.InferenceSession.run_with_iobinding

        def timed(*args: object, **kwargs: object) -> object:
            started = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        onnxruntime.InferenceSession.run_with_iobinding = timed


def host(bench: Bench) -> Iterator[Figure]:
    bundle = bench.tiny.bundle
    calls = CallClock()
    listed = [ids for own in prompts(bundle, 12).values() for ids in own]
    for batch, bound in ((1, 0.10), (32, 0.05)):
        for temperature in (0.0, 1.0):
            engine = Engine.load(
                bundle,
                backend_options=bench.options,
                options=EngineOptions(max_batch=batch),
                scheduler=f"fixed:{bundle.draft.gamma}",
            )
            shares, rounds = [], []
            reports: list[RoundReport] = []
            engine.observers.append(reports.append)
            for turn in range(4):
                for ids in islice(cycle(listed), turn * batch, (turn + 1) * batch):
                    params = SamplingParams(
                        temperature=temperature,
                        max_new_tokens=NEW_TOKENS,
                        seed=0,
                        ignore_eos=True,
                    )
                    engine.submit(Request(prompt_ids=ids, params=params))
                while engine.has_work:
                    started, calls.seconds = time.perf_counter(), 0.0
                    engine.step()
                    taken = time.perf_counter() - started
                    if (
                        turn
                        and reports[-1].decoding.all()
                        and len(reports[-1].decoding) == batch
                    ):
                        shares.append(1 - calls.seconds / taken)
                        rounds.append(taken)
            yield Figure(
                group="host",
                name=f"outside backend calls, tiny, batch {batch}, T = {temperature:g}",
                measured=median(shares),
                bound=bound,
                detail=f"of rounds of {1e3 * median(rounds):.2f} ms",
            )


# Speculation ---------------------------------------------------------------------------------------


def speculation(bench: Bench) -> Iterator[Figure]:
    """Adaptive lengths against plain decoding, one request, prompts that the fixtures were evaluated with. Both take
    turns every tenth of a second: the machine's phases last seconds.
    """
    from adaptive import PROMPTS as RECORDED
    from adaptive import by_domain, random_drafter

    listed = [Prompt(ids, domain) for domain, own in by_domain(RECORDED).items() for ids in own]
    trained = bench.tiny.bundle
    threads = str(
        bench.options.threads or 1
    )  # what the table is measured with has to be what runs
    if not (trained.path / CALIBRATION).exists():
        command("calibrate", trained.path)
    command(
        "profile", trained.path, "--max-requests", "1", "--seconds", "3", "--threads", threads
    )
    random_path = bench.folder / "random"
    if not random_path.exists():
        random_drafter(bench.folder / "random-work")
        (bench.folder / "random-work" / "bundle").rename(random_path)
    shutil.copy(trained.path / CALIBRATION, random_path)
    command(
        "profile", random_path, "--max-requests", "1", "--seconds", "3", "--threads", threads
    )
    bounds = {"trained": {"math": 1.5, "all": 1.2}, "random": {}}
    for name, bundle in (("trained", trained), ("random", load_bundle(random_path))):
        plan = BenchPlan(
            schedulers=("fixed:0", "auto"), requests=(1,), new_tokens=96, repeats=60
        )
        backend = open_backend("onnxruntime", bundle, BackendOptions(threads=int(threads)))
        result = run_bench(backend, listed, plan)
        for cell, tally in result.tallies.items():
            if cell.scheduler != "auto":
                continue
            plain = result.tallies[replace(cell, scheduler="fixed:0")].tokens_per_second
            # Turns of one request: it gains or it does not, so totals count, not the median request.
            adaptively, plainly = (
                sum(1 / speed for speed in speeds)
                for speeds in (tally.tokens_per_second, plain)
            )
            tau = interval_of_mean(tally.accepted)
            parts = ", ".join(
                f"{part} {1e3 * spent / tally.rounds:.2f}"
                for part, spent in tally.parts.items()
            )
            yield Figure(
                group="speculation",
                name=f"adaptive / plain, {name} drafter, {cell.domain}, T = {cell.temperature:g}",
                measured=plainly / adaptively,
                bound=bounds[name].get(cell.domain, 0.98),
                is_floor=True,
                detail=f"τ {'-' if tau is None else f'{tau[0]:.2f}'}, "
                f"ℓ {tally.verified / tally.decoding:.1f}, ms: {parts}",
            )


def command(*arguments: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "dspark_trt", *map(str, arguments)],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


# Limits of the machine -----------------------------------------------------------------------------


def roofline(bench: Bench) -> Iterator[Figure]:
    """Parts at hidden 1024, eight requests, over the least time they could take."""
    models, batch = bench.wide, 8
    bundle, backend = models.bundle, models.backend(bench)
    threads = backend.options.threads or 1
    assert bundle.target is not None
    drafter, target, verifier = (
        backend.draft_model(batch), backend.target_model(batch), backend.verifier(batch)
    )  # fmt: skip
    rows = {own: step_rows(bundle, batch, own) for own in (1, 8)}
    steps = {own: target.step(each) for own, each in rows.items()}
    inputs = {heat: draft_inputs(bundle, batch, heat) for heat in (0.0, 1.0)}
    drafted = drafter.draft(inputs[1.0])
    gamma, vocab = bundle.draft.gamma, bundle.draft.decoder.vocab_size

    def verification(temperature: float) -> VerifyInputs:
        return VerifyInputs(
            target_logits=steps[8].logits,
            offsets=np.arange(batch + 1) * (gamma + 1),
            draft_tokens=drafted.tokens,
            draft_logits=drafted.logits,
            temperature=np.full(batch, temperature, np.float32),
            top_k=np.zeros(batch, np.int64),
            top_p=np.ones(batch, np.float32),
            min_p=np.zeros(batch, np.float32),
            uniforms=np.full((batch, gamma + 1), 0.5, np.float32),
        )

    arms: dict[str, tuple[Callable[[], object], Work]] = {}
    work = draft_work(bundle.draft, batch=batch, context=CONTEXT)
    for heat, own in inputs.items():
        arms[f"draft step, T = {heat:g}"] = partial(drafter.draft, own), work
    for count, own_rows in rows.items():
        work = target_work(
            bundle.target, batch=batch, rows=batch * count, logit_rows=batch * count,
            context=CONTEXT,
        )  # fmt: skip
        arms[f"target step, {count} rows each"] = partial(target.step, own_rows), work
    for heat in (0.0, 1.0):
        work = verify_work(
            vocab, target_rows=8 * batch, draft_rows=gamma * batch, is_greedy=heat == 0
        )
        arms[f"verification, T = {heat:g}"] = partial(verifier.verify, verification(heat)), work
    limits = measure_limits(threads, bundle.files[WEIGHTS].size_bytes)
    taken = bench.compare({name: arm for name, (arm, _) in arms.items()}, threads)
    for name, (_, work) in arms.items():
        least = work.seconds(limits)
        what = "computing" if work.flops / limits.flops == least else "reading"
        yield Figure(
            group="roofline",
            name=f"measured / limit, wide, batch {batch}: {name}",
            measured=taken[name] / least,
            bound=2.0,
            detail=f"{1e3 * taken[name]:.1f} ms against {1e3 * least:.1f} of {what}; "
            f"{limits.bytes_per_second / 1e9:.0f} GB/s, {limits.flops / 1e9:.0f} GFLOP/s",
        )


# Contexts and capacity -----------------------------------------------------------------------------


def context(bench: Bench) -> Iterator[Figure]:
    """A step over caches as the runtime holds them, and over caches of exactly the rows it needs."""
    from dspark_trt.runtime import cache

    bundle = bench.tiny.bundle
    backend = bench.tiny.backend(bench)
    longest = bundle.max_context_tokens - 2 * (bundle.draft.gamma + 1)
    for kind in ("draft", "target"):
        ratios: dict[str, list[float]] = {"grown to it": [], "after the longest context": []}
        for length in (64, 128, 256, 512):
            growth = cache.GROWTH, cache.QUANTUM_ROWS
            cache.GROWTH, cache.QUANTUM_ROWS = 1.0, 1
            try:
                arms = {"exact": step_at(backend, kind, length)}
                arms["exact"]()  # allocates
            finally:
                cache.GROWTH, cache.QUANTUM_ROWS = growth
            arms["grown to it"] = step_at(backend, kind, length)
            arms["after the longest context"] = step_at(backend, kind, length, longest)
            taken = bench.compare(arms, backend.options.threads)
            for name, own in ratios.items():
                own.append(taken[name] / taken["exact"])
        for name, own in ratios.items():
            yield Figure(
                group="context",
                name=f"{kind} step, cache {name} / exact cache",
                measured=max(own),
                bound=1.3,
                detail="at 64, 128, 256, 512 tokens: " + ", ".join(f"{r:.2f}" for r in own),
            )


def step_at(
    backend: Backend, kind: str, length: int, reserved: int = 0
) -> Callable[[], object]:
    model = backend.draft_model(1) if kind == "draft" else backend.target_model(1)
    if reserved:
        model.reserve(reserved)
        model.shrink(length)  # as the engine does when a long request leaves
    if kind == "draft":
        return partial(model.draft, draft_inputs(backend.bundle, 1, 0.0, length))
    return partial(model.step, step_rows(backend.bundle, 1, 8, length))


# Weights of eight bits -----------------------------------------------------------------------------


def int8(bench: Bench) -> Iterator[Figure]:
    small = {name: bench.quantised(getattr(bench, name)) for name in ("tiny", "wide")}
    arms: dict[str, Callable[[], object]] = {}
    for name, models in (("float32", bench.wide), ("int8", small["wide"])):
        backend = models.backend(bench)
        draft_step = draft_arm(backend, 1, 0.0)
        target_step = partial(backend.target_model(1).step, step_rows(models.bundle, 1, 8))
        arms[name] = lambda d=draft_step, t=target_step: (d(), t())
    taken = bench.compare(arms, bench.wide.backend(bench).options.threads)
    yield Figure(
        group="int8",
        name="draft + target of 8 rows, float32 / int8, wide, batch 1",
        measured=taken["float32"] / taken["int8"],
        bound=1.3,
        is_floor=True,
        detail=f"{1e3 * taken['float32']:.1f} ms against {1e3 * taken['int8']:.1f}",
    )
    tau = {}
    plan = BenchPlan(
        schedulers=(f"fixed:{bench.tiny.bundle.draft.gamma}",),
        requests=(8,),
        new_tokens=192,
        repeats=12,  # 2 % of an accepted length is little
    )
    for name, models in (("float32", bench.tiny), ("int8", small["tiny"])):
        listed = [
            Prompt(ids, "all") for own in prompts(models.bundle, 16).values() for ids in own
        ]
        result = run_bench(models.backend(bench), listed, plan)
        tau[name] = [
            interval_of_mean(tally.accepted) or (0.0, 0.0, 0.0)
            for tally in result.tallies.values()
        ]
    for heat, before, after in zip(plan.temperatures, tau["float32"], tau["int8"], strict=True):
        yield Figure(
            group="int8",
            name=f"accepted length, int8 / float32, tiny, T = {heat:g}",
            measured=after[0] / before[0],
            bound=0.98,
            is_floor=True,
            detail=f"{after[0]:.2f} ({after[1]:.2f}-{after[2]:.2f}) against {before[0]:.2f}",
        )


# Starting ------------------------------------------------------------------------------------------

_IMPORT = """
import time
started = time.process_time()
import dspark_trt.runtime.engine
print(time.process_time() - started)
"""


def start(bench: Bench) -> Iterator[Figure]:
    seconds = [
        float(subprocess.check_output([sys.executable, "-c", _IMPORT], cwd=ROOT))
        for _ in range(7)
    ]
    yield Figure(
        group="start",
        name="import of the engine, CPU seconds",
        measured=median(seconds),
        bound=0.5,
    )
    for models in (bench.tiny, bench.wide):
        bundle, name = models.bundle, models.name
        arms = {
            "first": partial(first_load, bundle),
            "again": partial(load_bundle, bundle.path),
            "read": partial(read_bytes, bundle),
        }
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache  # what loads remember
            taken = bench.compare(arms, None)  # by the wall clock: hashing has threads
        detail = ", ".join(f"{arm} {1e3 * value:.1f} ms" for arm, value in taken.items())
        for arm in ("first", "again"):
            yield Figure(
                group="start",
                name=f"bundle load, {arm} / reading its bytes, {name}, files cached",
                measured=taken[arm] / taken["read"],
                bound=1.2,
                detail=detail,
            )


def first_load(bundle: Bundle) -> None:
    """As on a machine that never saw the bundle: what was verified before is forgotten."""
    for file in verified_files.memory().glob("*"):
        file.unlink()
    load_bundle(bundle.path)


def read_bytes(bundle: Bundle) -> None:
    block = bytearray(1 << 22)
    for name in bundle.files:
        with (bundle.path / name).open("rb", buffering=0) as stream:
            while stream.readinto(block):
                pass


GROUPS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "draft": draft,
    "target": target,
    "generation": generation,
    "speculation": speculation,
    "host": host,
    "roofline": roofline,
    "context": context,
    "int8": int8,
    "start": start,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(GROUPS))
    parser.add_argument("--folder", type=Path, help="where bundles stay; default: nowhere")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each comparison")
    parser.add_argument(
        "--threads",
        type=int,
        help="for both sides; 1 also leaves other processes out of the times",
    )
    args = parser.parse_args()
    chosen = args.only.split(",")
    if unknown := set(chosen) - set(GROUPS):
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    figures = []
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(
            args.folder or Path(scratch),
            args.seconds,
            args.threads or usable_cpus(),
            BackendOptions(threads=args.threads),
        )
        bench.folder.mkdir(parents=True, exist_ok=True)
        for name in chosen:
            for figure in GROUPS[name](bench):
                figures.append(figure)
                print_figure(figure)
    print(
        json.dumps(
            {
                "figures": [asdict(each) | {"verdict": each.verdict} for each in figures],
                "machine": machine_name(),
                "load": os.getloadavg(),
                "torch": torch.__version__,
            }
        )
    )
    return 0


def print_figure(figure: Figure) -> None:
    measured = "-" if figure.measured is None else f"{figure.measured:.3f}"
    sign = "≥" if figure.is_floor else "≤"
    print(
        f"{figure.verdict:>12}  {measured:>7} {sign} {figure.bound:<5g} {figure.name}"
        f"{'  (' + figure.detail + ')' if figure.detail else ''}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
