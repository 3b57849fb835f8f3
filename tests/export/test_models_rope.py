# SPDX-License-Identifier: Apache-2.0
"""Rotary tables against transformers' own, over every YaRN setting."""

from typing import Any

import pytest
import torch

from dspark_trt.config import DecoderConfig, RopeConfig
from dspark_trt.models.rope import RotaryTable, inverse_frequencies

HEAD_DIM = 64


@pytest.mark.parametrize("theta", [1e4, 5e6])
@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    "yarn",
    [
        {"factor": 4.0, "original_max_position_embeddings": 4096},
        {"factor": 16.0, "original_max_position_embeddings": 64},  # the ramp leaves the head
        {
            "factor": 2.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 4,
            "beta_slow": 4,
        },
        {"factor": 40.0, "original_max_position_embeddings": 4096, "attention_factor": 0.7},
    ],
)
def test_yarn_equals_transformers(theta: float, truncate: bool, yarn: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {"rope_type": "yarn", "rope_theta": theta, "truncate": truncate, **yarn}
    config = LlamaConfig(
        head_dim=HEAD_DIM, rope_parameters=settings, max_position_embeddings=1 << 20
    )
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
    ours, our_factor = inverse_frequencies(
        RopeConfig(
            theta=theta,
            yarn_factor=yarn["factor"],
            original_positions=yarn["original_max_position_embeddings"],
            beta_fast=yarn.get("beta_fast", 32),
            beta_slow=yarn.get("beta_slow", 1),
            attention_factor=yarn.get("attention_factor"),
            truncate=truncate,
        ),
        HEAD_DIM,
    )
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor)


@pytest.mark.parametrize(("factor", "theta"), [(8.0, 5e5), (32.0, 5e5), (4.0, 1e4)])
def test_llama3_equals_transformers(factor: float, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {
        "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(
        head_dim=HEAD_DIM, rope_parameters=settings, max_position_embeddings=1 << 17
    )
    expected, scale = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    rope = RopeConfig(theta=theta, llama3_factor=factor, original_positions=8192)
    ours, our_scale = inverse_frequencies(rope, HEAD_DIM)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert scale == our_scale == 1.0


def test_table_is_exact_at_far_positions() -> None:
    """Angles in float32: at position 30,000 the fastest pair is wrong by less than 3e-3 radians."""
    decoder = DecoderConfig(
        hidden_size=64, intermediate_size=64, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=HEAD_DIM, vocab_size=8, rms_norm_eps=1e-6, rope=RopeConfig(theta=1e6),
        max_positions=40_960, qk_norm=True,
    )  # fmt: skip
    positions = torch.tensor([[0, 1, 4095, 30_000]])
    cos, sin = RotaryTable(decoder)(positions)
    half = torch.arange(HEAD_DIM // 2, dtype=torch.float64) / (HEAD_DIM // 2)
    angles = positions[..., None].double() * 1e6**-half
    torch.testing.assert_close(cos, angles.cos().float(), atol=3e-3, rtol=0)
    torch.testing.assert_close(sin, angles.sin().float(), atol=3e-3, rtol=0)
