# SPDX-License-Identifier: Apache-2.0
"""What is refused before anything is built, and what the refusal tells to do."""

from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

from dspark_trt.bundle import FileRecord
from dspark_trt.engine_manifest import AMPERE_PLUS
from dspark_trt.errors import BackendError, BuildError, BundleError
from dspark_trt.export.engines.support import (
    check_bundle,
    check_options,
    choose_archs,
    choose_graphs,
    unfused_attention,
)
from dspark_trt.gpu import Gpu
from dspark_trt.tensorrt_library import Library, load_library
from tests.export.test_engine_profiles import make_bundle

ADA = Gpu("NVIDIA GeForce RTX 4090", "sm89")
TURING = Gpu("Tesla T4", "sm75")
TENSORRT = Library("tensorrt", ModuleType("tensorrt"))  # its choices ask nothing of the library


@pytest.fixture
def rtx() -> Library:
    return load_library("tensorrt-rtx")


def with_head_dim(model: str, head_dim: int) -> Any:
    bundle = make_bundle()
    if model == "target":
        assert bundle.target is not None
        decoder = replace(bundle.target.decoder, head_dim=head_dim)
        return replace(bundle, target=replace(bundle.target, decoder=decoder))
    decoder = replace(bundle.draft.decoder, head_dim=head_dim)
    return replace(bundle, draft=replace(bundle.draft, decoder=decoder))


def test_the_drafter_s_parts_are_built_when_asked_for() -> None:
    record = FileRecord(sha256="0", size_bytes=0)
    names = ("context.onnx", "backbone.onnx", "confidence_head.onnx", "draft.onnx")
    bundle = replace(make_bundle(), files=dict.fromkeys(names, record))
    assert choose_graphs(bundle, ()) == ("context", "draft")
    assert choose_graphs(bundle, ["draft", "backbone", "draft"]) == ("draft", "backbone")
    assert choose_graphs(bundle, ["all"]) == ("backbone", "confidence_head", "context", "draft")
    with pytest.raises(BundleError, match=r"no graph target; it has backbone, .*--target"):
        choose_graphs(bundle, ["target"])


def test_float32_is_refused_with_the_export_command() -> None:
    with pytest.raises(BuildError, match=r"float16 and bfloat16 only.*--dtype float16"):
        check_bundle(make_bundle(dtype="float32"))


@pytest.mark.parametrize("head_dim", [8, 20, 100, 264, 512])
@pytest.mark.parametrize(
    ("model", "graph"), [("drafter", "draft"), ("drafter", "backbone"), ("target", "target")]
)
def test_odd_head_sizes_are_announced(model: str, graph: str, head_dim: int) -> None:
    (sentence,) = unfused_attention(with_head_dim(model, head_dim), ["verify", graph])
    assert f"attention of the {model} has heads of size {head_dim}; fused" in sentence
    assert "multiples of 8 from 16 to 256, so its scores go through memory" in sentence


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_even_head_sizes_are_not(head_dim: int) -> None:
    assert unfused_attention(with_head_dim("target", head_dim), ["draft", "target"]) == ()


def test_head_sizes_matter_where_attention_is() -> None:
    assert unfused_attention(with_head_dim("target", 20), ["draft", "verify"]) == ()
    others = ["context", "confidence_head", "target"]
    assert unfused_attention(with_head_dim("drafter", 20), others) == ()


@pytest.mark.trt
def test_tensorrt_rtx_builds_for_everything_or_for_what_is_named(rtx: Library) -> None:
    assert choose_archs(rtx, [], None) == choose_archs(rtx, [], ADA) == (AMPERE_PLUS,)
    assert choose_archs(rtx, ["SM120", "sm89", "sm89"], None) == ("sm120", "sm89")
    with pytest.raises(BuildError, match=r"--arch sm90: TensorRT-RTX .* builds for .*sm89"):
        choose_archs(rtx, ["sm90"], None)
    with pytest.raises(BuildError, match=r"--arch sm75: .*no float32 matrix products"):
        choose_archs(rtx, ["sm75"], None)
    with pytest.raises(BuildError, match=r"--arch ampere\+ covers the others"):
        choose_archs(rtx, [AMPERE_PLUS, "sm89"], None)


def test_tensorrt_builds_for_the_gpu_at_hand() -> None:
    assert choose_archs(TENSORRT, [], ADA) == ("sm89",)
    assert choose_archs(TENSORRT, [AMPERE_PLUS], ADA) == (AMPERE_PLUS,)
    with pytest.raises(BuildError, match=r"no CUDA device.*--backend tensorrt-rtx"):
        choose_archs(TENSORRT, [], None)
    with pytest.raises(BuildError, match=r"--arch sm120: .*RTX 4090, sm89.*--arch ampere\+"):
        choose_archs(TENSORRT, ["sm120"], ADA)
    with pytest.raises(BuildError, match=r"Tesla T4 is sm75; bundles need sm80"):
        choose_archs(TENSORRT, [], TURING)


NO_OPTIONS = {"stripped": False, "refit": False, "version_compatible": False}


@pytest.mark.trt
def test_options_that_this_machine_or_library_lacks(rtx: Library) -> None:
    check_options(rtx, (AMPERE_PLUS,), None, **NO_OPTIONS)
    with pytest.raises(BuildError, match=r"no version-compatible engines: build again"):
        check_options(rtx, (AMPERE_PLUS,), None, **NO_OPTIONS | {"version_compatible": True})
    for option in ("stripped", "refit"):
        with pytest.raises(BuildError, match=r"made and filled on a GPU.*no CUDA device"):
            check_options(rtx, ("sm89",), None, **NO_OPTIONS | {option: True})
    check_options(rtx, ("sm89",), ADA, **NO_OPTIONS | {"stripped": True})
    for archs in ((AMPERE_PLUS,), ("sm86", "sm89")):
        with pytest.raises(BuildError, match=r"one architecture at a time: .*one --arch, got"):
            check_options(rtx, archs, ADA, **NO_OPTIONS | {"stripped": True})


def test_backends_without_engines_are_refused() -> None:
    with pytest.raises(BackendError, match=r"'onnxruntime' has no engines; tensorrt and"):
        load_library("onnxruntime")


@pytest.mark.skipif(find_spec("tensorrt") is not None, reason="tensorrt is installed")
def test_tensorrt_is_asked_for_by_name() -> None:
    with pytest.raises(
        BackendError, match=r"package tensorrt .*pip install 'dspark-trt\[tensorrt\]'"
    ):
        load_library("tensorrt")
