# SPDX-License-Identifier: Apache-2.0
"""The trace file format: round trip, defaults, refusals."""

from pathlib import Path

import numpy as np
import pytest

from dspark_trt.errors import TableError
from dspark_trt.runtime.traces import load_traces, traces_from_arrays

_DATA = Path(__file__).parents[1] / "data" / "traces"


def test_the_official_trace_is_read() -> None:
    traces = load_traces(_DATA / "tiny-qwen3_T1.npz")
    assert (len(traces), traces.gamma, traces.domain_names) == (
        10328,
        7,
        ("math", "code", "chat"),
    )
    assert traces.split.tolist() == (traces.request_id % 2).tolist()
    assert traces.accept_prefix_mask.mean(axis=0) == pytest.approx(
        [0.75, 0.486, 0.307, 0.195, 0.13, 0.09, 0.063], abs=6e-3
    )
    assert np.all(traces.lengths == 7)


def test_saved_traces_come_back_equal(tmp_path: Path) -> None:
    traces = traces_from_arrays(
        conf_logits=[[0.5, -1.0], [2.0, 0.0]],
        accept_prefix_mask=[[1, 0], [0, 0]],
        request_id=[4, 9],
        lengths=[2, 0],
        domain=[1, 0],
        domain_names=["a", "b"],
        drafted_prob=[[0.5, 0.25], [1.0, 0.75]],
        step_seconds=[0.1, 0.2],
    )
    traces.save(tmp_path / "traces.npz")
    again = load_traces(tmp_path / "traces.npz")
    for name in ("conf_logits", "accept_prefix_mask", "request_id", "lengths", "split", "domain",
                 "drafted_prob", "step_seconds"):  # fmt: skip
        assert np.array_equal(getattr(again, name), getattr(traces, name)), name
    assert (again.domain_names, again.top_prob) == (("a", "b"), None)
    assert [path.name for path in tmp_path.iterdir()] == ["traces.npz"]


def test_without_a_split_prompts_alternate_and_stay_together() -> None:
    traces = traces_from_arrays(
        conf_logits=np.zeros((4, 1)),
        accept_prefix_mask=np.zeros((4, 1)),
        request_id=[0, 1, 2, 3],
        prompt_index=[10, 10, 20, 20],
    )
    assert traces.split.tolist() == [0, 0, 1, 1]
    assert traces.domain_names == ("all",)


def test_rounds_with_unverified_drafts_can_be_left_out() -> None:
    traces = traces_from_arrays(
        conf_logits=np.zeros((2, 2)),
        accept_prefix_mask=[[1, 0], [1, 1]],
        request_id=[0, 1],
        lengths=[1, 2],
    )
    assert traces.fully_verified().request_id.tolist() == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conf_logits": np.zeros(2)}, r"\[rounds, drafted\], got shape \(2,\)"),
        ({"conf_logits": [[0.0, 1.0], [np.nan, 0.0]]}, "round 1 are not finite"),
        ({"accept_prefix_mask": [[0, 1], [0, 0]]}, "round 0 is no prefix"),
        ({"accept_prefix_mask": [[0], [0]]}, r"must be numbers \[2, 2\], got int64 \[2, 1\]"),
        ({"request_id": [1]}, r"request_id must be numbers \[2\]"),
        ({"request_id": ["a", "b"]}, r"request_id must be numbers \[2\], got <U1"),
        ({"request_id": [0, np.nan]}, "request_id must be whole numbers, got nan"),
        ({"accept_prefix_mask": [[1, -3], [0, 0]]}, "mask must be 0 or 1, got -3"),
        ({"split": [0, 7]}, "split must be 0 or 1, got 7"),
        ({"domain": [0, 10**12]}, "domain must lie in 0..10000, got 0..1000000000000"),
        ({"conf_logits": [[0.0, 1e308], [0.0, 0.0]]}, "round 0 are not finite"),
        ({"lengths": [1.5, 2]}, r"lengths must be whole numbers, got 1\.5"),
        ({"lengths": [0, 2]}, "between the accepted drafts and 2"),
        ({"top_prob": [0.5, 0.5]}, r"top_prob must be numbers \[2, 2\]"),
    ],
)
def test_malformed_arrays_are_refused(change: dict[str, object], message: str) -> None:
    arrays: dict[str, object] = {
        "conf_logits": np.zeros((2, 2)),
        "accept_prefix_mask": [[1, 0], [0, 0]],
        "request_id": [0, 1],
    }
    with pytest.raises(TableError, match=message):
        traces_from_arrays(**{**arrays, **change})  # type: ignore[arg-type]


def test_files_that_are_no_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="cannot read traces"):
        load_traces(tmp_path / "nothing.npz")
    np.savez(tmp_path / "other.npz", conf_logits=np.zeros((1, 1)))
    with pytest.raises(TableError, match="lack accept_prefix_mask, request_id"):
        load_traces(tmp_path / "other.npz")
    whole = (tmp_path / "other.npz").read_bytes()
    np.save(tmp_path / "array.npy", np.zeros(3))
    no_archives = (
        b"",
        b"hello",
        whole[: len(whole) // 2],
        (tmp_path / "array.npy").read_bytes(),
    )
    for content in no_archives:
        (tmp_path / "other.npz").write_bytes(content)
        with pytest.raises(TableError, match=r"other\.npz is no .npz file, or was cut off"):
            load_traces(tmp_path / "other.npz")
    (tmp_path / "other.npz").write_bytes(whole.replace(b"descr", b"desXr"))
    with pytest.raises(TableError, match=r"cannot read traces .*other\.npz: Bad CRC"):
        load_traces(tmp_path / "other.npz")
