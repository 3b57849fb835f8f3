# SPDX-License-Identifier: Apache-2.0
"""Nothing half-written is left: new folders, JSON files, hashes."""

import errno
import hashlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dspark_trt.errors import OutputError
from dspark_trt.files import make_folder, new_directory, new_file, sha256_of_file, write_json


def test_new_directory_takes_its_name_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "made"
    with new_directory(path) as folder:
        (folder / "file").write_text("x")
        assert not path.exists()
        assert folder.parent == tmp_path  # same disk: the rename is atomic
    assert [file.name for file in path.iterdir()] == ["file"]
    assert [file.name for file in tmp_path.iterdir()] == ["made"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_new_directory_disappears_with_its_parents(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def fail() -> None:
        with new_directory(tmp_path / "a" / "b" / "made") as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "file").write_text("x")
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_parents_that_others_use_stay(tmp_path: Path) -> None:
    def fail() -> None:
        with new_directory(tmp_path / "a" / "made"):
            (tmp_path / "a" / "other").write_text("x")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["other"]


def test_an_existing_folder_is_not_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "made"
    path.mkdir()
    (path / "precious").write_text("x")
    with pytest.raises(OSError, match="not empty"), new_directory(path) as folder:
        (folder / "file").write_text("y")
    assert (path / "precious").read_text() == "x"
    assert [file.name for file in tmp_path.iterdir()] == ["made"]


def test_replacing_keeps_the_old_folder_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "made"
    path.mkdir()
    (path / "old").write_text("x")
    with pytest.raises(KeyboardInterrupt), new_directory(path, replace=True):
        raise KeyboardInterrupt
    assert [file.name for file in path.iterdir()] == ["old"]
    with new_directory(path, replace=True) as folder:
        (folder / "new").write_text("y")
        assert (path / "old").exists()
    assert [file.name for file in path.iterdir()] == ["new"]
    assert [file.name for file in tmp_path.iterdir()] == ["made"]


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(tmp_path: Path) -> None:
    path = tmp_path / "made"
    path.mkdir()
    (path / "old").write_text("x")
    with pytest.raises(FileNotFoundError), new_directory(path, replace=True) as folder:
        folder.rmdir()  # somebody cleans up behind our back
    assert [file.name for file in path.iterdir()] == ["old"]
    assert [file.name for file in tmp_path.iterdir()] == ["made"]


def test_whoever_comes_last_stays_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process writes the same folder between our two renames."""
    path, rename, others = tmp_path / "made", Path.rename, list[str]()

    def another_writes_too(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        if self == path and len(others) < 2:
            others.append(self.name)
            write("theirs")
        return moved

    def write(text: str) -> None:
        with new_directory(path, replace=True) as folder:
            (folder / "file").write_text(text)

    write("old")
    monkeypatch.setattr(Path, "rename", another_writes_too)
    write("ours")
    assert len(others) == 2
    assert (path / "file").read_text() == "ours"
    assert [file.name for file in tmp_path.iterdir()] == ["made"]


def test_threads_may_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: write_json(path, [number] * 200), range(200)))
    first, *others = json.loads(path.read_text())
    assert others == [first] * 199
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_write_json_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"a": float("nan")})
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_hash_reads_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "large"
    data = bytes(range(256)) * (5 << 12)  # 5 MiB: more than one chunk
    path.write_bytes(data + b"end")
    assert sha256_of_file(path) == hashlib.sha256(data + b"end").hexdigest()


def test_a_place_that_takes_no_file_is_named(tmp_path: Path) -> None:
    """Before the work where `require_place` is asked, and without a file of another name left."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    for path, text in (
        (tmp_path / "folder", "it is a folder. Give the name of a file"),
        (tmp_path / "nowhere" / "x.json", "there is no folder .*nowhere. Make it first"),
        (tmp_path / "file" / "x.json", "there is no folder .*file"),
    ):
        with pytest.raises(OutputError, match=f"cannot write {path}: {text}"):
            write_json(path, {})
    with pytest.raises(OutputError, match=r"the folder .*file/x: /.*file is a file$"):
        make_folder(tmp_path / "file" / "x")
    with (
        pytest.raises(OutputError, match=r"the folder .*file: /.*file is a file$"),
        new_directory(tmp_path / "file" / "x"),
    ):
        pytest.fail("work for a folder that cannot be")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """The old file stays; so does every other of the caller's errors."""
    write_json(tmp_path / "costs.json", [1])

    def write(error: Exception) -> None:
        with new_file(tmp_path / "costs.json") as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(
        OutputError, match=r"cannot write .*costs\.json: No space left on device"
    ):
        write(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(ValueError, match="mine"):
        write(ValueError("mine"))
    assert json.loads((tmp_path / "costs.json").read_text()) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_a_link_is_replaced_not_the_folder_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "file").write_text("old")
    (tmp_path / "current").symlink_to("v1")
    with new_directory(tmp_path / "current", replace=True) as folder:
        (folder / "file").write_text("new")
    assert (tmp_path / "current" / "file").read_text() == "new"
    assert (tmp_path / "v1" / "file").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "v1"]
