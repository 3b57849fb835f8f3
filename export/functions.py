# SPDX-License-Identifier: Apache-2.0
"""Bodies of the `dspark` nodes: a graph that uses one carries its ONNX function, so that any backend
without a kernel inlines it.
"""

import onnx_ir as ir

from dspark_trt.bindings import Binding


def add_dspark_functions(model: ir.Model, vocab_size: int) -> ir.Model:
    """Add the function bodies of the `dspark` nodes that `model` contains."""
    from dspark_trt.plugins.draft_functions import sample_draft_function
    from dspark_trt.plugins.functions import dspark
    from dspark_trt.plugins.verify_model import function_protos

    if any(node.domain == dspark.domain for node in model.graph):
        for proto in function_protos(sample_draft_function(vocab_size)):
            function = ir.serde.deserialize_function(proto)
            model.functions[function.identifier()] = function
        model.opset_imports[dspark.domain] = dspark.version
    return model


def greedy_draft(draft: ir.Model, sampling_inputs: tuple[Binding, ...], name: str) -> ir.Model:
    """A copy of a draft step, without its function bodies, that takes the first maximum of every slot."""
    model = ir.from_proto(ir.to_proto(draft))
    model.graph.name = name
    for node in list(model.graph):
        if node.op_type == "SampleDraft":
            best = ir.node("ArgMax", [node.inputs[0]], {"axis": -1, "keepdims": 0})
            best.outputs[0].name, best.outputs[0].type = (
                node.outputs[0].name,
                node.outputs[0].type,
            )
            best.outputs[0].shape = node.outputs[0].shape
            model.graph.insert_before(node, best)
            ir.convenience.replace_all_uses_with(node.outputs[0], best.outputs[0])
            model.graph.remove(node, safe=True)
    dropped = {binding.name for binding in sampling_inputs}
    for value in [value for value in model.graph.inputs if value.name in dropped]:
        model.graph.inputs.remove(value)
    return model
