# SPDX-License-Identifier: Apache-2.0
"""onnxruntime backend: sessions over the bundle's graphs, every tensor bound by address.

Inputs, outputs and caches are NumPy arrays that live as long as their model or longer; a cache is bound as
input and output at once, so `TensorScatter` writes in place. For the same shapes, a tensor is bound again only
when it is another array.
"""

import os
import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from operator import add, attrgetter, is_
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt import bindings
from dspark_trt.bindings import GraphBindings
from dspark_trt.bundle import GREEDY_DRAFT, WEIGHTS, Bundle
from dspark_trt.config import DecoderConfig
from dspark_trt.errors import BackendError, first_line
from dspark_trt.plugins.contract import VerifyMode, verify_bindings
from dspark_trt.runtime.backends.interface import (
    BackendOptions,
    CacheRows,
    DraftInputs,
    DraftOutput,
    Floats,
    TargetOutput,
    Verification,
    VerifyInputs,
)
from dspark_trt.runtime.cache import CacheBuffers
from dspark_trt.runtime.cuda_graphs.padding import scratch_rows
from dspark_trt.runtime.ragged import RaggedRows

Array = NDArray[Any]


def open_session(path: Path, options: BackendOptions) -> Any:
    """An onnxruntime session.

    Raises:
        BackendError: onnxruntime is not installed, has no such provider, or refuses the graph.
    """
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise BackendError(
            "onnxruntime is not installed. Install it with: pip install 'dspark-trt[cpu]'"
        ) from error
    missing = set(options.providers) - set(ort.get_available_providers())
    if missing:
        raise BackendError(
            f"onnxruntime {ort.__version__} here has no {', '.join(sorted(missing))}; "
            f"it has {', '.join(ort.get_available_providers())}. Use device cpu, or on a machine with "
            "a GPU install: pip install 'dspark-trt[gpu]'"
        )
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.threads or 0  # 0: onnxruntime's own choice
    # Drafter and target take turns: a pool that spins while it waits takes the other one's processors.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.log_severity_level = 2  # warnings: a copied cache must be seen
    index = (options.device or "").partition(":")[2] or "0"
    providers = [
        (name, {"device_id": index}) if name == "CUDAExecutionProvider" else name
        for name in options.providers
    ]
    try:
        session = ort.InferenceSession(str(path), settings, providers=providers)
    except Exception as error:  # onnxruntime raises several unrelated types
        reason = first_line(error)
        if "escapes model directory" in reason:
            reason = f"{WEIGHTS} is a link out of {path.parent}, which it does not follow. Copy: cp -rL"
        raise BackendError(f"onnxruntime cannot load {path.name}: {reason}") from error
    if lost := set(options.providers) - set(session.get_providers()):
        raise BackendError(
            f"onnxruntime could not start its {', '.join(sorted(lost))} and would run on the CPU instead: "
            "no usable GPU, driver or CUDA library here. Use device cpu, or mend that."
        )
    return session


_MOST_SHAPES = 256  # sets of shapes whose places are remembered


@dataclass(slots=True)
class _Places:
    """Where the tensors of one set of shapes are."""

    binding: Any  # onnxruntime's
    # Weak: arrays of shapes that do not come again would never be freed.
    bound: dict[str, weakref.ref[Array]] = field(default_factory=dict)
    fed: dict[str, Array] = field(default_factory=dict)
    groups: dict[str, tuple[Array, ...]] = field(default_factory=dict)
    caches: tuple[int, slice] | None = None  # their version, and the requests of them


