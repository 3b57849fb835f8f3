# SPDX-License-Identifier: Apache-2.0
"""A bundle's files, and that a refused, failed or interrupted export leaves nothing behind."""

import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest

import dspark_trt
from dspark_trt import verified_files
from dspark_trt.bundle import Bundle, load_bundle
from dspark_trt.checkpoint import (
    DraftCheckpoint,
    DraftOverrides,
    TargetCheckpoint,
    read_draft,
    read_target,
    source_hash,
)
from dspark_trt.errors import CheckpointError, ExportError
from dspark_trt.export.bundle_from_checkpoints import Progress, export_bundle
from dspark_trt.runtime.session import DraftSession
from tests.checkpoints import write_draft, write_target
from tests.export.conftest import Toy, ToyBundle

SMALLEST: dict[str, Any] = {"head": "none", "confidence": "none", "layers": 1, "gamma": 1}


class Stored(NamedTuple):
    graph: str
    name: str
    offset: int
    length: int
    location: str


def external_tensors(bundle: Bundle) -> list[Stored]:
    found = []
    for graph in bundle.graph_names:
        for tensor in onnx.load(
            bundle.graph_path(graph), load_external_data=False
        ).graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                data = {entry.key: entry.value for entry in tensor.external_data}
                place = int(data["offset"]), int(data["length"])
                found.append(Stored(graph, tensor.name, *place, data["location"]))
            else:
                assert len(tensor.SerializeToString()) < 2048, tensor.name
    return found


def test_all_graphs_point_into_one_file(toy: Toy) -> None:
    stored = external_tensors(toy.bundle)
    assert {tensor.location for tensor in stored} == {"weights.bin"}
    graphs_of = defaultdict(set)
    for tensor in stored:
        assert tensor.offset % 4096 == 0  # a runtime may map it
        graphs_of[tensor.offset].add(tensor.graph)
    assert {"draft", "draft_greedy", "backbone"} in list(graphs_of.values())
    end = max(tensor.offset + tensor.length for tensor in stored)
    assert (toy.bundle.path / "weights.bin").stat().st_size == end


def test_equal_tensors_are_stored_once(toy: Toy) -> None:
    data = (toy.bundle.path / "weights.bin").read_bytes()
    places = {(tensor.offset, tensor.length) for tensor in external_tensors(toy.bundle)}
    digests = [hashlib.sha256(data[start : start + size]).digest() for start, size in places]
    assert len(set(digests)) == len(digests)


def test_copied_embeddings_are_stored_once(tiny_bundle: Bundle) -> None:
    """The drafter's file has a full copy of the target's embedding: same bytes, another file."""
    places = {(t.graph, t.name): t.offset for t in external_tensors(tiny_bundle)}
    embeddings = {offset for (_, name), offset in places.items() if "embed_tokens" in name}
    assert len(embeddings) == 1


def test_the_manifest_tells_where_everything_came_from(toy: Toy) -> None:
    bundle = load_bundle(toy.bundle.path)  # hashes every file
    depth = (
        bundle.draft.num_target_layers
    )  # speculators files do not record it: the target tells
    assert bundle.draft == replace(toy.draft.config, num_target_layers=depth)
    assert depth == (4 if toy.target is None else toy.target.config.decoder.num_layers)
    assert bundle.draft_source.name == "draft"
    assert bundle.draft_source.format == toy.draft.format
    assert bundle.draft_source.sha256 == source_hash(toy.draft)
    if toy.target is not None:
        assert bundle.target == toy.target.config
        assert bundle.target_source is not None
        assert bundle.target_source.name == "target"
        assert bundle.target_source.sha256 == source_hash(toy.target)
    assert bundle.tool_versions["dspark-trt"] == dspark_trt.__version__
    for tool in ("torch", "onnx", "onnx-ir", "onnxscript", "safetensors", "numpy"):
        assert bundle.tool_versions[tool] == version(tool)
    on_disk = {
        p.relative_to(bundle.path).as_posix() for p in bundle.path.rglob("*") if p.is_file()
    }
    assert on_disk == {*bundle.files, "bundle.json"}


