# SPDX-License-Identifier: Apache-2.0
"""What `triton-repo` writes, and what it refuses; test_triton.py runs it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dspark_trt.bundle import Bundle, load_bundle
from dspark_trt.cli import build_app
from dspark_trt.errors import BundleError, RequestError
from dspark_trt.runtime.serving.triton_repository import write_repository


def test_a_repository_holds_the_bundle(tiny_bundle: Bundle, tmp_path: Path) -> None:
    output = tmp_path / "repository"
    arguments = ["triton-repo", str(tiny_bundle.path), "-o", str(output), "--name", "chat"]
    done = CliRunner().invoke(build_app(), [*arguments, "--graph", "verify", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["models"] == ["chat", "chat_verify"]
    assert sorted(path.name for path in output.iterdir()) == ["chat", "chat_verify"]
    held = load_bundle(output / "chat" / "1" / "bundle")
    assert held.fingerprint() == tiny_bundle.fingerprint()
    assert (output / "chat_verify" / "1" / "model.onnx").is_file()


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
    assert list(tmp_path.iterdir()) == []
