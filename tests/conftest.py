# SPDX-License-Identifier: Apache-2.0
"""Bundles of the trained fixtures, exported once per test run and shared by all workers."""

import gc
import importlib.util
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from dspark_trt.bundle import Bundle, load_bundle, write_manifest

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"
TINY_TARGET = ROOT / "examples" / "tiny" / "target"
DRAFTERS = {
    "dspark-vanilla": ROOT / "examples" / "tiny" / "drafter",
    "dspark-rnn": DATA / "drafters" / "dspark-rnn",
    "dflash": DATA / "drafters" / "dflash",
}
CHAINS = {"eagle3": DATA / "drafters" / "eagle3"}
LONGEST = "test_engine_scale.py"

ExportBundle = Callable[..., Bundle]


@pytest.fixture(scope="session", autouse=True)
def _children_take_ctrl_c() -> None:
    """A run in a shell's background has Ctrl-C ignored, and so would have the programs that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all pytest-xdist workers of a run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def traced_once(shared_folder: Path) -> Iterator[None]:
    """Exports of this process trace no graph that another export of this run has traced."""
    from dspark_trt.export import bundle_from_checkpoints
    from tests.traced_once import TracedOnce

    with pytest.MonkeyPatch.context() as patch:
        trace = TracedOnce(shared_folder / "traced")
        patch.setattr(bundle_from_checkpoints, "onnx_from_module", trace)
        yield


@pytest.fixture(scope="session")
def fixture_bundle(shared_folder: Path, traced_once: None) -> ExportBundle:
    """`fixture_bundle("dspark-rnn", dtype="float16")`: the trained fixture with the tiny target, by
    `dspark-trt export` as the pages have it.
    """

    def export(name: str, **options: str) -> Bundle:
        from tests.command_line import dspark

        path = shared_folder / "-".join(["bundle", name, *options.values()])
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        words += ["--draft", str((DRAFTERS | CHAINS)[name]), "--target", str(TINY_TARGET)]
        with FileLock(f"{path}.lock"):
            if not path.exists():
                done = dspark("export", *words, "-o", path)
                assert done.code == 0, done.stderr
        return load_bundle(path, verify_hashes=False)

    return export


def copied(bundle: Bundle, folder: Path) -> Bundle:
    """In a folder of its own, where a test may change it."""
    return load_bundle(shutil.copytree(bundle.path, folder / "bundle"), verify_hashes=False)


def copied_without(bundle: Bundle, folder: Path, *beginnings: str, **changes: Any) -> Bundle:
    """Without the files whose names begin so; `changes` are those of its manifest."""
    copy = copied(bundle, folder)
    left_out = [name for name in copy.files if name.startswith(beginnings)]
    for name in left_out:
        (copy.path / name).unlink()
    files = {name: record for name, record in copy.files.items() if name not in left_out}
    write_manifest(replace(copy, files=files, **changes))
    return load_bundle(copy.path, verify_hashes=False)


def drafter_alone(bundle: Bundle, folder: Path) -> Bundle:
    """As it is exported without `--target`: no target's graph, no tokenizer."""
    return copied_without(
        bundle, folder, "target", "tokenizer/", target=None, target_source=None
    )


@pytest.fixture(scope="session")
def tiny_bundle(fixture_bundle: ExportBundle) -> Bundle:
    """The shipped example: `dspark-vanilla` with its target, float32."""
    return fixture_bundle("dspark-vanilla")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine lacks; with DSPARK_REQUIRE_GPU=1 such a skip is a failure."""
    missing = {
        "gpu": None if _has_cuda() else "no CUDA device",
        "trt": None
        if importlib.util.find_spec("tensorrt_rtx")
        else "tensorrt-rtx is not installed",
    }
    # pytest adds its handlers to loggers that do not propagate, and torch traces as soon as one has a
    # handler: exports take twice as long.
    logging.getLogger("torch.__trace").propagate = True
    # Files with long tests first: no worker is left alone with one at the end. The longest begins, which needs
    # no shared bundle: the other worker exports the first, and nobody waits for it.
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in long, item.path.name != LONGEST))
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                if os.environ.get("DSPARK_REQUIRE_GPU") == "1":
                    item.add_marker(pytest.mark.usefixtures("required_hardware"))
                else:
                    item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not go through it again and again during exports."""
    gc.freeze()


@pytest.fixture
def required_hardware() -> None:
    pytest.fail("DSPARK_REQUIRE_GPU=1, but this machine lacks what the test needs")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
