# SPDX-License-Identifier: Apache-2.0
"""A target that is already an ONNX graph, made by some other tool, is refused with what it has and what it lacks.

Graphs of a bundle come from checkpoints: they take ragged rows and return, beside the logits, the hidden states
that the drafter taps. Usual exports return logits and caches alone.
"""

import re
from pathlib import Path

from dspark_trt.checkpoint import DraftCheckpoint
from dspark_trt.errors import ExportError

_HIDDEN_STATE = re.compile(r"hidden_states?[._](\d+)")  # number 0 is the embedding output
_SHOWN = 8  # output names in a sentence; a cache has two of each layer


def refuse_graph_as_target(source: str | Path, draft: DraftCheckpoint) -> None:
    """Do nothing about a checkpoint or a hub id.

    Raises:
        ExportError: ``source`` is an ONNX file, or a folder with one and without safetensors; names the
            graph's outputs, the taps it lacks, and the command that exports a target with them.
    """
    graph = _graph(Path(source).expanduser())
    if graph is None:
        return
    names = _outputs(graph)
    ids = draft.config.target_layer_ids
    present = {int(found[1]) - 1 for name in names if (found := _HIDDEN_STATE.search(name))}
    missing = [layer for layer in ids if layer not in present]
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    lacks = (
        f"no output holds what the drafter taps, the outputs of target layers {missing}"
        if missing
        else "it has what the drafter taps, but neither ragged rows nor caches in place"
    )
    raise ExportError(
        f"{graph} is an ONNX graph with the outputs {shown}{more}: {lacks}. Give --target the checkpoint it was "
        f"made from (config.json and safetensors), and the taps are added: dspark-trt export --draft {draft.path} "
        "--target CHECKPOINT -o BUNDLE. To run the graph yourself, leave --target out and implement HostTarget."
    )


def _graph(path: Path) -> Path | None:
    if path.suffix == ".onnx":
        return path if path.is_file() else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    graphs = sorted(path.glob("*.onnx")) or sorted(path.glob("onnx/*.onnx"))
    likely = [graph for name in ("model", "target") for graph in graphs if graph.stem == name]
    return next(iter([*likely, *graphs]), None)


def _outputs(graph: Path) -> list[str]:
    import onnx

    try:
        model = onnx.load(graph, load_external_data=False)
    except Exception as error:  # damaged protobuf has no exception of its own
        raise ExportError(f"{graph} cannot be read as an ONNX model: {error}") from error
    return [output.name for output in model.graph.output]
