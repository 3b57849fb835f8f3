# SPDX-License-Identifier: Apache-2.0
"""Real `tensorrt.plugin` functions on this project's plugins; run by `test_tensorrt_plugin` in a process of its
own, because the bindings are loaded over a stand-in library and plugins can be registered once a process.
"""

import ctypes
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark_trt.plugins.contract import VerifyMode
from dspark_trt.plugins.kernel_compile import argument_types
from dspark_trt.plugins.kernel_plan import Step, VerifyPlan, verify_plan
from dspark_trt.plugins.tensorrt_plugin import register_plugins

GAMMA, VOCAB, BATCH = 7, 151_936, 5
CAPABILITY = 90
SONAMES = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")
MODES = (VerifyMode.REJECTION, VerifyMode.COUPLED)
STEPS = [
    pytest.param(plan, step, mode, id=f"{mode}-{step.name}")
    for mode in MODES
    for plan in (verify_plan(mode, gamma=GAMMA, vocab_size=VOCAB),)
    for step in plan.steps
]


def load_tensorrt(folder: Path) -> tuple[Any, Any]:
    """(tensorrt, tensorrt.plugin) of NVIDIA's bindings wheel over the library of TensorRT-RTX."""
    library = importlib.util.find_spec("tensorrt_rtx_libs")
    assert library is not None
    assert library.submodule_search_locations is not None
    location = Path(library.submodule_search_locations[0]) / "libtensorrt_rtx.so.1"
    os.environ["TENSORRT_RTX_LIBRARY"] = str(location)
    source = Path(__file__).with_name("tensorrt_shim.c")
    for soname in SONAMES:
        target = folder / soname
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", target, source, f"-Wl,-soname,{soname}", "-ldl"],
            check=True,
        )
        ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)
    sys.modules["tensorrt"] = importlib.import_module("tensorrt_bindings")
    sys.modules["tensorrt.plugin"] = importlib.import_module("tensorrt_bindings.plugin")
    return sys.modules["tensorrt"], sys.modules["tensorrt.plugin"]


class Constant:
    """Stands for TensorRT's dimension expressions, which exist only while a network is being built."""

    def __init__(self, value: int) -> None:
        self.value = value

    def is_constant(self) -> bool:
        return True

    def get_constant_value(self) -> int:
        return self.value


class ConstantBuilder:
    constant = Constant


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    trt, trtp = load_tensorrt(tmp_path_factory.mktemp("shim"))
    names = register_plugins(CAPABILITY)
    library = sys.modules["tensorrt_bindings.plugin._lib"]
    expressions = sys.modules["tensorrt_bindings.plugin._tensor"]
    expressions.SymIntExpr._exprBuilder = ConstantBuilder()
    yield {"trt": trt, "trtp": trtp, "names": names, "known": library.QDP_REGISTRY}
    expressions.SymIntExpr._exprBuilder = None


def descriptors(
    registry: dict[str, Any], plan: VerifyPlan, mode: VerifyMode, names: tuple[str, ...]
) -> list[Any]:
    """TensorRT descriptors of tensors of BATCH requests with bfloat16 logits."""
    trt, trtp = registry["trt"], registry["trtp"]
    types = argument_types(mode, plan, gamma=GAMMA, vocab_size=VOCAB, logits_dtype="bfloat16")
    inputs = {
        "target_logits": (BATCH * (GAMMA + 1), VOCAB),
        "offsets": (BATCH + 1,),
        "draft_tokens": (BATCH, GAMMA),
        "draft_logits": (BATCH, GAMMA, VOCAB),
        "uniforms": (BATCH, GAMMA + 1),
    }
    shapes = inputs | {name: (BATCH, *buffer.shape) for name, buffer in plan.buffers.items()}
    return [
        trtp.from_shape_expr(shapes.get(name, (BATCH,)), getattr(trt, types[name]))
        for name in names
    ]


def extents(expressions: Any) -> list[int]:
    return [expression._expr.get_constant_value() for expression in expressions]


def test_every_kernel_has_a_creator(registry: dict[str, Any]) -> None:
    creators = registry["trt"].get_plugin_registry().all_creators
    known = {f"{creator.plugin_namespace}::{creator.name}" for creator in creators}
    assert set(registry["names"]) <= known
    assert {f"dspark::{s.values[1].name}" for s in STEPS} == set(registry["names"])  # type: ignore[union-attr]


