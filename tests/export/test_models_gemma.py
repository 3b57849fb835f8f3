# SPDX-License-Identifier: Apache-2.0
"""Gemma4: drafters against float64 NumPy, derived here a second time from what is public about them;
text targets against transformers.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dspark_trt.checkpoint import read_draft, read_target
from dspark_trt.config import DraftConfig, TargetConfig
from dspark_trt.models.loading import load_drafter, load_target
from dspark_trt.runtime.engine import Engine
from dspark_trt.runtime.request import Request, SamplingParams
from tests.checkpoints import gemma_weights, write_gemma_draft, write_gemma_target
from tests.export.draft_reference import ANCHORS, SIZES, Doubles, all_taps, prepared
from tests.export.toys import empty_caches, ragged_inputs

HOW: dict[str, Any] = {"layers": SIZES.layers, "gamma": SIZES.gamma, "rank": SIZES.rank}


def rms(x: Doubles, weight: Doubles | float = 1.0) -> Doubles:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight)


def gelu_tanh(x: Doubles) -> Doubles:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def turn(x: Doubles, positions: NDArray[np.int64]) -> Doubles:
    """Proportional rotary embedding: of D/2 pairs (i, i + D/2) the first quarter turns."""
    half = x.shape[-1] // 2
    speed = 1e6 ** (-np.arange(half) / half) * (np.arange(half) < half // 4)
    angle = positions[:, None, None] * speed
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
    )


class Gemma:
    """One request, no cache."""

    def __init__(self, weights: dict[str, Doubles], cap: float | None) -> None:
        self.w, self.cap = weights, cap

    def hidden(self, taps: Doubles, anchor: int) -> Doubles:  # [N, m*H] -> [γ, H]
        w = self.w
        context = rms(taps @ w["fc.weight"].T, w["hidden_norm.weight"])
        ids = [anchor] + [SIZES.mask] * (SIZES.gamma - 1)
        x = w["embed_tokens.weight"][ids] * np.sqrt(SIZES.hidden)  # masks are scaled as well
        for layer in range(SIZES.layers):
            p = f"layers.{layer}."
            mixed = self.attention(
                p + "self_attn.", context, rms(x, w[p + "input_layernorm.weight"])
            )
            x = x + rms(mixed, w[p + "post_attention_layernorm.weight"])
            y = rms(x, w[p + "pre_feedforward_layernorm.weight"])
            y = gelu_tanh(y @ w[p + "mlp.gate_proj.weight"].T) * (
                y @ w[p + "mlp.up_proj.weight"].T
            )
            y = y @ w[p + "mlp.down_proj.weight"].T
            x = (x + rms(y, w[p + "post_feedforward_layernorm.weight"])) * w[p + "layer_scalar"]
        return rms(x, w["norm.weight"])

    def attention(self, p: str, context: Doubles, block: Doubles) -> Doubles:
        w, size = self.w, SIZES.head_dim
        rows = np.concatenate([context, block])
        positions = np.arange(len(rows))
        queries = (block @ w[p + "q_proj.weight"].T).reshape(len(block), -1, size)
        keys = (rows @ w[p + "k_proj.weight"].T).reshape(len(rows), -1, size)
        values = keys
        if p + "v_proj.weight" in w:
            values = (rows @ w[p + "v_proj.weight"].T).reshape(len(rows), -1, size)
        queries = turn(rms(queries, w[p + "q_norm.weight"]), positions[len(context) :])
        keys = turn(rms(keys, w[p + "k_norm.weight"]), positions)
        values = rms(values)
        group = SIZES.heads // SIZES.kv_heads
        keys, values = keys.repeat(group, 1), values.repeat(group, 1)
        scores = np.einsum("qhd,khd->hqk", queries, keys)  # scale 1
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, values)
        return np.asarray(mixed.reshape(len(block), -1) @ w[p + "o_proj.weight"].T)

    def draft(self, hidden: Doubles, anchor: int) -> tuple[list[int], Doubles, Doubles]:
        w, previous = self.w, anchor
        tokens, logits, scores = [], [], []
        for h in hidden:
            base = h @ w["lm_head.weight"].T
            if self.cap is not None:
                base = np.tanh(base / self.cap) * self.cap
            before = w["markov_head.markov_w1.weight"][previous]
            step = base + w["markov_head.markov_w2.weight"] @ before  # the bias is not capped
            features = np.concatenate([h, before])
            scores.append(
                features @ w["confidence_head.proj.weight"][0]
                + w["confidence_head.proj.bias"][0]
            )
            previous = int(step.argmax())
            tokens.append(previous)
            logits.append(step)
        return tokens, np.stack(logits), np.array(scores)


@pytest.mark.parametrize("softcap", [2.0, None])
@pytest.mark.parametrize("key_is_value", [True, False])
def test_draft_step_equals_float64(
    tmp_path: Path, key_is_value: bool, softcap: float | None
) -> None:
    path = write_gemma_draft(
        tmp_path / "draft", key_is_value=key_is_value, softcap=softcap, **HOW
    )
    draft = read_draft(path)
    assert DraftConfig.from_json(draft.config.to_json()) == draft.config
    module = load_drafter(draft)
    weights = gemma_weights(SIZES, key_is_value=key_is_value)
    reference = Gemma({n: t.double().numpy() for n, t in weights.items()}, softcap)
    taps = all_taps()
    with torch.inference_mode():
        tokens, logits, scores, *_ = module(*prepared(module, taps))
    for request, (rows, anchor) in enumerate(zip(taps, ANCHORS, strict=True)):
        hidden = reference.hidden(rows.astype(np.float64), anchor)
        drafted, expected, confident = reference.draft(hidden, anchor)
        assert tokens[request].tolist() == drafted
        np.testing.assert_allclose(logits[request], expected, atol=1e-4)
        np.testing.assert_allclose(scores[request], confident, atol=1e-4)


@pytest.mark.parametrize("key_is_value", [True, False])
def test_target_equals_transformers(tmp_path: Path, key_is_value: bool) -> None:
    """Contexts beyond the window, layers of two sizes, and taps of both kinds."""
    from transformers import Gemma4ForCausalLM

    path = write_gemma_target(tmp_path / "target", key_is_value=key_is_value)
    reference = Gemma4ForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert reference.model.layers[0].layer_scalar.item() != 1
    checkpoint = read_target(path)
    assert TargetConfig.from_json(checkpoint.config.to_json()) == checkpoint.config
    target = load_target(checkpoint, (-1, 0, 1))
    prompts = [[3, 14, 15, 92, 65, 35, 89, 79, 32], [7], [2, 71, 82, 81] * 6]
    caches = empty_caches(target.config.decoder, len(prompts))
    with torch.inference_mode():
        logits, taps, *_ = target(*ragged_inputs(prompts), *caches)
    lengths = [len(prompt) for prompt in prompts]
    for prompt, ours, tapped in zip(
        prompts, logits.split(lengths), taps.split(lengths), strict=True
    ):
        with torch.inference_mode():
            theirs = reference(torch.tensor([prompt]), output_hidden_states=True)
        states = torch.cat([theirs.hidden_states[i][0] for i in range(3)], -1)
        torch.testing.assert_close(ours, theirs.logits[0], atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(tapped, states, atol=5e-5, rtol=1e-5)


def test_text_part_of_a_multimodal_target(tmp_path: Path) -> None:
    plain = read_target(write_gemma_target(tmp_path / "plain"))
    nested = read_target(write_gemma_target(tmp_path / "nested", nested=True))
    assert nested.config == plain.config
    assert nested.tensors.keys() == plain.tensors.keys()
    unused = next(d for d in nested.decisions if d.name == "unused_tensors")
    assert unused.value == ["model.vision_tower.patch_embedder.weight"]


def test_exported_graphs_equal_the_modules(tmp_path: Path) -> None:
    """Scale, norm without weight, cap, scalars and caches of two sizes survive the export; the runtime
    decodes through them what the target decodes alone.
    """
    from dspark_trt.export.bundle_from_checkpoints import export_bundle
    from dspark_trt.export.parity import check_parity

    sizes: dict[str, Any] = {"target_layers": 2, "target_layer_ids": (0,)}
    path = write_gemma_draft(tmp_path / "draft", layers=1, gamma=2, rank=8, **sizes)
    served = read_target(write_gemma_target(tmp_path / "target", layers=2))
    bundle = export_bundle(read_draft(path), served, tmp_path / "bundle")
    results = list(check_parity(bundle))
    assert {result.name for result in results} >= {"context", "draft", "backbone", "target"}
    assert [result for result in results if not result.passed] == []
    prompt = (5, 9, 200, 31, 7, 7, 12, 90, 41)
    params = SamplingParams(max_new_tokens=24, stop_token_ids=())
    requests = [Request(prompt_ids=prompt, params=params, speculate=s) for s in (True, False)]
    with Engine.load(bundle) as engine:
        drafted, alone = engine.generate(requests)
    assert drafted.token_ids == alone.token_ids
