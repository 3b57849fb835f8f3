# SPDX-License-Identifier: Apache-2.0
"""Eagle3 drafters against float64 NumPy, which keeps no cache and recomputes every row at every step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dspark_trt.checkpoint import DraftOverrides, read_draft
from dspark_trt.config import DraftConfig
from dspark_trt.models.chain import ChainDrafter
from dspark_trt.models.loading import load_draft
from dspark_trt.models.vocabulary import UNDRAFTABLE
from tests.checkpoints import EAGLE3_LAYOUTS, Dims, eagle3_weights, write_eagle3_draft
from tests.conftest import ExportBundle
from tests.export.draft_reference import Doubles, rms, sigmoid, turn
from tests.export.toys import empty_caches

SIZES = Dims(layers=1, gamma=4)
TOKENS = [9, 31, 7, 200, 5, 5, 64, 17, 300]  # behind position 8 stands the anchor
ANCHOR = 42
CACHED = 6  # rows appended before the step


class Chain:
    """Rows pair taps (or the output before) with the token behind them; a row sees all rows up to it."""

    def __init__(self, weights: dict[str, Doubles], normed_residual: bool) -> None:
        self.w, self.normed_residual = weights, normed_residual

    def draft(
        self, taps: Doubles, behind: list[int], allowed: list[int]
    ) -> tuple[list[int], Doubles]:
        w = self.w
        hidden = taps @ w["fc.weight"].T
        tokens: list[int] = []
        logits = []
        ids = list(behind)
        for _ in range(SIZES.gamma):
            outputs = self.layer(w["embed_tokens.weight"][ids], hidden)
            step = rms(outputs[-1], w["norm.weight"]) @ w["lm_head.weight"].T
            logits.append(step)
            tokens.append(allowed[int(step[allowed].argmax())])
            hidden = np.concatenate([hidden, outputs[-1:]])
            ids.append(tokens[-1])
        return tokens, np.stack(logits)

    def layer(self, embedded: Doubles, hidden: Doubles) -> Doubles:
        w, p = self.w, "layers.0."
        normed = rms(hidden, w[p + "hidden_norm.weight"])
        pairs = np.concatenate([rms(embedded, w[p + "input_layernorm.weight"]), normed], -1)
        x = (normed if self.normed_residual else hidden) + self.attention(pairs)
        y = rms(x, w[p + "post_attention_layernorm.weight"])
        gate = y @ w[p + "mlp.gate_proj.weight"].T
        up = y @ w[p + "mlp.up_proj.weight"].T
        return np.asarray(x + (gate * sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T)

    def attention(self, pairs: Doubles) -> Doubles:
        w, p, count = self.w, "layers.0.self_attn.", len(pairs)
        q, k, v = (
            (pairs @ w[f"{p}{name}_proj.weight"].T).reshape(count, -1, SIZES.head_dim)
            for name in "qkv"
        )
        if p + "q_norm.weight" in w:
            q, k = rms(q, w[p + "q_norm.weight"]), rms(k, w[p + "k_norm.weight"])
        positions = np.arange(count)
        group = SIZES.heads // SIZES.kv_heads
        q, k, v = turn(q, positions), turn(k, positions).repeat(group, 1), v.repeat(group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(SIZES.head_dim)
        scores = np.where(positions <= positions[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v)
        return np.asarray(mixed.reshape(count, -1) @ w[p + "o_proj.weight"].T)


def taps() -> NDArray[np.float32]:
    width = len(SIZES.target_layer_ids) * SIZES.target_hidden
    return np.random.default_rng(7).standard_normal((len(TOKENS), width), np.float32)


def step(module: ChainDrafter, garbage: float) -> tuple[list[int], NDArray[np.float32]]:
    """Rows up to CACHED appended, the others with the step; the other request in the batch is noise."""
    rows = np.concatenate([taps(), np.array(TOKENS, np.float32)[:, None]], 1)
    caches = empty_caches(module.config.decoder, 2)
    for cache in caches:
        cache.fill_(garbage)
    own = [cache[1:] for cache in caches]
    new = torch.full((2, SIZES.gamma + 1, rows.shape[1]), garbage)
    new[1, : len(rows) - CACHED] = torch.from_numpy(rows[CACHED:])
    new[1, len(rows) - CACHED - 1, -1] = 0  # the graph puts the anchor there
    with torch.inference_mode():
        module.append_context(torch.from_numpy(rows[:CACHED])[None], torch.tensor([0]), *own)
        tokens, logits, *_ = module(
            torch.tensor([3, ANCHOR]), new, torch.tensor([1, len(rows) - CACHED]),
            torch.tensor([11, CACHED]), torch.zeros(2), torch.zeros(2, SIZES.gamma), *caches,
        )  # fmt: skip
    return tokens[1].tolist(), logits[1].numpy()


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("normed_residual", [True, False])
@pytest.mark.parametrize("drafted", [None, (2, 7, 9, 40, 111, 200, 319)])
def test_draft_step_equals_float64(
    tmp_path: Path, drafted: tuple[int, ...] | None, normed_residual: bool, qk_norm: bool
) -> None:
    draft = read_draft(
        write_eagle3_draft(
            tmp_path / "draft", layout="speculators", qk_norm=qk_norm,
            normed_residual=normed_residual, drafted=drafted, gamma=SIZES.gamma,
        )
    )  # fmt: skip
    assert DraftConfig.from_json(draft.config.to_json()) == draft.config
    module = load_draft(draft)
    assert isinstance(module, ChainDrafter)
    weights = eagle3_weights(SIZES, qk_norm=qk_norm)
    chain = Chain({n: t.double().numpy() for n, t in weights.items()}, normed_residual)
    allowed = list(drafted or range(SIZES.vocab))
    expected, scores = chain.draft(taps().astype(np.float64), [*TOKENS[:-1], ANCHOR], allowed)
    tokens, logits = step(module, garbage=50.0)
    assert tokens == expected
    np.testing.assert_allclose(logits[:, allowed], scores[:, allowed], atol=5e-5)
    missing = sorted(set(range(SIZES.vocab)) - set(allowed))
    assert (logits[:, missing] == UNDRAFTABLE).all()
    same, again = step(module, garbage=1e4)  # nothing beyond the valid rows is seen
    assert same == tokens
    np.testing.assert_array_equal(logits, again)


def test_one_drafter_in_every_layout(tmp_path: Path) -> None:
    results = []
    for layout in EAGLE3_LAYOUTS:
        path = write_eagle3_draft(tmp_path / layout, layout=layout, gamma=SIZES.gamma)
        draft = read_draft(path, overrides=DraftOverrides(gamma=SIZES.gamma))
        assert draft.config.target_layer_ids == SIZES.target_layer_ids
        module = load_draft(draft)
        assert isinstance(module, ChainDrafter)
        results.append(step(module, garbage=1.0))
    for tokens, logits in results[1:]:
        assert tokens == results[0][0]
        np.testing.assert_array_equal(logits, results[0][1])


def test_graphs_equal_the_modules(fixture_bundle: ExportBundle) -> None:
    from dspark_trt.export.parity import check_parity

    results: list[Any] = list(check_parity(fixture_bundle("eagle3")))
    assert {result.name for result in results} >= {"context", "draft", "target"}
    assert [result for result in results if not result.passed] == []
