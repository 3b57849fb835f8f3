# SPDX-License-Identifier: Apache-2.0
"""The tree: what setuptools is told equals what is there, and every file keeps the house rules."""

import os
import tomllib

import pytest

from tests.conftest import ROOT
from tests.packaging.tree import FOLDERS, python_files

CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = CONFIG["tool"]["setuptools"]


def test_packages_are_all_packages() -> None:
    """A sub-package left out is silently absent from the wheel."""
    found = {
        ".".join([package, *init.parent.relative_to(ROOT / folder).parts])
        for package, folder in SETUPTOOLS["package-dir"].items()
        for init in (ROOT / folder).rglob("__init__.py")
        if not any(parent.is_symlink() for parent in init.parents)
    }
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)


def test_every_module_lies_in_a_package() -> None:
    for file in python_files():
        assert (file.parent / "__init__.py").exists(), f"{file} would not be installed"


def test_package_folders_are_the_four() -> None:
    assert SETUPTOOLS["package-dir"] == FOLDERS


@pytest.mark.parametrize("name", ["export", "plugins", "runtime"])
def test_links_show_the_mapped_folders(name: str) -> None:
    link = ROOT / "dspark_trt" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"  # relative: the tree can be moved
    assert link.resolve() == ROOT / name


def test_every_tests_folder_is_a_package() -> None:
    """Two conftest.py or equal file names in plain folders stop mypy."""
    folders = {file.parent for file in (ROOT / "tests").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_files_begin_with_their_licence() -> None:
    folders = [
        *map(ROOT.joinpath, FOLDERS.values()),
        *(ROOT / n for n in ("tests", "examples", "benchmarks")),
    ]
    for file in {f.resolve() for folder in folders for f in folder.rglob("*.py")}:
        text = file.read_text()
        assert not text or text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), file


def test_licence_and_type_marker_are_shipped() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert CONFIG["project"]["license-files"] == ["LICENSE"]
    assert SETUPTOOLS["package-data"]["dspark_trt"] == ["py.typed"]
    assert (ROOT / "dspark_trt" / "py.typed").exists()


def test_versions_agree() -> None:
    import dspark_trt

    assert CONFIG["project"]["version"] == dspark_trt.__version__


def test_base_install_has_no_heavy_library() -> None:
    """What a bundle needs on a CPU, except onnxruntime; everything else is an extra."""
    base = {name(requirement) for requirement in CONFIG["project"]["dependencies"]}
    light = {"jinja2", "numpy", "prometheus-client", "rich", "tokenizers", "typer", "xxhash"}
    assert base <= light
    extras = CONFIG["project"]["optional-dependencies"]
    assert {"cpu", "gpu", "export", "tensorrt", "tensorrt-rtx", "dev"} <= set(extras)
    assert [name(r) for r in extras["cpu"]] == ["onnxruntime"]
    assert [name(r) for r in extras["gpu"]] == ["onnxruntime-gpu"]


def name(requirement: str) -> str:
    return requirement.split(">")[0].split("=")[0].split("[")[0].strip()
