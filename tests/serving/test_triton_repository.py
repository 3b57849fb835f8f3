# SPDX-License-Identifier: Apache-2.0
"""What `triton-repo` writes, and what it refuses; test_triton.py runs it.

No server of a package index has the backends `onnxruntime` and `tensorrt`: configurations of parts are read by
the client's protobuf and held against the graphs themselves and the plans' manifests; test_triton_parts.py runs
graphs.
"""

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from typer.testing import CliRunner

from dspark_trt.bundle import Bundle, load_bundle
from dspark_trt.cli import build_app
from dspark_trt.engine_manifest import (
    EngineSet,
    engine_folder,
    read_engine_manifest,
    write_engine_manifest,
)
from dspark_trt.errors import BundleError, OutputError, RequestError
from dspark_trt.export.engines.build import BuildOptions, build_engines, plan_build
from dspark_trt.export.engines.profiles import profiles_for
from dspark_trt.runtime.serving.triton_repository import write_repository
from tests.conftest import ExportBundle, copied
from tests.serving.triton_rounds import with_fused_target

ONNX_TYPES = {
    "tensor(float)": "TYPE_FP32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(int32)": "TYPE_INT32",
    "tensor(bool)": "TYPE_BOOL",
}
PLAN_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "int64": "TYPE_INT64"}
HEADS = ("confidence_head", "sequential_head")

Shape = tuple[int, ...]  # -1: any
Tensors = dict[str, tuple[str, Shape]]  # name -> type, shape as the model has it


