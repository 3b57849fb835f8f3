# SPDX-License-Identifier: Apache-2.0
"""Put verification behind the logits of a language model that some other tool exported.

The model then returns counts and tokens instead of logits. Logits may be rows ``[T, V]`` (ragged, as this
project's own targets return them) or padded ``[B, L, V]``, what most exporters make of ``input_ids [B, L]``;
then two inputs say which rows count: ``draft_lengths [B]`` and ``anchor_places [B]``, the place of request
r's anchor in its row of input_ids.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from dspark_trt.bindings import Binding
from dspark_trt.errors import ExportError
from dspark_trt.plugins.contract import DOMAIN, VerifyMode
from dspark_trt.plugins.verify_model import (
    DOMAIN_VERSION,
    function_protos,
    value_info,
    verify_nodes,
)

OLDEST_OPSET = 18  # what the function bodies use means the same in every opset since
LOGITS = "target_logits"
PADDED_INPUTS = (
    Binding("draft_lengths", "int64", ("batch",)),
    Binding("anchor_places", "int64", ("batch",)),
)


def attach_to_file(
    source: Path,
    destination: Path,
    *,
    mode: VerifyMode | str,
    gamma: int,
    logits: str | None = None,
    vocab_size: int | None = None,
    keep_logits: bool = False,
) -> onnx.ModelProto:
    """`attach_verify` from file to file; weights in external files are linked or copied beside the result.

    Raises `ExportError` as `attach_verify` does, or when ``source`` is no ONNX model.
    """
    try:
        model = onnx.load(source, load_external_data=False)
    except Exception as error:  # damaged protobuf has no exception of its own
        raise ExportError(f"{source} cannot be read as an ONNX model: {error}") from error
    attached = attach_verify(
        model,
        mode=mode,
        gamma=gamma,
        logits=logits,
        vocab_size=vocab_size,
        keep_logits=keep_logits,
    )
    destination.parent.mkdir(parents=True, exist_ok=True)
    for location in _external_files(model):
        _place(source.parent / location, destination.parent / location)
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    try:
        temporary.write_bytes(attached.SerializeToString())
        temporary.replace(destination)
    finally:
        temporary.unlink(missing_ok=True)
    return attached


def attach_verify(
    model: onnx.ModelProto,
    *,
    mode: VerifyMode | str,
    gamma: int,
    logits: str | None = None,
    vocab_size: int | None = None,
    keep_logits: bool = False,
    processors: bool = False,
    top_logprobs: int | None = None,
) -> onnx.ModelProto:
    """A copy of ``model`` that ends in verification; inputs and outputs as in `contract.verify_bindings`.

    ``logits`` names the output to verify (default: the one called ``logits``, or the only output).
    ``vocab_size`` is needed where the graph leaves that extent symbolic. Raises `ExportError` when there is
    no such output, when a name is taken, or for a graph older than opset 18 that cannot be converted.
    """
    attached = _copy_with_opset(model)
    graph = attached.graph
    output = _logits_output(graph, logits)
    parts = verify_nodes(
        mode=mode,
        gamma=gamma,
        vocab_size=_vocab_size(output, vocab_size),
        processors=processors,
        top_logprobs=top_logprobs,
    )
    nodes, functions = list(parts.nodes), list(parts.functions)
    inputs = {info.name: info for info in parts.inputs if info.name != LOGITS}
    rows = output.name
    if output.type.tensor_type.elem_type != TensorProto.FLOAT:
        nodes.insert(0, helper.make_node("Cast", [rows], [LOGITS], to=TensorProto.FLOAT))
        rows = LOGITS
    if len(output.type.tensor_type.shape.dim) == 3:
        from dspark_trt.plugins.padded_functions import PackRows

        del inputs["offsets"]
        inputs |= {binding.name: value_info(binding) for binding in PADDED_INPUTS}
        packing = [rows, "draft_tokens", *(binding.name for binding in PADDED_INPUTS)]
        pack = helper.make_node(
            "PackRows", packing, ["packed_logits", "offsets"], domain=DOMAIN
        )
        nodes.insert(len(nodes) - len(parts.nodes), pack)
        functions += function_protos(PackRows)
        rows = "packed_logits"
    for node in nodes[len(nodes) - len(parts.nodes) :]:
        node.input[:] = [rows if name == LOGITS else name for name in node.input]
    produced = (name for node in nodes for name in node.output)
    _check_names(graph, (*inputs, *produced, *(tensor.name for tensor in parts.initializers)))
    graph.node.extend(nodes)
    graph.initializer.extend(parts.initializers)
    graph.input.extend(inputs.values())
    if not keep_logits:
        graph.output.remove(output)
    graph.output.extend(parts.outputs)
    _add_functions(attached, functions)
    return attached


def _copy_with_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    opset = _opset(model)
    if opset >= OLDEST_OPSET:
        copied = onnx.ModelProto()
        copied.CopyFrom(model)
        return copied
    try:
        return onnx.version_converter.convert_version(model, OLDEST_OPSET)
    except Exception as error:  # the converter raises whatever its C++ part threw
        raise ExportError(
            f"the model is of opset {opset} and cannot be converted to {OLDEST_OPSET} ({error}); "
            f"export it again with opset {OLDEST_OPSET} or later"
        ) from error


def _opset(model: onnx.ModelProto) -> int:
    versions = (e.version for e in model.opset_import if e.domain in ("", "ai.onnx"))
    return int(next(versions))


def _logits_output(graph: onnx.GraphProto, name: str | None) -> onnx.ValueInfoProto:
    names = [output.name for output in graph.output]
    wanted = name or ("logits" if "logits" in names else names[0] if len(names) == 1 else None)
    if wanted not in names:
        raise ExportError(
            f"no output {'called logits' if wanted is None else wanted} among {', '.join(names)}; "
            "name the one that holds logits with --logits"
        )
    output: onnx.ValueInfoProto = graph.output[names.index(wanted)]
    rank = len(output.type.tensor_type.shape.dim)
    if rank not in (2, 3):
        raise ExportError(f"output {wanted} has rank {rank}; logits are [T, V] or [B, L, V]")
    return output


def _vocab_size(output: onnx.ValueInfoProto, given: int | None) -> int:
    extent = output.type.tensor_type.shape.dim[-1].dim_value
    if extent and given and extent != given:
        raise ExportError(
            f"output {output.name} has {extent} columns, not the {given} asked for"
        )
    if not (extent or given):
        raise ExportError(
            f"the last extent of output {output.name} is symbolic; give it with --vocab-size"
        )
    return extent or int(given or 0)


def _check_names(graph: onnx.GraphProto, added: Iterable[str]) -> None:
    taken = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    taken |= {name for node in graph.node for name in node.output}
    if clash := sorted(taken & set(added)):
        raise ExportError(
            f"the graph already has tensors called {', '.join(clash)}: rename them"
        )


def _add_functions(model: onnx.ModelProto, functions: list[onnx.FunctionProto]) -> None:
    """Add bodies, said to be of the model's own opset: runtimes want one version of a domain."""
    opset, known = _opset(model), {(f.domain, f.name) for f in model.functions}
    for function in functions:
        if (function.domain, function.name) in known:
            continue
        known.add((function.domain, function.name))
        for entry in function.opset_import:
            if entry.domain == "":
                entry.version = opset
        model.functions.append(function)
    if DOMAIN not in (entry.domain for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, DOMAIN_VERSION))


def _external_files(model: onnx.ModelProto) -> set[str]:
    tensors = (t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL)
    found = {
        entry.value for t in tensors for entry in t.external_data if entry.key == "location"
    }
    for location in found:  # a model from elsewhere must not make us write outside its folder
        if Path(location).is_absolute() or ".." in Path(location).parts:
            raise ExportError(f"the model keeps weights in {location}, outside its own folder")
    return found


def _place(source: Path, destination: Path) -> None:
    if destination.exists() and destination.samefile(source):
        return
    if not source.is_file():
        raise ExportError(f"{source}, which holds weights of the model, is missing")
    destination.parent.mkdir(parents=True, exist_ok=True)
    destination.unlink(missing_ok=True)
    try:
        os.link(source, destination)
    except OSError:  # another file system
        shutil.copyfile(source, destination)
