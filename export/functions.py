# SPDX-License-Identifier: Apache-2.0
"""Bodies of the `dspark` nodes: a graph that uses one carries its ONNX function, so that any backend
without a kernel inlines it.
"""

import onnx_ir as ir

from dspark_trt.bindings import Binding


def add_dspark_functions(model: ir.Model) -> ir.Model:
    """Add the function bodies of the `dspark` nodes that `model` contains."""
    from dspark_trt.plugins.draft_functions import sample_draft_function
    from dspark_trt.plugins.functions import dspark
    from dspark_trt.plugins.verify_model import function_protos

    sampling = next((node for node in model.graph if node.domain == dspark.domain), None)
    if sampling is not None:
        logits = sampling.inputs[0]
        assert logits is not None
        assert logits.shape is not None
        vocab_size = logits.shape[-1]
        assert isinstance(vocab_size, int)  # a dimension of the head
        for proto in function_protos(sample_draft_function(vocab_size)):
            function = ir.serde.deserialize_function(proto)
            model.functions[function.identifier()] = function
        model.opset_imports[dspark.domain] = dspark.version
    return model


def greedy_draft(draft: ir.Model, sampling_inputs: tuple[Binding, ...], name: str) -> ir.Model:
    """A copy of a draft step, without its function bodies, that takes the first maximum of every slot."""
    model = ir.from_proto(ir.to_proto(draft))
    model.graph.name = name
    for node in [node for node in model.graph if node.op_type == "SampleDraft"]:
        best = ir.node("ArgMax", [node.inputs[0]], {"axis": -1, "keepdims": 0})
        token, drawn = best.outputs[0], node.outputs[0]
        token.name, token.type, token.shape = drawn.name, drawn.type, drawn.shape
        model.graph.insert_before(node, best)
        drawn.replace_all_uses_with(token, replace_graph_outputs=True)  # with γ = 1 it is one
        model.graph.remove(node, safe=True)
    model.opset_imports.pop("dspark", None)
    dropped = {binding.name for binding in sampling_inputs}
    for value in [value for value in model.graph.inputs if value.name in dropped]:
        model.graph.inputs.remove(value)
    return model