def test_the_tokenizer_comes_along(tiny_bundle: Bundle) -> None:
    names = {name for name in tiny_bundle.files if name.startswith("tokenizer/")}
    assert names >= {"tokenizer/tokenizer.json", "tokenizer/chat_template.jinja"}


def test_a_hub_checkpoint_is_known_by_its_id(tmp_path: Path, toy_bundle: ToyBundle) -> None:
    from dspark_trt.export.bundle_from_checkpoints import _name

    snapshot = (
        tmp_path / "models--deepseek-ai--dspark_qwen3_4b_block7" / "snapshots" / ("a" * 40)
    )
    snapshot.mkdir(parents=True)
    assert _name(snapshot) == "deepseek-ai/dspark_qwen3_4b_block7"
    assert _name(tmp_path / "x" / ".." / "drafter") == "drafter"


def test_a_moved_bundle_runs(
    toy_bundle: ToyBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = toy_bundle("gated-in-place-llama-yarn").bundle
    shutil.copytree(original.path, tmp_path / "a" / "moved")
    monkeypatch.chdir(tmp_path / "a")
    taps = np.random.default_rng(0).standard_normal((5, original.draft.tap_size), np.float32)
    proposals = []
    for bundle in (original.path, Path("moved")):
        with DraftSession.load(bundle) as session:
            session.append(0, taps, 0)
            proposals.append(session.propose([0], [7]))
    np.testing.assert_array_equal(proposals[0].tokens, proposals[1].tokens)
    np.testing.assert_array_equal(proposals[0].logits, proposals[1].logits)


# ------------------------------------------------------------------ refusals, before anything is traced


Pair = tuple[DraftCheckpoint, TargetCheckpoint | None]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    folder = tmp_path / "checkpoints"
    return read_draft(write_draft(folder / "draft")), read_target(
        write_target(folder / "target")
    )


def unfit(path: Path, **target: Any) -> Pair:
    return read_draft(write_draft(path / "d")), read_target(write_target(path / "t", **target))


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (
            {"hidden": 32},
            "target_hidden_size of the drafter is 64, but hidden_size of the target is 32",
        ),
        (
            {"vocab": 400},
            "vocab_size of the drafter is 320, but vocab_size of the target is 400",
        ),
        (
            {"layers": 5},
            "num_target_layers of the drafter is 4, but num_hidden_layers of the target is 5",
        ),
        ({"layers": 3}, r"target_layer_ids \[0, 2\] taps the last of 3 layers"),
    ],
)
def test_pairs_that_do_not_belong_together(
    tmp_path: Path, target: dict[str, Any], sentence: str
) -> None:
    draft, served = unfit(tmp_path / "checkpoints", **target)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        export_bundle(draft, served, tmp_path / "out" / "bundle")
    assert "do not belong together" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_every_fault_of_a_pair_is_listed(tmp_path: Path) -> None:
    draft, served = unfit(tmp_path / "checkpoints", hidden=32, vocab=400, layers=9)
    with pytest.raises(
        CheckpointError, match=r"hidden_size .*; vocab_size .*; num_target_layers"
    ):
        export_bundle(draft, served, tmp_path / "bundle")


def test_more_tokens_than_the_block_has(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", gamma=4)
    with pytest.raises(
        CheckpointError,
        match=r"gamma 5 was asked for, but block_size is 4: .* proposes 1 to 4 tokens",
    ):
        read_draft(path, overrides=DraftOverrides(gamma=5))


def test_a_truncated_checkpoint(tmp_path: Path) -> None:
    file = write_draft(tmp_path / "draft") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: truncated: \d+ bytes, expected \d+"
    ):
        read_draft(tmp_path / "draft")


def test_a_borrowing_drafter_without_its_target(tmp_path: Path) -> None:
    draft = read_draft(write_draft(tmp_path / "draft", layout="zlab-dflash"))
    with pytest.raises(
        CheckpointError,
        match=r"has no embed_tokens.weight, lm_head.weight: .* Give it with --target",
    ):
        export_bundle(draft, None, tmp_path / "out" / "bundle")
    assert not (tmp_path / "out").exists()


