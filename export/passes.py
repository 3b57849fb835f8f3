# SPDX-License-Identifier: Apache-2.0
"""Graph passes of the exporter. Each changes the model in place and says how many places it changed."""

import onnx
import onnx_ir as ir

from dspark_trt.bindings import TRANSPOSED_SUFFIX
from dspark_trt.errors import ExportError


def fold_weight_transposes(model: ir.Model) -> int:
    """`MatMul(x, Transpose(W))` -> `MatMul(x, W.T)` with W.T stored transposed.

    torch keeps linear weights as [out, in]; backends would transpose them at every load.
    """
    folded = 0
    for node in list(model.graph):
        weight = node.inputs[0] if node.op_type == "Transpose" else None
        if (
            weight is None
            or not weight.is_initializer()
            or list(node.attributes["perm"].as_ints()) != [1, 0]
        ):
            continue
        assert weight.name is not None
        name = weight.name + TRANSPOSED_SUFFIX
        if name not in model.graph.initializers:
            model.graph.initializers[name] = _transposed(weight, name)
        node.outputs[0].replace_all_uses_with(model.graph.initializers[name])
        model.graph.remove(node, safe=True)
        if not weight.uses():
            del model.graph.initializers[weight.name]
        folded += 1
    return folded


def _transposed(weight: ir.Value, name: str) -> ir.Value:
    """A new initializer; its value is read only when the model is written."""
    source = weight.const_value
    assert source is not None
    shape = ir.Shape(source.shape.numpy()[::-1])

    def transpose() -> ir.TensorProtocol:
        return ir.Tensor(source.numpy().T, dtype=source.dtype, shape=shape, name=name)

    tensor = ir.LazyTensor(transpose, dtype=source.dtype, shape=shape, name=name)
    return ir.Value(name=name, shape=shape, type=weight.type, const_value=tensor)


def drop_unused_outputs(model: ir.Model) -> int:
    """Trailing outputs nobody reads: TensorRT's parser rejects the optional ones of `Attention`."""
    dropped = 0
    for node in model.graph:
        used, required = len(node.outputs), _required_outputs(node)
        while (
            used > required
            and not node.outputs[used - 1].uses()
            and not node.outputs[used - 1].is_graph_output()
        ):
            used -= 1
        if used < len(node.outputs):
            dropped += len(node.outputs) - used
            node.resize_outputs(used)
    return dropped


def _required_outputs(node: ir.Node) -> int:
    """`TopK` has two, whether or not both are read."""
    if node.domain or not onnx.defs.has(node.op_type):
        return 1
    return max(onnx.defs.get_schema(node.op_type).min_output, 1)


def unfilled(value: ir.Value) -> ir.TensorProtocol:
    """The tensor of an initializer whose value `weights.py` is to write."""

    def refuse() -> ir.TensorProtocol:
        raise ExportError(f"weight {value.name} was never written")

    assert value.dtype is not None
    assert value.shape is not None
    return ir.LazyTensor(refuse, dtype=value.dtype, shape=value.shape, name=value.name)
