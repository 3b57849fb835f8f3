# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation of the verification kernels: PTX and cubin for any architecture, no GPU needed."""

import re
from dataclasses import dataclass
from typing import Any

from dspark_trt.plugins.contract import VerifyMode, verify_bindings
from dspark_trt.plugins.kernel_plan import COMPILE_OPTIONS, Step, VerifyPlan, verify_plan

WARP_THREADS = 32
PTX_VERSION = 87  # the oldest that knows sm_120, so that drivers since CUDA 12.8 take it
POINTERS = {
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "int32": "*i32",
    "int64": "*i64",
}


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel for one architecture. It takes exactly the step's inputs and outputs as pointers."""

    name: str
    ptx: str
    cubin: bytes
    threads: int
    shared_bytes: int


def argument_types(
    mode: VerifyMode, plan: VerifyPlan, *, gamma: int, vocab_size: int, logits_dtype: str
) -> dict[str, str]:
    """NumPy type of every tensor the kernels of a plan read or write."""
    inputs = verify_bindings(mode, gamma=gamma, vocab_size=vocab_size).inputs
    types = {binding.name: binding.dtype for binding in inputs}
    types |= {name: logits_dtype for name in ("target_logits", "draft_logits") if name in types}
    return types | {name: buffer.dtype for name, buffer in plan.buffers.items()}


def compile_step(step: Step, types: dict[str, str], capability: int) -> CompiledKernel:
    """Compile one kernel for sm_``capability``, e.g. 90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = step.kernel.arg_names
    tensors = (*step.inputs, *step.outputs)
    signature = dict(zip(names, (POINTERS[types[name]] for name in tensors), strict=False))
    signature |= dict.fromkeys(step.constants, "constexpr")
    # Buffers of torch and TensorRT are aligned to 256 bytes: whole vectors can be loaded.
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(tensors))}
    source = ASTSource(step.kernel, signature, constexprs=step.constants, attrs=aligned)
    target = GPUTarget("cuda", capability, WARP_THREADS)
    options = {"num_warps": step.warps, "ptx_version": PTX_VERSION, **COMPILE_OPTIONS}
    compiled: Any = triton.compile(source, target=target, options=options)
    return CompiledKernel(
        name=compiled.metadata.name,
        ptx=without_scratch_parameters(compiled.asm["ptx"], len(tensors)),
        cubin=compiled.asm["cubin"],
        threads=compiled.metadata.num_warps * WARP_THREADS,
        shared_bytes=compiled.metadata.shared,
    )


def without_scratch_parameters(ptx: str, used: int) -> str:
    """Drop the trailing parameters that Triton adds for its own runtime (scratch memory, profiling).

    TensorRT passes what the plugin declares and nothing else; a longer entry would read past it.
    """
    header = re.search(r"\.entry\s+\w+\((.*?)\)", ptx, re.DOTALL)
    assert header is not None, "Triton returned PTX without an entry"
    parameters = [line.strip().rstrip(",") for line in header[1].strip().splitlines()]
    dropped = [parameter.split()[-1] for parameter in parameters[used:]]
    body = ptx[header.end() :]
    assert not any(re.search(rf"\b{name}\b", body) for name in dropped), (
        "scratch memory is used"
    )
    kept = ",\n\t".join(parameters[:used])
    return f"{ptx[: header.start(1)]}\n\t{kept}\n{ptx[header.end(1) :]}"


def compile_plan(
    mode: VerifyMode, *, gamma: int, vocab_size: int, logits_dtype: str, capability: int
) -> dict[str, CompiledKernel]:
    """Every kernel of one verification, by the name of its step."""
    plan = verify_plan(mode, gamma=gamma, vocab_size=vocab_size)
    types = argument_types(
        mode, plan, gamma=gamma, vocab_size=vocab_size, logits_dtype=logits_dtype
    )
    return {step.name: compile_step(step, types, capability) for step in plan.steps}
