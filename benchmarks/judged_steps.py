# SPDX-License-Identifier: Apache-2.0
"""Promises about single steps: draft and target, their limits, and contexts."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from eager import choose_threads
from judged_models import CONTEXT, NEW_ROWS, Bench, Figure, Models

from dspark_trt.bundle import WEIGHTS, Bundle
from dspark_trt.runtime.backends import Backend
from dspark_trt.runtime.backends.interface import DraftInputs, VerifyInputs
from dspark_trt.runtime.bench_limits import measure_limits
from dspark_trt.runtime.bench_work import Work, draft_work, target_work, verify_work
from dspark_trt.runtime.ragged import RaggedRows, ragged_rows

# Draft and target steps ---------------------------------------------------------------------------


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


# Limits of the machine ----------------------------------------------------------------------------


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


# Contexts and capacity ----------------------------------------------------------------------------


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
