# SPDX-License-Identifier: Apache-2.0
"""torch module -> ONNX graph without weights: parameters stay symbolic until they are written.

The modules carry untouched memory, so tracing a drafter of several gigabytes costs next to nothing; the
exporter must never look at a parameter's value, which is why parameters are graph inputs while the
optimiser runs.
"""

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping

import onnx_ir as ir
import torch

from dspark_trt.errors import ExportError, first_line
from dspark_trt.export.graphs import Graph, example_inputs, symbolic_dims
from dspark_trt.export.passes import drop_unused_outputs, fold_weight_transposes, unfilled

OPSET = 24


def onnx_from_module(graph: Graph) -> ir.Model:
    """Export one graph; every parameter is an initializer without a value, named as in the module.

    Raises:
        ExportError: torch could not trace or translate the module.
    """
    with warnings.catch_warnings(), _quiet("torch.onnx", "torch._export", "onnxscript"):
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                torch.export.export(
                    graph.module,
                    example_inputs(graph),
                    dynamic_shapes=_dynamic_shapes(graph),
                    strict=False,
                ),
                opset_version=OPSET,
                optimize=False,
                verbose=False,
            )
        except Exception as error:
            raise ExportError(
                f"graph {graph.name} cannot be exported: {first_line(error)}"
            ) from error
        assert program is not None
        model = program.model
        parameters = _hide_parameters(
            model, [name for name, _ in graph.module.named_parameters()]
        )
        _optimise(model)
    _name_bindings(model, graph)
    _restore_parameters(model, parameters)
    drop_unused_outputs(model)
    fold_weight_transposes(model)
    _strip_traces(model)
    model.graph.name = graph.name
    model.producer_name = "dspark-trt"
    return model


def _dynamic_shapes(graph: Graph) -> tuple[object, ...]:
    """Dynamic axes in the structure of the module's `forward`, whose last parameter may be `*rest`."""
    dims: dict[str, object] = {}
    axes = []
    for binding in graph.bindings.inputs:
        named = symbolic_dims(binding)
        axes.append(
            {i: dims.setdefault(d, torch.export.Dim(d, min=1)) for i, d in named.items()}
        )
    signature = inspect.signature(graph.module.forward).parameters.values()
    fixed = [p for p in signature if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    rest = axes[len(fixed) :]
    return (*axes[: len(fixed)], tuple(rest)) if rest else tuple(axes)


def _hide_parameters(model: ir.Model, names: Iterable[str]) -> list[ir.Value]:
    hidden = []
    for name in names:
        value = model.graph.initializers.pop(name, None)
        if value is not None:  # a graph need not use every parameter
            value.const_value = None
            model.graph.inputs.append(value)
            hidden.append(value)
    return hidden


def _restore_parameters(model: ir.Model, parameters: list[ir.Value]) -> None:
    """Back to initializers; their values come from `weights.py`."""
    for value in parameters:
        model.graph.inputs.remove(value)
        if value.uses():
            value.const_value = unfilled(value)
            model.graph.initializers.add(value)


def _optimise(model: ir.Model) -> None:
    from onnxscript import optimizer

    optimizer.optimize(model, num_iterations=2, onnx_shape_inference=False)


def _name_bindings(model: ir.Model, graph: Graph) -> None:
    """Give inputs, outputs and symbolic dimensions the names of the contract."""
    renamed: dict[str, str] = {}
    inputs = model.graph.inputs[: len(graph.bindings.inputs)]
    for value, binding in zip(inputs, graph.bindings.inputs, strict=True):
        assert value.shape is not None
        for axis, dim in symbolic_dims(binding).items():
            renamed[str(value.shape[axis])] = dim
        value.name = binding.name
    for value, binding in zip(model.graph.outputs, graph.bindings.outputs, strict=True):
        value.name = binding.name
    _rename_dims(model, renamed)
    for value, binding in zip(model.graph.outputs, graph.bindings.outputs, strict=True):
        value.shape = ir.Shape(binding.shape)


def _rename_dims(model: ir.Model, renamed: Mapping[str, str]) -> None:
    for node in model.graph:
        for value in node.outputs:
            if value.shape is not None:
                value.shape = _renamed(value.shape, renamed)
    for value in model.graph.inputs:
        if value.shape is not None:
            value.shape = _renamed(value.shape, renamed)


def _renamed(shape: ir.Shape, renamed: Mapping[str, str]) -> ir.Shape:
    """Plain symbols take the contract's name; derived ones (`15*s16`) become unknown."""
    return ir.Shape([d if isinstance(d, int) else renamed.get(str(d)) for d in shape])


def _strip_traces(model: ir.Model) -> None:
    """Torch records Python stack traces, with the exporting machine's paths, in every node."""
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.metadata_props.clear()


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Silence loggers that warn about missing torchvision and the like on every export."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    try:
        for logger in levels:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
