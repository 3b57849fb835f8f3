# SPDX-License-Identifier: Apache-2.0
"""Eagle3 drafters in three layouts, and what is refused of them."""

from pathlib import Path
from typing import Any

import pytest

from dspark_trt.checkpoint import (
    EMBEDDING,
    LM_HEAD,
    DraftOverrides,
    check_pair,
    read_draft,
    read_target,
)
from dspark_trt.checkpoint.convert import convert_draft
from dspark_trt.config import ChainConfig, ConfidenceInput
from dspark_trt.errors import CheckpointError
from tests.checkpoints import (
    EAGLE3_LAYOUTS,
    edit_config,
    edit_tensors,
    write_eagle3_draft,
    write_target,
)

FORMATS = {
    "deepspec": "deepspec-eagle3",
    "authors": "eagle3",
    "speculators": "speculators-eagle3",
}
GAMMA = DraftOverrides(gamma=3)


@pytest.mark.parametrize("layout", EAGLE3_LAYOUTS)
def test_layouts_read_alike(tmp_path: Path, layout: str) -> None:
    draft = read_draft(write_eagle3_draft(tmp_path / "d", layout=layout), overrides=GAMMA)
    config = draft.config
    assert draft.format == FORMATS[layout]
    assert config.chain == ChainConfig(normed_residual=False)
    assert (config.gamma, config.target_layer_ids) == (3, (0, 2))
    assert (config.tap_size, config.context_size) == (128, 129)
    assert config.confidence is ConfidenceInput.NONE
    assert draft.tensors["layers.0.self_attn.q_proj.weight"].shape == (128, 128)
    assert draft.borrowed == frozenset()
    assert check_pair(draft, read_target(write_target(tmp_path / "t"))) == ()


def test_steps_come_from_training_or_from_a_flag(tmp_path: Path) -> None:
    path = write_eagle3_draft(tmp_path / "deepspec", gamma=5)
    assert read_draft(path).config.gamma == 5
    longer = read_draft(path, overrides=DraftOverrides(gamma=8))
    assert longer.config.gamma == 8
    assert any(
        "ttt_length is 5: steps beyond it were never trained" in w for w in longer.warnings
    )
    said = write_eagle3_draft(tmp_path / "speculators", layout="speculators", gamma=6)
    assert read_draft(said).config.gamma == 6
    silent = write_eagle3_draft(tmp_path / "authors", layout="authors")
    with pytest.raises(CheckpointError, match="give it with --gamma"):
        read_draft(silent)
    with pytest.raises(CheckpointError, match=r"gamma is 0 .asked for., expected at least 1"):
        read_draft(silent, overrides=DraftOverrides(gamma=0))


def test_heads_of_their_own(tmp_path: Path) -> None:
    """The embedding is often the target's; a reduced head cannot be."""
    path = write_eagle3_draft(
        tmp_path / "d", layout="authors", owns_embedding=False, drafted=(1, 5, 200)
    )
    draft = read_draft(path, overrides=GAMMA)
    assert draft.borrowed == {EMBEDDING}
    assert draft.config.draft_vocab_size == 3
    edit_tensors(path, lambda weights: weights.pop(LM_HEAD))
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        read_draft(path, overrides=GAMMA)


def test_normed_residual_is_read(tmp_path: Path) -> None:
    path = write_eagle3_draft(tmp_path / "d", layout="speculators", normed_residual=True)
    assert read_draft(path).config.chain == ChainConfig(normed_residual=True)


@pytest.mark.parametrize(
    ("layout", "changes", "text"),
    [
        ("deepspec", {"target_layer_ids": [0, 3]}, "target_layer_ids .0, 3. taps the last of 4"),
        ("deepspec", {"target_layer_ids": None}, "target_layer_ids is missing"),
        ("deepspec", {"num_hidden_layers": 2}, "num_hidden_layers is 2: Eagle3 drafters .* 1 layer"),
        ("deepspec", {"layer_types": ["sliding_attention"], "sliding_window": 8}, "sliding_window is 8: .*without windows"),
        ("authors", {"eagle_config": None}, "the reference taps 2, N/2 and N-3"),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [3, 1]}, "is not strictly increasing"),
        ("speculators", {"draft_vocab_size": 100}, r"d2t is int64 \(320,\), expected int64 \(100,\)"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(
    tmp_path: Path, layout: str, changes: dict[str, Any], text: str
) -> None:
    path = write_eagle3_draft(tmp_path / "d", layout=layout)
    edit_config(path, changes)
    with pytest.raises(CheckpointError, match=text):
        read_draft(path, overrides=GAMMA)


@pytest.mark.parametrize("name", ["fc.weight", "layers.0.hidden_norm.weight", "norm.weight"])
def test_a_lost_tensor_is_missed(tmp_path: Path, name: str) -> None:
    path = write_eagle3_draft(tmp_path / "d")
    edit_tensors(path, lambda weights: weights.update({name + "s": weights.pop(name)}))
    with pytest.raises(CheckpointError, match=f"missing: .*{name}.*unexpected: {name}s"):
        read_draft(path)


def test_it_is_not_converted(tmp_path: Path) -> None:
    draft = read_draft(write_eagle3_draft(tmp_path / "d"))
    with pytest.raises(CheckpointError, match="speculators, which has no words for Eagle3"):
        convert_draft(draft, tmp_path / "out", to="speculators")
