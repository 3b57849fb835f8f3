# SPDX-License-Identifier: Apache-2.0
"""Which engines may be loaded: everything that does not fit is one sentence with the rebuild command."""

import json
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_trt.bindings import Binding
from dspark_trt.bundle import Bundle, FileRecord
from dspark_trt.engine_manifest import (
    AMPERE_PLUS,
    MANIFEST,
    EngineRecord,
    EngineSet,
    Limits,
    Profile,
    check_engine,
    covers,
    engine_folder,
    find_engines,
    read_engine_manifest,
    write_engine_manifest,
)
from dspark_trt.errors import BundleError
from tests.export.test_engine_profiles import make_bundle

PLAN = b"a plan" * 1000
VERSION = "1.7.1.116"
REBUILD = r"dspark-trt build .* --backend tensorrt-rtx --arch ampere\+ --max-batch 8 --max-tokens 512 --capacity 4096"


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    files = {"draft.onnx": FileRecord(sha256="0", size_bytes=0)}
    return replace(make_bundle(), path=tmp_path, files=files)


def engine_set(bundle: Bundle, **changes: object) -> EngineSet:
    record = EngineRecord(
        file="draft.engine",
        sha256=sha256(PLAN).hexdigest(),
        size_bytes=len(PLAN),
        graph_sha256="1",
        structure_sha256="2",
        inputs=(Binding("past_key_0", "float16", (-1, 2, 4096, 64)),),
        outputs=(Binding("present_key_0", "float16", (-1, 2, 4096, 64)),),
        aliases={"present_key_0": "past_key_0"},
        profiles=(Profile(name="all", shapes={"past_key_0": ((1, 2), (1, 2), (8, 2))}),),
        layers={"KV_CACHE_UPDATE": 1},
        seconds=1.5,
        peak_bytes=None,
    )
    engines = EngineSet(
        path=engine_folder(bundle, "tensorrt-rtx", (AMPERE_PLUS,), VERSION),
        backend="tensorrt-rtx",
        version=VERSION,
        archs=(AMPERE_PLUS,),
        gpu="none (built for ampere+)",
        limits=Limits(batch=8, tokens=512, capacity=4096),
        batch_buckets=(1, 2, 4, 8),
        token_buckets=(1, 2, 4, 8, 16, 32, 64),
        bundle_fingerprint=bundle.fingerprint(),
        plugin_sha256=None,
        engines={"draft": record},
    )
    return replace(engines, **changes)  # type: ignore[arg-type]


def stored(engines: EngineSet) -> EngineSet:
    engines.path.mkdir(parents=True)
    (engines.path / "draft.engine").write_bytes(PLAN)
    write_engine_manifest(engines)
    return engines


def find(bundle: Bundle, version: str = VERSION, arch: str = "sm89") -> EngineSet:
    return find_engines(bundle, "tensorrt-rtx", version=version, device_arch=arch)


def test_what_is_written_is_read(bundle: Bundle) -> None:
    engines = stored(engine_set(bundle))
    assert engines.path.name == f"tensorrt-rtx-ampere+-{VERSION}"
    assert read_engine_manifest(engines.path) == engines
    assert find(bundle) == engines
    assert check_engine(engines, "draft", bundle) == engines.path / "draft.engine"


def test_no_engines_at_all(bundle: Bundle) -> None:
    with pytest.raises(
        BundleError, match=r"has no tensorrt-rtx engines.*dspark-trt build .*-rtx$"
    ):
        find(bundle)


@pytest.mark.parametrize("version", ["1.6.0.1", "1.7.1.117", "2.0.0.1"])
def test_another_version_is_refused(bundle: Bundle, version: str) -> None:
    stored(engine_set(bundle))
    with pytest.raises(BundleError, match=rf"built by version {VERSION}, {version}.*{REBUILD}"):
        find(bundle, version=version)


def test_version_compatible_engines_run_in_later_versions_of_their_major(
    bundle: Bundle,
) -> None:
    engines = stored(engine_set(bundle, version_compatible=True))
    assert find(bundle, version="1.8.0.3") == engines
    for version in ("1.7.0.0", "2.0.0.0"):
        with pytest.raises(BundleError, match=r"built by version"):
            find(bundle, version=version)


def test_another_architecture_is_refused(bundle: Bundle) -> None:
    engines = engine_set(bundle, archs=("sm120", "sm89"))
    folder = engine_folder(bundle, "tensorrt-rtx", engines.archs, VERSION)
    stored(replace(engines, path=folder))
    assert find(bundle, arch="sm120").archs == ("sm120", "sm89")
    message = r"engines are for sm120, sm89, this GPU is sm86.*dspark-trt build .* --arch sm86"
    with pytest.raises(BundleError, match=message):
        find(bundle, arch="sm86")


