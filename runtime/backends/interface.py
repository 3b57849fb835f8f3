# SPDX-License-Identifier: Apache-2.0
"""What the engine and sessions ask of a backend. Row r of every batch is row r of the caches: active
requests are a prefix of the rows, so bindings never move.

Results are views of static buffers: they last until the next call of the same model. Inputs are C-contiguous; an array
may come again, with other values.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dspark_trt.bundle import Bundle
from dspark_trt.errors import RequestError
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


@runtime_checkable
class Shrinks(Protocol):
    """A model that can give cache rows back."""

    def shrink(self, context_tokens: int) -> None:
        """No context is longer than that: give back most rows beyond it, if they are many."""


@runtime_checkable
class OpensLate(Protocol):
    """A model or verifier that opens a graph with the first batch that needs it."""

    def open_graphs(self) -> None:
        """Open them all now: no request waits for one."""


@runtime_checkable
class CountsWaits(Protocol):
    """A model whose steps are launched: how often so far the host waited for the device."""

    @property
    def waits(self) -> int: ...


class Verifier(Protocol):
    def verify(self, inputs: VerifyInputs) -> Verification: ...


class DecodingRows(NamedTuple):
    """The first rows as they stand between two rounds; both caches hold what they say."""

    anchor_ids: Ints  # [B]
    new_taps: Floats  # [B, K+1, m*H]
    new_len: Ints  # [B] valid rows of new_taps
    draft_len: Ints  # [B] rows in the drafter's cache
    target_len: Ints  # [B] rows in the target's
    temperature: Floats  # [B]
    top_k: Ints  # [B]
    top_p: Floats  # [B]
    min_p: Floats  # [B]


class RoundInputs(NamedTuple):
    """What a round needs to know when it is launched."""

    budget: int  # drafts that are verified, of all requests together
    limits: Ints  # [B] of each of them
    shifts: NDArray[np.float64]  # [B, K] added to scaled confidence logits
    draft_uniforms: Floats  # [B, K]
    verify_uniforms: Floats  # [B, K+1]


class Committed(NamedTuple):
    """What a launched round did; the caller's to keep."""

    accepted: Ints  # [B]; -1: refused
    tokens: Ints  # [B, K+1]; -1 behind the committed ones
    lengths: Ints  # [B] ℓ
    confidence_logits: Floats | None  # [B, K]
    draft_seconds: float  # on the device
    step_seconds: float  # target, verification and commit


class RoundOnTheWay(Protocol):
    def read(self) -> Committed:
        """Wait for the committed tokens; to be done before the next round but one is launched."""


class DeviceRounds(Protocol):
    """Whole rounds of the first rows: draft, budget, target, verification and commit launched at once, while
    the host reads nothing.
    """

    def calibrate(self, slope: NDArray[np.float64]) -> None:  # [K]
        """Confidence is σ(slope · logit + shift), a round's shifts come with it."""

    def take(self, rows: DecodingRows) -> None:
        """Take rows over: from now on the device keeps them."""

    def launch(self, inputs: RoundInputs) -> RoundOnTheWay:
        """Launch a round of the first B rows and return at once."""

    def drafted(self, count: int) -> DraftOutput:
        """Drafts of the last round, which come to the host when somebody reads them."""

    def new_taps(self, count: int) -> Floats:
        """`[count, K+1, m*H]`: what `take` needs of rows besides what `Committed` says; waits."""


@runtime_checkable
class RunsRounds(Protocol):
    """A backend that can also run whole rounds on its device."""

    def rounds(self, requests: int) -> DeviceRounds:
        """Rounds on the caches of the models opened last for so many requests."""


_MOST_THREADS = 256  # a process that asks for many more is ended by the system


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """`threads` None: chosen for the machine. `device` is "cpu", "cuda" or "cuda:N"; without one onnxruntime
    takes the execution providers in `providers`, the others a GPU where there is one.
    """

    threads: int | None = None
    providers: tuple[str, ...] = field(default=("CPUExecutionProvider",))
    device: str | None = None
    max_graphs: int = (
        64  # captured CUDA graphs of each step; 0: none (TensorRT-RTX then captures its own)
    )

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= _MOST_THREADS:
            raise RequestError(f"threads must lie in 1..{_MOST_THREADS}, got {self.threads}")


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
