# SPDX-License-Identifier: Apache-2.0
"""Weight-only quantisation of the products of a graph, for onnxruntime's CPU kernels.

`MatMulNBits` and not `DynamicQuantizeMatMul`, which is faster from a few rows on: that one rounds all rows of a
step on one scale, so that a token would depend on who else is in the batch and how many drafts are verified.
"""

import onnx_ir as ir

from dspark_trt.bindings import TRANSPOSED_SUFFIX
from dspark_trt.block_weights import (
    PACKED_SUFFIX,
    SCALES_SUFFIX,
    block_size,
    packed_shapes,
)
from dspark_trt.export.passes import unfilled

DOMAIN = "com.microsoft"
# All that cost anything, but the projection of the taps, which are large, and the confidence head, whose
# logit is the answer itself.
_PRODUCTS = frozenset(
    (
        "qkv_proj", "q_proj", "kv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head", "markov_w2",
    )
)  # fmt: skip
_ROUND_INPUTS = (
    4  # `accuracy_level`: inputs become 8 bits, each block of each row on a scale of its own
)


def quantise_products(model: ir.Model, bits: int) -> int:
    """`MatMul` and `Gemm` with a stored weight -> `MatMulNBits`; how many there were.

    The new initializers have no values: `weights.py` writes them, `block_weights` describes them.
    """
    nodes = [node for node in model.graph if _weight(node) is not None]
    for node in nodes:
        weight = _weight(node)
        assert weight is not None
        _replace(model, node, weight, bits)
    if nodes:
        model.opset_imports[DOMAIN] = 1
    return len(nodes)


def _weight(node: ir.Node) -> ir.Value | None:
    """The weight of a product to be quantised."""
    value = node.inputs[1] if node.op_type in ("MatMul", "Gemm") else None
    if value is None or not value.is_initializer():
        return None
    assert value.name is not None
    module = value.name.removesuffix(TRANSPOSED_SUFFIX).removesuffix(".weight")
    return value if module.rpartition(".")[2] in _PRODUCTS else None


def _replace(model: ir.Model, node: ir.Node, weight: ir.Value, bits: int) -> None:
    assert weight.name is not None
    assert weight.shape is not None
    name = weight.name.removesuffix(TRANSPOSED_SUFFIX)
    outputs, inputs = weight.shape.numpy()
    if name != weight.name:
        outputs, inputs = inputs, outputs
    packed_shape, scales_shape = packed_shapes(outputs, inputs, bits)
    operands = [
        node.inputs[0],
        _initializer(model, name + PACKED_SUFFIX, ir.DataType.UINT8, packed_shape),
        _initializer(model, name + SCALES_SUFFIX, ir.DataType.FLOAT, scales_shape),
    ]
    if len(node.inputs) > 2:  # a bias
        operands += [None, None, node.inputs[2]]
    attributes = {
        "K": inputs,
        "N": outputs,
        "bits": bits,
        "block_size": block_size(inputs, bits),
        "accuracy_level": _ROUND_INPUTS,
    }
    product = ir.node("MatMulNBits", operands, attributes, domain=DOMAIN, name=node.name)
    result, replaced = product.outputs[0], node.outputs[0]
    result.name, result.type, result.shape = replaced.name, replaced.type, replaced.shape
    model.graph.insert_before(node, product)
    replaced.replace_all_uses_with(result, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
    if not weight.uses():
        del model.graph.initializers[weight.name]


def _initializer(
    model: ir.Model, name: str, dtype: ir.DataType, shape: tuple[int, ...]
) -> ir.Value:
    if name not in model.graph.initializers:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        value.const_value = unfilled(value)
        model.graph.initializers[name] = value
    return model.graph.initializers[name]