class OrtGraph:
    """A session whose tensors are bound by address. The caller keeps bound arrays alive and contiguous.

    Verification lengths change from round to round, and so do the shapes of a step. Binding a tensor
    again takes some microseconds, and a step has dozens: so every set of shapes keeps its own places.
    """

    def __init__(self, path: Path, options: BackendOptions) -> None:
        self.name = path.stem
        self._session = open_session(path, options)
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._known: dict[Hashable, _Places] = {}
        self.places = self.at(None)

    def at(self, shapes: Hashable) -> _Places:
        """Turn to the places of a set of shapes, whatever names it."""
        places = self._known.get(shapes)
        if places is None:
            if len(self._known) == _MOST_SHAPES:
                self._known.clear()
            places = self._known[shapes] = _Places(self._session.io_binding())
        self.places = places
        return places

    def feed(self, name: str, values: Array) -> None:
        """Copy a small array, new every time, to where it is bound already: cheaper than binding it."""
        place = self.places.fed.get(name)
        if place is None or place.shape != values.shape:
            place = self.places.fed[name] = np.empty_like(values, order="C")
            self._bind(name, place)
        place[...] = values

    def bind(self, arrays: Iterable[tuple[str, Array]]) -> None:
        """Bind arrays that keep their places; those of the last call cost nothing."""
        bound = self.places.bound
        for name, array in arrays:
            known = bound.get(name)
            if known is None or known() is not array:
                self._bind(name, array)
                bound[name] = weakref.ref(array)

    def bind_group(self, names: tuple[str, ...], arrays: tuple[Array, ...]) -> None:
        """`bind` for small arrays that change together or not at all: one look instead of one at each."""
        known = self.places.groups.get(names[0])
        if known is arrays or (known is not None and all(map(is_, known, arrays))):
            return
        for name, array in zip(names, arrays, strict=True):
            self._bind(name, array)
        self.places.groups[names[0]] = arrays

    def _bind(self, name: str, array: Array) -> None:
        assert array.flags.c_contiguous, name
        binding = self.places.binding
        bind = binding.bind_input if name in self._inputs else binding.bind_output
        address = array.__array_interface__["data"][0]
        bind(name, "cpu", 0, array.dtype.type, array.shape, address)

    def run(self) -> None:
        """Run on what is bound.

        Raises:
            BackendError: onnxruntime failed; the graph can be run again.
        """
        try:
            self._session.run_with_iobinding(self.places.binding)
        except Exception as error:
            raise BackendError(f"graph {self.name} failed: {first_line(error)}") from error


class _Outputs:
    """One array a tensor, for the largest batch seen, and its beginnings by number of rows."""

    def __init__(self, listed: Iterable[bindings.Binding], rows: int) -> None:
        # Memory is touched only as far as batches reach.
        self._arrays = {
            b.name: np.zeros((rows, *(int(d) for d in b.shape[1:])), b.dtype) for b in listed
        }
        self._rows = rows
        self._first: dict[int, dict[str, Array]] = {}

    def grow(self, rows: int) -> bool:
        """Make room; True if the arrays moved."""
        if rows <= self._rows:
            return False
        self._rows = rows
        self._arrays = {
            name: np.zeros((rows, *array.shape[1:]), array.dtype)
            for name, array in self._arrays.items()
        }
        self._first.clear()
        return True

    def first(self, rows: int) -> dict[str, Array]:
        views = self._first.get(rows)
        if views is None:
            views = {name: array[:rows] for name, array in self._arrays.items()}
            self._first[rows] = views
        return views


class _CachedModel:
    """Caches of one model and their binding to its graphs."""

    def __init__(self, decoder: DecoderConfig, bundle: Bundle, requests: int) -> None:
        self._caches = CacheBuffers(
            sizes=decoder.cache_sizes, requests=requests, dtype=bundle.dtype
        )
        self._names = [
            (past.name, present.name)
            for past, present in zip(
                bindings.cache_bindings(decoder, bundle.dtype, "past"),
                bindings.cache_bindings(decoder, bundle.dtype, "present"),
                strict=True,
            )
        ]

    def shrink(self, context_tokens: int) -> None:
        self._caches.shrink(context_tokens)

    def swap_rows(self, first: int, second: int) -> None:
        self._caches.swap(first, second)

    def read_rows(self, row: int, count: int) -> CacheRows:
        return self._caches.read_rows(row, count)

    def write_rows(self, row: int, saved: CacheRows) -> None:
        self._caches.write_rows(row, saved)

    def _bind_caches(self, graph: OrtGraph, requests: slice) -> None:
        state = (self._caches.version, requests)
        if graph.places.caches == state:
            return
        for (past, present), array in zip(self._names, self._caches.arrays, strict=True):
            own = array[requests]
            graph.bind(((past, own), (present, own)))
        graph.places.caches = state