@pytest.mark.parametrize(("plan", "step", "mode"), STEPS)
def test_output_types_and_shapes(
    registry: dict[str, Any], plan: VerifyPlan, step: Step, mode: VerifyMode
) -> None:
    described = registry["known"][f"dspark::{step.name}"]
    assert described.input_tensor_names == list(step.inputs)
    outputs = described.register_func(
        *descriptors(registry, plan, mode, step.inputs), gamma=GAMMA, vocab_size=VOCAB
    )
    assert len(outputs) == described.num_outputs == len(step.outputs)
    for name, output in zip(step.outputs, outputs, strict=True):
        buffer = plan.buffers[name]
        assert output.dtype == getattr(registry["trt"], buffer.dtype)
        assert extents(output.shape_expr) == [BATCH, *buffer.shape]


@pytest.mark.parametrize(("plan", "step", "mode"), STEPS)
def test_ahead_of_time_kernel_and_launch(
    registry: dict[str, Any], plan: VerifyPlan, step: Step, mode: VerifyMode
) -> None:
    described = registry["known"][f"dspark::{step.name}"]
    name, ptx, launch, extra = described.aot_impl_func(
        *descriptors(registry, plan, mode, step.inputs),
        GAMMA,
        VOCAB,
        descriptors(registry, plan, mode, step.outputs),
        0,
    )
    assert f".entry {name}(" in ptx
    assert f".target sm_{CAPABILITY}" in ptx
    assert len(extra) == 0  # arguments are the tensors, inputs first
    assert ptx.split("(", 1)[1].split(")", 1)[0].count(".param") == len(
        step.inputs + step.outputs
    )
    grid = extents([launch.grid_x, launch.grid_y, launch.grid_z])
    assert grid == [BATCH, *(*step.grid, 1, 1)[:2]]
    assert extents([launch.block_x, launch.block_y, launch.block_z]) == [32 * step.warps, 1, 1]
    assemble(ptx)


def assemble(ptx: str) -> None:
    """NVIDIA's assembler takes the shortened PTX."""
    import triton

    assembler = triton.knobs.nvidia.ptxas.path
    done = subprocess.run(
        [assembler, f"--gpu-name=sm_{CAPABILITY}a", "/dev/stdin", "-o", "/dev/null"],
        input=ptx,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("plan", "step", "mode"), STEPS)
def test_combinations_offer_half_precision_for_logits_alone(
    registry: dict[str, Any], plan: VerifyPlan, step: Step, mode: VerifyMode
) -> None:
    trt = registry["trt"]
    described = registry["known"][f"dspark::{step.name}"]
    names = (*step.inputs, *step.outputs)
    (combination,) = described.autotune_func(
        *descriptors(registry, plan, mode, step.inputs),
        GAMMA,
        VOCAB,
        descriptors(registry, plan, mode, step.outputs),
    )
    offered = combination._get_combinations()
    for index, name in enumerate(names):
        types = {each.types[index] for each in offered}
        if name in ("target_logits", "draft_logits"):
            assert types == {trt.float32, trt.float16, trt.bfloat16}
        else:
            assert len(types) == 1
        assert {each.layouts[index] for each in offered} == {trt.TensorFormat.LINEAR}


def test_plugin_objects_are_made_for_ahead_of_time_building(registry: dict[str, Any]) -> None:
    trt = registry["trt"]
    creator = trt.get_plugin_registry().get_creator("Match", "1", "dspark")
    import numpy as np

    fields = [
        trt.PluginField(name, np.array([value]), trt.PluginFieldType.INT64)
        for name, value in (("gamma", GAMMA), ("vocab_size", VOCAB))
    ]
    plugin = creator.create_plugin(
        "Match",
        "dspark",
        trt.PluginFieldCollection(fields),
        trt.TensorRTPhase.BUILD,
        trt.QuickPluginCreationRequest.STRICT_AOT,
    )
    inputs = [trt.int64, trt.int64, trt.float32, trt.float32, trt.int32]
    assert plugin.get_output_data_types(inputs, [1, 2, 3, 3, 3]) == [trt.int64, trt.int64]
