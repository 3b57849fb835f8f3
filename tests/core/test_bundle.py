# SPDX-License-Identifier: Apache-2.0
"""The bundle loader: whole bundles load anywhere, and each kind of damage has its own sentence."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark_trt import verified_files
from dspark_trt.bundle import Bundle, Source, load_bundle, record_files, write_manifest
from dspark_trt.checkpoint import read_draft, read_target
from dspark_trt.errors import BundleError
from tests.checkpoints import write_draft, write_target
from tests.command_line import dspark

VERSIONS = {"dspark-trt": "0", "torch": "1"}


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """Real descriptions over files that nobody runs; nothing was verified before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    draft = read_draft(write_draft(tmp_path / "draft", max_positions=300))
    target = read_target(write_target(tmp_path / "target", max_positions=200))
    path = tmp_path / "bundle"
    (path / "tokenizer").mkdir(parents=True)
    for name in ("draft.onnx", "context.onnx", "weights.bin", "tokenizer/tokenizer.json"):
        (path / name).write_bytes(f"{name:24}".encode() * 50)
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
    assert load_bundle(bundle.path, trust_earlier=False) == bundle
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
    """And what was verified stays verified."""
    time.sleep(2 * verified_files._FINE_TICK_S)
    load_bundle(bundle.path)
    remembered = [*verified_files.memory().iterdir()]
    for name in (
        "calibration.json",
        "sps.json",
        "engines/rtx-sm120-1.7/draft.engine",
        ".DS_Store",
    ):
        (bundle.path / name).parent.mkdir(parents=True, exist_ok=True)
        (bundle.path / name).write_text("x")
    assert load_bundle(bundle.path) == bundle
    assert [*verified_files.memory().iterdir()] == remembered != []


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


def swap_files(bundle: Bundle) -> None:
    """Two of one size: names and sizes are what they were."""
    draft, context = bundle.path / "draft.onnx", bundle.path / "context.onnx"
    draft.rename(draft.with_suffix(".tmp"))
    context.rename(draft)
    draft.with_suffix(".tmp").rename(context)


def append_byte(bundle: Bundle) -> None:
    with (bundle.path / "weights.bin").open("ab") as stream:
        stream.write(b"x")


def remove_weights(bundle: Bundle) -> None:
    (bundle.path / "weights.bin").unlink()


def folder_instead_of_graph(bundle: Bundle) -> None:
    (bundle.path / "draft.onnx").unlink()
    (bundle.path / "draft.onnx").mkdir()


def file_without_a_name(bundle: Bundle) -> None:
    edit(bundle, lambda data: data["files"].update({"a\0b": {"sha256": "", "bytes": 0}}))


def foreign_file(bundle: Bundle) -> None:
    (bundle.path / "model.onnx").write_text("x")


def foreign_file_in_a_folder(bundle: Bundle) -> None:
    (bundle.path / "tokenizer" / "vocab.txt").write_text("x")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            change_byte,
            r"weights.bin was changed: xxh3 \w{12}…, expected \w{12}…. Restore it, or export",
        ),
        (swap_files, r"(draft|context).onnx was changed: xxh3"),
        (
            append_byte,
            r"weights.bin has 1201 bytes, expected 1200. Restore it, or export the bundle again",
        ),
        (remove_weights, r"weights.bin is missing. Restore it, or export the bundle again"),
        (folder_instead_of_graph, r"draft.onnx is missing"),
        (file_without_a_name, r"a\0b is missing"),
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


def without_checksums(data: dict[str, Any]) -> None:
    for record in data["files"].values():
        del record["xxh3_16mib"]


def test_bundles_from_before_there_were_checksums(bundle: Bundle) -> None:
    """They load, have the same fingerprint, and are compared by SHA-256."""
    edit(bundle, without_checksums)
    loaded = load_bundle(bundle.path)
    assert {record.xxh3 for record in loaded.files.values()} == {None}
    assert loaded.fingerprint() == bundle.fingerprint()
    write_manifest(loaded)
    assert load_bundle(bundle.path) == loaded
    change_byte(bundle)
    with pytest.raises(BundleError, match=r"weights.bin was changed: sha256 \w{12}…"):
        load_bundle(bundle.path)


@pytest.mark.parametrize("key", ["sha256", "xxh3_16mib"])
def test_full_verification_compares_every_hash(bundle: Bundle, key: str) -> None:
    edit(bundle, lambda data: data["files"]["weights.bin"].update({key: "c" * 64}))
    with pytest.raises(
        BundleError, match=rf"weights.bin was changed: {key[:4]}.* expected cccccccccccc…"
    ):
        load_bundle(bundle.path, trust_earlier=False)


def test_full_verification_from_the_command_line(bundle: Bundle) -> None:
    assert dspark("inspect", bundle.path, "--verify").code == 0
    change_byte(bundle)
    edit(bundle, without_checksums)
    assert dspark("inspect", bundle.path).code == 0
    ran = dspark("inspect", bundle.path, "--verify")
    assert ran.code == 2
    assert "weights.bin was changed: sha256" in ran.stderr.replace("\n", " ")
    assert dspark("inspect", bundle.path.parent / "draft", "--verify").code == 2  # no bundle


def test_a_bundle_that_was_verified_is_compared_again_when_written_to(bundle: Bundle) -> None:
    time.sleep(2 * verified_files._FINE_TICK_S)
    for _ in range(2):
        load_bundle(bundle.path)
    assert len(list(verified_files.memory().iterdir())) == 1  # it was, and is remembered
    times = (bundle.path / "weights.bin").stat()
    change_byte(bundle)
    os.utime(bundle.path / "weights.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(BundleError, match=r"weights.bin was changed: xxh3"):
        load_bundle(bundle.path)


def test_a_folder_that_cannot_be_written_to(bundle: Bundle) -> None:
    for path in (bundle.path, *bundle.path.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    for trust_earlier in (True, True, False):
        assert load_bundle(bundle.path, trust_earlier=trust_earlier) == bundle


def test_a_file_that_cannot_be_read(bundle: Bundle) -> None:
    (bundle.path / "weights.bin").unlink()
    (bundle.path / "weights.bin").symlink_to("weights.bin")
    with pytest.raises(
        BundleError, match=r"bundle cannot be read: .*weights.bin.*. Restore it, or export"
    ):
        load_bundle(bundle.path)


@pytest.mark.parametrize(
    ("version", "mend"),
    [
        (0, "Export"),
        (2, "Install a newer dspark-trt, or export"),
        ("1", "Export"),
        (None, "Export"),
        ([1], "Export"),
    ],
)
def test_another_format_version(bundle: Bundle, version: object, mend: str) -> None:
    edit(bundle, lambda data: data.update(format_version=version))
    with pytest.raises(
        BundleError,
        match=rf"has bundle format .*, this version of dspark-trt reads 1\. {mend} the bundle again",
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
