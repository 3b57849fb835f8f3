# SPDX-License-Identifier: Apache-2.0
"""Eagle3 through the engine: rounds of the official implementation, and output that is the target's."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dspark_trt.bundle import Bundle
from dspark_trt.errors import MissingContextError, RequestError
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.backends.interface import BackendOptions, DraftInputs
from dspark_trt.runtime.backends.ort import OrtDraftModel
from dspark_trt.runtime.engine import Engine, EngineOptions
from dspark_trt.runtime.ragged import ragged_rows
from dspark_trt.runtime.request import Completion, Request, SamplingParams
from dspark_trt.runtime.session import DraftSession
from tests.conftest import DATA, ExportBundle

Golden = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def golden() -> Golden:
    with np.load(DATA / "golden" / "eagle3.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def eagle3(fixture_bundle: ExportBundle) -> Bundle:
    return fixture_bundle("eagle3")


def test_graphs_of_a_chain(eagle3: Bundle) -> None:
    assert set(eagle3.graph_names) >= {"context", "draft", "target", "verify"}
    assert not {"backbone", "sequential_head", "confidence_head"} & set(eagle3.graph_names)


@pytest.mark.parametrize("prompt", range(3))
def test_draft_steps_equal_the_official_ones(
    eagle3: Bundle, golden: Golden, prompt: int
) -> None:
    model = OrtDraftModel(eagle3, 1, BackendOptions(threads=1))
    gamma = eagle3.draft.gamma
    for number in golden[f"p{prompt}_recorded_rounds"]:

        def of(name: str, number: int = number) -> NDArray[Any]:
            return golden[f"p{prompt}_r{number}_{name}"]

        next_ids = of("ctx_input_ids")[:, None].astype(np.float32)
        rows = np.concatenate((of("target_hidden_states"), next_ids), 1)
        start = int(of("start"))
        done = max(len(rows) - (gamma + 1), 0)
        if done:
            model.append(0, rows[:done], start - len(rows))
        new_rows = np.zeros((1, gamma + 1, eagle3.draft.context_size), np.float32)
        new_rows[0, : len(rows) - done] = rows[done:]
        # The graph puts the anchor behind the last row itself.
        new_rows[0, len(rows) - done - 1, -1] = 0
        output = model.draft(
            DraftInputs(
                anchor_ids=np.array([of("anchor")]),
                new_taps=new_rows,
                new_len=np.array([len(rows) - done]),
                context_len=np.array([start - len(rows) + done]),
                temperature=np.zeros(1, np.float32),
                uniforms=np.zeros((1, gamma), np.float32),
            )
        )
        assert output.tokens[0].tolist() == of("draft_tokens").tolist()
        np.testing.assert_allclose(output.logits[0], of("corrected_logits"), atol=5e-5)
        assert output.confidence_logits is None
    model.close()


def answers(bundle: Bundle, golden: Golden, **options: Any) -> list[Completion]:
    gamma = bundle.draft.gamma
    requests = [
        Request(
            prompt_ids=tuple(golden[f"p{prompt}_prompt_ids"].tolist()),
            params=SamplingParams(max_new_tokens=48, stop_token_ids=()),
        )
        for prompt in range(3)
    ]
    with Engine.load(
        bundle, options=EngineOptions(**options), scheduler=f"fixed:{gamma}"
    ) as engine:
        return [*engine.generate(requests), *engine.generate(requests[:1])]


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch": 3},
        {"max_batch": 3, "max_tokens_per_step": 24},  # prompts in chunks of few rows
        {
            "max_batch": 2,
            "prefix_cache_bytes": 1 << 24,
        },  # the last answer begins from the cache
    ],
)
def test_rounds_accept_what_the_official_loop_accepts(
    eagle3: Bundle, golden: Golden, options: dict[str, int]
) -> None:
    """Were a context row paired with the wrong token, or one position off, drafts would be others."""
    found = answers(eagle3, golden, **options)
    assert (found[-1].stats.cached_tokens > 0) == ("prefix_cache_bytes" in options)
    for index, answer in enumerate(found):
        prompt = index % 3
        expected = golden[f"p{prompt}_output_ids"][len(answer.prompt_ids) :][:48]
        assert list(answer.token_ids) == expected.tolist()
        # Its first token comes out of the prompt's own step; the last round may be cut short.
        ours = list(answer.stats.accepted_lengths)
        official = golden[f"p{prompt}_acceptance_lengths"].tolist()
        assert ours[:-1] == official[: len(ours) - 1]
        assert len(ours) > 5


def test_sampled_output_does_not_depend_on_company(eagle3: Bundle, golden: Golden) -> None:
    """Chunks of prompts, batches and rows that move leave a request's draws as they are."""
    requests = [
        Request(
            prompt_ids=tuple(golden[f"p{prompt}_prompt_ids"].tolist()),
            params=SamplingParams(max_new_tokens=20, temperature=0.8, seed=prompt),
        )
        for prompt in range(3)
    ]
    with Engine.load(eagle3, options=EngineOptions(max_batch=1), scheduler="fixed:7") as engine:
        alone = [engine.generate([request])[0] for request in requests]
    options = EngineOptions(max_batch=3, max_tokens_per_step=40)
    with Engine.load(eagle3, options=options, scheduler="fixed:7") as engine:
        together = engine.generate(requests)
    assert [a.token_ids for a in alone] == [b.token_ids for b in together]


