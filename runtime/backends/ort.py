# SPDX-License-Identifier: Apache-2.0
"""onnxruntime backend: sessions over the bundle's graphs, every tensor bound by address.

Inputs, outputs and caches are NumPy arrays that live as long as their model; a cache is bound as input
and output at once, so `TensorScatter` writes in place. A tensor is bound again only when its address or
shape changed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt import bindings
from dspark_trt.bindings import GraphBindings
from dspark_trt.bundle import Bundle
from dspark_trt.config import DecoderConfig
from dspark_trt.errors import BackendError
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
            f"it has {', '.join(ort.get_available_providers())}"
        )
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.threads or 0  # 0: onnxruntime's own choice
    # Drafter and target take turns: a pool that spins while it waits takes the other one's processors.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.log_severity_level = 2  # warnings: a copied cache must be seen
    try:
        return ort.InferenceSession(str(path), settings, providers=list(options.providers))
    except Exception as error:  # onnxruntime raises several unrelated types
        reason = str(error).strip().splitlines()[0]
        raise BackendError(f"onnxruntime cannot load {path.name}: {reason}") from error


class OrtGraph:
    """A session whose tensors are bound by address. The caller keeps bound arrays alive and contiguous."""

    def __init__(self, path: Path, options: BackendOptions) -> None:
        self.name = path.stem
        self._session = open_session(path, options)
        self._binding = self._session.io_binding()
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._bound: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._fed: dict[str, Array] = {}

    def feed(self, name: str, values: Array) -> None:
        """Copy a small input to where it is bound already: cheaper than binding a new address."""
        place = self._fed.get(name)
        if place is None or place.shape != values.shape:
            place = self._fed[name] = np.empty_like(values, order="C")
            self.bind(name, place)
        place[...] = values

    def bind(self, name: str, array: Array) -> None:
        place = (array.__array_interface__["data"][0], array.shape)
        if self._bound.get(name) == place:
            return
        assert array.flags.c_contiguous, name
        bind = self._binding.bind_input if name in self._inputs else self._binding.bind_output
        bind(name, "cpu", 0, array.dtype.type, array.shape, place[0])
        self._bound[name] = place

    def run(self, tensors: Mapping[str, Array]) -> None:
        """Bind what moved, then run.

        Raises:
            BackendError: onnxruntime failed; the graph can be run again.
        """
        for name, array in tensors.items():
            self.bind(name, array)
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise BackendError(f"graph {self.name} failed: {reason}") from error


class _Cached:
    """Caches of one model and their binding to its graphs."""

    def __init__(self, decoder: DecoderConfig, bundle: Bundle, requests: int) -> None:
        self.caches = CacheBuffers(
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
        self._seen: dict[str, tuple[int, slice]] = {}

    def bind(self, graph: OrtGraph, requests: slice) -> None:
        state = (self.caches.version, requests)
        if self._seen.get(graph.name) == state:
            return
        for (past, present), array in zip(self._names, self.caches.arrays, strict=True):
            graph.bind(past, array[requests])
            graph.bind(present, array[requests])
        self._seen[graph.name] = state


class OrtDraftModel:
    """`draft.onnx` and `context.onnx` over the drafter's caches."""

    def __init__(self, bundle: Bundle, requests: int, options: BackendOptions) -> None:
        config = bundle.draft
        # A step writes new context, block and padding in one go: 2γ+2 rows at most behind the valid end.
        self._slack_rows = config.gamma + 1 + config.block_slots
        self._cached = _Cached(config.decoder, bundle, requests)
        self._draft = OrtGraph(bundle.graph_path("draft"), options)
        self._context = OrtGraph(bundle.graph_path("context"), options)
        contract = bindings.draft_bindings(config, bundle.dtype)
        self._outputs = _buffers(_without_caches(contract), requests)

    def reserve(self, context_tokens: int) -> None:
        self._cached.caches.reserve(context_tokens + self._slack_rows)

    def swap_rows(self, first: int, second: int) -> None:
        self._cached.caches.swap(first, second)

    def read_rows(self, row: int, count: int) -> CacheRows:
        return self._cached.caches.read_rows(row, count)

    def write_rows(self, row: int, saved: CacheRows) -> None:
        self._cached.caches.write_rows(row, saved)

    def append(self, row: int, taps: Floats, start: int) -> None:
        self._cached.caches.reserve(start + len(taps) + self._slack_rows)
        self._cached.bind(self._context, slice(row, row + 1))
        context_len = np.array([start], np.int64)
        rows = np.ascontiguousarray(taps[None], np.float32)
        self._context.run({"taps": rows, "context_len": context_len})

    def draft(self, inputs: DraftInputs) -> DraftOutput:
        batch = len(inputs.anchor_ids)
        self.reserve(int((inputs.context_len + inputs.new_len).max()))
        self._cached.bind(self._draft, slice(0, batch))
        for name in DraftInputs._fields:
            self._draft.feed(name, getattr(inputs, name))
        outputs = {name: array[:batch] for name, array in self._outputs.items()}
        self._draft.run(outputs)
        return DraftOutput(
            outputs["tokens"], outputs["logits"], outputs.get("confidence_logits")
        )

    def close(self) -> None:
        self._cached.caches.arrays.clear()


