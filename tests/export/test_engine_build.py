# SPDX-License-Identifier: Apache-2.0
"""Engines built on a CPU by TensorRT-RTX: what is in the plans, in the manifest, and in the refusals."""

import json
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import typer
from onnx import TensorProto, helper
from typer.testing import CliRunner

from dspark_trt.bundle import Bundle, load_bundle, record_files, write_manifest
from dspark_trt.checkpoint import read_draft, read_target
from dspark_trt.cli.build import command
from dspark_trt.engine_manifest import (
    EngineSet,
    Profile,
    check_engine,
    find_engines,
    read_engine_manifest,
)
from dspark_trt.errors import BuildError, BundleError
from dspark_trt.export import bundle_from_checkpoints
from dspark_trt.export.bundle_from_checkpoints import export_bundle
from dspark_trt.export.engines.build import (
    BuildOptions,
    Progress,
    build_engines,
    plan_build,
    run_job,
)
from dspark_trt.export.engines.describe import describe_engine
from dspark_trt.export.engines.engine_from_onnx import Job
from dspark_trt.export.engines.layer_times import LayerTimes
from dspark_trt.export.engines.profiles import graph_bindings
from dspark_trt.gpu import visible_gpu
from dspark_trt.tensorrt_library import load_library
from tests.checkpoints import write_gemma_draft
from tests.command_line import dspark
from tests.conftest import CHAINS, TINY_TARGET, ExportBundle, copied
from tests.export.engine_plan_reader import Plan, read_plan

pytestmark = pytest.mark.trt

CAPACITY, BATCH, TOKENS = 256, 4, 64
SMALL = BuildOptions(
    backend="tensorrt-rtx", max_batch=BATCH, max_tokens=TOKENS, capacity=CAPACITY
)
CACHED = ("context", "draft", "backbone", "target")
OTHERS = ("sequential_head", "confidence_head", "verify", "verify_greedy", "verify_processed")


@pytest.fixture
def bundle(fixture_bundle: ExportBundle, tmp_path: Path) -> Bundle:
    """A copy of the trained fixture in float16 that a test may change."""
    return copied(fixture_bundle("dspark-vanilla", dtype="float16"), tmp_path)


@pytest.fixture(scope="module")
def built(
    fixture_bundle: ExportBundle, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bundle, EngineSet]:
    """The fixture with engines of all graphs."""
    shared = fixture_bundle("dspark-vanilla", dtype="float16")
    bundle = copied(shared, tmp_path_factory.mktemp("engines"))
    return bundle, build_engines(plan_build(bundle, replace(SMALL, graphs=bundle.graph_names)))


def plan_of(engines: EngineSet, graph: str) -> Plan:
    return read_plan((engines.path / engines.engines[graph].file).read_bytes())


every_graph = pytest.mark.parametrize("graph", [*CACHED, *OTHERS])


@every_graph
def test_tensors_in_the_plan_are_those_of_the_contract(
    built: tuple[Bundle, EngineSet], graph: str
) -> None:
    bundle, engines = built
    contract, plan = graph_bindings(bundle, graph), plan_of(engines, graph)
    expected = {
        binding.name: (
            index,
            binding.name in contract.input_names,
            binding.dtype,
            tuple(
                CAPACITY if d == "capacity" else d if isinstance(d, int) else -1
                for d in binding.shape
            ),
        )
        for index, binding in enumerate((*contract.inputs, *contract.outputs))
    }
    assert {
        t.name: (t.index, t.is_input, t.dtype, t.shape) for t in plan.tensors.values()
    } == expected


@every_graph
def test_profiles_in_the_plan_are_those_of_the_manifest(
    built: tuple[Bundle, EngineSet], graph: str
) -> None:
    _, engines = built
    plan = plan_of(engines, graph)
    found = [
        {t.name: shapes[t.index] for t in plan.tensors.values() if t.is_input}
        for shapes in plan.profiles
    ]
    assert found == [dict(profile.shapes) for profile in engines.engines[graph].profiles]


