# SPDX-License-Identifier: Apache-2.0
"""What `bench` counts and measures: work against the graphs, intervals, turns, and whole small benches."""

import json
import os
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime as ort
import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.config import DraftConfig
from dspark_trt.errors import RequestError
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.bench import (
    PARTS,
    BenchPlan,
    Cell,
    interval_of_mean,
    least_seconds,
    run_bench,
)
from dspark_trt.runtime.bench_limits import MATMUL, MachineLimits, measure_limits
from dspark_trt.runtime.bench_report import bench_report, markdown, prompts_hash
from dspark_trt.runtime.bench_turns import clock_for, seconds_by_turns
from dspark_trt.runtime.bench_work import Work, draft_work, target_work, verify_work
from dspark_trt.runtime.ragged import ragged_rows
from dspark_trt.runtime.trace_collection import Prompt

CONTEXT, BATCH = 40, 3
Feeds = dict[str, np.ndarray]


def counted(path: Path, feeds: Feeds, folder: Path) -> Work:
    """Products and attention of one run of a graph as it was exported, by onnxruntime's own record."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling, options.profile_file_prefix = True, str(folder / path.stem)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, feeds)
    record = json.loads(Path(session.end_profiling()).read_text())
    logits = outputs[[o.name for o in session.get_outputs()].index("logits")]
    work = Work(logits.nbytes)
    for event in record:
        arguments = event.get("args", {})
        shapes = [next(iter(each.values())) for each in arguments.get("input_type_shape", [])]
        if arguments.get("op_name") in ("MatMul", "Gemm"):
            # Weights are packed beforehand and have no shape here: rows .. x inner -> rows .. x outer.
            (result,) = (next(iter(each.values())) for each in arguments["output_type_shape"])
            inner, outer = shapes[0][-1], result[-1]
            work += Work(4 * inner * outer, 2.0 * prod(result) * inner)
        elif arguments.get("op_name") == "Attention":
            query, key = shapes[:2]
            work += Work(2 * 4 * prod(key), 4.0 * prod(query) * key[2])
    return work


def caches(session_inputs: list[Any], capacity: int) -> Feeds:
    return {
        each.name: np.zeros((BATCH, each.shape[1], capacity, each.shape[3]), np.float32)
        for each in session_inputs
        if each.name.startswith("past_")
    }


def inputs_of(path: Path) -> list[Any]:
    return list(
        ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).get_inputs()
    )


def draft_feeds(config: DraftConfig, path: Path) -> Feeds:
    gamma = config.gamma
    return {
        "anchor_ids": np.full(BATCH, 5),
        "new_taps": np.ones((BATCH, gamma + 1, config.tap_size), np.float32),
        "new_len": np.full(BATCH, gamma + 1),
        "context_len": np.full(BATCH, CONTEXT),
        "temperature": np.zeros(BATCH, np.float32),
        "uniforms": np.zeros((BATCH, gamma), np.float32),
        **caches(inputs_of(path), CONTEXT + gamma + 1 + config.block_slots),
    }


@pytest.mark.parametrize("name", ["dspark-vanilla", "dspark-rnn"])
def test_draft_work_is_what_the_graph_does(
    name: str, fixture_bundle: Any, tmp_path: Path
) -> None:
    bundle = fixture_bundle(name)
    path = bundle.graph_path("draft")
    seen = counted(path, draft_feeds(bundle.draft, path), tmp_path)
    said = draft_work(bundle.draft, batch=BATCH, context=CONTEXT)
    assert said.flops == pytest.approx(seen.flops, rel=0.03)
    assert said.nbytes == pytest.approx(seen.nbytes, rel=0.03)


def test_target_work_is_what_the_graph_does(tiny_bundle: Bundle, tmp_path: Path) -> None:
    path = tiny_bundle.graph_path("target")
    own = 5
    rows = ragged_rows(
        [np.arange(4, 4 + own)] * BATCH, np.full(BATCH, CONTEXT), np.full(BATCH, True)
    )
    names = [each.name for each in inputs_of(path) if not each.name.startswith("past_")]
    feeds = {name: getattr(rows, name) for name in names}
    seen = counted(path, feeds | caches(inputs_of(path), CONTEXT + own), tmp_path)
    assert tiny_bundle.target is not None
    said = target_work(
        tiny_bundle.target, batch=BATCH, rows=BATCH * own, logit_rows=BATCH * own,
        context=CONTEXT,
    )  # fmt: skip
    assert said.flops == pytest.approx(seen.flops, rel=0.03)
    assert said.nbytes == pytest.approx(seen.nbytes, rel=0.03)


def test_the_slower_of_reading_and_computing_is_the_limit() -> None:
    limits = MachineLimits(bytes_per_second=10.0, flops=100.0, threads=1)
    assert Work(20.0, 100.0).seconds(limits) == 2.0
    assert Work(20.0, 1000.0).seconds(limits) == 10.0
    greedy = verify_work(50, target_rows=8, draft_rows=7, is_greedy=True)
    sampled = verify_work(50, target_rows=8, draft_rows=7, is_greedy=False)
    assert greedy.nbytes == 4 * 8 * 50
    assert sampled.nbytes == 4 * 15 * 50


def test_the_measured_product_is_the_model_that_it_says() -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> '
        "g (float[m,k] a, float[k,n] b) => (float[m,n] c) { c = MatMul(a, b) }"
    )
    assert onnx.load_from_string(MATMUL) == onnx.parser.parse_model(text)


def test_limits_are_of_this_machine() -> None:
    limits = measure_limits(1, 1 << 22)
    assert 1e8 < limits.bytes_per_second < 1e13
    assert 1e8 < limits.flops < 1e14


def test_turns_go_to_every_arm_and_warm_ups_do_not_count() -> None:
    now, calls = [0.0], dict.fromkeys("ab", 0)

    def arm(name: str, seconds: float) -> None:
        calls[name] += 1
        now[0] += 100 if calls[name] == 1 else seconds  # the first call is slow

    taken = seconds_by_turns(
        {"a": lambda: arm("a", 1.0), "b": lambda: arm("b", 3.0)},
        seconds=0, turns=4, calls=3, clock=lambda: now[0],
    )  # fmt: skip
    assert taken == {"a": [1.0] * 8, "b": [3.0] * 8}
    assert calls == {"a": 13, "b": 13}
    assert clock_for(1) is not clock_for(2)


def test_intervals_widen_with_requests_that_differ_not_with_rounds() -> None:
    assert interval_of_mean({}) is None
    assert interval_of_mean({1: [2, 2], 2: [2]}) == (3.0, 3.0, 3.0)
    alike = interval_of_mean({i: [0, 6] * 50 for i in range(8)})
    unlike = interval_of_mean({i: [6 * (i % 2)] * 100 for i in range(8)})
    assert alike is not None
    assert unlike is not None
    assert alike[0] == unlike[0] == 4.0
    assert alike[2] - alike[1] == 0
    assert unlike[2] - unlike[1] > 2


PROMPTS = [
    Prompt((1, 5, 9, 11, 20 + n), domain) for n in range(3) for domain in ("left", "right")
]


def test_a_small_bench(tiny_bundle: Bundle) -> None:
    backend = open_backend("onnxruntime", tiny_bundle)
    plan = BenchPlan(
        schedulers=("fixed:0", "fixed:7", "fixed:2"), requests=(2,), temperatures=(0.0, 1.0),
        new_tokens=8, repeats=2, max_new_tokens=20,
    )  # fmt: skip
    turns: list[tuple[int, int]] = []
    result = run_bench(backend, PROMPTS, plan, progress=lambda *turn: turns.append(turn))
    assert turns[-1] == (2 * 2 * 3, 2 * 2 * 3)
    assert len(result.tallies) == 3 * 2 * 3  # with both domains together
    for cell, tally in result.tallies.items():
        assert len(tally.seconds) == 2
        assert all(seconds > 0 for seconds in tally.seconds)
        assert sum(tally.parts.values()) == pytest.approx(sum(tally.seconds), rel=1e-6)
        assert set(tally.parts) == set(PARTS)
        assert tally.decoding == cell.requests * tally.rounds
        length = int(cell.scheduler[-1])
        assert tally.rows == tally.decoding + tally.verified
        if length == 0:
            assert tally.drafted == 0
            assert not tally.accepted
            continue
        assert tally.drafted == tally.decoding
        assert 0 < tally.verified <= length * tally.drafted
        assert tally.kept.sum() == sum(map(sum, tally.accepted.values()))
        assert (tally.reached[length:] == 0).all()
        cut_off = tally.drafted + tally.kept.sum() - sum(tally.tokens)  # at max_new_tokens
        assert 0 <= cut_off < length * len(tally.accepted)
    limits = MachineLimits(bytes_per_second=1e12, flops=1e14, threads=1)
    some = Cell(scheduler="fixed:7", requests=2, temperature=1.0, domain="all")
    least = least_seconds(backend, some, result.tallies[some], limits)
    for part, seconds in least.items():
        assert 0 < seconds < result.tallies[some].parts[part] / result.tallies[some].rounds
    report = bench_report(backend, PROMPTS, plan, result, limits)
    json.dumps(report, allow_nan=False)
    assert report["prompts"] == {
        "sha256": prompts_hash(PROMPTS), "count": {"left": 3, "right": 3}
    }  # fmt: skip
    assert [cell["domain"] for cell in report["cells"][:3]] == ["all"] * 3
    assert report["cells"][0]["over_first"] == 1.0
    text = markdown(report)
    assert "| fixed:2 | 2 | 1 | right |" in text
    assert os.linesep.join(text.splitlines()[:1]) == "# Bench of drafter with target"


def test_greedy_acceptance_does_not_depend_on_the_load(tiny_bundle: Bundle) -> None:
    """One request alone, and the same one twice, in step: the same rounds."""
    backend = open_backend("onnxruntime", tiny_bundle)
    plan = BenchPlan(
        schedulers=("fixed:7",), requests=(1, 2), temperatures=(0.0,), new_tokens=96, repeats=1,
        max_new_tokens=512,
    )  # fmt: skip
    result = run_bench(backend, [PROMPTS[0]], plan)
    one, two = result.tallies.values()
    first = next(iter(one.accepted.values()))
    for own in two.accepted.values():
        assert own[: len(first)] == first[: len(own)]


def test_prompts_are_named_by_what_they_are() -> None:
    assert prompts_hash(PROMPTS) == prompts_hash(list(PROMPTS))
    assert prompts_hash(PROMPTS) != prompts_hash(PROMPTS[::-1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": (1, 1)}, r"requests must be distinct and not empty, got \[1, 1\]"),
        ({"schedulers": ()}, r"schedulers must be distinct and not empty"),
        ({"requests": (0,)}, r"requests must be at least 1, got \[0\]"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
    ],
)
def test_impossible_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BenchPlan(**({"schedulers": ("auto",)} | changes))


def test_nothing_to_ask_is_refused(tiny_bundle: Bundle) -> None:
    backend = open_backend("onnxruntime", tiny_bundle)
    with pytest.raises(RequestError, match="no prompts to measure with"):
        run_bench(backend, [], BenchPlan(schedulers=("auto",)))
    with pytest.raises(RequestError, match="scheduler 'fast' is unknown"):
        run_bench(backend, PROMPTS, BenchPlan(schedulers=("fast",)))
