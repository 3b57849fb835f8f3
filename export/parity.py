# SPDX-License-Identifier: Apache-2.0
"""Does every graph of a bundle compute what its torch module computes?

The modules get the weights of the checkpoints, or the bundle's own, and fresh random inputs; Polygraphy
runs the graphs in onnxruntime and compares. Verification graphs are compared with their NumPy specification.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dspark_trt.bundle import FUSED_TARGET, GREEDY_DRAFT, Bundle, Source
from dspark_trt.checkpoint import DraftCheckpoint, TargetCheckpoint, source_hash
from dspark_trt.errors import BackendError, CheckpointError
from dspark_trt.export.graphs import (
    TORCH_DTYPES,
    Graph,
    draft_graphs,
    greedy_draft_graph,
    target_graph,
)
from dspark_trt.export.verify_cases import Arrays, verify_cases
from dspark_trt.models.loading import load_draft, load_target
from dspark_trt.models.stored_weights import StoredWeights
from dspark_trt.models.vocabulary import UNDRAFTABLE
from dspark_trt.plugins.specification import verify_rejection

# Absolute, for outputs of magnitude up to 8, and in proportion beyond: float32 sums in another order,
# float16 operands round at 2^-11.
TOLERANCES = {"float32": 2e-4, "float16": 2e-2}
# Against the matrices that few bits stand for: what is left is the inputs of each product, rounded to 8 bits.
_FEW_BITS_TOLERANCE = 0.25
_MAGNITUDE = 8.0


@dataclass(frozen=True, slots=True)
class OutputParity:
    """One output of one graph against its reference, over all valid elements."""

    name: str  # of the graph
    output: str
    max_abs_error: float | None  # None: not finite
    tolerance: float
    passed: bool


def check_parity(
    bundle: Bundle,
    *,
    draft: DraftCheckpoint | None = None,
    target: TargetCheckpoint | None = None,
    seed: int = 0,
) -> Iterator[OutputParity]:
    """Compare graph by graph, yielding results as they come.

    Args:
        bundle: what to check.
        draft: checkpoint that the reference takes its weights from; None: the bundle's own weights.
        target: the same for the target.
        seed: of the random inputs.

    Raises:
        BackendError: onnxruntime's CPU provider cannot run the bundle's precision.
        CheckpointError: a checkpoint is not the one the bundle was exported from.
    """
    if bundle.dtype not in TOLERANCES:
        raise BackendError(
            f"onnxruntime's CPU provider has no {bundle.dtype} kernels, so parity cannot be measured here. "
            "Check a float32 or float16 export of the same checkpoint."
        )
    random = np.random.default_rng(seed)
    for graph in _graphs(bundle, draft, target):
        weights = bundle.weights if graph.name == "target" else bundle.draft_weights
        tolerance = TOLERANCES[bundle.dtype] if weights is None else _FEW_BITS_TOLERANCE
        inputs = _inputs(graph, random)
        outputs = _run_graph(bundle.graph_path(graph.name), inputs)
        reference = _run_module(graph, inputs)
        if graph.name in ("draft", GREEDY_DRAFT):
            _forget_after_divergence(inputs, reference, outputs, tolerance)
        yield from _compare(graph.name, reference, outputs, tolerance)
        if graph.name == "target":
            yield _many_rows_against_one(bundle, graph, random, tolerance)
            if FUSED_TARGET in bundle.graph_names:
                yield from _fused_target(bundle, graph, random)
    for case in verify_cases(bundle, random):
        outputs = _run_graph(bundle.graph_path(case.graph), case.inputs)
        yield from _compare(case.graph, case.expected, outputs, TOLERANCES["float32"])


def _graphs(
    bundle: Bundle, draft: DraftCheckpoint | None, target: TargetCheckpoint | None
) -> list[Graph]:
    """The modules behind the graphs, with weights."""
    dtype, stored = TORCH_DTYPES[bundle.dtype], StoredWeights(bundle)
    if draft is not None:
        _check_source(draft, bundle.draft_source)
        drafter = load_draft(draft, target, dtype)
    else:
        drafter = stored.draft_module()
    graphs = draft_graphs(drafter, bundle.dtype)
    graphs.append(greedy_draft_graph(drafter, bundle.dtype))
    if bundle.target is None:
        return graphs
    layers = bundle.draft.target_layer_ids
    if target is not None:
        _check_source(target, bundle.target_source)
        served = load_target(target, layers, dtype)
    else:
        served = stored.target()
    return [*graphs, target_graph(served, bundle.draft, bundle.dtype)]


def _check_source(
    checkpoint: DraftCheckpoint | TargetCheckpoint, source: Source | None
) -> None:
    digest = source_hash(checkpoint)
    if source is None or digest != source.sha256:
        expected = (
            "no target" if source is None else f"{source.name}, sha256 {source.sha256[:12]}…"
        )
        raise CheckpointError(
            f"{checkpoint.path} (sha256 {digest[:12]}…) is not what the bundle was exported from: {expected}"
        )


def _many_rows_against_one(
    bundle: Bundle, graph: Graph, random: np.random.Generator, tolerance: float
) -> OutputParity:
    """How far logits of a block verified at once are from decoding it row by row: greedy decoding can
    differ from plain decoding only where two logits are nearer than that (see `strict_margin`).
    """
    path, rows, start = bundle.graph_path(graph.name), 8, 20
    inputs = _inputs(graph, random)
    caches = {name: value[:1] for name, value in inputs.items() if name.startswith("past_")}
    tokens = random.integers(0, _vocab(graph), rows)

    def step(first: int, count: int) -> Arrays:
        index = np.arange(count)
        return _run_graph(
            path,
            {
                "token_ids": tokens[first : first + count],
                "positions": start + first + index,
                "pad_index": index[None],
                "unpad_index": index,
                "logit_rows": index,
                "context_len": np.array([start + first]),
                **caches,
            },
        )

    together = step(0, rows)["logits"]
    alone = []
    for row in range(rows):
        outputs = step(row, 1)
        alone.append(outputs["logits"][0])
        caches = {name: outputs[name.replace("past", "present")] for name in caches}
    with np.errstate(invalid="ignore"):  # not finite: said in the result
        error = float(np.abs(together - alone).max())
    limit = _limit(together, tolerance)
    finite = error if isfinite(error) else None
    return OutputParity("target", "logits, 8 rows against 1", finite, limit, error <= limit)


def _fused_target(
    bundle: Bundle, graph: Graph, random: np.random.Generator
) -> Iterator[OutputParity]:
    """The target with verification behind it, against the plain target's logits under the specification."""
    gamma = bundle.draft.gamma
    inputs = _inputs(graph, random)
    lengths = np.minimum([3, 2, 1], gamma)
    starts = np.array([0, 4, 7])  # first flattened row of each request
    inputs["logit_rows"] = np.concatenate(
        [start + np.arange(1 + length) for start, length in zip(starts, lengths, strict=True)]
    )
    reference = _run_graph(bundle.graph_path(graph.name), inputs)
    logits = reference.pop("logits")
    offsets = np.concatenate([[0], np.cumsum(1 + lengths)])
    verify: Arrays = {
        "offsets": offsets.astype(np.int64),
        "draft_tokens": np.stack(
            [np.resize(logits[a:].argmax(-1), gamma) for a in offsets[:-1]]
        ),
        "draft_logits": random.standard_normal((3, gamma, logits.shape[1]), np.float32),
        "draft_temperature": np.array([0, 0.7, 1], np.float32),
        "temperature": np.array([0, 0.7, 1], np.float32),
        "top_k": np.array([0, 20, 0], np.int64),
        "top_p": np.array([1, 1, 0.9], np.float32),
        "min_p": np.zeros(3, np.float32),
        "uniforms": random.random((3, gamma + 1), np.float32),
    }
    outputs = _run_graph(bundle.graph_path(FUSED_TARGET), inputs | verify)
    expected = reference | verify_rejection(target_logits=logits, **verify)._asdict()
    yield from _compare(FUSED_TARGET, expected, outputs, TOLERANCES[bundle.dtype])


