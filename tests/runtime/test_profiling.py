# SPDX-License-Identifier: Apache-2.0
"""What a profile times, told from what it runs by a clock of its own."""

from typing import Any

import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.runtime import profiling
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.engine import Engine
from dspark_trt.runtime.round_report import RoundReport


def test_plain_rounds_are_those_of_a_request_that_never_drafts(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds that follow drafting are slower, for as long as caches are full of the drafter: here γ rounds."""
    now, since = 0.0, 0

    class Watched(Engine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.observers.append(tick)

    def tick(report: RoundReport) -> None:
        nonlocal now, since
        if report.drafted.any():
            now, since = now + 9 + report.target_rows, 0
        else:
            since += 1
            now += 1 if since > tiny_bundle.draft.gamma else 3

    monkeypatch.setattr(profiling, "Engine", Watched)
    monkeypatch.setattr(profiling, "_clock", lambda _: lambda: now)
    plan = profiling.ProfilePlan(
        requests=(1,), lengths=(0, 3, 7), context_tokens=(32,), seconds=1.0
    )
    costs = profiling.profile(open_backend("onnxruntime", tiny_bundle), plan).costs
    assert costs.seconds(1, 1, requests=1, drafting=0)[0] == 1
    assert costs.draft_cost(1) == 9
