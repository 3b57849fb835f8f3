# SPDX-License-Identifier: Apache-2.0
"""Buckets, padding, buffers and launches of CUDA graphs: pure, so proved without a GPU."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_trt.bindings import Binding
from dspark_trt.errors import CapacityError
from dspark_trt.runtime.cuda_graphs.buckets import Buckets, GraphKey, RecentGraphs
from dspark_trt.runtime.cuda_graphs.buffers import ALIGNMENT, Traffic, Wanted, plan_buffers
from dspark_trt.runtime.cuda_graphs.padding import (
    own_pad_index,
    pad_offsets,
    pad_ragged,
    scratch_rows,
)
from dspark_trt.runtime.cuda_graphs.schedule import Step, round_launches
from dspark_trt.runtime.ragged import RaggedRows, ragged_rows

GAMMA, SLOTS = 4, 5


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=6))))


@st.composite
def ragged_batches(draw: st.DrawFn) -> tuple[RaggedRows, int]:
    """A decoding batch, with room for more requests than it has: (rows, requests)."""
    requests = draw(st.integers(1, 7))
    lengths = draw(st.lists(st.integers(1, GAMMA + 1), min_size=1, max_size=requests))
    context = draw(st.lists(st.integers(0, 60), min_size=len(lengths), max_size=len(lengths)))
    wants = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    tokens = [[7 * r + i + 1 for i in range(n)] for r, n in enumerate(lengths)]
    return ragged_rows(tokens, np.array(context, np.int64), np.array(wants)), requests


@given(sizes(), sizes(), st.integers(1, 50), st.integers(0, 200))
def test_the_smallest_bucket_that_holds_a_batch(
    batches: tuple[int, ...], rows: tuple[int, ...], batch: int, extra: int
) -> None:
    if rows[-1] < batches[-1]:
        rows = (*rows, max(batches[-1], rows[-1] + 1))
    buckets = Buckets(batches, rows)
    total = batch + extra
    found = buckets.find(batch, total)
    holding = [b for b in batches if b >= batch]
    # Requests that fill the batch up need a row each.
    fitting = [n for n in rows if holding and n >= total + holding[0] - batch]
    expected = GraphKey(holding[0], fitting[0]) if holding and fitting else None
    assert found == expected
    if found is None:
        with pytest.raises(CapacityError, match=f"{batch} requests with {total} rows exceed"):
            buckets.require(batch, total)


@given(st.integers(1, 33), st.integers(2, 9), st.data())
def test_default_buckets_hold_every_round(
    requests: int, rows_a_request: int, data: st.DataObject
) -> None:
    buckets = Buckets.up_to(requests, rows_a_request)
    batch = data.draw(st.integers(1, requests))
    lengths = data.draw(
        st.lists(st.integers(1, rows_a_request), min_size=batch, max_size=batch)
    )
    key = buckets.require(batch, sum(lengths))
    assert key.batch < 2 * batch
    assert key.rows < 2 * (sum(lengths) + key.batch - batch)


@pytest.mark.parametrize(
    ("batch", "rows"), [((), (1,)), ((2, 1), (4,)), ((0,), (1,)), ((4,), (3,))]
)
def test_impossible_buckets_are_refused(batch: tuple[int, ...], rows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"buckets must be|does not hold"):
        Buckets(batch, rows)


@given(st.integers(1, 5), st.lists(st.integers(1, 9), max_size=60))
def test_graphs_are_bounded_and_the_oldest_use_goes_first(limit: int, uses: list[int]) -> None:
    graphs: RecentGraphs[int] = RecentGraphs(limit)
    order: list[GraphKey] = []
    for use in uses:
        key = GraphKey(use, use)
        assert (graphs.get(key) is not None) == (key in order)
        graphs.put(key, use)
        order = [*(k for k in order if k != key), key][-limit:]
        assert list(graphs.keys) == order
    assert len(graphs) <= limit


@given(ragged_batches())
def test_padding_keeps_the_batch_and_its_indices_in_range(made: tuple[RaggedRows, int]) -> None:
    rows, requests = made
    padded = GAMMA + 1
    key = Buckets.up_to(requests, padded).require(rows.batch, len(rows.token_ids))
    filled = pad_ragged(rows, key, padded=padded, scratch_start=100)
    total, batch = len(rows.token_ids), rows.batch
    assert filled.token_ids.shape == filled.unpad_index.shape == (key.rows,)
    assert filled.pad_index.shape == (key.batch, padded)
    assert filled.offsets.shape == (key.batch + 1,)
    np.testing.assert_array_equal(filled.token_ids[:total], rows.token_ids)
    np.testing.assert_array_equal(filled.positions[:total], rows.positions)
    np.testing.assert_array_equal(filled.context_len[:batch], rows.context_len)
    np.testing.assert_array_equal(filled.offsets[: batch + 1], rows.offsets)
    for name, bound in (
        ("pad_index", key.rows),
        ("unpad_index", key.batch * padded),
        ("logit_rows", key.rows),
    ):
        index = getattr(filled, name)
        assert index.min() >= 0, name
        assert index.max() < bound, name
    # Every flattened row comes back from the padded place it went to.
    flat = np.arange(filled.offsets[-1])
    np.testing.assert_array_equal(filled.pad_index.ravel()[filled.unpad_index[flat]], flat)
    # A request's places hold its own rows only.
    for r, (start, end) in enumerate(itertools.pairwise(filled.offsets)):
        assert set(filled.pad_index[r]) == set(range(start, end))
    assert filled.offsets[-1] <= key.rows
    np.testing.assert_array_equal(filled.logit_rows[: len(rows.logit_rows)], rows.logit_rows)


@given(ragged_batches(), st.lists(st.integers(0, 80), min_size=7, max_size=7))
def test_padded_rows_never_alias_valid_cache_rows(
    made: tuple[RaggedRows, int], others: list[int]
) -> None:
    """Cache rows behind the batch belong to other requests, with `others` valid rows each."""
    rows, requests = made
    padded, scratch = GAMMA + 1, scratch_rows(GAMMA, SLOTS)
    valid = np.array(others[:requests], np.int64)
    lengths = np.diff(rows.offsets)
    valid[: rows.batch] = rows.context_len + lengths
    capacity = int(valid.max()) + scratch
    key = Buckets.up_to(requests, padded).require(rows.batch, len(rows.token_ids))
    filled = pad_ragged(rows, key, padded=padded, scratch_start=capacity - scratch)
    for r in range(key.batch):
        written = filled.context_len[r] + np.arange(padded)
        assert written.max() < capacity
        if r < rows.batch:  # its own committed rows stay, and it sees none but those it has
            assert written.min() == rows.context_len[r]
            own = filled.positions[filled.pad_index[r]]
            assert own.max() < valid[r]
        elif r < requests:
            assert written.min() >= valid[r]
    # A draft step's single update fits as well.
    assert capacity - scratch + GAMMA + 1 + SLOTS <= capacity


@given(ragged_batches())
def test_places_behind_a_request_repeat_its_last_row(made: tuple[RaggedRows, int]) -> None:
    rows, _ = made
    own = own_pad_index(rows)
    lengths = np.diff(rows.offsets)
    for r, length in enumerate(lengths):
        assert own[r, :length].tolist() == list(range(rows.offsets[r], rows.offsets[r + 1]))
        assert (own[r, length:] == rows.offsets[r + 1] - 1).all()


def test_offsets_of_added_requests_hold_one_row_each() -> None:
    assert pad_offsets(np.array([0, 3, 4]), 4).tolist() == [0, 3, 4, 5, 6]
    assert pad_offsets(np.array([0, 3, 4]), 2).tolist() == [0, 3, 4]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("float32", "int64", "bfloat16", "bool")),
            st.lists(st.sampled_from(("batch", "rows", 1, 3, 7)), min_size=1, max_size=3),
            st.sampled_from(list(Traffic)),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_buffers_never_overlap(wanted: list[tuple[str, list[int | str], Traffic]]) -> None:
    plan = plan_buffers(
        [
            Wanted(f"b{i}", Binding("b", dtype, tuple(shape)), traffic)
            for i, (dtype, shape, traffic) in enumerate(wanted)
        ],
        {"batch": 5, "rows": 11},
    )
    for traffic in Traffic:
        placed = [p for p in plan.placements.values() if p.traffic is traffic]
        for one, other in itertools.pairwise(placed):
            assert one.offset + one.nbytes <= other.offset
        assert all(p.offset % ALIGNMENT == 0 for p in placed)
        assert all(p.offset + p.nbytes <= plan.sizes[traffic] for p in placed)
    exact = sum(p.nbytes for p in plan.placements.values())
    assert exact <= plan.nbytes < exact + ALIGNMENT * (len(wanted) + len(Traffic))


@given(st.integers(1, 8), st.integers(0, 100))
def test_with_a_budget_nothing_waits_for_the_host(batch: int, budget: int) -> None:
    buckets = Buckets.up_to(8, GAMMA + 1)
    launches = round_launches(batch, gamma=GAMMA, buckets=buckets, budget=budget)
    assert [each.step for each in launches] == [
        Step.DRAFT, Step.RANK, Step.TARGET, Step.VERIFY, Step.DOWNLOAD,
    ]  # fmt: skip
    assert not any(each.waits_for_host for each in launches)
    rows = batch + min(budget, batch * GAMMA)
    assert launches[2].key == buckets.require(batch, rows)


def test_without_a_budget_the_target_waits_for_the_confidences() -> None:
    launches = round_launches(3, gamma=GAMMA, buckets=Buckets.up_to(8, 5), budget=None)
    assert [each.step for each in launches if each.waits_for_host] == [Step.TARGET]
    with pytest.raises(CapacityError, match="9 requests"):
        round_launches(9, gamma=GAMMA, buckets=Buckets.up_to(8, 5), budget=0)