_SIZES = {
    "batch": 3, "capacity": 256, "rows": 9, "padded": 4, "logit_rows": 5, "context_rows": 6, "slots": 4,
}  # fmt: skip


def _inputs(graph: Graph, random: np.random.Generator) -> Arrays:
    """Random tensors of the contract's shapes; integers within their meaning."""
    ragged: Arrays = {
        # Requests of 4, 3 and 2 rows: flattened, padded to 4.
        "pad_index": np.array([[0, 1, 2, 3], [4, 5, 6, 0], [7, 8, 0, 0]], np.int64),
        "unpad_index": np.array([0, 1, 2, 3, 4, 5, 6, 8, 9], np.int64),
        "logit_rows": np.array([0, 3, 4, 6, 8], np.int64),
        "context_len": np.array([0, 5, 17], np.int64),
        "positions": np.array([0, 1, 2, 3, 5, 6, 7, 17, 18], np.int64),
        "new_len": np.array([0, 1, 2], np.int64),
        "temperature": np.array([0.0, 0.7, 1.0], np.float32),
    }
    made: Arrays = {}
    for binding in graph.bindings.inputs:
        shape = tuple(d if isinstance(d, int) else _SIZES[d] for d in binding.shape)
        if binding.name in ragged:
            made[binding.name] = ragged[binding.name]
        elif binding.dtype == "int64":
            made[binding.name] = random.integers(0, _vocab(graph), shape)
        elif binding.name == "uniforms":
            made[binding.name] = random.random(shape, np.float32)
        else:
            made[binding.name] = random.standard_normal(shape, np.float32).astype(binding.dtype)
    return made