@given(st.sampled_from(["sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120"]))
def test_portable_engines_run_from_ampere_on(arch: str) -> None:
    assert covers((AMPERE_PLUS,), arch) == (arch != "sm75")
    assert covers((arch,), arch)
    assert not covers(("sm121",), arch)


def test_engines_for_exactly_this_gpu_come_first(bundle: Bundle) -> None:
    stored(engine_set(bundle))
    folder = engine_folder(bundle, "tensorrt-rtx", ("sm89",), VERSION)
    exact = stored(engine_set(bundle, archs=("sm89",), path=folder))
    assert find(bundle, arch="sm89") == exact
    assert find(bundle, arch="sm86").archs == (AMPERE_PLUS,)


def test_a_graph_that_was_not_built(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=rf"no engine for target.*{REBUILD}"):
        check_engine(stored(engine_set(bundle)), "target", bundle)


def test_missing_engine_file(bundle: Bundle) -> None:
    engines = stored(engine_set(bundle))
    (engines.path / "draft.engine").unlink()
    with pytest.raises(BundleError, match=rf"draft.engine is missing.*{REBUILD}"):
        check_engine(engines, "draft", bundle)


@pytest.mark.parametrize("length", [0, 1, len(PLAN) - 1, len(PLAN) + 1])
def test_truncated_and_grown_engines(bundle: Bundle, length: int) -> None:
    engines = stored(engine_set(bundle))
    (engines.path / "draft.engine").write_bytes((PLAN + PLAN)[:length])
    message = rf"has {length} bytes, expected {len(PLAN)}.*{REBUILD}"
    with pytest.raises(BundleError, match=message):
        check_engine(engines, "draft", bundle)


@pytest.mark.parametrize("place", [0, 3000, len(PLAN) - 1])
def test_a_single_changed_bit(bundle: Bundle, place: int) -> None:
    engines = stored(engine_set(bundle))
    changed = bytearray(PLAN)
    changed[place] ^= 1
    (engines.path / "draft.engine").write_bytes(changed)
    with pytest.raises(BundleError, match=rf"draft.engine was changed: sha256 .*{REBUILD}"):
        check_engine(engines, "draft", bundle)


def test_engines_of_another_bundle(bundle: Bundle) -> None:
    engines = stored(engine_set(bundle))
    retrained = replace(bundle, files={"draft.onnx": FileRecord(sha256="9", size_bytes=0)})
    message = (
        rf"built from bundle {bundle.fingerprint()}, .* is {retrained.fingerprint()}.*{REBUILD}"
    )
    with pytest.raises(BundleError, match=message):
        check_engine(engines, "draft", retrained)


def test_engines_with_other_kernels(bundle: Bundle) -> None:
    engines = stored(engine_set(bundle, plugin_sha256="old"))
    check_engine(engines, "draft", bundle, plugin_sha256="old")
    with pytest.raises(
        BundleError, match=rf"kernels of another version of dspark-trt.*{REBUILD}"
    ):
        check_engine(engines, "draft", bundle, plugin_sha256="new")


def test_engines_without_weights_say_how_to_fill_them(bundle: Bundle) -> None:
    engines = stored(engine_set(bundle, stripped=True))
    message = rf"holds no weights.*dspark-trt build .* --refit {re.escape(str(engines.path))}$"
    with pytest.raises(BundleError, match=message):
        check_engine(engines, "draft", bundle)


def test_a_folder_without_manifest(tmp_path: Path) -> None:
    with pytest.raises(
        BundleError, match=r"holds no engines: it has no manifest.json.*Build it again"
    ):
        read_engine_manifest(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.update(format_version=99), r"has format 99, .* reads 1"),
        (lambda data: data.pop("limits"), r"is damaged \(KeyError: 'limits'\)"),
        (lambda data: data.update(surprise=1), r"is damaged \(TypeError"),
        (
            lambda data: data["engines"]["draft"].update(file="../x"),
            r"'../x' is not in this folder",
        ),
        (lambda data: data["engines"]["draft"].update(size_bytes="1"), r"of the wrong type"),
        (lambda data: data["engines"].update(draft=[]), r"is damaged \("),
    ],
)
def test_damaged_manifests(bundle: Bundle, edit: object, message: str) -> None:
    engines = stored(engine_set(bundle))
    data = json.loads((engines.path / MANIFEST).read_text())
    edit(data)  # type: ignore[operator]
    (engines.path / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(BundleError, match=message):
        read_engine_manifest(engines.path)


@given(cut=st.integers(0, 400))
def test_cut_manifests_end_in_a_sentence(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bundle = replace(make_bundle(), path=tmp_path_factory.mktemp("cut"))
    engines = stored(engine_set(bundle))
    text = (engines.path / MANIFEST).read_text()
    (engines.path / MANIFEST).write_text(text[:cut])
    with pytest.raises(BundleError, match=r"cannot be read|has format"):
        read_engine_manifest(engines.path)
