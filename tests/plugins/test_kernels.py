# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels: interpreted, on a GPU where there is one, and compiled for every architecture."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from dspark_trt.plugins.contract import VerifyMode
from dspark_trt.plugins.kernel_compile import compile_plan, without_scratch_parameters
from dspark_trt.plugins.kernel_plan import verify_plan

ROOT = Path(__file__).parents[2]
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
MODES = (VerifyMode.REJECTION, VerifyMode.COUPLED)
DTYPES = ("float16", "bfloat16", "float32")


def run_suite(**environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "tests/plugins/interpreted_kernels.py"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_interpreted_kernels_agree_with_specification() -> None:
    run_suite(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.gpu
def test_kernels_on_a_gpu_agree_with_specification() -> None:
    run_suite(TRITON_INTERPRET="0", DSPARK_KERNEL_EXAMPLES="300")


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def architectures() -> Iterator[ParameterSet]:
    """Every architecture with both verifiers and two types of logits; the oldest and the newest always."""
    for a, capability in enumerate(ARCHITECTURES):
        for m, mode in enumerate(MODES):
            dtype = DTYPES[(a + m) % len(DTYPES)]
            is_end = (a, m) in ((0, 0), (len(ARCHITECTURES) - 1, 1))
            yield pytest.param(
                mode, capability, dtype, marks=() if is_end else pytest.mark.slow
            )


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize(("mode", "capability", "logits_dtype"), architectures())
def test_kernels_compile_without_a_gpu(
    mode: VerifyMode, capability: int, logits_dtype: str
) -> None:
    check_compiled(mode, capability, logits_dtype)


def check_compiled(mode: VerifyMode, capability: int, logits_dtype: str) -> None:
    plan = verify_plan(mode, gamma=7, vocab_size=151_936)
    kernels = compile_plan(
        mode, gamma=7, vocab_size=151_936, logits_dtype=logits_dtype, capability=capability
    )
    for step in plan.steps:
        kernel = kernels[step.name]
        assert kernel.cubin[:4] == b"\x7fELF"
        assert re.search(rf"\.target sm_{capability}a?\b", kernel.ptx)
        entry = re.search(rf"\.entry {kernel.name}\((.*?)\)", kernel.ptx, re.DOTALL)
        assert entry is not None
        parameters = re.findall(r"\.param \.u64", entry[1])
        assert len(parameters) == len(step.inputs) + len(step.outputs)
        assert kernel.shared_bytes < 48 * 1024


def test_rows_are_read_in_whole_vectors() -> None:
    """16 bytes a load: what a kernel bound by memory needs."""
    kernels = compile_plan(
        VerifyMode.REJECTION,
        gamma=7,
        vocab_size=151_936,
        logits_dtype="bfloat16",
        capability=90,
    )
    for name in ("TargetRows", "DraftRows", "Masses"):
        assert "ld.global.v4.b32" in kernels[name].ptx


def test_parameters_that_tensorrt_does_not_pass_are_dropped() -> None:
    ptx = ".visible .entry k(\n\t.param .u64 a,\n\t.param .u64 b,\n\t.param .u64 c\n)\n{ ld [a]; }"
    shortened = " ".join(without_scratch_parameters(ptx, 1).split())
    assert shortened == ".visible .entry k( .param .u64 a ) { ld [a]; }"
    with pytest.raises(AssertionError, match="scratch memory is used"):
        without_scratch_parameters(ptx.replace("[a]", "[c]"), 2)


@pytest.mark.parametrize("mode", MODES)
def test_workspace_has_no_term_of_vocabulary_times_drafts(mode: VerifyMode) -> None:
    """The formula of its docstring, and far less than one float32 row a drafted token."""
    gamma, vocab_size, batch = 7, 248_320, 64
    plan = verify_plan(mode, gamma=gamma, vocab_size=vocab_size)
    chunks, blocks = 31, 970
    rows = 12 * chunks * (gamma + 1) + 8 * chunks * gamma
    assert plan.workspace_bytes(batch) <= batch * (rows + 8 * blocks + 12 * gamma + 48)
    assert plan.workspace_bytes(batch) < batch * gamma * vocab_size * 4 / 500
