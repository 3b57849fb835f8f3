# SPDX-License-Identifier: Apache-2.0
"""What the engine and sessions ask of a backend. Row r of every batch is row r of the caches: active
requests are a prefix of the rows, so bindings never move.

Results are views of static buffers: they last until the next call of the same model.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dspark_trt.bundle import Bundle
from dspark_trt.runtime.ragged import RaggedRows

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class DraftOutput(NamedTuple):
    tokens: Ints  # [B, K]
    logits: Floats  # [B, K, V]: what each token was drawn from, before temperature
    confidence_logits: Floats | None  # [B, K]; None: the drafter has no confidence head


class TargetOutput(NamedTuple):
    logits: Floats  # [R, V]
    taps: Floats  # [T, m*H]


class Verification(NamedTuple):
    accepted: Ints  # [B]: -1 where the request is refused (no usable distribution)
    tokens: Ints  # [B, K+1]: accepted drafts, then one more; -1 behind
    logprobs: Floats | None = None  # [B, K+1], with processors
    top_tokens: Ints | None = None  # [B, K+1, N]
    top_logprobs: Floats | None = None  # [B, K+1, N]


class DraftInputs(NamedTuple):
    anchor_ids: Ints  # [B]
    new_taps: Floats  # [B, K+1, m*H]
    new_len: Ints  # [B] valid rows of new_taps
    context_len: Ints  # [B] cache rows before them
    temperature: Floats  # [B]
    uniforms: Floats  # [B, K]


class Processors(NamedTuple):
    """What changes target logits before sampling; neutral values where a request asks for nothing."""

    logit_bias: Floats  # [B, V]
    repetition_penalty: Floats  # [B], 1: off
    presence_penalty: Floats  # [B]
    frequency_penalty: Floats  # [B]
    prompt_mask: NDArray[np.bool_]  # [B, V]: occurs in the prompt
    output_counts: NDArray[np.int32]  # [B, V]: occurrences in the output so far
    allowed: NDArray[np.bool_]  # [T, V]


class VerifyInputs(NamedTuple):
    target_logits: Floats  # [T, V]
    offsets: Ints  # [B+1]
    draft_tokens: Ints  # [B, K]
    draft_logits: Floats  # [B, K, V]
    temperature: Floats  # [B], of draft and target
    top_k: Ints  # [B], 0: off
    top_p: Floats  # [B], 1: off
    min_p: Floats  # [B], 0: off
    uniforms: Floats  # [B, K+1]
    processors: Processors | None = None


CacheRows = list[NDArray[np.generic]]  # 2L x [Hkv, rows, D]: one request's cache


class CachedModel(Protocol):
    """A model with one cache row per request."""

    def reserve(self, context_tokens: int) -> None:
        """Make room for contexts of that many tokens; a step makes the room it needs by itself."""

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange two requests' caches."""

    def read_rows(self, row: int, count: int) -> CacheRows:
        """Copies of a request's first `count` cache rows."""

    def write_rows(self, row: int, saved: CacheRows) -> None:
        """Put copies back, possibly for another request."""

    def close(self) -> None: ...


class DraftModel(CachedModel, Protocol):
    def append(self, row: int, taps: Floats, start: int) -> None:
        """Write context rows `start ..` of one request from taps `[N, m*H]`."""

    def draft(self, inputs: DraftInputs) -> DraftOutput: ...


class TargetModel(CachedModel, Protocol):
    def step(self, rows: RaggedRows) -> TargetOutput: ...


@runtime_checkable
class PaysCapacity(Protocol):
    """A model whose attention costs by the rows its caches have, not by those that are valid."""

    @property
    def capacity_rows(self) -> int: ...


class Verifier(Protocol):
    def verify(self, inputs: VerifyInputs) -> Verification: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """`threads` None: chosen for the machine. `providers` are onnxruntime's execution providers; the
    others choose a `device` ("cpu", "cuda", "cuda:1"; None: a GPU where there is one).
    """

    threads: int | None = None
    providers: tuple[str, ...] = field(default=("CPUExecutionProvider",))
    device: str | None = None
    max_graphs: int = (
        64  # captured CUDA graphs of each step; 0: none, steps are launched one by one
    )


class Backend(Protocol):
    """Opens the parts of one bundle for so many requests. Models share nothing but files and weights."""

    @property
    def name(self) -> str: ...

    @property
    def bundle(self) -> Bundle: ...

    @property
    def options(self) -> BackendOptions: ...

    def draft_model(self, requests: int) -> DraftModel: ...

    def target_model(self, requests: int) -> TargetModel: ...

    def verifier(self, requests: int) -> Verifier: ...
