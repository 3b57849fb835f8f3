# SPDX-License-Identifier: Apache-2.0
"""Verification as ONNX nodes: the stand-alone graph ``verify.onnx``, and what another graph needs to carry it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from dspark_trt.bindings import Binding
from dspark_trt.plugins.contract import DOMAIN, OPSET, VerifyMode, verify_bindings

DOMAIN_VERSION = 1
IR_VERSION = 11  # opset 24; what onnxruntime 1.26 reads


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyNodes:
    """Nodes of domain ``dspark``, their function bodies and constants, and the tensors they read and write."""

    nodes: tuple[onnx.NodeProto, ...]
    functions: tuple[onnx.FunctionProto, ...]
    initializers: tuple[onnx.TensorProto, ...]
    inputs: tuple[onnx.ValueInfoProto, ...]
    outputs: tuple[onnx.ValueInfoProto, ...]


def verify_model(
    *,
    mode: VerifyMode | str = VerifyMode.REJECTION,
    gamma: int,
    vocab_size: int,
    processors: bool = False,
    top_logprobs: int | None = None,
) -> onnx.ModelProto:
    """``verify.onnx``: inputs and outputs as in `contract.verify_bindings`, one verification node in between."""
    parts = verify_nodes(
        mode=mode,
        gamma=gamma,
        vocab_size=vocab_size,
        processors=processors,
        top_logprobs=top_logprobs,
    )
    graph = helper.make_graph(
        parts.nodes,
        f"verify_{VerifyMode(mode)}",
        parts.inputs,
        parts.outputs,
        initializer=parts.initializers,
    )
    return helper.make_model(
        graph,
        functions=parts.functions,
        opset_imports=[
            helper.make_opsetid("", OPSET),
            helper.make_opsetid(DOMAIN, DOMAIN_VERSION),
        ],
        ir_version=IR_VERSION,
        producer_name="dspark-trt",
    )


def verify_nodes(
    *,
    mode: VerifyMode | str,
    gamma: int,
    vocab_size: int,
    processors: bool = False,
    top_logprobs: int | None = None,
) -> VerifyNodes:
    """The nodes of `verify_model`; the tensor ``target_logits`` is the first of its inputs."""
    from dspark_trt.plugins.coupled_functions import VerifyCoupled
    from dspark_trt.plugins.functions import VerifyGreedy
    from dspark_trt.plugins.processor_functions import ProcessLogits, TokenLogprobs, TopLogprobs
    from dspark_trt.plugins.rejection_functions import VerifyRejection

    mode = VerifyMode(mode)
    bindings = verify_bindings(
        mode,
        gamma=gamma,
        vocab_size=vocab_size,
        processors=processors,
        top_logprobs=top_logprobs,
    )
    verify = {
        VerifyMode.REJECTION: VerifyRejection,
        VerifyMode.COUPLED: VerifyCoupled,
        VerifyMode.GREEDY: VerifyGreedy,
    }[mode]
    plain = verify_bindings(mode, gamma=gamma, vocab_size=vocab_size)
    ragged = plain.input_names[:3]
    calls: list[tuple[Any, tuple[str, ...], tuple[str, ...]]] = []
    logits = "target_logits"
    if processors:
        logits = "processed_logits"
        own = bindings.input_names[len(plain.inputs) :]
        calls.append((ProcessLogits, (*ragged, *own), (logits,)))
    calls.append((verify, (logits, *plain.input_names[1:]), plain.output_names))
    initializers = []
    if top_logprobs is not None:
        committed = ("target_logits", "offsets", "tokens")
        calls.append((TokenLogprobs, committed, ("logprobs",)))
        if top_logprobs:
            count = helper.make_tensor("top_count", onnx.TensorProto.INT64, [1], [top_logprobs])
            initializers.append(count)
            alternatives = ("top_tokens", "top_logprobs")
            calls.append((TopLogprobs, (*committed, count.name), alternatives))
    return VerifyNodes(
        nodes=tuple(
            helper.make_node(function.name, inputs, outputs, name=function.name, domain=DOMAIN)
            for function, inputs, outputs in calls
        ),
        functions=tuple(function_protos(*(function for function, _, _ in calls))),
        initializers=tuple(initializers),
        inputs=tuple(value_info(binding) for binding in bindings.inputs),
        outputs=tuple(value_info(binding) for binding in bindings.outputs),
    )


def function_protos(*functions: Any) -> list[onnx.FunctionProto]:
    """The given onnxscript functions and everything they call, for ``model.functions``."""
    needed: dict[str, Any] = {}
    for function in functions:
        called = function.function_ir.get_called_functions().values()
        needed |= {each.name: each for each in (function, *called)}
    protos = [function.to_function_proto() for function in needed.values()]
    for proto in protos:  # onnxscript overlooks calls inside the branches of an If
        if DOMAIN not in (entry.domain for entry in proto.opset_import):
            proto.opset_import.append(helper.make_opsetid(DOMAIN, DOMAIN_VERSION))
    return protos


def value_info(binding: Binding) -> onnx.ValueInfoProto:
    """A graph input or output as the contract describes it."""
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(binding.dtype))
    info: onnx.ValueInfoProto = helper.make_tensor_value_info(
        binding.name, dtype, binding.shape
    )
    return info