def rounds_of(golden: Golden, prompt: int) -> Iterator[dict[str, NDArray[Any]]]:
    for number in golden[f"p{prompt}_recorded_rounds"]:
        prefix = f"p{prompt}_r{number}_"
        yield {n.removeprefix(prefix): v for n, v in golden.items() if n.startswith(prefix)}


def append(session: DraftSession, slot: int, found: dict[str, NDArray[Any]]) -> None:
    taps = found["target_hidden_states"]
    session.append(slot, taps, int(found["start"]) - len(taps), found["ctx_input_ids"])


def test_sessions_propose_what_the_official_loop_proposes(
    eagle3: Bundle, golden: Golden
) -> None:
    """Three hosts' sequences in one session, round by round."""
    with DraftSession.load(eagle3, slots=3) as session:
        for found in zip(*(rounds_of(golden, prompt) for prompt in range(3)), strict=False):
            for slot in range(3):
                append(session, slot, found[slot])
            for order in ([2, 0, 1], [1]):  # again: nothing new has come
                proposal = session.propose(
                    order, [int(found[slot]["anchor"]) for slot in order]
                )
                for row, slot in enumerate(order):
                    expected = found[slot]["draft_tokens"].tolist()
                    assert proposal.tokens[row].tolist() == expected
                    np.testing.assert_allclose(
                        proposal.logits[row], found[slot]["corrected_logits"], atol=5e-5
                    )
            assert proposal.confidence is None


def test_sessions_propose_what_the_engine_verifies(eagle3: Bundle, golden: Golden) -> None:
    """A greedy host loop around a session, and the engine: same tokens, same accepted lengths."""
    done = answers(eagle3, golden, max_batch=3)[0]
    prompt, output = golden["p0_prompt_ids"].tolist(), list(done.token_ids)
    target = open_backend("onnxruntime", eagle3).target_model(1)
    text = [*prompt, *output]
    rows = ragged_rows([text[:-1]], np.zeros(1, np.int64), np.zeros(1, np.bool_))
    taps = target.step(rows).taps.copy()
    lengths, place = [], len(prompt)  # of the anchor
    with DraftSession.load(eagle3) as session:
        session.append(0, taps[:place], 0, text[1 : place + 1])
        while place + 1 < len(text):
            drafts = session.propose([0], [text[place]]).tokens[0].tolist()
            wanted = text[place + 1 : place + 1 + len(drafts)]
            same = [a == b for a, b in zip(drafts, wanted, strict=False)]
            accepted = same.index(False) if False in same else len(same)
            new = taps[place : place + accepted + 1]
            session.append(0, new, place, text[place + 1 : place + 1 + len(new)])
            place += accepted + 1
            lengths.append(accepted + 1)
    assert lengths[:-1] == list(done.stats.accepted_lengths)[: len(lengths) - 1]
    assert len(lengths) > 5


def test_rows_of_a_chain_come_and_go(eagle3: Bundle, golden: Golden) -> None:
    first = next(rounds_of(golden, 0))
    taps, ids, anchor = (
        first["target_hidden_states"],
        first["ctx_input_ids"],
        int(first["anchor"]),
    )
    assert len(taps) > 20
    with DraftSession.load(eagle3, slots=3) as session:
        session.append(0, taps, 0, ids)
        whole = session.propose([0], [anchor]).logits
        for cut in ([0, 3, 4, len(taps)], [0, len(taps) - 1, len(taps)]):
            session.reset(1)
            for a, b in pairwise(cut):
                session.append(1, taps[a:b], a, ids[a:b])
            np.testing.assert_allclose(session.propose([1], [anchor]).logits, whole, atol=5e-5)
        session.append(1, taps[:3], len(taps), ids[:3])  # verified, then rolled back
        session.truncate(1, len(taps))
        np.testing.assert_allclose(session.propose([1], [anchor]).logits, whole, atol=5e-5)
        session.restore(2, session.snapshot(0))
        np.testing.assert_allclose(session.propose([2], [anchor]).logits, whole, atol=5e-5)
        session.restore(2, session.snapshot(0, 10))
        with pytest.raises(MissingContextError, match=r"taps of row 9, .*with start=9"):
            session.propose([2], [anchor])
        session.append(2, taps[9:], 9, ids[9:])
        np.testing.assert_allclose(session.propose([2], [anchor]).logits, whole, atol=5e-5)
        session.truncate(2, 5)
        with pytest.raises(MissingContextError, match=r"taps of row 4, .*with start=4"):
            session.propose([2], [anchor])


def test_a_chain_s_rows_want_their_tokens(eagle3: Bundle) -> None:
    with DraftSession.load(eagle3) as session:
        taps = np.zeros((3, eagle3.draft.tap_size), np.float32)
        with pytest.raises(RequestError, match=r"wants tokens \[3\] with the taps.*got none"):
            session.append(0, taps, 0)
        with pytest.raises(RequestError, match=r"got shape \(2,\)"):
            session.append(0, taps, 0, [1, 2])
        with pytest.raises(RequestError, match="outside the vocabulary of 2048"):
            session.append(0, taps, 0, [1, 2, 2048])
        with pytest.raises(MissingContextError, match="slot 0 has no context"):
            session.propose([0], [1])
