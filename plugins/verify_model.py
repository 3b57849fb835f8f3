# SPDX-License-Identifier: Apache-2.0
"""The stand-alone verification graph ``verify.onnx``."""

from typing import TYPE_CHECKING, Any

from dspark_trt.plugins.contract import DOMAIN, OPSET, TensorSpec, VerifyMode, verify_inputs, verify_outputs

if TYPE_CHECKING:
    import onnx


def function_protos(*functions: Any) -> list["onnx.FunctionProto"]:
    """The given onnxscript functions and everything they call, for ``model.functions``."""
    import onnx

    needed: dict[str, Any] = {}
    for function in functions:
        called = function.function_ir.get_called_functions().values()
        needed |= {each.name: each for each in (function, *called)}
    protos = [function.to_function_proto() for function in needed.values()]
    for proto in protos:  # onnxscript overlooks calls inside the branches of an If
        if DOMAIN not in (entry.domain for entry in proto.opset_import):
            proto.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    return protos


def verify_model(
    *, mode: VerifyMode | str = VerifyMode.REJECTION, gamma: int, vocab_size: int
) -> "onnx.ModelProto":
    """One node of domain ``dspark`` with its function bodies; names and shapes are those of the contract."""
    import onnx

    from dspark_trt.plugins.functions import VerifyGreedy, dspark
    from dspark_trt.plugins.rejection_functions import VerifyRejection

    mode = VerifyMode(mode)
    function = {VerifyMode.GREEDY: VerifyGreedy, VerifyMode.REJECTION: VerifyRejection}[mode]
    sizes = {"K": gamma, "K+1": gamma + 1, "V": vocab_size}
    inputs, outputs = verify_inputs(mode), verify_outputs()
    node = onnx.helper.make_node(
        function.name,
        [spec.name for spec in inputs],
        [spec.name for spec in outputs],
        name="verify",
        domain=dspark.domain,
    )
    graph = onnx.helper.make_graph(
        [node],
        f"verify_{mode}",
        [_value_info(spec, sizes) for spec in inputs],
        [_value_info(spec, sizes) for spec in outputs],
    )
    return onnx.helper.make_model(
        graph,
        functions=function_protos(function),
        opset_imports=[
            onnx.helper.make_opsetid("", OPSET),
            onnx.helper.make_opsetid(dspark.domain, dspark.version),
        ],
        ir_version=11,
        producer_name="dspark-trt",
    )


def _value_info(spec: TensorSpec, sizes: dict[str, int]) -> "onnx.ValueInfoProto":
    import onnx

    dtype = onnx.helper.np_dtype_to_tensor_dtype(__import__("numpy").dtype(spec.dtype))
    return onnx.helper.make_tensor_value_info(
        spec.name, dtype, [sizes.get(dim, dim) for dim in spec.shape]
    )
