# SPDX-License-Identifier: Apache-2.0
"""Comparison of drafters: figures against an engine's own counts, and what cannot be compared."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dspark_trt.bundle import Bundle, Source
from dspark_trt.cli import build_app
from dspark_trt.errors import RequestError
from dspark_trt.runtime.comparison import (
    ComparisonPlan,
    accepted_length_interval,
    compare_drafters,
)
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.request import Request, SamplingParams
from dspark_trt.runtime.text import TextCodec
from dspark_trt.runtime.trace_collection import Prompt
from dspark_trt.runtime.traces import traces_from_arrays
from tests.conftest import ExportBundle

TEXTS = {
    "math": ("What is 3 + 4?", "Compute 37 + 58."),
    "code": ("Write a Python function that adds two numbers.", "Write a class for a stack."),
}
PLAN = ComparisonPlan(max_new_tokens=16, requests=2, turns=1, profile_seconds=0.02)


def encoded(bundle: Bundle) -> list[Prompt]:
    codec = TextCodec(bundle)
    return [
        Prompt(codec.encode_chat([{"role": "user", "content": text}]), domain)
        for domain, texts in TEXTS.items()
        for text in texts
    ]


def test_figures_are_those_of_the_engine(fixture_bundle: ExportBundle) -> None:
    """A drafter with a confidence head and one without; accepted lengths counted a second time."""
    bundles = [fixture_bundle("dspark-vanilla"), fixture_bundle("dflash")]
    prompts = encoded(bundles[0])
    results = compare_drafters(bundles, prompts, PLAN)
    for bundle, result in zip(bundles, results, strict=True):
        gamma = bundle.draft.gamma
        options = EngineOptions(max_batch=2)
        with Engine.load(bundle, options=options, scheduler=f"fixed:{gamma}") as engine:
            params = SamplingParams(max_new_tokens=PLAN.max_new_tokens)
            engine.generate([Request(prompt_ids=p.token_ids, params=params) for p in prompts])
            metrics = engine.metrics
        assert result.rounds == metrics.reached[0]
        assert list(result.reached) == metrics.reached.tolist()
        expected = metrics.accepted / np.maximum(metrics.reached, 1)
        shown = [0.0 if c is None else c for c in result.conditional_acceptance]
        np.testing.assert_allclose(shown, expected)
        kept = 1 + metrics.accepted.sum() / result.rounds
        assert result.accepted_length == pytest.approx(kept)
        low, high = result.accepted_length_interval
        assert 1 <= low <= result.accepted_length <= high <= 1 + gamma
        assert set(result.by_domain) == {"math", "code"}
        assert result.draft_ms > 0
        assert result.step_ms > 0
        assert 0 <= result.recommended_gamma <= gamma
        assert result.tokens_per_second > 0
        assert result.speed_up == pytest.approx(
            result.tokens_per_second / result.plain_tokens_per_second
        )


def test_interval_draws_requests_not_rounds() -> None:
    """Two kinds of requests: rounds of one agree, so the interval spans nearly both kinds."""
    accepted = np.repeat([0, 2], 50)
    traces = traces_from_arrays(
        conf_logits=np.zeros((100, 2)),
        accept_prefix_mask=np.arange(2) < accepted[:, None],
        request_id=np.repeat(np.arange(4), 25),
    )
    low, high = accepted_length_interval(traces)
    assert low < 1.6
    assert high > 2.4
    single = traces_from_arrays(
        conf_logits=np.zeros((100, 2)),
        accept_prefix_mask=np.arange(2) < accepted[:, None],
        request_id=np.arange(100),
    )
    low, high = accepted_length_interval(single)
    assert 1.7 < low < 2 < high < 2.3


def test_what_cannot_be_compared(fixture_bundle: ExportBundle) -> None:
    bundle = fixture_bundle("dspark-vanilla")
    prompts = [Prompt((1, 2, 3))]
    other = Source(name="other", format="qwen3", sha256="0" * 64)
    with pytest.raises(RequestError, match=r"target other .* compare drafters of one target"):
        compare_drafters([bundle, replace(bundle, target_source=other)], prompts, PLAN)
    with pytest.raises(RequestError, match="has no target: export it again with --target"):
        compare_drafters([replace(bundle, target_source=None)], prompts, PLAN)
    with pytest.raises(RequestError, match="export both with one --dtype"):
        compare_drafters([bundle, replace(bundle, dtype="float16")], prompts, PLAN)
    with pytest.raises(RequestError, match="at least one bundle and one prompt"):
        compare_drafters([bundle], [], PLAN)
    with pytest.raises(RequestError, match="requests must be at least 1, got 0"):
        ComparisonPlan(requests=0)


def test_command(fixture_bundle: ExportBundle, tmp_path: Path) -> None:
    paths = [str(fixture_bundle(name).path) for name in ("dspark-vanilla", "dflash")]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What is 3 + 4?\n\nWrite a function.\n")
    runner, app = CliRunner(), build_app()
    options = ["--prompts", str(prompts), "--max-new-tokens", "8", "--turns", "1"]
    options += ["--requests", "2", "--plot", str(tmp_path / "plot.png")]
    result = runner.invoke(app, ["compare", *paths, *options, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["prompts"] == 2
    assert [row["bundle"] for row in report["drafters"]] == paths
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    named = tmp_path / "of-16-characters"
    named.symlink_to(paths[0])
    shown = runner.invoke(app, ["compare", str(named), *options], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    assert shown.output.count(named.name) == 2  # whole, in both tables
    assert "accepted, if reached, by position" in shown.output
    prompts.write_text("\n")
    empty = runner.invoke(app, ["compare", paths[0], *options])
    assert isinstance(empty.exception, RequestError)
    assert "holds no prompt" in str(empty.exception)
