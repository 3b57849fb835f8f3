# SPDX-License-Identifier: Apache-2.0
"""Promises about whole generations: speed, Python's share, speculation, weights of eight bits, starting."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from statistics import mean, median

from eager import choose_threads
from judged_models import NEW_TOKENS, ROOT, Bench, Figure, ask, command, prompts
from judged_steps import draft_arm, step_rows

from dspark_trt import verified_files
from dspark_trt.bundle import CALIBRATION, Bundle, load_bundle
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.backends.interface import BackendOptions
from dspark_trt.runtime.bench import BenchPlan, interval_of_mean, run_bench
from dspark_trt.runtime.bench_turns import clock_for
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.round_report import RoundReport
from dspark_trt.runtime.trace_collection import Prompt

# Whole generations --------------------------------------------------------------------------------


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


# Host share ---------------------------------------------------------------------------------------


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


# Speculation --------------------------------------------------------------------------------------


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


# Weights of eight bits ----------------------------------------------------------------------------


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


# Starting -----------------------------------------------------------------------------------------


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
