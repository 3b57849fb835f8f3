# SPDX-License-Identifier: Apache-2.0
"""Files on disk: sources, safetensors headers, shards, hashing."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark_trt.checkpoint import (
    DraftOverrides,
    read_checkpoint,
    read_draft,
    read_target,
    source_hash,
)
from dspark_trt.errors import CheckpointError
from tests.checkpoints import edit_config, edit_tensors, write_draft, write_target


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    draft, target = write_draft(tmp_path / "draft"), write_target(tmp_path / "target")
    code = (
        "import sys; from dspark_trt.checkpoint import *\n"
        f"check_pair(read_draft({str(draft)!r}), read_target({str(target)!r}))\n"
        "print([name for name in ('torch', 'numpy', 'safetensors', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "mixed"])
def test_every_tensor_loads_as_written(tmp_path: Path, dtype: str, shards: int) -> None:
    path = write_draft(tmp_path / "draft", dtype=dtype, shards=shards)
    written: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        written |= load_file(file)
    read = read_draft(path).tensors
    assert read.keys() == written.keys()
    for name, ref in read.items():
        assert torch.equal(ref.load(), written[name])
        assert ref.dtype == str(written[name].dtype).removeprefix("torch.")
        assert ref.shape == tuple(written[name].shape)
        assert ref.nbytes == written[name].nbytes
        assert b"".join(ref.chunks(100)) == written[name].view(torch.uint8).numpy().tobytes()


def test_load_sees_a_replaced_file(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft")
    before = read_draft(path).tensors["norm.weight"].load().clone()
    edit_tensors(path, lambda weights: weights["norm.weight"].add_(1))
    assert torch.equal(read_draft(path).tensors["norm.weight"].load(), before + 1)


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    file = write_draft(tmp_path / "draft") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
        read_draft(file.parent)


def test_trailing_bytes_are_refused(tmp_path: Path) -> None:
    file = write_draft(tmp_path / "draft") / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="has trailing bytes"):
        read_draft(file.parent)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'{"', b"{{"), (b'"F32"', b'"F16"'), (b'"shape"', b'"shaqe"'), (b'"dtype"', b'"dtyqe"')],
)
def test_malformed_header_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    file = write_draft(tmp_path / "draft") / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(old, new, 1))
    with pytest.raises(CheckpointError, match="malformed safetensors header"):
        read_draft(file.parent)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_broken_config_is_refused(tmp_path: Path, text: str) -> None:
    path = write_draft(tmp_path / "draft")
    (path / "config.json").write_text(text)
    with pytest.raises(
        CheckpointError, match=r"config\.json: (not valid JSON|expected a JSON object)"
    ):
        read_draft(path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft")
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        read_draft(path)
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        read_draft(path)


def _edit_index(path: Path, edit: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    edit(index["weight_map"])
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    path = write_target(tmp_path / "target", shards=2)
    shard = "model-00002-of-00002.safetensors"
    _edit_index(path, lambda index: index.update(ghost=shard))
    with pytest.raises(CheckpointError, match=r"not in their shards: ghost \(model-00002"):
        read_target(path)
    _edit_index(path, lambda index: [index.pop("ghost"), index.pop("model.norm.weight")])
    with pytest.raises(CheckpointError, match=r"the index lacks: model\.norm\.weight"):
        read_target(path)
    (path / shard).unlink()
    with pytest.raises(CheckpointError, match=rf"are missing: {shard}"):
        read_target(path)
    _edit_index(path, lambda index: index.update(ghost="../other.safetensors"))
    with pytest.raises(CheckpointError, match="is not a plain file name"):
        read_target(path)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", shards=2)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="holds 2 safetensors files and no"):
        read_draft(path)


def test_sources_that_are_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        read_draft(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="not a hub id"):
        read_draft("./a/b/c")
    path = write_draft(tmp_path / "draft")
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        read_draft(path / "config.json")


def _hub(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PATH": "/usr/bin:/bin",
    }
    return subprocess.run(
        [sys.executable, "-c", f"from dspark_trt.checkpoint import *\n{code}"],
        capture_output=True, text=True, env=environment, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip


def test_hub_id_is_read_from_the_cache_offline(tmp_path: Path) -> None:
    commit = "0" * 40
    repository = tmp_path / "hub/hub/models--owner--drafter"
    write_draft(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    done = _hub(tmp_path, "print(read_draft('owner/drafter').config.gamma)")
    assert (done.stdout.strip(), done.returncode) == ("4", 0), done.stderr


def test_hub_id_that_is_not_cached_gives_one_sentence(tmp_path: Path) -> None:
    done = _hub(
        tmp_path,
        "try: read_draft('owner/absent', overrides=DraftOverrides(revision='v2'))\n"
        "except Exception as error: print(type(error).__name__, error)",
    )
    assert done.stdout.startswith("CheckpointError owner/absent: no such folder, and the hub")
    assert "revision v2" in done.stdout
    assert done.stdout.count("\n") == 1


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    drafter = write_draft(tmp_path / "drafter")
    for read in (read_draft, read_checkpoint):
        with pytest.raises(CheckpointError, match="is a local folder and has no revision v2"):
            read(drafter, overrides=DraftOverrides(revision="v2"))
    with pytest.raises(CheckpointError, match="is a local folder and has no revision v2"):
        read_target(drafter, revision="v2")


def test_source_hash_follows_content_only(tmp_path: Path) -> None:
    first = write_draft(tmp_path / "first", shards=2)
    second = write_draft(tmp_path / "second", shards=2)
    digest = source_hash(read_draft(first))
    assert len(digest) == 64
    assert source_hash(read_draft(second)) == digest
    (second / "notes.txt").write_text("not part of the checkpoint")
    assert source_hash(read_draft(second)) == digest
    edit_config(second, {"block_size": 3})
    assert source_hash(read_draft(second)) != digest
    assert source_hash(read_draft(write_draft(tmp_path / "third", shards=2, seed=1))) != digest
