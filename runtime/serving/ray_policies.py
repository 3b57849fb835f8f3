# SPDX-License-Identifier: Apache-2.0
"""Decisions that Ray leaves to an application: which replica a request goes to, and how many there are."""

import random
from hashlib import blake2b
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import (
    MultiplexMixin,
    PendingRequest,
    RequestRouter,
    RunningReplica,
)

from dspark_trt.runtime.request import Request


class PrefixRouter(MultiplexMixin, RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Sends requests that begin alike to the same replica, whose prefix cache has their beginning.

    Rendezvous hashing: every replica has a score for every beginning, the best one gets it, and where it is
    full the next best. A replica that comes or goes moves only the beginnings it has. What decides is the
    session (`x-session-id` over HTTP, `session_id` of a handle), else the first tokens of a `Request`.
    Anything else goes to the less busy of two replicas, as Ray does by default.
    """

    def initialize_state(self, prefix_tokens: int = 64) -> None:
        self._prefix_tokens = prefix_tokens

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Replicas by preference."""
        if pending_request is not None and pending_request.metadata.multiplexed_model_id:
            having = self.apply_multiplex_routing(pending_request)
            candidate_replicas = [r for r in candidate_replicas if r.replica_id in having]
        if pending_request is None:
            key = None
        else:
            key = self._key(pending_request)
            pending_request.routing_context.should_backoff = True  # before all are asked again
        if key is None:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        ranked = sorted(
            candidate_replicas, key=lambda r: _score(key, r.replica_id.unique_id), reverse=True
        )
        return [[replica] for replica in ranked]

    def _key(self, pending: PendingRequest) -> bytes | None:
        if pending.metadata.session_id:
            return str(pending.metadata.session_id).encode()
        for argument in pending.args:
            if isinstance(argument, Request):
                return repr(argument.prompt_ids[: self._prefix_tokens]).encode()
        return None


def _score(key: bytes, replica: str) -> bytes:
    return blake2b(key, key=replica.encode()[:64], digest_size=8).digest()


class ScaleByWork:
    """So many replicas that each has the ongoing requests it is meant to have.

    Where drafts are accepted less, a request takes more rounds and a replica serves fewer of them at the
    same pace: with a reference accepted length the requests count by it over the recent one.
    """

    def __init__(self, accepted_length: float | None = None) -> None:
        self._reference = accepted_length

    def __call__(self, ctx: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Wanted replicas; Ray rounds, bounds and delays them as configured."""
        requests = ctx.total_num_requests / ctx.config.target_ongoing_requests
        recent = (ctx.aggregated_metrics or {}).get("accepted_length") or {}
        if self._reference is None or not recent:
            return requests, {}
        return requests * self._reference * len(recent) / sum(recent.values()), {}


class RecentAcceptance:
    """Accepted length of the last few readings: each counts half as much as the one behind it."""

    def __init__(self) -> None:
        self._totals = (0, 0)
        self._rounds = self._accepted = 0.0

    def update(self, rounds: int, accepted: int) -> float | None:
        """Take running totals of drafted rounds and accepted drafts; None before the first round."""
        self._rounds = self._rounds / 2 + rounds - self._totals[0]
        self._accepted = self._accepted / 2 + accepted - self._totals[1]
        self._totals = (rounds, accepted)
        return 1 + self._accepted / self._rounds if self._rounds else None
