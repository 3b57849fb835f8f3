# SPDX-License-Identifier: Apache-2.0
"""Verification as TensorRT plugins: the Triton kernels become part of the engine, which then needs no Python.

An ahead-of-time plugin of TensorRT holds one kernel, so one verification is a chain of plugins, one for each
`kernel_plan.Step`; what passes between them are tensors of the network. `register_plugins` has to run before
a graph rewritten by `plugin_graph.use_plugins` is parsed.
"""

import inspect
from collections.abc import Callable
from types import GenericAlias
from typing import Any

from dspark_trt.plugins.contract import DOMAIN, VerifyMode, verify_bindings
from dspark_trt.plugins.kernel_compile import argument_types, compile_step
from dspark_trt.plugins.kernel_plan import Step, VerifyPlan, verify_plan
from dspark_trt.plugins.plugin_graph import HALF_LOGITS, MODES

ATTRIBUTES = ("gamma", "vocab_size")


def register_plugins(capability: int) -> tuple[str, ...]:
    """Register a plugin for each kernel; its PTX is made for sm_``capability`` while an engine is built.

    Returns the plugins' names. TensorRT refuses a second registration in one process.
    """
    modes = {
        step.name: mode
        for mode in MODES.values()
        for step in verify_plan(mode, gamma=1, vocab_size=1).steps
    }
    for name, mode in modes.items():
        _register(name, mode, capability)
    return tuple(f"{DOMAIN}::{name}" for name in modes)


def _register(name: str, mode: VerifyMode, capability: int) -> None:
    import tensorrt as trt
    import tensorrt.plugin as trtp

    plugin_id = f"{DOMAIN}::{name}"
    inputs = _step(name, mode, 1, 1)[1].inputs

    def describe(*descriptors: Any, gamma: int, vocab_size: int) -> Any:
        plan, step = _step(name, mode, gamma, vocab_size)
        batch = _batch(step, mode, descriptors)
        return tuple(
            trtp.from_shape_expr(
                (batch, *plan.buffers[output].shape), _trt_type(trt, plan.buffers[output].dtype)
            )
            for output in step.outputs
        )

    def combine(*descriptors: Any) -> Any:
        """Linear layouts; logits of any float type, everything else as declared."""
        gamma, vocab_size, _ = descriptors[-3:]
        plan, step = _step(name, mode, gamma, vocab_size)
        types = argument_types(mode, plan, gamma=gamma, vocab_size=vocab_size, logits_dtype="")
        names = (*step.inputs, *step.outputs)
        accepted = [
            "FP32*FP16*BF16"
            if n in HALF_LOGITS
            else _trt_type(trt, types[n]).name.replace("FLOAT", "FP32")
            for n in names
        ]
        return [
            trtp.AutoTuneCombination(", ".join(accepted), ", ".join(["LINEAR"] * len(names)))
        ]

    def compile_ahead(*arguments: Any) -> Any:
        descriptors, (gamma, vocab_size, _, _) = arguments[:-4], arguments[-4:]
        plan, step = _step(name, mode, gamma, vocab_size)
        types = argument_types(mode, plan, gamma=gamma, vocab_size=vocab_size, logits_dtype="")
        read = {n: d for n, d in zip(step.inputs, descriptors, strict=True) if n in HALF_LOGITS}
        types |= {n: _numpy_type(trt, descriptor.dtype) for n, descriptor in read.items()}
        kernel = compile_step(step, types, capability)
        launch = trtp.KernelLaunchParams()
        launch.grid_x = _batch(step, mode, descriptors)
        launch.grid_y, launch.grid_z = (*step.grid, 1, 1)[:2]
        launch.block_x = kernel.threads
        launch.shared_mem = kernel.shared_bytes
        return kernel.name, kernel.ptx, launch, trtp.SymIntExprs(0)

    tensors = dict.fromkeys(inputs, trtp.TensorDesc)
    attributes = dict.fromkeys(ATTRIBUTES, int)
    step = _step(name, mode, 1, 1)[1]
    described = GenericAlias(tuple, (trtp.TensorDesc,) * len(step.outputs))
    kernel_source = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]
    with_outputs = {**tensors, **attributes, "outputs": tuple[trtp.TensorDesc]}
    trtp.register(plugin_id)(_with_signature(describe, {**tensors, **attributes}, described))
    trtp.autotune(plugin_id)(
        _with_signature(combine, with_outputs, list[trtp.AutoTuneCombination])
    )
    trtp.aot_impl(plugin_id)(
        _with_signature(compile_ahead, {**with_outputs, "tactic": int}, kernel_source)
    )


def _step(name: str, mode: VerifyMode, gamma: int, vocab_size: int) -> tuple[VerifyPlan, Step]:
    plan = verify_plan(mode, gamma=gamma, vocab_size=vocab_size)
    return plan, next(step for step in plan.steps if step.name == name)


def _batch(step: Step, mode: VerifyMode, descriptors: tuple[Any, ...]) -> Any:
    """B as an expression: the first extent of an input that has one row a request."""
    bindings = verify_bindings(mode, gamma=1, vocab_size=1).inputs
    ragged = {binding.name for binding in bindings if binding.shape[0] != "batch"}
    index = next(i for i, name in enumerate(step.inputs) if name not in ragged)
    return descriptors[index].shape_expr[0]


def _with_signature(
    function: Callable[..., Any], parameters: dict[str, Any], returned: Any
) -> Callable[..., Any]:
    """TensorRT reads names and types of a plugin's tensors and attributes from the function's signature."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind, annotation=type_) for name, type_ in parameters.items()],
        return_annotation=returned,
    )
    return function


def _trt_type(trt: Any, dtype: str) -> Any:
    return {"float32": trt.float32, "int32": trt.int32, "int64": trt.int64}[dtype]


def _numpy_type(trt: Any, dtype: Any) -> str:
    return {trt.float32: "float32", trt.float16: "float16", trt.bfloat16: "bfloat16"}[dtype]
