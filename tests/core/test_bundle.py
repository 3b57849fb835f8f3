# SPDX-License-Identifier: Apache-2.0
"""The bundle loader: whole bundles load anywhere, and each kind of damage has its own sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark_trt.bundle import Bundle, Source, load_bundle, record_files, write_manifest
from dspark_trt.checkpoint import read_draft, read_target
from dspark_trt.errors import BundleError
from tests.checkpoints import write_draft, write_target

VERSIONS = {"dspark-trt": "0", "torch": "1"}


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """Real descriptions over files that nobody runs."""
    draft = read_draft(write_draft(tmp_path / "draft", max_positions=300))
    target = read_target(write_target(tmp_path / "target", max_positions=200))
    path = tmp_path / "bundle"
    (path / "tokenizer").mkdir(parents=True)
    for name in ("draft.onnx", "context.onnx", "weights.bin", "tokenizer/tokenizer.json"):
        (path / name).write_bytes(name.encode() * 50)
    made = Bundle(
        path=path,
        dtype="float16",
        draft=draft.config,
        draft_source=Source(name="draft", format="deepspec", sha256="a" * 64),
        target=target.config,
        target_source=Source(name="target", format="qwen3", sha256="b" * 64),
        files=record_files(path),
        tool_versions=VERSIONS,
    )
    write_manifest(made)
    return made


def edit(bundle: Bundle, change: Callable[[dict[str, Any]], object]) -> None:
    file = bundle.path / "bundle.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def test_round_trip(bundle: Bundle) -> None:
    assert load_bundle(bundle.path) == bundle
    assert load_bundle(str(bundle.path)) == bundle
    assert bundle.graph_names == ("context", "draft")
    assert bundle.max_context_tokens == 200


def test_a_bundle_without_target(bundle: Bundle) -> None:
    edit(bundle, lambda data: data.update(target=None))
    loaded = load_bundle(bundle.path)
    assert loaded.target is None
    assert loaded.max_context_tokens == 300
    with pytest.raises(
        BundleError,
        match=r"has no graph target; it has context, draft. Export again with --target",
    ):
        loaded.graph_path("target")


def test_loads_after_the_folder_moved(bundle: Bundle, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(bundle.path, moved)
    shutil.rmtree(bundle.path)
    loaded = load_bundle(moved)
    assert loaded.graph_path("draft") == moved / "draft.onnx"
    assert loaded.fingerprint() == bundle.fingerprint()


def test_fingerprint_follows_the_files_alone(bundle: Bundle) -> None:
    before = bundle.fingerprint()
    (bundle.path / "calibration.json").write_text("{}")
    edit(bundle, lambda data: data["tool_versions"].update(torch="2"))
    assert load_bundle(bundle.path).fingerprint() == before
    edit(bundle, lambda data: data["files"]["weights.bin"].update(sha256="c" * 64))
    assert load_bundle(bundle.path, verify_hashes=False).fingerprint() != before


def test_calibration_tables_and_engines_may_come_later(bundle: Bundle) -> None:
    for name in (
        "calibration.json",
        "sps.json",
        "engines/rtx-sm120-1.7/draft.engine",
        ".DS_Store",
    ):
        (bundle.path / name).parent.mkdir(parents=True, exist_ok=True)
        (bundle.path / name).write_text("x")
    assert load_bundle(bundle.path) == bundle


def test_no_bundle_there(tmp_path: Path) -> None:
    made_with = r"Make one with: dspark-trt export --draft DRAFTER --target TARGET -o BUNDLE"
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(
            BundleError, match=rf"is no bundle: it has no bundle.json. {made_with}"
        ):
            load_bundle(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="is no bundle"):
        load_bundle(tmp_path / "file")


def change_byte(bundle: Bundle) -> None:
    file = bundle.path / "weights.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def append_byte(bundle: Bundle) -> None:
    with (bundle.path / "weights.bin").open("ab") as stream:
        stream.write(b"x")


def remove_weights(bundle: Bundle) -> None:
    (bundle.path / "weights.bin").unlink()


def folder_instead_of_graph(bundle: Bundle) -> None:
    (bundle.path / "draft.onnx").unlink()
    (bundle.path / "draft.onnx").mkdir()


def foreign_file(bundle: Bundle) -> None:
    (bundle.path / "model.onnx").write_text("x")


def foreign_file_in_a_folder(bundle: Bundle) -> None:
    (bundle.path / "tokenizer" / "vocab.txt").write_text("x")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            change_byte,
            r"weights.bin was changed: sha256 \w{12}…, expected \w{12}…. Restore it, or export",
        ),
        (
            append_byte,
            r"weights.bin has 551 bytes, expected 550. Restore it, or export the bundle again",
        ),
        (remove_weights, r"weights.bin is missing. Restore it, or export the bundle again"),
        (folder_instead_of_graph, r"draft.onnx is missing"),
        (foreign_file, r"model.onnx does not belong to this bundle. Move it out of the folder"),
        (foreign_file_in_a_folder, r"tokenizer/vocab.txt does not belong to this bundle"),
    ],
)
def test_changed_missing_and_foreign_files(
    bundle: Bundle, damage: Callable[[Bundle], None], sentence: str
) -> None:
    damage(bundle)
    with pytest.raises(BundleError, match=sentence):
        load_bundle(bundle.path)


@pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
def test_another_format_version(bundle: Bundle, version: object) -> None:
    edit(bundle, lambda data: data.update(format_version=version))
    with pytest.raises(
        BundleError,
        match=r"has bundle format .*, this version of dspark-trt reads 1. Export the bundle again",
    ):
        load_bundle(bundle.path)


@pytest.mark.parametrize(
    "text", ["", "{", "\x00", '{"format_version": 1', "\udcff", "[" * 200_000]
)
def test_a_manifest_that_is_no_json(bundle: Bundle, text: str) -> None:
    (bundle.path / "bundle.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(
        BundleError, match=r"bundle.json cannot be read: .* Export the bundle again"
    ):
        load_bundle(bundle.path)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"bundle"', "{}"])
def test_a_manifest_of_something_else(bundle: Bundle, text: str) -> None:
    (bundle.path / "bundle.json").write_text(text)
    with pytest.raises(BundleError, match="has bundle format None"):
        load_bundle(bundle.path)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("dtype"),
        lambda data: data.update(dtype="int3"),
        lambda data: data.update(gamma=5),
        lambda data: data.update(files=[]),
        lambda data: data["files"]["draft.onnx"].pop("sha256"),
        lambda data: data.update(draft=None),
        lambda data: data["draft"]["config"].pop("head_type"),
        lambda data: data["draft"]["config"].update(head_type="transformer"),
        lambda data: data["draft"]["config"].update(unknown=1),
        lambda data: data["draft"]["config"]["decoder"].update(head_dim=7),
        lambda data: data["draft"]["config"]["decoder"].update(head_dim="x"),
        lambda data: data["draft"]["source"].pop("name"),
        lambda data: data["target"]["config"].update(family="gpt2"),
        lambda data: data["target"].pop("source"),
    ],
)
def test_a_damaged_manifest(bundle: Bundle, change: Callable[[dict[str, Any]], object]) -> None:
    edit(bundle, change)
    with pytest.raises(
        BundleError, match=r"bundle.json is damaged \(.+\). Export the bundle again"
    ):
        load_bundle(bundle.path)