@every_graph
def test_the_manifest_says_what_the_plan_holds(
    built: tuple[Bundle, EngineSet], graph: str
) -> None:
    _, engines = built
    record, plan = engines.engines[graph], plan_of(engines, graph)
    for binding in (*record.inputs, *record.outputs):
        tensor = plan.tensors[binding.name]
        assert (tensor.dtype, tensor.shape) == (binding.dtype, binding.shape)
    assert engines.version == ".".join(map(str, plan.version))
    assert record.seconds > 0
    assert record.peak_bytes is None or record.peak_bytes > record.size_bytes


@pytest.mark.parametrize("graph", CACHED)
def test_caches_are_updated_in_place(built: tuple[Bundle, EngineSet], graph: str) -> None:
    """The compiled graph reads and writes each cache under one name: that of the output."""
    bundle, engines = built
    contract, plan = graph_bindings(bundle, graph), plan_of(engines, graph)
    present = {name for name in contract.output_names if name.startswith("present_")}
    past = {name.replace("present", "past") for name in present}
    assert past <= set(contract.input_names)
    assert plan.compiled_inputs & plan.compiled_outputs == present
    assert not plan.compiled_inputs & past
    assert engines.engines[graph].aliases == {
        name: name.replace("present", "past") for name in present
    }


def test_engines_are_found_by_a_machine_that_can_run_them(
    built: tuple[Bundle, EngineSet],
) -> None:
    bundle, engines = built
    library = load_library("tensorrt-rtx")
    found = find_engines(bundle, "tensorrt-rtx", version=library.version, device_arch="sm120")
    assert found == read_engine_manifest(engines.path) == engines
    for graph in engines.engines:
        assert check_engine(found, graph, bundle).is_file()
    assert load_bundle(bundle.path).fingerprint() == engines.bundle_fingerprint


def test_tampered_engines_are_refused(built: tuple[Bundle, EngineSet]) -> None:
    bundle, engines = built
    file = engines.path / "sequential_head.engine"
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:-1])
        with pytest.raises(
            BundleError, match=r"bytes, expected .*dspark-trt build .*--capacity 256"
        ):
            check_engine(engines, "sequential_head", bundle)
        with pytest.raises(BundleError, match=r"bytes, expected"):
            describe_engine(file)
    finally:
        file.write_bytes(whole)
    check_engine(engines, "sequential_head", bundle)


def test_description_of_an_engine(built: tuple[Bundle, EngineSet]) -> None:
    _, engines = built
    facts = json.loads(json.dumps(describe_engine(engines.path / "draft.engine")))
    taps = next(item for item in facts["inputs"] if item["name"] == "new_taps")
    assert taps["profiles"] == {"all": [[1, 8, 384], [1, 8, 384], [BATCH, 8, 384]]}
    caches = {item["name"]: item["in_place_of"] for item in facts["outputs"]}
    assert caches["present_value_1"] == "past_value_1"
    assert caches["tokens"] is None
    assert facts["network_layers"]["KV_CACHE_UPDATE"] == 4
    if visible_gpu() is None:
        assert facts["engine_layers"] is facts["layer_times"] is None  # not known here
    assert facts["limits"] == {"batch": BATCH, "tokens": TOKENS, "capacity": CAPACITY}
    with pytest.raises(BundleError, match=r"no engine other.engine; it has .*draft.engine"):
        describe_engine(engines.path / "other.engine")
    shown = dspark("inspect", engines.path / "draft.engine")
    assert shown.code == 0, shown.stderr
    assert f" new_taps float32 [?, 8, 384] all: 1..{BATCH} " in shown.stdout
    assert f" context_len int64 [?] all: 1..{BATCH} " in shown.stdout


def test_layers_are_ranked_by_their_share_of_the_time() -> None:
    times = LayerTimes(load_library("tensorrt-rtx").module)
    assert times.shares() is None
    for name, ms in (("norm", 0.5), ("attention", 1.0), ("norm", 0.5), ("product", 2.0)):
        times.profiler.report_layer_time(name, ms)
    assert list((times.shares() or {}).items()) == [
        ("product", 0.5), ("norm", 0.25), ("attention", 0.25),
    ]  # fmt: skip


