# SPDX-License-Identifier: Apache-2.0
"""Target modules against transformers, against themselves in other batches, and against known sums."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_trt.checkpoint import read_target
from dspark_trt.config import TargetConfig
from dspark_trt.models.loading import load_target
from dspark_trt.models.target import Target
from tests.checkpoints import edit_tensors, write_target
from tests.export.toys import empty_caches, make_sums_visible, ragged_inputs

TAPS = (-1, 0, 2)
PROMPTS = ([3, 14, 15, 92, 65, 35, 89, 79, 32], [7], [2, 71, 82, 81] * 10)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "qwen3-tied": {"family": "qwen3", "tied": True},
    "qwen3-untied": {"family": "qwen3", "tied": False},
    "qwen3-attention-bias": {"family": "qwen3", "tied": True, "attention_bias": True},
    "llama": {"family": "llama", "tied": False},
    "llama-attention-bias": {"family": "llama", "tied": True, "attention_bias": True},
    "one-kv-head": {"family": "qwen3", "tied": True, "kv_heads": 1},
    "rope-parameters": {
        "family": "qwen3",
        "config": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    },
    "yarn-rope-scaling": {"family": "llama", "config": {"rope_scaling": YARN}},
    "yarn-rope-parameters": {
        "family": "qwen3",
        "config": {"rope_theta": None, "rope_parameters": YARN | {"rope_theta": 5e5}},
    },
    "yarn-all-settings": {
        "family": "qwen3",
        "config": {
            "rope_scaling": YARN
            | {"beta_fast": 8, "beta_slow": 2, "attention_factor": 1.3, "truncate": False}
        },
    },
    "qwen2": {"family": "qwen2", "tied": False},
    "qwen3-moe": {"family": "qwen3_moe", "tied": False},
    "qwen3-moe-plain-sums": {
        "family": "qwen3_moe",
        "config": {"norm_topk_prob": False, "num_experts_per_tok": 3},
    },
    "llama3-rope": {"family": "llama", "config": {"rope_scaling": LLAMA3}},
    "linear-rope": {
        "family": "llama", "config": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    },
    "mistral-window": {
        "family": "mistral", "tied": False, "config": {"sliding_window": 9, "layer_types": None},
    },
    "qwen2-window-in-upper-layers": {
        "family": "qwen2",
        "config": {
            "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2,
            "layer_types": None,
        },
    },
    "qwen3-window-by-layer-types": {
        "family": "qwen3",
        "config": {
            "sliding_window": 5, "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    },
    "yarn-mscale": {
        "family": "llama",
        "config": {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.9}},
    },
}  # fmt: skip


def run(target: Target, prompts: list[list[int]], caches: list[Tensor] | None = None,
        context_len: list[int] | None = None) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """Logits and taps of every row, by prompt, and the caches."""
    caches = caches or empty_caches(target.config.decoder, len(prompts))
    with torch.inference_mode():
        logits, taps, *caches = target(*ragged_inputs(prompts, context_len), *caches)
    lengths = [len(prompt) for prompt in prompts]
    return list(logits.split(lengths)), list(taps.split(lengths)), caches


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(tmp_path: Path, case: str) -> None:
    from transformers import AutoModelForCausalLM

    path = write_target(tmp_path / "target", **CASES[case])
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    target = load_target(read_target(path), TAPS)
    logits, taps, _ = run(target, list(PROMPTS))
    for prompt, ours, tapped in zip(PROMPTS, logits, taps, strict=True):
        with torch.inference_mode():
            theirs = reference(torch.tensor([prompt]), output_hidden_states=True)
        states = torch.cat([theirs.hidden_states[i + 1][0] for i in TAPS], -1)
        torch.testing.assert_close(ours, theirs.logits[0], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(tapped, states, atol=2e-5, rtol=1e-5)


def test_embedding_tap_is_the_embedding(tmp_path: Path) -> None:
    path = write_target(tmp_path / "target")
    target = load_target(read_target(path), (-1,))
    _, (taps, *_), _ = run(target, list(PROMPTS))
    assert torch.equal(taps, target.embed_tokens.weight[torch.tensor(PROMPTS[0])])


@pytest.mark.parametrize("ids", [(0,), (1, 2), (-1, 0, 1, 2)])
def test_taps_are_outputs_of_the_named_layers(tmp_path: Path, ids: tuple[int, ...]) -> None:
    """Layer i adds 2^i to every element (vllm-project/vllm#42704: taps one layer early)."""
    path = write_target(tmp_path / "target", family="llama", attention_bias=True)
    edit_tensors(path, make_sums_visible)
    target = load_target(read_target(path), ids)
    _, (taps, *_), _ = run(target, list(PROMPTS))
    embedded = target.embed_tokens.weight[torch.tensor(PROMPTS[0])]
    expected = [embedded + sum(2.0**layer for layer in range(i + 1)) for i in ids]
    assert torch.equal(taps, torch.cat(expected, -1))


def test_ragged_rows_equal_separate_runs(tmp_path: Path) -> None:
    target = load_target(read_target(write_target(tmp_path / "target")), TAPS)
    together, tapped, _ = run(target, list(PROMPTS))
    for prompt, logits, taps in zip(PROMPTS, together, tapped, strict=True):
        (alone,), (alone_taps,), _ = run(target, [prompt])
        torch.testing.assert_close(logits, alone, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(taps, alone_taps, atol=1e-5, rtol=1e-5)


def test_steps_of_any_length_equal_one_run(tmp_path: Path) -> None:
    """Rejected rows of an earlier step and another owner's rows lie behind the valid end, unseen."""
    target = load_target(read_target(write_target(tmp_path / "target")), TAPS)
    prompts = [list(PROMPTS[0]), list(PROMPTS[2][:8])]
    (whole, other), *_ = run(target, prompts)
    caches = empty_caches(target.config.decoder, 2)
    for cache in caches:
        cache.fill_(1e4)
    first, _, caches = run(target, [[*prompts[0][:4], 9, 9], prompts[1][:1]], caches)
    second, _, caches = run(target, [prompts[0][4:5], prompts[1][1:6]], caches, [4, 1])
    third, _, _ = run(target, [prompts[0][5:], prompts[1][6:]], caches, [5, 6])
    stepped = torch.cat((first[0][:4], second[0], third[0]))
    torch.testing.assert_close(stepped, whole, atol=1e-5, rtol=1e-5)
    stepped = torch.cat((first[1], second[1], third[1]))
    torch.testing.assert_close(stepped, other, atol=1e-5, rtol=1e-5)


def test_only_the_rows_asked_for_get_logits(tmp_path: Path) -> None:
    target = load_target(read_target(write_target(tmp_path / "target")), TAPS)
    prompts = list(PROMPTS)
    (first, _, last), *_ = run(target, prompts)
    inputs = ragged_inputs(prompts)
    caches = empty_caches(target.config.decoder, len(prompts))
    with torch.inference_mode():
        logits, taps, *_ = target(*inputs[:4], torch.tensor([13, 0, 0]), inputs[5], *caches)
    expected = torch.stack((last[3], first[0], first[0]))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert taps.shape[0] == sum(map(len, prompts))


def test_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    tied = load_target(read_target(write_target(tmp_path / "tied")), TAPS)
    assert tied.lm_head.weight.data_ptr() == tied.embed_tokens.weight.data_ptr()
    own = load_target(read_target(write_target(tmp_path / "own", tied=False)), TAPS)
    assert own.lm_head.weight.data_ptr() != own.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_and_logits_stay_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    target = load_target(read_target(write_target(tmp_path / "target")), TAPS, dtype)
    assert target.get_parameter("layers.0.mlp.down_proj.weight").dtype == dtype
    assert target.norm.weight.dtype == torch.float32
    caches = empty_caches(target.config.decoder, len(PROMPTS), dtype=dtype)
    logits, taps, caches = run(target, list(PROMPTS), caches)
    assert logits[0].dtype == taps[0].dtype == torch.float32
    assert caches[0].dtype == dtype


def test_config_survives_json(tmp_path: Path) -> None:
    config = read_target(
        write_target(tmp_path / "target", config={"rope_scaling": YARN})
    ).config
    assert TargetConfig.from_json(config.to_json()) == config