# A graph of its own for greedy batches holds the drafter's weights once more. Where they are many, the
# time that sampling costs beside them is small.
_GREEDY_DRAFT_BELOW_BYTES = 64_000_000
_DRAFT_INPUTS = DraftInputs._fields
_BLOCK_INPUTS = _DRAFT_INPUTS[:4]  # without what sampling needs


class OrtDraftModel(_CachedModel):
    """`draft.onnx` and `context.onnx` over the drafter's caches; small drafters also run `draft_greedy.onnx`,
    loaded with the first batch in which nobody samples.
    """

    def __init__(self, bundle: Bundle, requests: int, options: BackendOptions) -> None:
        config = bundle.draft
        self._bundle, self._options = bundle, options
        # A step writes new context, block and padding in one go: 2γ+2 rows at most behind the valid end.
        self._slack_rows = scratch_rows(config.gamma, config.block_slots)
        super().__init__(config.decoder, bundle, requests)
        self._graphs: dict[str, OrtGraph] = {}
        is_small = bundle.files[WEIGHTS].size_bytes < _GREEDY_DRAFT_BELOW_BYTES
        self._has_greedy = is_small and GREEDY_DRAFT in bundle.graph_names
        contract = bindings.draft_bindings(config, bundle.dtype)
        self._outputs = _Outputs(_without_caches(contract), requests)
        self._graph("context")
        if not self._has_greedy:
            self._graph("draft")

    def _graph(self, name: str) -> OrtGraph:
        if name not in self._graphs:
            self._graphs[name] = OrtGraph(self._bundle.graph_path(name), self._options)
        return self._graphs[name]

    def open_graphs(self) -> None:
        self._graph("draft")
        if self._has_greedy:
            self._graph(GREEDY_DRAFT)

    def reserve(self, context_tokens: int) -> None:
        self._caches.reserve(context_tokens + self._slack_rows)

    def append(self, row: int, taps: Floats, start: int) -> None:
        graph = self._graph("context")
        self._caches.reserve(start + len(taps) + self._slack_rows)
        self._bind_caches(graph, slice(row, row + 1))
        graph.feed("taps", taps[None])
        graph.feed("context_len", np.array([start], np.int64))
        graph.run()

    def draft(self, inputs: DraftInputs) -> DraftOutput:
        is_greedy = self._has_greedy and not any(inputs.temperature.tolist())
        graph = self._graph(GREEDY_DRAFT if is_greedy else "draft")
        batch = len(inputs.anchor_ids)
        self.reserve(max(map(add, inputs.context_len.tolist(), inputs.new_len.tolist())))
        self._bind_caches(graph, slice(0, batch))
        if is_greedy:
            graph.bind_group(_BLOCK_INPUTS, inputs[:4])
        else:
            graph.bind_group(_DRAFT_INPUTS, inputs)
        outputs = self._outputs.first(batch)
        graph.bind(outputs.items())
        graph.run()
        return DraftOutput(
            outputs["tokens"], outputs["logits"], outputs.get("confidence_logits")
        )

    def close(self) -> None:
        self._graphs.clear()
        self._caches.arrays.clear()
        _return_memory()


_NEW_EVERY_STEP = ("token_ids", "positions")
_OF_THE_SHAPE = ("pad_index", "unpad_index", "logit_rows", "context_len")
_of_the_shape = attrgetter(*_OF_THE_SHAPE)


