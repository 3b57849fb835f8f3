# SPDX-License-Identifier: Apache-2.0
"""A decoding round as launches, decided before the first one starts.

Asynchronous form (paper, section 5.2): the budget K is known before the draft step ends, so the target's shapes
are too, and everything is launched at once; which drafts share K is decided on the device. Synchronous form:
the host waits for the confidences, decides lengths, and launches the rest.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from dspark_trt.runtime.cuda_graphs.buckets import Buckets, GraphKey


class Step(StrEnum):
    DRAFT = "draft"
    RANK = "rank"  # the K drafts likeliest to be accepted, on the device
    TARGET = "target"
    VERIFY = "verify"
    DOWNLOAD = "download"  # committed tokens and counts, to pinned memory


@dataclass(frozen=True, slots=True)
class Launch:
    step: Step
    key: GraphKey | None  # None: no graph, or its shapes are not known yet
    waits_for_host: bool = False  # the host has to read the step before it


@lru_cache(maxsize=1024)  # asked for in every round
def round_launches(
    batch: int, *, gamma: int, buckets: Buckets, budget: int | None
) -> tuple[Launch, ...]:
    """Launches of one round in order.

    Args:
        batch: requests, all of them decoding.
        gamma: γ.
        buckets: of the captured graphs.
        budget: drafts to verify over all requests; None: decided from this round's confidences.

    Raises:
        CapacityError: more requests or rows than the largest graph takes.
    """
    draft = Launch(Step.DRAFT, buckets.require(batch, batch))
    download = Launch(Step.DOWNLOAD, None)
    if budget is None:
        return (
            draft,
            Launch(Step.TARGET, None, waits_for_host=True),
            Launch(Step.VERIFY, None),
            download,
        )
    key = buckets.require(batch, batch + min(budget, batch * gamma))
    return (
        draft,
        Launch(Step.RANK, key),
        Launch(Step.TARGET, key),
        Launch(Step.VERIFY, key),
        download,
    )
