# SPDX-License-Identifier: Apache-2.0
"""`profile`, `calibrate` and the schedulers of `generate`, as a user runs them."""

import json
import shutil
from pathlib import Path

import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.runtime.traces import load_traces
from tests.command_line import dspark
from tests.conftest import copied_without, drafter_alone


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example that commands may write into."""
    return shutil.copytree(tiny_bundle.path, tmp_path_factory.mktemp("scheduling") / "bundle")


def test_a_profiled_bundle_is_scheduled_by_cost(bundle: Path) -> None:
    ids = "--prompt-ids=1,5,9,11"
    before = dspark("generate", bundle, ids, "--max-new-tokens", 12)
    assert "no cost table" in before.stderr
    assert "dspark-trt profile" in before.stderr
    done = dspark(
        "profile", bundle, "--max-requests", 2, "--seconds", 0.3, "--json",
        "--export-format", "sglang-flat",
    )  # fmt: skip
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (bundle / "sps.json").is_file()
    assert [row["requests"] for row in report["break_even"]] == [1, 2]
    assert 0 < report["break_even"][0]["break_even_acceptance"] <= 1
    assert set(report["exported"]) >= {"sample_batch_tokens", "sample_steps_per_sec"}
    after = dspark("generate", bundle, ids, "--max-new-tokens", 12)
    assert after.code == 0
    assert "no cost table" not in after.stderr
    assert "--max-requests 8" in after.stderr  # what `generate` may run at a time
    others = dspark("generate", bundle, ids, "--max-new-tokens", 12, "--threads", 3)
    note = " ".join(others.stderr.split())
    assert "instead of '3'; it is not used. Measure one here: " in note
    assert f"dspark-trt profile {bundle} --threads 3" in note
    assert after.stdout == before.stdout  # greedy: the scheduler changes costs, not text


def test_a_bundle_without_tokenizer_asks_for_ids(tiny_bundle: Bundle, tmp_path: Path) -> None:
    bundle = copied_without(tiny_bundle, tmp_path, "tokenizer/")
    for words, wanted in (
        (["calibrate"], "--prompts FILE"),
        (["generate", "--prompt", "Hello"], "--prompt-ids"),
    ):
        done = dspark(*words, bundle.path)
        assert done.code == 2
        assert f"this bundle has no tokenizer: give {wanted}" in " ".join(done.stderr.split())


def test_traces_are_recorded_and_a_bundle_calibrated_from_its_own_answers(
    bundle: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"What is {n} + {n + 3}?" for n in range(24)))
    done = dspark("calibrate", bundle, "--prompts", prompts, "--json")
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (bundle / "calibration.json").is_file()
    assert len(report["temperatures"]) == 7
    trace = tmp_path / "trace.npz"
    done = dspark(
        "generate", bundle, "--prompt-ids=1,5,9", "--scheduler=fixed:3", "--trace", trace
    )
    assert done.code == 0, done.stderr
    assert set(load_traces(trace).lengths.tolist()) == {3}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("generate", "--prompt-ids=1", "--scheduler=fixed:9"),
            "expected a length from 0 to 7",
        ),
        (("generate", "--prompt-ids=1", "--scheduler=best"), "scheduler 'best' is unknown"),
        (("profile", "--max-requests=0"), "must be positive and finite, got 0"),
        (("profile", "--seconds=inf"), "must be positive and finite, got 8, inf"),
        (("bench", "--seed=-1"), "'--seed': Input should be greater"),
        (("calibrate", "--bins=100000000"), "--bins must lie in 2..1000, got 100000000"),
        (("profile", "--export-format=csv"), "--export-format 'csv' is unknown"),
        (("generate", "--prompt-ids=1", "--scheduler=fixed:-1"), "fixed:-1: expected a length"),
        (("generate", "--prompt-ids=1", "--threads=0"), "threads must lie in 1..256, got 0"),
        (
            ("generate", "--prompt-ids=1", "--trace=no/x.npz"),
            "no/x.npz: there is no folder no.",
        ),
        (
            ("generate", "--prompt-ids=1", f"--max-batch={10**13}"),
            "max_batch must be at most 65536, got 10000000000000",
        ),
        (("profile", "--plot=/"), "cannot write /: it is a folder"),
        (("compare", "--plot=no/x.png"), "cannot write no/x.png: there is no folder no."),
        (("bench", "--output=/dev/null/x"), "cannot make the folder /dev/null/x: Not a dir"),
        (("calibrate", "--plots=/dev/null/x"), "cannot make the folder /dev/null/x: Not a dir"),
    ],
)
def test_bad_flags_are_refused(bundle: Path, arguments: tuple[str, ...], sentence: str) -> None:
    command, *rest = arguments
    done = dspark(command, bundle, *rest)
    assert done.code == 2
    assert sentence in done.stderr


def test_a_bundle_without_target_is_told_so_by_every_command_that_runs_one(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    alone = drafter_alone(tiny_bundle, tmp_path).path
    for command, *rest in (
        ("generate", "--prompt", "Once"), ("chat",), ("serve", "--port", "0"), ("bench",), ("compare",),
        ("profile",), ("calibrate",), ("triton-repo", "-o", tmp_path / "repository"),
    ):  # fmt: skip
        done = dspark(command, alone, *rest)
        assert done.code == 2, command
        assert f"{alone} has no target. Export it again with --target" in done.stderr, command
