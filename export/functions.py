# SPDX-License-Identifier: Apache-2.0
"""Bodies of the `dspark` nodes: a graph that uses one carries its ONNX function, so that any backend
without a kernel inlines it.
"""

import onnx_ir as ir


def add_dspark_functions(model: ir.Model) -> ir.Model:
    """Add the function bodies of the `dspark` nodes that `model` contains."""
    from dspark_trt.plugins.functions import SampleDraft, dspark
    from dspark_trt.plugins.verify_model import function_protos

    if any(node.domain == dspark.domain for node in model.graph):
        for proto in function_protos(SampleDraft):
            function = ir.serde.deserialize_function(proto)
            model.functions[function.identifier()] = function
        model.opset_imports[dspark.domain] = dspark.version
    return model