def test_an_unknown_precision(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match="dtype 'int4' is not one of float32, float16, bfloat16"
    ):
        export_bundle(*pair, tmp_path / "bundle", dtype="int4")


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: p.write_text("precious")])
def test_an_output_that_exists(
    pair: Pair, tmp_path: Path, make: Callable[[Path], object]
) -> None:
    output = tmp_path / "bundle"
    make(output)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(
        ExportError, match=r"exists already. Choose another folder, or pass --overwrite"
    ):
        export_bundle(*pair, output)
    assert sorted(tmp_path.iterdir()) == before


def test_overwriting_takes_only_bundles_away(pair: Pair, tmp_path: Path) -> None:
    output = tmp_path / "home"
    output.mkdir()
    (output / "precious").write_text("x")
    with pytest.raises(ExportError, match=r"is no bundle, so --overwrite does not remove it"):
        export_bundle(*pair, output, overwrite=True)
    assert (output / "precious").read_text() == "x"


def test_a_disk_without_room_is_refused_before_work_begins(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(
        ExportError, match=r"bundle needs about 1 MB, 0 MB are free on that disk"
    ):
        export_bundle(*pair, tmp_path / "out" / "bundle")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_may_not_be_written(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match=r"cannot write .*bundle: "):
        export_bundle(*pair, tmp_path / "file" / "bundle")


# ------------------------------------------------------------------ exports that begin


def test_a_new_bundle_replaces_an_old_one_and_reports_on_its_way(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(verified_files, "_FINE_TICK_S", 0.0)  # a tiny export is fast
    draft = read_draft(write_draft(tmp_path / "draft", **SMALLEST))
    output = tmp_path / "bundle"
    output.mkdir()
    for name in ("bundle.json", "calibration.json", "old.onnx"):
        (output / name).write_text("{}")
    reports: list[Progress] = []
    bundle = export_bundle(draft, None, output, overwrite=True, on_progress=reports.append)
    remembered = [*verified_files.memory().iterdir()]
    assert not (output / "old.onnx").exists()
    assert not (output / "calibration.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "draft"]
    assert load_bundle(output) == bundle
    assert [*verified_files.memory().iterdir()] == remembered != []  # it read nothing again
    stages = [report.stage for report in reports]
    assert stages == sorted(stages, key=["trace", "write", "hash"].index)
    assert set(stages) == {"trace", "write", "hash"}
    traced = [report for report in reports if report.stage == "trace"]
    assert [(r.detail, r.done, r.total) for r in traced] == [
        ("context", 0, 3), ("draft", 1, 3), ("backbone", 2, 3),
    ]  # fmt: skip
    written = [report.done for report in reports if report.stage == "write"]
    assert written == sorted(written)
    assert all(0 <= report.done <= report.total for report in reports)


def test_a_disk_that_fills_up_leaves_the_old_bundle_alone(tmp_path: Path) -> None:
    """A real failing write: no file of this process may grow beyond 100 kB for a while."""
    draft = read_draft(write_draft(tmp_path / "draft", **SMALLEST))
    output = tmp_path / "bundle"
    output.mkdir()
    (output / "bundle.json").write_text("{}")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ExportError, match=rf"cannot write .*: {os.strerror(errno.EFBIG)}"):
            export_bundle(draft, None, output, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "draft"]
    assert [p.name for p in output.iterdir()] == ["bundle.json"]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, stop: signal.Signals) -> None:
    draft = write_draft(tmp_path / "draft", **SMALLEST)
    folder = tmp_path / "new"
    command = [sys.executable, "-m", "dspark_trt", "export", "--draft", str(draft)]
    process = subprocess.Popen(
        [*command, "-o", str(folder / "bundle"), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not list(folder.glob(".bundle.*.partial")):  # work has begun
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(stop)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode not in (0, None)
    assert "Traceback" not in stderr
    assert stdout == ""
    assert not folder.exists()


def test_manifest_is_plain_json_without_paths(toy: Toy) -> None:
    text = (toy.bundle.path / "bundle.json").read_text()
    assert json.loads(text)["format_version"] == 1
    assert str(toy.bundle.path.parent) not in text
