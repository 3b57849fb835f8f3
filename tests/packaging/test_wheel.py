# SPDX-License-Identifier: Apache-2.0
"""The root run tests the source tree; this tests what users install."""

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.packaging.tree import module_name, python_files

pytestmark = pytest.mark.slow

BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
LEFT_OUT = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "examples", "tests"
)


def build(kind: str, source: Path, output: Path) -> Path:
    """Run a build hook in ``source``, as `pip` and `build` do."""
    command = [sys.executable, "-c", BUILD, kind, str(output)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=LEFT_OUT)
    return build("sdist", folder / "tree", folder)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, so that one missing there is missing here."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


def installed_names() -> set[str]:
    """What the wheel must hold: every module under its package's folder."""
    names = set()
    for file in python_files():
        stem = module_name(file).replace(".", "/")
        names.add(f"{stem}/__init__.py" if file.name == "__init__.py" else f"{stem}.py")
    return names


def test_the_wheel_holds_each_file_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        contents = Counter(
            (Path(name).name, archive.read(name)) for name in names if archive.read(name)
        )
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert max(Counter(names).values()) == 1
    modules = {name for name in names if name.endswith(".py")}
    assert modules == installed_names()
    assert [key[0] for key, count in contents.items() if count > 1] == []
    assert "dspark_trt/py.typed" in names
    assert "dspark_trt/runtime/serving/ui/page.html" in names
    assert [n for n in names if n.endswith("licenses/LICENSE")]
    assert "License-Expression: Apache-2.0" in metadata
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"dspark_trt"}


def test_the_source_distribution_holds_each_file_once(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
    names = [member.name.split("/", 1)[1] for member in members]
    assert max(Counter(names).values()) == 1
    modules = [
        name for name in names if name.endswith(".py") and not name.startswith("benchmarks")
    ]
    expected = [str(file.relative_to(ROOT)) for file in python_files()]
    assert sorted(modules) == sorted(expected)
    assert {"LICENSE", "pyproject.toml", "README.md", "dspark_trt/py.typed"} <= set(names)


IMPORT_ALL = """
import importlib, json, pkgutil, dspark_trt
names = [m.name for m in pkgutil.walk_packages(dspark_trt.__path__, "dspark_trt.")]
files = {n: importlib.import_module(n).__file__ for n in names if n != "dspark_trt.__main__"}
print(json.dumps({"dspark_trt": dspark_trt.__file__, **files}))
"""


def test_an_installed_wheel_works_anywhere(wheel: Path, tmp_path: Path) -> None:
    """A fresh environment that borrows this one's libraries, run from the root of the disk."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True)
    (site,) = home.glob("lib/python*/site-packages")
    # Behind the wheel's own files, and without the .pth files of this environment.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    done = subprocess.run(
        [python, "-c", IMPORT_ALL], cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout.splitlines()[-1])
    assert {Path(file).relative_to(site).as_posix() for file in files.values()} == (
        installed_names() - {"dspark_trt/__main__.py"}
    )

    for command in ([home / "bin" / "dspark-trt"], [python, "-m", "dspark_trt"]):
        shown = subprocess.run(
            [*command, "--help"], cwd="/", capture_output=True, text=True, check=True
        )
        assert "inspect" in shown.stdout
        assert "generate" in shown.stdout