def test_command_line(bundle: Bundle) -> None:
    app = typer.Typer()
    app.command()(command)
    arguments = [str(bundle.path), "--backend", "tensorrt-rtx", "--graph", "confidence_head"]
    limits = ["--max-batch", "2", "--arch", "sm89", "--arch", "sm86"]
    answer = CliRunner().invoke(app, [*arguments, *limits, "--json"])
    assert answer.exit_code == 0, answer.output
    printed = json.loads(answer.stdout)
    assert printed["archs"] == ["sm86", "sm89"]
    assert printed["limits"] == {"max_batch": 2, "max_tokens": 512, "capacity": 1024}
    (engine,) = printed["engines"]
    file = Path(engine["path"])
    assert file.parent.name.startswith("tensorrt-rtx-sm86_sm89-")
    assert engine["bytes"] == file.stat().st_size
    assert engine["seconds"] > 0
    assert engine["peak_bytes"] > engine["bytes"]
    shown = CliRunner().invoke(app, arguments)
    assert "at most 8 requests (--max-batch)" in shown.stderr
    assert "confidence_head.engine" in shown.stdout


def test_later_builds_add_to_a_set_or_replace_it(bundle: Bundle) -> None:
    def build(graph: str, **changes: Any) -> EngineSet:
        return build_engines(plan_build(bundle, replace(SMALL, graphs=(graph,), **changes)))

    build("sequential_head")
    both = build("verify_greedy")
    assert set(both.engines) == {"sequential_head", "verify_greedy"}
    other = build("confidence_head", max_batch=2)
    assert set(other.engines) == {"confidence_head"}
    assert other.path == both.path
    assert {file.name for file in other.path.iterdir()} == {
        "manifest.json",
        "confidence_head.engine",
    }


def test_progress_only_rises(bundle: Bundle) -> None:
    seen: list[Progress] = []
    plan = plan_build(bundle, replace(SMALL, graphs=("target",)))
    build_engines(plan, on_progress=seen.append)
    fractions = [report.fraction for report in seen]
    assert len(fractions) > 1
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] < fractions[-1] <= 1


def with_graph(bundle: Bundle, name: str, model: onnx.ModelProto) -> Bundle:
    """The bundle with another graph under a name, as if it had been exported so."""
    for file in bundle.path.glob("*.json"):
        file.unlink()
    (bundle.path / f"{name}.onnx").write_bytes(model.SerializeToString())
    changed = replace(bundle, files=record_files(bundle.path))
    write_manifest(changed)
    return load_bundle(bundle.path)


def test_a_graph_the_parser_refuses(bundle: Bundle) -> None:
    model = onnx.load(bundle.graph_path("verify_greedy"))
    model.graph.node.append(
        helper.make_node("Unique", ["draft_tokens"], ["unique"], name="culprit")
    )
    model.graph.output.append(helper.make_tensor_value_info("unique", TensorProto.INT64, None))
    bundle = with_graph(bundle, "verify_greedy", model)
    plan = plan_build(bundle, replace(SMALL, graphs=("verify_greedy",)))
    message = (
        r"engine of graph verify_greedy could not be built: its parser refuses .*\(Unique\)"
    )
    with pytest.raises(BuildError, match=message):
        build_engines(plan)
    assert [file.name for file in plan.engines.path.iterdir()] == ["manifest.json"]


