# SPDX-License-Identifier: Apache-2.0
"""Drafters as wide as the published ones, one layer deep: read from files of full size, some also traced.

Weights are holes in files and memory that nobody touches, so that none of it costs anything. Width, vocabulary,
depth of the target, tapped layers, mask and block are those of the configurations; MLP and heads are chosen.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_trt.checkpoint import DraftCheckpoint, draft_shapes, read_draft
from dspark_trt.config import (
    ConfidenceInput,
    DecoderConfig,
    DraftConfig,
    GemmaConfig,
    HeadType,
    RopeConfig,
    SlotSemantics,
)
from dspark_trt.export.functions import add_dspark_functions
from dspark_trt.export.graphs import draft_graphs
from dspark_trt.export.onnx_from_module import onnx_from_module
from dspark_trt.models.loading import (
    draft_skeleton,
    draft_tensors,
    parameter_sources,
    reserve,
)
from tests.core.test_checkpoint_robust import write_hollow

YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 4096,
    "rope_theta": 1e4,
}
QWEN_LAYERS = (1, 9, 17, 25, 33)
# hidden, vocabulary, target layers, taps, mask token, block, extra settings
PUBLISHED: dict[str, tuple[int, int, int, tuple[int, ...], int, int, dict[str, Any]]] = {
    "qwen3-4b": (2560, 151_936, 36, QWEN_LAYERS, 151_669, 7, {}),
    "qwen3-8b": (4096, 151_936, 36, QWEN_LAYERS, 151_669, 7, {}),
    "qwen3-14b": (5120, 151_936, 40, (1, 10, 19, 28, 37), 151_669, 7, {}),
    "qwen3.6-27b": (5120, 248_320, 64, (2, 17, 32, 47, 62), 248_070, 16, {}),
    "glm-5.2": (6144, 154_880, 78, (1, 19, 38, 57, 76), 154_856, 7, {}),
    "kimi-k3": (
        7168, 163_840, 93, (7, 23, 51, 67, 83), 163_824, 7,
        {"rope_theta": None, "rope_parameters": YARN},
    ),
}  # fmt: skip


def described(name: str) -> DraftConfig:
    hidden, vocab, depth, taps, mask, block, extra = PUBLISHED[name]
    yarn: dict[str, Any] = {"yarn_factor": 16.0, "original_positions": 4096} if extra else {}
    return DraftConfig(
        decoder=DecoderConfig(
            hidden_size=hidden, intermediate_size=2 * hidden, num_layers=1, num_heads=32,
            num_kv_heads=8, head_dim=128, vocab_size=vocab, rms_norm_eps=1e-6,
            rope=RopeConfig(theta=1e4 if extra else 1e6, **yarn), max_positions=40_960, qk_norm=True,
        ),
        block_slots=block,
        slot_semantics=SlotSemantics.ANCHOR_FIRST,
        mask_token_id=mask,
        target_layer_ids=taps,
        num_target_layers=depth,
        target_hidden_size=hidden,
        head_type=HeadType.VANILLA,
        markov_rank=256,
        confidence=ConfidenceInput.HIDDEN_MARKOV,
    )  # fmt: skip


def written(config: DraftConfig, extra: dict[str, Any]) -> dict[str, Any]:
    decoder = config.decoder
    return {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3",
        "hidden_size": decoder.hidden_size, "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": 1, "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads, "head_dim": decoder.head_dim,
        "vocab_size": decoder.vocab_size, "rms_norm_eps": decoder.rms_norm_eps,
        "max_position_embeddings": decoder.max_positions, "rope_theta": 1e6,
        "num_target_layers": config.num_target_layers, "block_size": config.block_slots,
        "target_layer_ids": list(config.target_layer_ids), "mask_token_id": config.mask_token_id,
        "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "layer_types": ["full_attention"],
    } | extra  # fmt: skip


def read(folder: Path, config: DraftConfig, settings: dict[str, Any]) -> DraftCheckpoint:
    write_hollow(folder / "draft", settings, draft_shapes(config))
    draft = read_draft(folder / "draft")
    assert draft.config == config
    assert draft.warnings == ()
    return draft


def trace(folder: Path, config: DraftConfig, settings: dict[str, Any]) -> set[str]:
    """Operators of the draft graph, traced from a checkpoint of full size."""
    draft = read(folder, config, settings)
    module = draft_skeleton(draft.config)
    reserve(module, parameter_sources(module, draft_tensors(draft, None), torch.float16))
    graph = next(g for g in draft_graphs(module, "float16") if g.name == "draft")
    model = add_dspark_functions(onnx_from_module(graph))
    assert [value.name for value in model.graph.inputs] == list(graph.bindings.input_names)
    logits = next(value for value in model.graph.outputs if value.name == "logits")
    assert list(logits.shape or ())[1:] == [config.gamma, config.decoder.vocab_size]
    assert "embed_tokens" in " ".join(model.graph.initializers)
    return {node.op_type for node in model.graph}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(tmp_path: Path, name: str) -> None:
    config = described(name)
    read(tmp_path, config, written(config, PUBLISHED[name][-1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3.6-27b", "kimi-k3"])  # the longest block, the widest
def test_published_widths(tmp_path: Path, name: str) -> None:
    config = described(name)
    operators = trace(tmp_path, config, written(config, PUBLISHED[name][-1]))
    assert operators >= {"Attention", "TensorScatter", "RotaryEmbedding", "SampleDraft"}
    # Shapes that depend on data cannot be built (docs/engines.md).
    assert not operators & {"NonZero", "Loop", "If"}


@pytest.mark.slow
def test_gemma4_12b(tmp_path: Path) -> None:
    hidden, vocab = 3840, 262_144
    config = DraftConfig(
        decoder=DecoderConfig(
            hidden_size=hidden, intermediate_size=4 * hidden, num_layers=1, num_heads=16,
            num_kv_heads=1, head_dim=512, vocab_size=vocab, rms_norm_eps=1e-6,
            rope=RopeConfig(theta=1e6, rotary_fraction=0.25), max_positions=131_072, qk_norm=True,
            gemma=GemmaConfig(key_is_value=True, logit_softcap=30.0),
        ),
        block_slots=7,
        slot_semantics=SlotSemantics.ANCHOR_FIRST,
        mask_token_id=4,
        target_layer_ids=(5, 17, 29, 41, 46),
        num_target_layers=48,
        target_hidden_size=hidden,
        head_type=HeadType.VANILLA,
        markov_rank=256,
        confidence=ConfidenceInput.HIDDEN_MARKOV,
    )  # fmt: skip
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    settings = written(
        config,
        {
            "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "rope_theta": None,
            "rope_parameters": {"full_attention": full}, "global_head_dim": 512, "head_dim": 256,
            "num_global_key_value_heads": 1, "attention_k_eq_v": True,
            "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
        },
    )  # fmt: skip
    assert trace(tmp_path, config, settings) >= {"Attention", "Gelu", "Tanh", "SampleDraft"}