_TARGET_INPUTS = (
    "token_ids", "positions", "pad_index", "unpad_index", "logit_rows", "context_len",
)  # fmt: skip


class OrtTargetModel:
    """`target.onnx` over the target's caches."""

    def __init__(self, bundle: Bundle, requests: int, options: BackendOptions) -> None:
        config = bundle.target
        self._graph = OrtGraph(bundle.graph_path("target"), options)
        assert config is not None  # graph_path has refused a bundle without target
        self._cached = _Cached(config.decoder, bundle, requests)
        self._vocab, self._tap_size = config.decoder.vocab_size, bundle.draft.tap_size
        self._logits = np.empty((0, self._vocab), np.float32)
        self._taps = np.empty((0, self._tap_size), np.float32)

    @property
    def capacity_rows(self) -> int:
        return self._cached.caches.capacity_rows

    def reserve(self, context_tokens: int) -> None:
        self._cached.caches.reserve(context_tokens)

    def swap_rows(self, first: int, second: int) -> None:
        self._cached.caches.swap(first, second)

    def read_rows(self, row: int, count: int) -> CacheRows:
        return self._cached.caches.read_rows(row, count)

    def write_rows(self, row: int, saved: CacheRows) -> None:
        self._cached.caches.write_rows(row, saved)

    def step(self, rows: RaggedRows) -> TargetOutput:
        self.reserve(int(rows.context_len.max()) + rows.pad_index.shape[1])
        self._cached.bind(self._graph, slice(0, rows.batch))
        if len(self._logits) < len(rows.logit_rows):
            self._logits = np.empty((len(rows.logit_rows), self._vocab), np.float32)
        if len(self._taps) < len(rows.token_ids):
            self._taps = np.empty((len(rows.token_ids), self._tap_size), np.float32)
        output = TargetOutput(
            self._logits[: len(rows.logit_rows)], self._taps[: len(rows.token_ids)]
        )
        for name in _TARGET_INPUTS:
            self._graph.feed(name, getattr(rows, name))
        self._graph.run({"logits": output.logits, "taps": output.taps})
        return output

    def close(self) -> None:
        self._cached.caches.arrays.clear()


_GREEDY: tuple[str, ...] = ("offsets", "draft_tokens")
_SAMPLING = (*_GREEDY, "temperature", "top_k", "top_p", "min_p", "uniforms")


class OrtVerifier:
    """The smallest graph that serves a batch: `verify_greedy` where all are greedy, `verify`, or
    `verify_processed` where a request needs penalties, masks or log-probabilities (loaded on first use).
    """

    def __init__(self, bundle: Bundle, requests: int, options: BackendOptions) -> None:
        self._bundle, self._options = bundle, options
        self._sampled = OrtGraph(bundle.graph_path("verify"), options)
        self._greedy = OrtGraph(bundle.graph_path("verify_greedy"), options)
        self._processed: OrtGraph | None = None
        self._outputs = _buffers(_processed_bindings(bundle).outputs, requests)

    def verify(self, inputs: VerifyInputs) -> Verification:
        batch = len(inputs.temperature)
        outputs = {name: array[:batch] for name, array in self._outputs.items()}
        tensors: dict[str, Array] = {
            "target_logits": inputs.target_logits,
            "accepted": outputs["accepted"],
            "tokens": outputs["tokens"],
        }
        graph, small = self._sampled, _SAMPLING
        if inputs.processors is not None:
            graph = self._load_processed()
            tensors |= outputs | inputs.processors._asdict()
        elif not inputs.temperature.any():
            graph, small = self._greedy, _GREEDY
        for name in small:
            graph.feed(name, getattr(inputs, name))
        if graph is not self._greedy:
            graph.feed("draft_temperature", inputs.temperature)
            tensors["draft_logits"] = inputs.draft_logits
        graph.run(tensors)
        if inputs.processors is None:
            return Verification(outputs["accepted"], outputs["tokens"])
        return Verification(**outputs)

    def _load_processed(self) -> OrtGraph:
        if self._processed is None:
            path = self._bundle.graph_path("verify_processed")
            self._processed = OrtGraph(path, self._options)
        return self._processed


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


def _buffers(listed: tuple[bindings.Binding, ...], requests: int) -> dict[str, Array]:
    """One array a tensor for the largest batch; memory is touched only as far as batches reach."""
    return {
        b.name: np.zeros(tuple(requests if d == "batch" else int(d) for d in b.shape), b.dtype)
        for b in listed
    }
