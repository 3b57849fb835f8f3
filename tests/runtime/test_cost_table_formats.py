# SPDX-License-Identifier: Apache-2.0
"""SGLang's and TensorRT-LLM's cost tables, read and written."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_trt.errors import TableError
from dspark_trt.runtime.cost_table import CostTable
from dspark_trt.runtime.cost_table_formats import (
    load_cost_table,
    sglang_additive,
    sglang_flat,
    trtllm_curve,
)

_TABLE = CostTable(
    [1, 8, 32],
    [100.0, 80.0, 40.0],
    requests=[1, 4],
    draft_seconds=[0.001, 0.002],
    padded=False,
)


def _loaded(path: Path, data: Any, **options: int) -> CostTable:
    path.write_text(json.dumps(data))
    table = load_cost_table(path, **options)
    assert isinstance(table, CostTable)
    return table


def test_our_own_format(tmp_path: Path) -> None:
    _TABLE.save(tmp_path / "sps.json")
    assert load_cost_table(tmp_path / "sps.json").fingerprint == _TABLE.fingerprint


@pytest.mark.parametrize("write", [sglang_additive, lambda t: trtllm_curve(t, min_gain=0.01)])
def test_additive_spellings_keep_both_curves(tmp_path: Path, write: Any) -> None:
    table = _loaded(tmp_path / "sps.json", write(_TABLE))
    for requests in (1, 2, 4):
        assert table.seconds(1, 32, drafting=requests) == pytest.approx(
            _TABLE.seconds(1, 32, drafting=requests)
        )


def test_flat_spelling_keeps_the_step_curve(tmp_path: Path) -> None:
    data = sglang_flat(_TABLE)
    assert data["max_batch_tokens"] == 32
    assert _loaded(tmp_path / "sps.json", data).seconds(1, 32) == pytest.approx(
        _TABLE.seconds(1, 32)
    )


def test_sglang_additive_example(tmp_path: Path) -> None:
    table = _loaded(
        tmp_path / "sps.json",
        {
            "bias_seconds": 0.01, "bs_probes": [1, 3], "alpha_seconds": [0.0, 0.002],
            "m_probes": [1, 11], "theta_seconds": [0.0, 0.01],
        },
    )  # fmt: skip
    assert table.seconds(6, 6, drafting=2)[0] == pytest.approx(0.01 + 0.001 + 0.005)


def _cells(**change: Any) -> dict[str, Any]:
    fingerprint = {"gpu": "H200", "source_head": "abc", "topology": "tp1", "max_draft_len": 5}
    canonical = json.dumps(fingerprint, sort_keys=True, separators=(",", ":"))
    return {
        "schema_version": 2,
        "engine_fingerprint": fingerprint,
        "engine_fingerprint_sha256": sha256(canonical.encode()).hexdigest(),
        "cost_tables": {
            "16": {"token_counts": [0, 32, 64], "step_time_ms": [20.0, 10.0, 15.0]},
            "32": {"token_counts": [0, 64], "step_time_ms": [30.0, 15.0]},
        },
        **change,
    }


def test_cells_of_one_graph_size(tmp_path: Path) -> None:
    table = _loaded(tmp_path / "sps.json", _cells(), graph_requests=16)
    assert table.tokens.tolist() == [32, 64, 96]  # V = 0: 16 requests of 6 rows
    assert table.seconds(33, 33)[0] == pytest.approx(0.015)
    assert table.seconds(96, 96)[0] == pytest.approx(0.020)
    assert table.origin["gpu"] == "H200"


def test_cells_are_refused_unless_authentic_and_asked_for_by_size(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"cells for \[16, 32\] requests, asked for None"):
        _loaded(tmp_path / "a.json", _cells())
    with pytest.raises(TableError, match="does not match engine_fingerprint"):
        _loaded(tmp_path / "b.json", _cells(engine_fingerprint_sha256="0"), graph_requests=16)
    no_native = {"8": {"token_counts": [8], "step_time_ms": [1.0]}}
    with pytest.raises(TableError, match="lack V = 0"):
        _loaded(tmp_path / "c.json", _cells(cost_tables=no_native))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "must hold a JSON object, got list"),
        ({"speed": 1}, r"no cost table: .* got keys \['speed'\]"),
        ({"sample_batch_tokens": [1]}, "malformed: KeyError"),
        ({"token_counts": [1], "step_time_ms": [0.0]}, "takes 0.0 s, expected more than 0"),
        (
            {"sample_batch_tokens": [1, 1], "sample_steps_per_sec": [1, 1]},
            r"sps\.json is malformed: tokens must be strictly increasing",
        ),
        (
            {"sample_batch_tokens": [1, 2**63], "sample_steps_per_sec": [1, 1]},
            "list of positive integers",
        ),
        ({"token_counts": [1], "step_time_ms": [10**400]}, "malformed: OverflowError"),
        (_cells(cost_tables=[]), "malformed: AttributeError"),
        (
            _cells(cost_tables={"1": {"token_counts": [0], "step_time_ms": [0]}}),
            "malformed: ZeroDivisionError",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(TableError, match=message):
        _loaded(tmp_path / "sps.json", data)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot read cost table"):
        load_cost_table(tmp_path / "sps.json")


def test_writing_uses_the_monotone_curve() -> None:
    noisy = CostTable([1, 2], [10.0, 11.0])
    assert np.diff(sglang_flat(noisy)["sample_steps_per_sec"]).tolist() == [0.0]
