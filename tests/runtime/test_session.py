# SPDX-License-Identifier: Apache-2.0
"""`DraftSession`: the official rounds, and what must not be possible."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dspark_trt.bundle import Bundle
from dspark_trt.errors import (
    BackendError,
    CapacityError,
    EngineClosedError,
    MissingContextError,
    RequestError,
)
from dspark_trt.runtime.session import DraftSession
from tests.conftest import DRAFTERS, ExportBundle
from tests.runtime.golden import golden_rounds


@pytest.fixture
def session(tiny_bundle: Bundle) -> DraftSession:
    return DraftSession.load(tiny_bundle, slots=3)


def taps_for(session: DraftSession, rows: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.standard_normal((rows, session.config.tap_size), np.float32)


@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_replays_the_official_rounds(drafter: str, fixture_bundle: ExportBundle) -> None:
    session = DraftSession.load(fixture_bundle(drafter), slots=3)
    rounds = list(golden_rounds(drafter))
    assert len(rounds) == 18
    for golden in rounds:
        session.append(golden.prompt, golden.taps, golden.first_row)
        proposal = session.propose([golden.prompt], [golden.anchor])
        assert proposal.tokens[0].tolist() == golden.draft_tokens.tolist()
        np.testing.assert_allclose(
            proposal.logits[0], golden.corrected_logits, atol=2e-4, rtol=0
        )
        if golden.confidence_logits is None:
            assert proposal.confidence is None
            assert proposal.survival is None
        else:
            assert proposal.confidence_logits is not None
            np.testing.assert_allclose(
                proposal.confidence_logits[0], golden.confidence_logits, atol=2e-4, rtol=0
            )


def test_slots_in_one_batch_equal_slots_alone(session: DraftSession) -> None:
    """Any order, any subset: caches move, results do not change."""
    alone = {}
    for slot in range(3):
        session.append(slot, taps_for(session, 5 + 20 * slot, seed=slot), 0)
        alone[slot] = session.propose([slot], [10 + slot]).logits[0]
    for order in ([2, 0, 1], [1, 2], [0, 2, 1], [2]):
        together = session.propose(order, [10 + slot for slot in order])
        for row, slot in enumerate(order):
            np.testing.assert_allclose(together.logits[row], alone[slot], atol=2e-5, rtol=0)


def test_rows_may_come_in_any_portions(session: DraftSession) -> None:
    taps = taps_for(session, 40)
    session.append(0, taps, 0)
    whole = session.propose([0], [7]).logits
    for cut in ([0, 1, 2, 3, 40], [0, 8, 17, 40], [0, 39, 40]):
        session.reset(0)
        for a, b in pairwise(cut):
            session.append(0, taps[a:b], a)
        np.testing.assert_allclose(session.propose([0], [7]).logits, whole, atol=2e-5, rtol=0)


def test_a_gap_is_refused_until_it_is_filled(session: DraftSession) -> None:
    """The prefix-cache case: rows 32.. are known, rows 0..31 never passed through the target."""
    taps = taps_for(session, 40)
    session.append(1, taps[32:], 32)
    with pytest.raises(
        MissingContextError, match=r"slot 1: context rows 0\.\.31 were never appended"
    ):
        session.propose([1], [7])
    session.append(1, taps[:32], 0)
    filled = session.propose([1], [7]).logits
    session.append(0, taps, 0)
    np.testing.assert_allclose(filled, session.propose([0], [7]).logits, atol=2e-5, rtol=0)


def test_a_gap_behind_drafted_rows_is_filled(session: DraftSession) -> None:
    """The filling rows are few enough to wait for the next step, and follow what is in the cache."""
    taps = taps_for(session, 12)
    session.append(0, taps[:5], 0)
    session.propose([0], [3])
    session.append(0, taps[8:], 8)
    session.append(0, taps[5:8], 5)
    filled = session.propose([0], [7]).logits
    session.append(1, taps, 0)
    np.testing.assert_allclose(filled, session.propose([1], [7]).logits, atol=2e-5, rtol=0)


def test_nothing_of_the_previous_owner_is_seen(session: DraftSession) -> None:
    session.append(0, taps_for(session, 12, seed=1), 0)
    fresh = session.propose([0], [5]).logits
    session.append(1, taps_for(session, 60, seed=2), 0)
    session.propose([1], [9])
    session.reset(1)
    with pytest.raises(MissingContextError, match="slot 1 has no context"):
        session.propose([1], [9])
    session.append(1, taps_for(session, 12, seed=1), 0)
    np.testing.assert_allclose(session.propose([1], [5]).logits, fresh, atol=2e-5, rtol=0)


def test_rolling_back_equals_never_having_gone_there(session: DraftSession) -> None:
    taps = taps_for(session, 30)
    session.append(0, taps[:20], 0)
    before = session.propose([0], [5]).logits
    session.append(0, taps[20:], 20)
    session.propose([0], [6])
    session.truncate(0, 20)
    np.testing.assert_allclose(session.propose([0], [5]).logits, before, atol=2e-5, rtol=0)
    session.append(0, taps[10:15], 10)  # rewriting history drops what came behind
    rewritten = session.propose([0], [5]).logits
    session.append(1, taps[:15], 0)
    np.testing.assert_allclose(session.propose([1], [5]).logits, rewritten, atol=2e-5, rtol=0)


def test_a_restored_prefix_plus_its_suffix_is_the_full_run(session: DraftSession) -> None:
    taps = taps_for(session, 50)
    session.append(0, taps, 0)
    full = session.propose([0], [7]).logits
    session.append(1, taps[:40], 0)
    prefix = session.snapshot(1, 32)
    assert prefix.length == 32
    session.append(2, taps_for(session, 45, seed=9), 0)  # a previous owner
    session.restore(2, prefix)
    session.append(2, taps[32:], 32)
    np.testing.assert_allclose(session.propose([2], [7]).logits, full, atol=2e-5, rtol=0)
    with pytest.raises(RequestError, match="slot 1 has 40 context rows, cannot copy 41"):
        session.snapshot(1, 41)
    session.reset(1)
    with pytest.raises(MissingContextError, match="slot 1 has no context"):
        session.snapshot(1)


def test_seeded_sampling_repeats_and_follows_temperature(session: DraftSession) -> None:
    session.append(0, taps_for(session, 12), 0)
    first = session.propose([0], [5], temperature=1.0, seed=3).tokens
    assert (session.propose([0], [5], temperature=1.0, seed=3).tokens == first).all()
    drawn = {
        tuple(session.propose([0], [5], temperature=1.5, seed=s).tokens[0]) for s in range(20)
    }
    assert len(drawn) > 5
    greedy = session.propose([0], [5]).tokens
    cold = session.propose([0], [5], temperature=1e-6, seed=4).tokens
    assert (cold == greedy).all()


def test_one_temperature_is_that_of_every_slot(session: DraftSession) -> None:
    """Arrays of the host may be views of others: a column of its tokens, one number for all."""
    for slot in (0, 1):
        session.append(slot, taps_for(session, 12 + slot), 0)
    columns = np.array([[5, 0], [6, 0]])
    one = session.propose([0, 1], columns[:, 0], temperature=1.0, seed=3)
    each = session.propose([0, 1], [5, 6], temperature=[1.0, 1.0], seed=3)
    assert (one.tokens == each.tokens).all()
    assert (one.tokens != session.propose([0, 1], [5, 6]).tokens).any()


def test_proposals_outlive_the_next_step(session: DraftSession) -> None:
    session.append(0, taps_for(session, 12), 0)
    first = session.propose([0], [5])
    kept = first.logits.copy()
    session.propose([0], [6])
    assert (first.logits == kept).all()


def test_survival_is_the_product_of_confidences(session: DraftSession) -> None:
    session.append(0, taps_for(session, 12), 0)
    proposal = session.propose([0], [5])
    assert proposal.confidence is not None
    assert proposal.survival is not None
    np.testing.assert_allclose(proposal.survival, np.cumprod(proposal.confidence, axis=1))


def test_refusals_name_the_value(session: DraftSession) -> None:
    with pytest.raises(
        RequestError, match=r"shape \(4, 5\), expected \[n, 384\] \(3 layers x 128\)"
    ):
        session.append(0, np.zeros((4, 5)), 0)
    with pytest.raises(RequestError, match=r"slot 3 is not one of the 3 slots"):
        session.append(3, taps_for(session, 1), 0)
    with pytest.raises(
        RequestError, match="start must be a whole number of at least 0, got -1"
    ):
        session.append(0, taps_for(session, 1), -1)
    with pytest.raises(RequestError, match=r"start must be .*, got 0\.5"):
        session.append(0, taps_for(session, 1), 0.5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="taps from position 2 on are not finite"):
        session.append(0, taps_for(session, 1) * np.nan, 2)
    with pytest.raises(CapacityError, match="exceed the 1024 positions"):
        session.append(0, taps_for(session, 10), 1020)
    session.append(0, taps_for(session, 4), 0)
    with pytest.raises(RequestError, match="distinct and not empty"):
        session.propose([0, 0], [1, 1])
    with pytest.raises(RequestError, match="1 slots but 2 anchors"):
        session.propose([0], [1, 2])
    with pytest.raises(RequestError, match="anchor 2048 is outside the vocabulary of 2048"):
        session.propose([0], [2048])
    with pytest.raises(RequestError, match="temperature must be finite"):
        session.propose([0], [1], temperature=-1.0)


def test_refused_calls_leave_the_slot_as_it_was(session: DraftSession) -> None:
    session.append(0, taps_for(session, 12), 0)
    before = session.propose([0], [5]).logits
    with pytest.raises(CapacityError):
        session.append(0, taps_for(session, 2000), 12)
    with pytest.raises(RequestError):
        session.append(0, taps_for(session, 3) * np.inf, 12)
    np.testing.assert_allclose(session.propose([0], [5]).logits, before, atol=2e-5, rtol=0)


@pytest.mark.parametrize("portion", [1, 3, 40])
def test_rows_that_a_device_did_not_take_are_not_there(
    session: DraftSession, portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taps = taps_for(session, 40)
    session.append(0, taps, 0)
    expected = session.propose([0], [5]).tokens
    session.reset(0)
    failures = 0
    for start in range(0, 40, portion):
        with monkeypatch.context() as patch:
            patch.setattr(session._model, "append", _refuses)
            try:
                session.append(0, taps[start : start + portion], start)
                continue  # it waits for a draft step
            except BackendError:
                failures += 1
        if start:
            assert session.snapshot(0).length == start
        session.append(0, taps[start : start + portion], start)
    assert failures
    assert np.array_equal(session.propose([0], [5]).tokens, expected)


def _refuses(*_: object) -> None:
    raise BackendError("no memory")


def test_contexts_up_to_the_last_position(session: DraftSession) -> None:
    session.append(0, taps_for(session, 1024), 0)
    assert np.isfinite(session.propose([0], [5]).logits).all()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"anchors": [5.5]}, "anchors must be whole numbers, got"),
        ({"temperature": [1.0, 2.0]}, "1 slots but 2 temperatures"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        (
            {"uniforms": np.zeros((1, 3))},
            r"uniforms must be float32 \[1, 7\] in .* shape \[1, 3\]",
        ),
        ({"uniforms": np.ones((1, 7))}, r"in \[0, 1\), got shape \[1, 7\] between 1.0 and 1.0"),
        ({"uniforms": np.full((1, 7), np.nan)}, "between nan and nan"),
    ],
)
def test_what_would_fail_inside_a_graph_is_refused(
    session: DraftSession, given: dict[str, Any], text: str
) -> None:
    session.append(0, taps_for(session, 5), 0)
    before = session.propose([0], [7]).tokens
    asked: dict[str, Any] = {"slots": [0], "anchors": [7], "temperature": 1.0, **given}
    with pytest.raises(RequestError, match=text):
        session.propose(**asked)
    with pytest.raises(RequestError, match="length must be at least 0, got -1"):
        session.truncate(0, -1)
    assert (session.propose([0], [7]).tokens == before).all()


def test_a_closed_session_says_so(session: DraftSession) -> None:
    session.append(0, taps_for(session, 5), 0)
    session.close()
    session.close()
    with pytest.raises(EngineClosedError, match="the session is closed"):
        session.propose([0], [7])
    with pytest.raises(EngineClosedError, match="the session is closed"):
        session.append(0, taps_for(session, 5), 5)
