# SPDX-License-Identifier: Apache-2.0
"""``calibrate`` and ``simulate`` as commands."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from dspark_trt.bundle import Bundle, Source, load_bundle, write_manifest
from dspark_trt.cli import calibrate, simulate
from dspark_trt.config import (
    ConfidenceInput,
    DecoderConfig,
    DraftConfig,
    HeadType,
    RopeConfig,
    SlotSemantics,
)
from dspark_trt.errors import BundleError, DSparkError, RequestError, TableError
from dspark_trt.runtime.calibration import Calibration
from dspark_trt.runtime.cost_table import CostTable
from dspark_trt.runtime.traces import load_traces, models_of

_TRACES = Path(__file__).parents[1] / "data" / "traces" / "smollm2_T1.npz"


def _run(command: Callable[..., None], *arguments: str) -> str:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, arguments, catch_exceptions=True)
    if isinstance(result.exception, DSparkError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def _bundle(folder: Path, *, gamma: int = 7, confidence: str = "hidden+markov") -> Path:
    decoder = DecoderConfig(
        hidden_size=8, intermediate_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8,
        vocab_size=32, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e4), max_positions=64, qk_norm=True,
    )  # fmt: skip
    has_head = confidence != "none"
    draft = DraftConfig(
        decoder=decoder, block_slots=gamma, slot_semantics=SlotSemantics.ANCHOR_FIRST,
        mask_token_id=3, target_layer_ids=(0,), num_target_layers=2, target_hidden_size=8,
        head_type=HeadType.VANILLA if has_head else HeadType.NONE, markov_rank=4 if has_head else 0,
        confidence=ConfidenceInput(confidence),
    )  # fmt: skip
    folder.mkdir()
    write_manifest(
        Bundle(
            path=folder, dtype="float32", draft=draft,
            draft_source=Source(name="toy", format="deepspec", sha256="0" * 64),
            target=None, target_source=None, files={}, tool_versions={},
        )
    )  # fmt: skip
    return folder


def test_calibrate_writes_the_bundles_calibration_and_reports(tmp_path: Path) -> None:
    bundle = _bundle(tmp_path / "bundle")
    report = json.loads(
        _run(
            calibrate.command,
            str(bundle), "--traces", str(_TRACES), "--json", "--plots", str(tmp_path / "plots"),
        )
    )  # fmt: skip
    calibration = Calibration.load(bundle / "calibration.json").require_gamma(7)
    assert calibration.method == report["method"] == "auto"
    assert report["slope"] == calibration.slope.tolist()
    held_out = report["held_out"]
    assert np.mean(held_out["after"]["ece"]) < 0.5 * np.mean(held_out["before"]["ece"])
    assert set(report["conditional_acceptance"]) == {"math", "code", "chat"}
    sweep = report["threshold_sweep"]
    assert sweep["verified_per_round"][0] == 7.0
    assert np.all(np.diff(sweep["verified_per_round"]) <= 0)
    assert len(report["plots"]) == 3
    for path in report["plots"]:
        assert Path(path).read_bytes().startswith(b"\x89PNG")


def test_calibrate_prints_a_table(tmp_path: Path) -> None:
    bundle = _bundle(tmp_path / "bundle")
    text = _run(calibrate.command, str(bundle), "--traces", str(_TRACES), "--method", "sts")
    assert "sts: held-out error of survival" in text
    assert "…" not in text  # 80 columns hold it
    assert "calibration.json" in text
    assert Calibration.load(bundle / "calibration.json").offset.tolist() == [0.0] * 7


def test_a_drafter_without_a_head_gets_an_estimator(tmp_path: Path) -> None:
    bundle = _bundle(tmp_path / "bundle", confidence="none")
    with pytest.raises(TableError, match="without a confidence head needs drafted_prob"):
        _run(calibrate.command, str(bundle), "--traces", str(_TRACES))
    with np.load(_TRACES) as file:
        arrays = {key: file[key] for key in ("conf_logits", "accept_prefix_mask", "request_id")}
    probability = 1 / (
        1 + np.exp(-arrays["conf_logits"])
    )  # a drafter that knows as much as the head
    np.savez(tmp_path / "t.npz", **arrays, drafted_prob=probability, top_prob=probability)
    _run(calibrate.command, str(bundle), "--traces", str(tmp_path / "t.npz"))
    estimator = Calibration.load(bundle / "calibration.json").estimator
    assert estimator is not None
    assert estimator.weights.shape == (7, 3)


def test_calibrate_refuses_rounds_of_other_models(tmp_path: Path) -> None:
    bundle = _bundle(tmp_path / "bundle")
    traces, recorded = load_traces(_TRACES), tmp_path / "t.npz"
    replace(traces, models="1234+5678").save(recorded)
    with pytest.raises(RequestError, match=r"rounds of other models .* 1234\+5678, here 0000"):
        _run(calibrate.command, str(bundle), "--traces", str(recorded))
    assert not (bundle / "calibration.json").exists()
    replace(traces, models=models_of(load_bundle(bundle))).save(recorded)
    _run(calibrate.command, str(bundle), "--traces", str(recorded))
    assert (bundle / "calibration.json").exists()


def test_calibrate_refuses_what_does_not_fit(tmp_path: Path) -> None:
    bundle = _bundle(tmp_path / "bundle", gamma=5)
    with pytest.raises(RequestError, match=r"rounds of 7 drafted tokens, .* drafts 5"):
        _run(calibrate.command, str(bundle), "--traces", str(_TRACES))
    with pytest.raises(
        BundleError, match=r"bundle has no target\. Export it again with --target"
    ):
        _run(calibrate.command, str(bundle))
    with pytest.raises(RequestError, match="'best' is unknown; expected sts, affine, auto"):
        _run(calibrate.command, str(bundle), "--method", "best")
    with pytest.raises(RequestError, match=r"--bins must lie in 2\.\.1000, got 1"):
        _run(calibrate.command, str(bundle), "--bins", "1")
    assert not (bundle / "calibration.json").exists()


def _simulate(*arguments: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(
        _run(simulate.command, "--json", "--rounds", "800", *arguments)
    )
    return report


def test_simulate_compares_policies(tmp_path: Path) -> None:
    report = _simulate(
        "--concurrency",
        "2,8",
        "--policies",
        "fixed:0,async",
        "--plots",
        str(tmp_path / "p"),
    )
    assert list(report["outcomes"]) == ["fixed:0", "async"]
    assert list(report["outcomes"]["fixed:0"]) == ["2", "8"]
    speed = {name: row["8"]["tokens_per_second"] for name, row in report["outcomes"].items()}
    assert speed["async"] > 1.5 * speed["fixed:0"]
    assert [Path(path).stat().st_size > 1000 for path in report["plots"]] == [True, True]


def test_simulate_replays_traces_on_a_measured_table(tmp_path: Path) -> None:
    rounds = load_traces(_TRACES)
    Calibration.identity(rounds.gamma).save(tmp_path / "calibration.json")
    CostTable([1, 64], [100.0, 20.0], padded=False).save(tmp_path / "sps.json")
    report = _simulate(
        "--traces", str(_TRACES), "--calibration", str(tmp_path / "calibration.json"),
        "--table", str(tmp_path / "sps.json"), "--arrivals", "1.5", "--concurrency", "4",
        "--policies", "fixed:1",
    )  # fmt: skip
    assert report["domains"] == ["math", "code", "chat"]
    assert list(report["outcomes"]["fixed:1"]) == ["1.5/s"]


def test_simulate_plans_capacity() -> None:
    report = _simulate(
        "--sla", "150", "--load-requests", "100", "--policies", "fixed:0,fixed:7"
    )
    assert report["capacity"]["fixed:7"]["requests"] > report["capacity"]["fixed:0"]["requests"]
    long = _simulate("--sla", "150", "--policies", "fixed:0", "--prompt-tokens", "16000")
    assert long["capacity"]["fixed:0"]["requests"] < report["capacity"]["fixed:0"]["requests"]
    text = _run(simulate.command, "--sla", "150", "--rounds", "500", "--policies", "fixed:0")
    assert "150 tokens/s/user" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "best"), "policy 'best' is unknown; expected some of fixed:K"),
        (("--policies", "fixed:8"), "fixed:8: expected a length from 0 to 7"),
        (
            ("--concurrency", "many"),
            "--concurrency must be comma-separated numbers, got 'many'",
        ),
        (("--concurrency", "1,inf"), "--concurrency must be whole numbers, got '1,inf'"),
        (("--acceptance", "0.5/0.5,0.5"), "domains must have one length"),
        (("--gpu", "abacus"), "no roofline for 'abacus'"),
        (("--calibration", "calibration.json"), "give them with --traces"),
        (("--load-requests", "100"), "give --sla"),
        (("--sla", "50", "--plots", "figures"), "leave --arrivals and --plots out"),
    ],
)
def test_simulate_refuses_bad_options(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        _run(simulate.command, *arguments)


def test_simulate_refuses_a_flat_table(tmp_path: Path) -> None:
    CostTable([1, 64], [100.0, 100.0]).save(tmp_path / "sps.json")
    with pytest.raises(TableError, match="cost table is flat"):
        _run(simulate.command, "--table", str(tmp_path / "sps.json"))
