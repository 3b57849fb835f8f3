# SPDX-License-Identifier: Apache-2.0
"""The cost curve: what it says between, before and after its points, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

from dspark_trt.errors import TableError
from dspark_trt.runtime.cost_table import CostTable


def test_padded_sizes_cost_the_next_measured_one() -> None:
    table = CostTable([2, 4, 8], [10.0, 5.0, 4.0])
    assert table.seconds(1, 8).tolist() == [0.1, 0.1, 0.2, 0.2, 0.25, 0.25, 0.25, 0.25]


def test_unpadded_sizes_are_linear_between_points() -> None:
    table = CostTable([2, 4], [10.0, 5.0], padded=False)
    assert table.seconds(1, 4) == pytest.approx([0.1, 0.1, 0.15, 0.2])


def test_beyond_the_last_point_the_steepest_slope_goes_on() -> None:
    table = CostTable([1, 2, 4], [1.0, 1.0 / 2.0, 1.0 / 2.5])
    assert table.seconds(3, 6) == pytest.approx([2.5, 2.5, 3.5, 4.5])
    assert table.seconds(6, 7) == pytest.approx([4.5, 5.5])


def test_a_rate_that_rises_is_noise() -> None:
    assert CostTable([1, 2, 3], [10.0, 11.0, 5.0]).seconds(1, 3).tolist() == [0.1, 0.1, 0.2]


def test_context_buckets_and_draft_cost() -> None:
    table = CostTable(
        [1, 2],
        [[10.0, 5.0], [8.0, 4.0]],
        context_tokens=[128, 1024],
        requests=[1, 3],
        draft_seconds=[0.01, 0.03],
    )
    assert table.seconds(1, 1, context_tokens=100)[0] == pytest.approx(0.1)
    assert table.seconds(1, 1, context_tokens=129)[0] == pytest.approx(0.125)
    assert table.seconds(1, 1, context_tokens=9999)[0] == pytest.approx(0.125)
    assert table.seconds(1, 1)[0] == pytest.approx(0.125)
    assert table.seconds(2, 2, drafting=2)[0] == pytest.approx(0.25 + 0.02)


def test_context_reads_grow_with_requests_and_context() -> None:
    table = CostTable([1, 2], [10.0, 5.0], context_seconds=1e-5)
    assert table.seconds(2, 2, requests=2, context_tokens=1000)[0] == pytest.approx(0.22)
    with pytest.raises(TableError, match="context_seconds must be at least 0, got -1"):
        CostTable([1], [1.0], context_seconds=-1)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (CostTable([4], [1.0]), r"one point only \(4 tokens\)"),
        (CostTable([1, 8], [1.0, 0.995]), "flat: 8 tokens cost 0.50 % more than 1"),
    ],
    ids=["one point", "flat"],
)
def test_degenerate_tables_are_refused_with_the_reason(table: CostTable, reason: str) -> None:
    with pytest.raises(TableError, match=reason):
        table.require_informative()


def test_an_informative_table_passes() -> None:
    table = CostTable([1, 8], [1.0, 0.8])
    assert table.require_informative() is table


def test_a_foreign_table_is_refused() -> None:
    table = CostTable([1, 8], [1.0, 0.8], origin={"machine": "a", "backend": "torch"})
    assert table.require_origin(machine="a") is table
    with pytest.raises(TableError, match="machine 'a' instead of 'b'"):
        table.require_origin(machine="b", backend="torch")
    with pytest.raises(TableError, match="bundle 'not recorded' instead of 'f00'"):
        table.require_origin(bundle="f00")


@pytest.mark.parametrize(
    ("tokens", "rates", "message"),
    [
        ([], [], "0 token counts"),
        ([1, 2], [1.0], r"shape \(1, 1\) for 2 token counts"),
        ([2, 1], [1.0, 1.0], "strictly increasing"),
        ([0, 1], [1.0, 1.0], "positive integers"),
        ([1, 1.5], [1.0, 1.0], "positive integers"),
        ([1, 2], [1.0, float("nan")], "holds nan"),
        ([1, 2], [1.0, 0.0], "positive, got 0.0"),
        ([1, 2], [[1.0, 1.0], [1.0, 1.0]], "2 increasing bucket edges"),
        ([1, 1 << 21], [1.0, 1.0], "at most 1048576"),
    ],
)
def test_malformed_tables_are_refused(
    tokens: list[float], rates: list[float], message: str
) -> None:
    with pytest.raises(TableError, match=message):
        CostTable(tokens, rates)


def test_draft_cost_must_match_its_requests() -> None:
    with pytest.raises(TableError, match="each of 2 request counts"):
        CostTable([1], [1.0], requests=[1, 2], draft_seconds=[0.1])


def test_saved_tables_come_back_equal(tmp_path: Path) -> None:
    table = CostTable(
        [1, 2],
        [[10.0, 5.0], [8.0, 4.0]],
        context_tokens=[128, 1024],
        requests=[1],
        draft_seconds=[0.01],
        context_seconds=1e-6,
        padded=False,
        origin={"machine": "a"},
    )
    table.save(tmp_path / "sps.json")
    again = CostTable.from_json(json.loads((tmp_path / "sps.json").read_text()))
    assert again.to_json() == table.to_json()
    assert again.fingerprint == table.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["sps.json"]


def test_an_edited_table_is_refused() -> None:
    data = CostTable([1, 2], [10.0, 5.0]).to_json()
    data["fingerprint"] = CostTable([1, 2], [10.0, 5.0]).fingerprint
    data["steps_per_second"][0][1] = 9.0
    with pytest.raises(TableError, match="edited after it was measured"):
        CostTable.from_json(data)
    with pytest.raises(TableError, match="lacks 'tokens'"):
        CostTable.from_json({})


def test_arrays_cannot_be_changed_behind_the_curve() -> None:
    with pytest.raises(ValueError, match="read-only"):
        CostTable([1, 2], [10.0, 5.0]).steps_per_second[0, 0] = np.inf
