# SPDX-License-Identifier: Apache-2.0
"""MTP-1 against float64 NumPy and the layer of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dspark_trt.checkpoint import read_draft
from dspark_trt.config import DraftConfig
from dspark_trt.models.loading import load_draft
from dspark_trt.models.mtp import MtpDrafter
from tests.checkpoints_mtp import MtpDims, mtp_weights, write_mtp
from tests.export.mtp_reference import MtpReference
from tests.export.toys import empty_caches

TOKENS = [7, 31, 200, 3, 3, 118, 42, 9]  # behind each row; the last is the anchor
CACHED = 6


def hidden_states() -> NDArray[np.float32]:
    return np.random.default_rng(3).standard_normal((len(TOKENS), 64), np.float32)


def step(module: MtpDrafter, garbage: float) -> tuple[int, NDArray[np.float32]]:
    """Rows up to CACHED appended, the others with the step; the other request in the batch is noise."""
    rows = np.concatenate([hidden_states(), np.array(TOKENS, np.float32)[:, None]], 1)
    caches = empty_caches(module.config.decoder, 2)
    for cache in caches:
        cache.fill_(garbage)
    new = torch.full((2, 2, rows.shape[1]), garbage)
    new[1] = torch.from_numpy(rows[CACHED:])
    new[1, -1, -1] = 0  # the graph puts the anchor there
    zero = torch.tensor([0])
    with torch.inference_mode():
        own = [cache[1:] for cache in caches]
        module.append_context(torch.from_numpy(rows[:CACHED])[None], zero, *own)
        tokens, logits, *_ = module(
            torch.tensor([3, TOKENS[-1]]), new, torch.tensor([1, 2]), torch.tensor([4, CACHED]),
            torch.zeros(2), torch.zeros(2, 1), *caches,
        )  # fmt: skip
    assert tokens.shape == (2, 1)
    return int(tokens[1, 0]), logits[1, 0].numpy()


def loaded(path: Path, **how: Any) -> MtpDrafter:
    draft = read_draft(write_mtp(path, **how))
    assert DraftConfig.from_json(draft.config.to_json()) == draft.config
    module = load_draft(draft)
    assert isinstance(module, MtpDrafter)
    return module


@pytest.mark.parametrize(
    "dims", [{}, {"query_rank": None}, {"experts": None}, {"groups": 1, "groups_taken": 1}]
)
def test_draft_step_equals_float64(tmp_path: Path, dims: dict[str, Any]) -> None:
    sizes = MtpDims(**dims)
    module = loaded(tmp_path / "draft", **dims)
    weights = {name: w.double().numpy() for name, w in mtp_weights(sizes).items()}
    expected = MtpReference(weights, sizes).logits(hidden_states().astype(np.float64), TOKENS)
    token, logits = step(module, garbage=50.0)
    np.testing.assert_allclose(logits, expected, atol=5e-5)
    assert token == int(expected.argmax())
    same, again = step(module, garbage=1e4)  # nothing beyond the valid rows is seen
    assert same == token
    np.testing.assert_array_equal(logits, again)


def test_fp8_is_read_exactly(tmp_path: Path) -> None:
    """Blocks of one float32 scale: values are those of the elements times it."""
    sizes = MtpDims()
    weights = {}
    for name, tensor in mtp_weights(sizes).items():
        is_plain = tensor.ndim != 2 or name.startswith(
            ("embed", "shared_head", "eh_", "mlp.gate.")
        )
        rounded = (tensor * 100).to(torch.float8_e4m3fn).float() * torch.tensor(0.01)
        weights[name] = (tensor if is_plain else rounded).double().numpy()
    expected = MtpReference(weights, sizes).logits(hidden_states().astype(np.float64), TOKENS)
    _, logits = step(loaded(tmp_path / "draft", quantised=True), garbage=1.0)
    np.testing.assert_allclose(logits, expected, atol=5e-5)


def test_the_layer_equals_that_of_transformers(tmp_path: Path) -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3DecoderLayer,
        DeepseekV3RotaryEmbedding,
    )

    module, sizes = loaded(tmp_path / "draft"), MtpDims()
    settings = sizes.config_json() | {"num_hidden_layers": 2}
    config = DeepseekV3Config(**settings, attn_implementation="eager")
    theirs = DeepseekV3DecoderLayer(config, 1).eval()
    weights = mtp_weights(sizes)
    parts = ("self_attn", "input_l", "post_", "mlp.shared", "mlp.gate")
    named = {name: tensor for name, tensor in weights.items() if name.startswith(parts)}
    stems = [f"mlp.experts.{index}." for index in range(8)]
    gate_up = [
        torch.cat([weights[f"{s}{part}_proj.weight"] for part in ("gate", "up")]) for s in stems
    ]
    named["mlp.experts.gate_up_proj"] = torch.stack(gate_up)
    named["mlp.experts.down_proj"] = torch.stack(
        [weights[f"{s}down_proj.weight"] for s in stems]
    )
    theirs.load_state_dict(named)
    count = len(TOKENS)
    causal = torch.full((count, count), -torch.inf).triu(1)[None, None]
    with torch.inference_mode():
        hidden = torch.from_numpy(hidden_states())
        paired = module._paired(module.embed_tokens(torch.tensor(TOKENS)), hidden)[None]
        positions = torch.arange(count)[None]
        angles = DeepseekV3RotaryEmbedding(config)(paired, positions)
        output = theirs(
            paired, attention_mask=causal, position_ids=positions, position_embeddings=angles
        )
        output = output[0] if isinstance(output, tuple) else output
        expected = module.lm_head(module.norm(output.view(count, -1)[-1]))
    _, logits = step(module, garbage=1.0)
    np.testing.assert_allclose(logits, expected.numpy(), atol=5e-5)