class OrtTargetModel(_CachedModel):
    """`target.onnx` over the target's caches."""

    def __init__(self, bundle: Bundle, requests: int, options: BackendOptions) -> None:
        config = bundle.target
        self._graph: OrtGraph | None = OrtGraph(bundle.graph_path("target"), options)
        assert config is not None  # graph_path has refused a bundle without target
        super().__init__(config.decoder, bundle, requests)
        contract = bindings.target_bindings(config, bundle.draft.tap_size, bundle.dtype)
        self._logits, self._taps = (_Outputs([b], 0) for b in _without_caches(contract))
        self._outputs: dict[tuple[int, int], dict[str, Array]] = {}

    @property
    def capacity_rows(self) -> int:
        return self._caches.capacity_rows

    def reserve(self, context_tokens: int) -> None:
        self._caches.reserve(context_tokens)

    def step(self, rows: RaggedRows) -> TargetOutput:
        graph = self._graph
        assert graph is not None, "closed"
        self.reserve(max(rows.context_len.tolist()) + rows.pad_index.shape[1])
        graph.at((len(rows.logit_rows), rows.pad_index.shape, len(rows.token_ids)))
        self._bind_caches(graph, slice(0, rows.batch))
        for name in _NEW_EVERY_STEP:
            graph.feed(name, getattr(rows, name))
        graph.bind_group(_OF_THE_SHAPE, _of_the_shape(rows))
        outputs = self._places(len(rows.logit_rows), len(rows.token_ids))
        graph.bind(outputs.items())
        graph.run()
        return TargetOutput(outputs["logits"], outputs["taps"])

    def _places(self, logit_rows: int, rows: int) -> dict[str, Array]:
        places = self._outputs.get((logit_rows, rows))
        if places is None:
            moved = [self._logits.grow(logit_rows), self._taps.grow(rows)]
            if any(moved) or len(self._outputs) == _MOST_SHAPES:
                self._outputs.clear()
            places = self._logits.first(logit_rows) | self._taps.first(rows)
            self._outputs[logit_rows, rows] = places
        return places

    def close(self) -> None:
        self._graph = None
        self._caches.arrays.clear()
        _return_memory()


_LOGITS = VerifyInputs._fields[:3]
_SAMPLING = (*VerifyInputs._fields[4:9], "draft_temperature")


class OrtVerifier:
    """The smallest graph that serves a batch, loaded on first use: `verify_greedy` where all are greedy,
    `verify`, or `verify_processed` where a request needs penalties, masks or log-probabilities.
    """

    def __init__(self, bundle: Bundle, requests: int, options: BackendOptions) -> None:
        self._bundle, self._options = bundle, options
        self._graphs: dict[str, OrtGraph] = {}
        outputs = _processed_bindings(bundle).outputs
        self._committed = _Outputs(outputs[:2], requests)
        self._processed = _Outputs(outputs, requests)

    def open_graphs(self) -> None:
        for name in ("verify_greedy", "verify", "verify_processed"):
            self._graph(name)

    def verify(self, inputs: VerifyInputs) -> Verification:
        name = "verify" if any(inputs.temperature.tolist()) else "verify_greedy"
        if inputs.processors is not None:
            name = "verify_processed"
        graph = self._graph(name)
        graph.at((len(inputs.target_logits), len(inputs.temperature)))
        graph.bind(zip(_LOGITS, inputs[:3], strict=True))
        if name != "verify_greedy":
            graph.bind((("draft_logits", inputs.draft_logits),))
            graph.bind_group(_SAMPLING, (*inputs[4:9], inputs.temperature))
        batch = len(inputs.temperature)
        if inputs.processors is None:
            outputs = self._committed.first(batch)
        else:
            outputs = self._processed.first(batch)
            graph.bind(inputs.processors._asdict().items())
        graph.bind(outputs.items())
        graph.run()
        return Verification(**outputs)

    def _graph(self, name: str) -> OrtGraph:
        if name not in self._graphs:
            self._graphs[name] = OrtGraph(self._bundle.graph_path(name), self._options)
        return self._graphs[name]


def _processed_bindings(bundle: Bundle) -> GraphBindings:
    return verify_bindings(
        VerifyMode.REJECTION,
        gamma=bundle.draft.gamma,
        vocab_size=bundle.draft.decoder.vocab_size,
        processors=True,
        top_logprobs=bundle.top_logprobs,
    )


def _without_caches(contract: GraphBindings) -> tuple[bindings.Binding, ...]:
    return tuple(b for b in contract.outputs if not b.name.startswith("present_"))


def _return_memory() -> None:
    """The C library keeps what a session freed, hundreds of megabytes of packed weights, for the next one."""
    if os.name != "posix":
        return
    import ctypes

    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