def triton_repo(bundle: Bundle, output: Path, *options: str) -> dict[str, Any]:
    """What the command says it wrote."""
    words = ["triton-repo", str(bundle.path), "-o", str(output), "--name", "chat", "--json"]
    done = CliRunner().invoke(build_app(), [*words, *options])
    assert done.exit_code == 0, done.output
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def config_of(model: Path) -> Any:
    """`config.pbtxt` as the server reads it: any unknown field or wrong type is an error."""
    pytest.importorskip("tritonclient.grpc", reason="no tritonclient: make triton-server")
    from google.protobuf import text_format  # type: ignore[import-untyped]
    from tritonclient.grpc import model_config_pb2

    text = (model / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert config.name == model.name  # else the server refuses it
    return config


def tensors_of(config: Any, tensors: Iterable[Any]) -> Tensors:
    """What a backend hands to the model: the batch in front, `reshape` for `dims`."""
    batch = (-1,) if config.max_batch_size else ()
    return {
        each.name: (
            type_of(each),
            (*batch, *(each.reshape.shape if each.HasField("reshape") else each.dims)),
        )
        for each in tensors
    }


def type_of(tensor: Any) -> str:
    from tritonclient.grpc import model_config_pb2

    return str(model_config_pb2.DataType.Name(tensor.data_type))


def graph_of(model: Path) -> Path:
    """What the backend opens: a model of several files is a folder of the name of one."""
    path = model / "1" / "model.onnx"
    return path / "model.onnx" if path.is_dir() else path


def of_graph(tensors: Iterable[Any]) -> Tensors:
    return {
        each.name: (
            ONNX_TYPES[each.type],
            tuple(size if isinstance(size, int) else -1 for size in each.shape),
        )
        for each in tensors
    }


@pytest.fixture(scope="module")
def fused_bundle(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The shipped example as `export --fused-verify` writes it."""
    return with_fused_target(tiny_bundle, tmp_path_factory.mktemp("fused") / "bundle")


def test_a_repository_holds_the_bundle_and_its_parts(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    """Who names the repository gets the engine; the parts are a repository of their own."""
    output = tmp_path / "repository"
    said = triton_repo(tiny_bundle, output)
    assert [path.name for path in output.iterdir()] == ["chat"]
    assert sorted(path.name for path in (output / "chat").iterdir()) == [
        "1",
        "config.pbtxt",
        "parts",
    ]
    held = load_bundle(output / "chat" / "1" / "bundle")
    assert held.fingerprint() == tiny_bundle.fingerprint()
    parts = output / "chat" / "parts"
    assert said == {
        "repository": str(output),
        "model": "chat",
        "parts_repository": str(parts),
        "parts": [f"chat_{graph}" for graph in tiny_bundle.graph_names],
        "left_out": {},
    }
    assert sorted(path.name for path in parts.iterdir()) == said["parts"]


def test_the_engine_is_a_decoupled_model(tiny_bundle: Bundle, tmp_path: Path) -> None:
    triton_repo(tiny_bundle, tmp_path / "repository", "--graph", "none", "--max-batch", "3")
    assert not (tmp_path / "repository" / "chat" / "parts").exists()
    config = config_of(tmp_path / "repository" / "chat")
    assert (config.backend, config.max_batch_size) == ("python", 0)
    assert config.model_transaction_policy.decoupled
    assert config.parameters["max_batch"].string_value == "3"
    assert all(each.optional for each in config.input)


@pytest.mark.parametrize("drafter", ["fused", "dspark-rnn", "dflash", "eagle3"])
def test_graphs_are_described_as_they_are(
    drafter: str, fixture_bundle: ExportBundle, fused_bundle: Bundle, tmp_path: Path
) -> None:
    """Every name, type and dimension is the graph's own, and its weights are found beside it."""
    bundle = fused_bundle if drafter == "fused" else fixture_bundle(drafter)
    said = triton_repo(bundle, tmp_path / "repository", "--max-batch", "5")
    assert said["parts"]
    for name in said["parts"]:
        model = Path(said["parts_repository"]) / name
        config = config_of(model)
        assert config.platform == "onnxruntime_onnx"
        session = ort.InferenceSession(graph_of(model), providers=["CPUExecutionProvider"])
        assert tensors_of(config, config.input) == of_graph(session.get_inputs()), name
        assert tensors_of(config, config.output) == of_graph(session.get_outputs()), name
        is_head = name.removeprefix("chat_") in HEADS
        assert config.max_batch_size == (5 if is_head else 0)
        assert config.HasField("dynamic_batching") == is_head
        assert [group.kind for group in config.instance_group] == [2]  # KIND_CPU


@pytest.mark.parametrize("drafter", ["fused", "dspark-rnn", "dflash", "eagle3"])
def test_caches_are_states_of_sequences(
    drafter: str, fixture_bundle: ExportBundle, fused_bundle: Bundle, tmp_path: Path
) -> None:
    """The server's own tensors and those of requests are together the graph's; requests name one batch row."""
    bundle = fused_bundle if drafter == "fused" else fixture_bundle(drafter)
    options = ["--max-batch", "5", "--threads", "2", "--cache-rows", "96"]
    said = triton_repo(bundle, tmp_path / "repository", *options)
    assert said["left_out"].keys() == {"context"}
    assert "keeps the caches of each model apart" in said["left_out"]["context"]
    stateful = set()
    for name in said["parts"]:
        model = Path(said["parts_repository"]) / name
        config = config_of(model)
        session = ort.InferenceSession(graph_of(model), providers=["CPUExecutionProvider"])
        inputs, outputs = of_graph(session.get_inputs()), of_graph(session.get_outputs())
        states = config.sequence_batching.state
        for state in states:
            row = (1, *state.dims) if config.max_batch_size else tuple(state.dims)
            (initial,) = state.initial_state
            assert (type_of(initial), initial.dims) == (type_of(state), state.dims)
            assert initial.zero_data
            for tensor, known in ((state.input_name, inputs), (state.output_name, outputs)):
                kind, (_, heads, _, size) = known.pop(tensor)
                assert row == (1, heads, 96, size)
                assert kind == type_of(state)
        assert tensors_of(config, config.input) == inputs
        assert tensors_of(config, config.output) == outputs
        assert not any(tensor.startswith(("past_", "present_")) for tensor in inputs | outputs)
        assert config.parameters["intra_op_thread_count"].string_value == "2"
        if states:
            graph = name.removeprefix("chat_")
            stateful.add(graph)
            assert config.WhichOneof("scheduling_choice") == "sequence_batching"
            assert config.sequence_batching.oldest.max_candidate_sequences == 5
            assert config.max_batch_size == (0 if "target" in graph else 5)
    assert {"draft", "target"} <= stateful


def test_weights_are_on_the_disk_once(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """Only where a graph reads them, and as links to those of the bundle."""
    parts = Path(triton_repo(tiny_bundle, tmp_path / "repository")["parts_repository"])
    weights = tiny_bundle.path / "weights.bin"
    having = {path.parts[-4]: path for path in parts.glob("*/1/model.onnx/weights.bin")}
    assert {"chat_draft", "chat_target", "chat_sequential_head"} < having.keys()
    assert (parts / "chat_verify" / "1" / "model.onnx").is_file()
    assert all(path.samefile(weights) for path in having.values())


def test_links_leave_the_bundle_whole(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """Replacing a repository, or a calibration in it, changes nothing elsewhere."""
    output = tmp_path / "repository"
    write_repository(tiny_bundle, output, name="chat")
    (output / "chat" / "1" / "bundle" / "weights.bin").unlink()
    write_repository(tiny_bundle, output, name="chat", overwrite=True)
    load_bundle(output / "chat" / "1" / "bundle")
    load_bundle(tiny_bundle.path)


def test_refusals(tiny_bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"'a b' is no model name.*--name"):
        write_repository(tiny_bundle, tmp_path / "new", name="a b")
    with pytest.raises(BundleError, match=r"has no target\. Export it again with --target"):
        write_repository(replace(tiny_bundle, target=None), tmp_path / "new")
    with pytest.raises(RequestError, match=r"exists already.*--overwrite"):
        write_repository(tiny_bundle, tmp_path)
    with pytest.raises(RequestError, match=r"no model chat of this command"):
        write_repository(tiny_bundle, tmp_path, name="chat", overwrite=True)
    with pytest.raises(OutputError, match=r"cannot write .*/x{250}: File name too long"):
        write_repository(tiny_bundle, tmp_path / ("x" * 250))
    assert not list(tmp_path.iterdir())
    most = tiny_bundle.max_context_tokens + 15
    for rows in (15, most + 1):
        with pytest.raises(RequestError, match=rf"must lie in 16\.\.{most}, got {rows}:"):
            write_repository(tiny_bundle, tmp_path / "new", cache_rows=rows)
    words = ["triton-repo", str(tiny_bundle.path), "-o", str(tmp_path / "new")]
    done = CliRunner().invoke(build_app(), [*words, "--graph", "drafts"])
    assert isinstance(done.exception, BundleError)
    assert "has no graph drafts; it has backbone" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


# Engines -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(
    fixture_bundle: ExportBundle, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bundle, EngineSet]:
    """Real engines of TensorRT-RTX: TensorRT's own are built on a GPU only."""
    shared = fixture_bundle("dspark-vanilla", dtype="float16")
    bundle = copied(shared, tmp_path_factory.mktemp("engines"))
    options = BuildOptions(
        backend="tensorrt-rtx", max_batch=4, max_tokens=64, capacity=256,
        graphs=("sequential_head", "verify_greedy", "context"),
    )  # fmt: skip
    return bundle, build_engines(plan_build(bundle, options))


@pytest.fixture
def own(built: tuple[Bundle, EngineSet], tmp_path: Path) -> tuple[Bundle, EngineSet]:
    """The same in a copy that a test may change."""
    bundle = copied(built[0], tmp_path)
    return bundle, read_engine_manifest(bundle.path / "engines" / built[1].path.name)


def as_tensorrt(
    bundle: Bundle, built: EngineSet, arch: str, version: str = "10.15.1"
) -> EngineSet:
    """The set as TensorRT would have built it on a GPU: the same tensors, its own profiles."""
    folder = engine_folder(bundle, "tensorrt", (arch,), version)
    shutil.copytree(built.path, folder)
    engines = {
        graph: replace(record, profiles=profiles_for(bundle, graph, built.limits, "tensorrt"))
        for graph, record in built.engines.items()
    }
    made = replace(
        built, path=folder, backend="tensorrt", version=version, archs=(arch,), engines=engines
    )
    write_engine_manifest(made)
    return made


@pytest.mark.trt
def test_plans_are_described_as_their_manifests_say(
    own: tuple[Bundle, EngineSet], tmp_path: Path
) -> None:
    """One file for each GPU; engines with caches, and those of TensorRT-RTX, are named with the reason."""
    bundle, rtx = own
    engines = [as_tensorrt(bundle, rtx, arch) for arch in ("sm90", "sm120", "ampere+")]
    said = triton_repo(bundle, tmp_path / "repository", "--max-batch", "5")
    graphs = {f"chat_{graph}" for graph in bundle.graph_names}
    assert set(said["parts"]) - graphs == {
        "chat_sequential_head_plan",
        "chat_verify_greedy_plan",
    }
    assert said["left_out"].keys() == {rtx.path.name, "context.engine"}
    assert "none for tensorrt-rtx" in said["left_out"][rtx.path.name]
    assert "must be one memory as input and output" in said["left_out"]["context.engine"]

    for graph in ("sequential_head", "verify_greedy"):
        model = Path(said["parts_repository"]) / f"chat_{graph}_plan"
        config, record = config_of(model), engines[0].engines[graph]
        assert config.platform == "tensorrt_plan"
        for described, real in (
            (config.input, record.inputs),
            (config.output, record.outputs),
        ):
            assert tensors_of(config, described) == {
                each.name: (PLAN_TYPES[each.dtype], each.shape) for each in real
            }
        (group,) = config.instance_group
        assert group.kind == 1  # KIND_GPU
        assert [int(number) for number in group.profile] == [*range(len(record.profiles))]
        files = {"model.plan": "ampere+", "sm90.plan": "sm90", "sm120.plan": "sm120"}
        assert {path.name for path in (model / "1").iterdir()} == files.keys()
        assert dict(config.cc_model_filenames) == {"9.0": "sm90.plan", "12.0": "sm120.plan"}
        for each in engines:
            (file,) = (name for name, arch in files.items() if arch == each.archs[0])
            held = tmp_path / "repository/chat/1/bundle/engines" / each.path.name / record.file
            assert (model / "1" / file).samefile(held)

    batched = config_of(Path(said["parts_repository"]) / "chat_sequential_head_plan")
    widest = max(
        min(high[0] for _, _, high in profile.shapes.values())
        for profile in engines[0].engines["sequential_head"].profiles
    )
    assert batched.max_batch_size == widest == 4  # the engine's, not --max-batch
    assert batched.HasField("dynamic_batching")
    assert config_of(model).max_batch_size == 0


@pytest.mark.trt
def test_engines_that_do_not_fit_are_refused(
    own: tuple[Bundle, EngineSet], tmp_path: Path
) -> None:
    bundle, rtx = own
    old, new = (as_tensorrt(bundle, rtx, "sm90", version) for version in ("10.15.1", "11.4.0"))
    words = ["triton-repo", str(bundle.path), "-o", str(tmp_path / "new"), "--name", "chat"]

    def refusal(*options: str) -> str:
        done = CliRunner().invoke(build_app(), [*words, *options])
        assert isinstance(done.exception, RequestError | BundleError), done.output
        assert not (tmp_path / "new").exists()
        return str(done.exception)

    assert "by TensorRT 10.15.1, 11.4.0. A server has one" in refusal()
    assert "no engines of TensorRT 9.0, only of: 10.15.1, 11.4.0" in refusal(
        "--tensorrt-version", "9.0"
    )
    with (new.path / "verify_greedy.engine").open("r+b") as plan:
        plan.seek(100)
        plan.write(b"changed")
    assert "verify_greedy.engine was changed" in refusal("--tensorrt-version", new.version)

    said = triton_repo(bundle, tmp_path / "ten", "--tensorrt-version", old.version)
    assert "chat_verify_greedy_plan" in said["parts"]
    write_engine_manifest(replace(old, stripped=True))
    shutil.rmtree(new.path)
    said = triton_repo(bundle, tmp_path / "stripped")
    assert said["left_out"][old.path.name] == "its engines hold no weights"
    assert not any(name.endswith("_plan") for name in said["parts"])