def _vocab(graph: Graph) -> int:
    return next(
        p.shape[0] for n, p in graph.module.named_parameters() if "embed" in n or "_w1" in n
    )


def _run_module(graph: Graph, inputs: Arrays) -> Arrays:
    """Copies go in: eager modules update caches in place."""
    tensors = [torch.from_numpy(inputs[name].copy()) for name in graph.bindings.input_names]
    with torch.inference_mode():
        results = graph.module(*tensors)
    arrays = (result.contiguous().numpy() for result in results)  # Polygraphy asks for it
    return dict(zip(graph.bindings.output_names, arrays, strict=True))


def _run_graph(path: Path, inputs: Arrays) -> Arrays:
    import onnxruntime
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
    from polygraphy.logger import G_LOGGER

    onnxruntime.set_default_logger_severity(
        3
    )  # this runner copies caches, and is told so each time
    with (
        G_LOGGER.verbosity(G_LOGGER.CRITICAL),
        OnnxrtRunner(SessionFromOnnx(str(path), providers=["CPUExecutionProvider"])) as runner,
    ):
        return dict(runner.infer(inputs))


def _forget_after_divergence(
    inputs: Arrays, reference: Arrays, outputs: Arrays, tolerance: float
) -> None:
    """Two drafts that part at a near tie are both right; what follows has different inputs.

    A token differs from the reference only where the reference's own choice is within the tolerance;
    from there on the slot is left out of the comparison. Where rounding is coarse, a token that was drawn
    may differ; the logits before it are compared themselves.
    """
    temperature = inputs.get("temperature", np.zeros(len(reference["tokens"]), np.float32))
    drawn = (temperature > 0) & (tolerance >= _FEW_BITS_TOLERANCE)
    same = reference["tokens"] == outputs["tokens"]
    for request, slot in zip(*np.nonzero(~same), strict=True):
        if not same[request, :slot].all():
            continue  # behind the first difference
        row = reference["logits"][request, slot]
        chosen = [row[x["tokens"][request, slot]] for x in (reference, outputs)]
        if drawn[request] or abs(float(chosen[0] - chosen[1])) <= 2 * tolerance:
            outputs["tokens"][request, slot:] = reference["tokens"][request, slot:]
            outputs["logits"][request, slot + 1 :] = reference["logits"][request, slot + 1 :]
            if "confidence_logits" in outputs:
                outputs["confidence_logits"][request, slot + 1 :] = reference[
                    "confidence_logits"
                ][request, slot + 1 :]


def _compare(
    graph: str, reference: Arrays, outputs: Arrays, tolerance: float
) -> Iterator[OutputParity]:
    from polygraphy.comparator import Comparator, RunResults, SimpleCompareFunc
    from polygraphy.comparator.struct import IterationResult
    from polygraphy.logger import G_LOGGER

    runs = RunResults(
        [
            ("reference", [IterationResult(reference, runner_name="reference")]),
            ("onnxruntime", [IterationResult(outputs, runner_name="onnxruntime")]),
        ]
    )
    limits = {name: _limit(value, tolerance) for name, value in reference.items()}
    compare = SimpleCompareFunc(atol=limits, rtol=0.0, check_error_stat="max")
    # Polygraphy also divides by the reference, zeros included.
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL), np.errstate(all="ignore"):
        results = Comparator.compare_accuracy(runs, compare_func=compare)
    ((iteration,),) = results[0].values()  # one pair of runners, one iteration
    for output, verdict in iteration.items():
        error = float(verdict.max_absdiff)
        finite = error if isfinite(error) else None
        yield OutputParity(graph, output, finite, limits[output], bool(verdict))


def _limit(reference: NDArray[Any], tolerance: float) -> float:
    if reference.dtype.kind == "i":
        return 0.0
    # A limit drawn from infinities, or from what stands for them, would pass everything.
    values = reference.astype(np.float64)
    finite = np.abs(values[np.isfinite(values) & (values > UNDRAFTABLE)])
    return tolerance * max(1.0, float(finite.max(initial=0)) / _MAGNITUDE)
