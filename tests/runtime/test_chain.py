# SPDX-License-Identifier: Apache-2.0
"""Eagle3 through the engine: rounds of the official implementation, and output that is the target's."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dspark_trt.bundle import Bundle
from dspark_trt.errors import BackendError, RequestError
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.backends.interface import BackendOptions, DraftInputs
from dspark_trt.runtime.backends.ort import OrtDraftModel
from dspark_trt.runtime.engine import Engine, EngineOptions
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


def test_what_does_not_run_chains_says_so(eagle3: Bundle) -> None:
    with pytest.raises(RequestError, match="sessions do not take those yet, the engine does"):
        DraftSession.load(eagle3)
    with pytest.raises(BackendError, match="runs on onnxruntime and torch so far, not on"):
        open_backend("tensorrt-rtx", eagle3)
