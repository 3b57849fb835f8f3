# SPDX-License-Identifier: Apache-2.0
"""Targets, rotary settings, and pairs of drafter and target."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_trt.checkpoint import check_pair, read_draft, read_target
from dspark_trt.config import ExpertsConfig, RopeConfig, TargetConfig, TargetFamily
from dspark_trt.errors import CheckpointError
from tests.checkpoints import edit_config, edit_tensors, write_draft, write_target

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_families(tmp_path: Path, family: str, tied: bool) -> None:
    target = read_target(write_target(tmp_path / "target", family=family, tied=tied, shards=2))
    assert target.config.family is (
        TargetFamily.QWEN3 if family == "qwen3" else TargetFamily.LLAMA
    )
    assert target.config.decoder.qk_norm == (family == "qwen3")
    assert target.config.tie_word_embeddings == tied
    assert (HEAD in target.tensors) != tied
    assert "layers.3.self_attn.o_proj.weight" in target.tensors
    assert target.config.stop_token_ids == (1, 2)
    assert [path.name for path in target.tokenizer_files] == ["generation_config.json"]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_attention_biases(tmp_path: Path, family: str) -> None:
    path = write_target(tmp_path / "target", family=family, attention_bias=True)
    assert read_target(path).config.decoder.attention_bias
    edit_config(path, {"attention_bias": False})
    with pytest.raises(
        CheckpointError, match=r"unexpected: model\.layers\.0\.self_attn\.k_proj\.bias"
    ):
        read_target(path)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_family_without_model_type_is_read_off_the_tensors(tmp_path: Path, family: str) -> None:
    path = write_target(tmp_path / "target", family=family)
    edit_config(path, drop=["model_type", "architectures", "tie_word_embeddings"])
    target = read_target(path)
    assert (target.config.family.value, target.config.tie_word_embeddings) == (family, True)


def test_unsupported_targets_are_named(tmp_path: Path) -> None:
    path = write_target(tmp_path / "target", config={"model_type": "mixtral"})
    with pytest.raises(
        CheckpointError,
        match="'mixtral' are not supported yet; supported: qwen2, qwen3, qwen3_moe",
    ):
        read_target(path)
    edit_config(path, {"model_type": "llama"})
    with pytest.raises(
        CheckpointError, match=r"unexpected: model\.layers\.0\.self_attn\.k_norm"
    ):
        read_target(path)


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", {"layer_types": None, "sliding_window": 64}, (64,) * 4),
        ("mistral", {"layer_types": None, "sliding_window": None}, ()),
        ("mistral", {"layer_types": None, "sliding_window": 512}, ()),  # covers every position
        ("qwen3", {"layer_types": None, "sliding_window": 64}, ()),  # use_sliding_window is off
        ("qwen3", {"layer_types": None, "sliding_window": 64, "use_sliding_window": True,
                   "max_window_layers": 3}, (None, None, None, 64)),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"] * 2,
                   "sliding_window": 64}, (None, 64) * 2),
    ],
)  # fmt: skip
def test_windows_of_targets(
    tmp_path: Path, family: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    target = read_target(write_target(tmp_path / "target", family=family, config=changes))
    assert target.config.decoder.windows == windows
    assert TargetConfig.from_json(target.config.to_json()) == target.config


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
         "layer_types asks for a sliding window, but sliding_window is missing"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 64},
         "layer_types has 1 entries, expected 4"),
        ({"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "'chunked_attention'"),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": 0},
         "a sliding window must be at least 1, got 0"),
        ({"layer_types": None, "sliding_window": "4k"}, "sliding_window is '4k', expected an integer"),
    ],
)  # fmt: skip
def test_windows_that_contradict(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    path = write_target(tmp_path / "target", family="mistral", config=changes)
    with pytest.raises(CheckpointError, match=text):
        read_target(path)


def test_experts(tmp_path: Path) -> None:
    path = write_target(tmp_path / "target", family="qwen3_moe")
    experts = read_target(path).config.decoder.experts
    assert experts == ExpertsConfig(
        count=5, per_token=2, intermediate_size=24, normalised=True, layers=(0, 1, 2)
    )
    assert TargetConfig.from_json(read_target(path).config.to_json()).decoder.experts == experts
    edit_config(path, {"num_experts_per_tok": 6})
    with pytest.raises(CheckpointError, match="6 of 5 experts a token is impossible"):
        read_target(path)
    edit_config(path, {"num_experts_per_tok": 2, "num_experts": 4})
    with pytest.raises(
        CheckpointError, match=r"unexpected: model\.layers\.0\.mlp\.experts\.4\.down_proj"
    ):
        read_target(path)
    edit_config(path, {"num_experts": 5, "mlp_only_layers": [0, 3]})
    with pytest.raises(CheckpointError, match=r"missing: layers\.0\.mlp\.down_proj\.weight"):
        read_target(path)


def test_qwen2_has_biases_without_a_key(tmp_path: Path) -> None:
    decoder = read_target(write_target(tmp_path / "target", family="qwen2")).config.decoder
    assert (decoder.attention_bias, decoder.output_bias, decoder.qk_norm) == (
        True,
        False,
        False,
    )


def test_untied_head_must_be_there(tmp_path: Path) -> None:
    path = write_target(tmp_path / "target", config={"tie_word_embeddings": False})
    with pytest.raises(CheckpointError, match=rf"missing: {HEAD}"):
        read_target(path)


def test_tied_head_may_be_stored_if_it_is_a_copy(tmp_path: Path) -> None:
    path = write_target(tmp_path / "target")
    edit_tensors(path, lambda weights: weights.update({HEAD: weights[EMBEDDING]}))
    target = read_target(path)
    assert HEAD not in target.tensors
    assert any(
        item.name == "unused_tensors" and item.value == [HEAD] for item in target.decisions
    )
    edit_tensors(path, lambda weights: weights[HEAD][-1].add_(1))
    with pytest.raises(CheckpointError, match=rf"{HEAD} differs from {EMBEDDING}"):
        read_target(path)


def test_a_drafter_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds a drafter"):
        read_target(write_draft(tmp_path / "draft"))


def test_quantised_target_is_refused_by_dtype(tmp_path: Path) -> None:
    path = write_target(
        tmp_path / "target", config={"quantization_config": {"quant_method": "fp8"}}
    )
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(path, lambda weights: weights.update({name: weights[name].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=rf"{name} is int8"):
        read_target(path)


def test_stop_tokens(tmp_path: Path) -> None:
    path = write_target(tmp_path / "target", config={"eos_token_id": 5})
    generation = path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": 9}))
    assert read_target(path).config.stop_token_ids == (9,)
    generation.write_text("{}")
    assert read_target(path).config.stop_token_ids == (5,)
    edit_config(path, {"eos_token_id": [5, 320]})
    with pytest.raises(
        CheckpointError, match="eos_token_id 320 is not a token of the vocabulary of 320"
    ):
        read_target(path)
    edit_config(path, drop=["eos_token_id"])
    target = read_target(path)
    assert target.config.stop_token_ids == ()
    assert any("eos_token_id" in text for text in target.warnings)


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_llama3_and_linear_scaling(tmp_path: Path) -> None:
    assert rope_of(tmp_path, 5e5, rope_scaling=LLAMA3) == RopeConfig(
        theta=5e5, llama3_factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_positions=8192,
    )  # fmt: skip
    linear = {"type": "linear", "factor": 2.0}
    assert rope_of(tmp_path, 1e4, rope_scaling=linear) == RopeConfig(
        theta=1e4, linear_factor=2.0
    )


def rope_of(path: Path, theta: float | None, **settings: Any) -> RopeConfig:
    write_target(path, config={"rope_theta": theta, **settings})
    return read_target(path).config.decoder.rope


YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 128}


def test_rope_in_every_spelling(tmp_path: Path) -> None:
    plain = RopeConfig(theta=5e4)
    default = {"rope_type": "default"}
    assert rope_of(tmp_path, 5e4) == plain
    assert rope_of(tmp_path, None, rope_parameters={"rope_theta": 5e4, **default}) == plain
    assert rope_of(tmp_path, 50000, rope_scaling=None, rope_parameters=default) == plain
    assert rope_of(tmp_path, 5e4, rope_scaling={"type": "linear", "factor": 1.0}) == plain
    yarn = RopeConfig(theta=5e4, yarn_factor=4.0, original_positions=128)
    assert rope_of(tmp_path, 5e4, rope_scaling={"type": "yarn", **YARN}) == yarn
    assert rope_of(tmp_path, 5e4, rope_scaling={"rope_type": "yarn", **YARN}) == yarn
    new = {"rope_theta": 5e4, "rope_type": "yarn", **YARN}
    assert rope_of(tmp_path, None, rope_parameters=new) == yarn
    full = {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "truncate": False}
    assert rope_of(tmp_path, None, rope_parameters=new | full) == RopeConfig(
        theta=5e4, yarn_factor=4.0, original_positions=128,
        beta_fast=16.0, beta_slow=2.0, attention_factor=1.5, truncate=False,
    )  # fmt: skip


def test_yarn_with_two_scales(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5, **YARN}
    factor = rope_of(tmp_path, 1e4, rope_scaling=scaling).attention_factor
    assert factor == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("theta", "settings", "text"),
    [
        (None, {}, "rope_theta is missing"),
        (-1.0, {}, "rope theta must be above 1"),
        (1e4, {"rope_scaling": {"type": "llama3", "factor": 8.0}},
         "llama3 RoPE scaling needs original_max_position_embeddings, low_freq_factor"),
        (1e4, {"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, r"low_freq_factor 4\.0 must be"),
        (1e4, {"rope_scaling": LLAMA3 | {"beta_fast": 4}}, "does not know: beta_fast"),
        (1e4, {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
         "RoPE type 'dynamic'.*keys would have to be rotated again"),
        (1e4, {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "RoPE type 'longrope'"),
        (1e4, {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "RoPE type 'ntk'"),
        (1e4, {"rope_scaling": {"type": "linear"}}, "linear RoPE scaling needs factor"),
        (1e4, {"rope_scaling": {"type": "linear", "factor": 0.5}}, "linear factor must be"),
        (1e4, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "YaRN needs factor and"),
        (1e4, {"rope_scaling": {"type": "yarn", **YARN, "factor": "4"}}, "factor is '4'"),
        (1e4, {"rope_scaling": {"type": "yarn", **YARN, "gamma": 1}}, "does not know: gamma"),
        (1e4, {"rope_scaling": {"type": "yarn", **YARN, "factor": 0.5}}, "YaRN factor must be"),
        (1e4, {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": -1}}, "not above beta_fast"),
        (1e4, {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": -1}},
         "of at least 1, got -1"),
        (1e4, {"rope_scaling": {"factor": 2.0}}, r"factor 2\.0, but no rope_type"),
        (1e4, {"rope_parameters": {"rope_theta": 2e4}}, r"rope_theta is 10000\.0 but"),
        (1e4, {"rope_scaling": {"type": "yarn", "rope_type": "linear"}}, "but type is 'yarn'"),
        (1e4, {"rope_scaling": {"type": "yarn", **YARN}, "rope_parameters": {"type": "default"}},
         "contradicts"),
        (1e4, {"rope_parameters": {"full_attention": {}}}, "each layer type"),
        (1e4, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
    ],
)  # fmt: skip
def test_rope_that_is_refused(
    tmp_path: Path, theta: float | None, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(CheckpointError, match=text):
        rope_of(tmp_path / "target", theta, **settings)


@pytest.mark.parametrize("layout", ["deepspec", "specforge", "speculators"])
def test_a_pair_that_fits(tmp_path: Path, layout: str) -> None:
    draft = read_draft(write_draft(tmp_path / "draft", layout=layout))
    assert check_pair(draft, read_target(write_target(tmp_path / "target"))) == ()


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        (
            {"hidden": 128},
            "target_hidden_size of the drafter is 64, but hidden_size of the target is 128",
        ),
        (
            {"vocab": 322},
            "vocab_size of the drafter is 320, but vocab_size of the target is 322",
        ),
        (
            {"layers": 5},
            "num_target_layers of the drafter is 4, but num_hidden_layers of the target is 5",
        ),
        ({"layers": 3}, r"target_layer_ids \[0, 2\] taps the last of 3 layers"),
        ({"layers": 2}, r"target_layer_ids \[0, 2\] must lie in -1\.\.0"),
    ],
)
def test_pairs_that_do_not_fit(tmp_path: Path, dims: dict[str, Any], text: str) -> None:
    draft = read_draft(write_draft(tmp_path / "draft"))
    target = read_target(write_target(tmp_path / "target", **dims))
    with pytest.raises(CheckpointError, match=text):
        check_pair(draft, target)


def test_all_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    draft = read_draft(write_draft(tmp_path / "draft", layout="zlab-dflash"))
    target = read_target(write_target(tmp_path / "target", hidden=128, vocab=322, layers=2))
    with pytest.raises(CheckpointError) as caught:
        check_pair(draft, target)
    for key in (
        "target_hidden_size",
        "vocab_size",
        "num_target_layers",
        "borrowed",
        "target_layer_ids",
    ):
        assert key in str(caught.value)


def test_borrowing_needs_the_targets_width(tmp_path: Path) -> None:
    narrow: dict[str, Any] = {"hidden": 32, "config": {"target_hidden_size": 64}}
    target = read_target(write_target(tmp_path / "target"))
    own = read_draft(write_draft(tmp_path / "own", **narrow))
    assert own.config.tap_size == 128
    assert check_pair(own, target) == ()
    borrowing = read_draft(write_draft(tmp_path / "borrowing", layout="specforge", **narrow))
    with pytest.raises(CheckpointError, match=r"embedding borrowed\) of the drafter is 32"):
        check_pair(borrowing, target)


def test_pair_warnings(tmp_path: Path) -> None:
    draft = read_draft(write_draft(tmp_path / "draft", max_positions=256))
    path = write_target(tmp_path / "target")
    added = {"318": {"content": "<mask>"}, "1": {"content": "<end>"}}
    tokenizer = {"mask_token": "<mask>", "added_tokens_decoder": added}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    positions, mask = check_pair(draft, read_target(path))
    assert "256" in positions
    assert "512" in positions
    assert "319" in mask
    assert "318" in mask