def float32_attention_for_turing(tmp_path: Path) -> Job:
    """What is parsed, and then not compiled; `support` refuses it beforehand."""
    shape = ("batch", 2, 4, 64)
    names = ("q", "k", "v")
    graph = helper.make_graph(
        [helper.make_node("Attention", names, ["o"])],
        "attention",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in names],
        [helper.make_tensor_value_info("o", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    path = tmp_path / "attention.onnx"
    path.write_bytes(model.SerializeToString())
    shapes = dict.fromkeys(names, ((1, 2, 4, 64), (1, 2, 4, 64), (2, 2, 4, 64)))
    return Job(
        backend="tensorrt-rtx", graph=path, output=tmp_path / "out", capacity=64, gamma=1,
        vocab_size=8, profiles=(Profile(name="all", shapes=shapes),), archs=("sm75",),
        device_arch=None,
    )  # fmt: skip


def test_a_graph_that_does_not_compile(tmp_path: Path) -> None:
    job = float32_attention_for_turing(tmp_path)
    with pytest.raises(BuildError, match=r"graph attention could not be built: .*Error"):
        run_job(job, "attention", lambda _: None)


def children() -> set[int]:
    me = os.getpid()
    return set(map(int, Path(f"/proc/{me}/task/{me}/children").read_text().split()))


def test_a_library_that_ends_the_process(bundle: Bundle) -> None:
    plan = plan_build(bundle, replace(SMALL, graphs=("draft",)))
    others = children()

    def end(progress: Progress) -> None:
        if progress.fraction > 0:
            (worker,) = children() - others
            os.kill(worker, signal.SIGABRT)

    with pytest.raises(BuildError, match=r"graph draft .*building process ended with SIGABRT"):
        build_engines(plan, on_progress=end)
    assert not list(plan.engines.path.glob(".*"))
    assert read_engine_manifest(plan.engines.path).engines == {}


def test_a_plan_that_does_not_fit_the_disk_is_no_engine(bundle: Bundle) -> None:
    """TensorRT takes no notice of a writer that fails."""
    plan = plan_build(bundle, replace(SMALL, graphs=("draft",)))
    others = children()

    def limit(progress: Progress) -> None:
        if progress.fraction > 0:
            (worker,) = children() - others
            resource.prlimit(worker, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    with pytest.raises(
        BuildError, match=r"graph draft .*: its file cannot be written: File too"
    ):
        build_engines(plan, on_progress=limit)
    assert [file.name for file in plan.engines.path.iterdir()] == ["manifest.json"]


def test_interruption_leaves_nothing_half_written(bundle: Bundle) -> None:
    plan = plan_build(bundle, replace(SMALL, graphs=("draft",)))
    others = children()

    def interrupt(progress: Progress) -> None:
        if progress.fraction > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engines(plan, on_progress=interrupt)
    assert [file.name for file in plan.engines.path.iterdir()] == ["manifest.json"]
    assert children() == others


def test_engines_to_refit_need_a_gpu(built: tuple[Bundle, EngineSet]) -> None:
    bundle, engines = built
    options = replace(SMALL, refit=engines.path)
    with pytest.raises(BuildError, match=r"made and filled on a GPU"):
        plan_build(bundle, options)


def trace_only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Exports leave out graphs of which no engine is built: tracing costs more than building."""
    whole = bundle_from_checkpoints._parts

    def some(*of: Any) -> Any:
        return [part for part in whole(*of) if part.graph.name in names]

    monkeypatch.setattr(bundle_from_checkpoints, "_parts", some)


@pytest.mark.slow
def test_engines_of_a_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagle3: one update a cache although its layer runs γ times, and the token behind each row beside its taps."""
    trace_only(monkeypatch, "context", "draft")
    draft = read_draft(CHAINS["eagle3"])
    bundle = export_bundle(
        draft, read_target(TINY_TARGET), tmp_path / "bundle", dtype="float16"
    )
    engines = build_engines(plan_build(bundle, replace(SMALL, graphs=("context", "draft"))))
    for graph in ("context", "draft"):
        plan, contract = plan_of(engines, graph), graph_bindings(bundle, graph)
        inputs = {t.name for t in plan.tensors.values() if t.is_input}
        assert inputs == {b.name for b in contract.inputs}
        assert engines.engines[graph].aliases == {
            "present_key_0": "past_key_0", "present_value_0": "past_value_0",
        }  # fmt: skip
    taps = next(b for b in engines.engines["draft"].inputs if b.name == "new_taps")
    assert taps.shape == (-1, bundle.draft.gamma + 1, bundle.draft.tap_size + 1)


def test_heads_that_no_fused_kernel_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma4's full attention has heads of 512; left alone, the library refuses them."""
    trace_only(monkeypatch, "draft")
    draft = read_draft(
        write_gemma_draft(tmp_path / "draft", layers=1, kv_heads=1, head_dim=512)
    )
    bundle = export_bundle(draft, None, tmp_path / "bundle", dtype="float16")
    engines = build_engines(plan_build(bundle, replace(SMALL, graphs=("draft",))))
    record = engines.engines["draft"]
    assert record.layers["ATTENTION_INPUT"] == 1
    assert record.aliases == {
        f"present_{kind}_0": f"past_{kind}_0" for kind in ("key", "value")
    }
