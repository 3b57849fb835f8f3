# SPDX-License-Identifier: Apache-2.0
"""What exact rejection verification asks of a scheduler (paper, section 3.2.2)."""

import numpy as np

from dspark_trt.runtime.scheduler import Scheduler


def asks_nothing_later(
    scheduler: Scheduler,
    confidence: np.ndarray,  # [R, K]
    rng: np.random.Generator,
) -> None:
    """Whether one draft is verified stays the same when confidences behind it change: they depend on it."""
    row, position = (int(rng.integers(size)) for size in confidence.shape)
    changed = confidence.copy()
    changed[row, position + 1 :] = rng.random(confidence.shape[1] - position - 1)
    before, after = (scheduler.plan(c)[row] > position for c in (confidence, changed))
    assert before == after
