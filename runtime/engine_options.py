# SPDX-License-Identifier: Apache-2.0
"""Limits and switches of one engine."""

from dataclasses import dataclass
from numbers import Integral

from dspark_trt.errors import RequestError

# Requests: what is kept for each would fill memory before a step could run.
_MOST_AT_A_TIME = 1 << 16

_LEAST = {
    "max_batch": 1, "max_tokens_per_step": 1, "max_waiting": 0, "max_cached_tokens": 1, "prefix_cache_bytes": 0,
    "drafter_trained_tokens": 1, "drafter_rebase_tokens": 2,
}  # fmt: skip
_UNLIMITED = ("max_cached_tokens", "drafter_trained_tokens", "drafter_rebase_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Limits of one engine."""

    max_batch: int = 8  # requests decoded at the same time
    max_tokens_per_step: int = 512  # target rows a step, prompts and drafts together
    max_waiting: int = 1024  # beyond them QueueFullError
    max_cached_tokens: int | None = None  # positions of all active requests together
    prefix_cache_bytes: int = 0  # for beginnings of prompts; 0: none are kept
    strict_margin: float = (
        0.0  # greedy: best two logits this close are decided by one row alone
    )
    drafter_trained_tokens: int | None = None  # warn where a context grows beyond it
    drafter_rebase_tokens: int | None = None  # the drafter sees so many latest rows, moved to 0
    launch_rounds: bool = (
        True  # where the backend can; False: the host reads drafts in every round
    )

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _UNLIMITED:
                continue
            if not isinstance(value, Integral) or int(value) < least:
                raise RequestError(
                    f"{name} must be a whole number of at least {least}, got {value!r}"
                )
        if self.max_batch > _MOST_AT_A_TIME:
            raise RequestError(
                f"max_batch must be at most {_MOST_AT_A_TIME}, got {self.max_batch}"
            )
        if self.max_tokens_per_step < self.max_batch:
            raise RequestError(
                f"max_tokens_per_step {self.max_tokens_per_step} must be at least max_batch "
                f"{self.max_batch}: every active request needs one row a step"
            )
        if not 0 <= self.strict_margin < float("inf"):
            raise RequestError(f"strict_margin must be at least 0, got {self.strict_margin}")
        if self.drafter_rebase_tokens and self.prefix_cache_bytes:
            raise RequestError(
                "a prefix cache holds drafter rows by position: it cannot be used with drafter_rebase_tokens"
            )
