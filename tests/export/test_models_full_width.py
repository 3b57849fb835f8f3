# SPDX-License-Identifier: Apache-2.0
"""Drafters as wide as the published ones, one layer deep: read from files of full size, some also traced
(`benchmarks/published_configs.py` builds all; tests/export/test_engine_scale.py builds one of full depth).

Weights are holes in files and memory that nobody touches, so that reading and tracing cost nothing.
"""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dspark_trt.checkpoint import DraftCheckpoint, read_draft
from dspark_trt.config import GemmaConfig, SlotSemantics
from dspark_trt.export.functions import add_dspark_functions
from dspark_trt.export.graphs import draft_graphs
from dspark_trt.export.onnx_from_module import onnx_from_module
from dspark_trt.models.loading import (
    draft_skeleton,
    draft_tensors,
    parameter_sources,
    reserve,
)
from tests.conftest import ROOT
from tests.core.test_checkpoint_robust import write_hollow

BENCHMARKS = ROOT / "benchmarks"
PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (BENCHMARKS / "published_configs.json").read_text()
)


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    """`benchmarks/export_scale.py`, whose list of tensors the reader has no part in."""
    spec = importlib.util.spec_from_file_location(
        "export_scale", BENCHMARKS / "export_scale.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(folder: Path, name: str, scale: ModuleType) -> DraftCheckpoint:
    config = scale.shallow(name)
    write_hollow(folder / "draft", config, scale.shapes(config))
    draft = read_draft(folder / "draft")
    assert draft.warnings == ()
    assert draft.borrowed == frozenset()
    return draft


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - {"deepseek-v4-flash"}))
def test_published_configurations_are_read(
    tmp_path: Path, name: str, scale: ModuleType
) -> None:
    draft, said = read(tmp_path, name, scale), PUBLISHED[name]
    said = said | said.get("dflash_config", {}) | said.get("dspark_config", {})
    config, decoder = draft.config, draft.config.decoder
    assert draft.format == ("specforge" if "dflash_config" in said else "deepspec")
    assert decoder.hidden_size == config.target_hidden_size == said["hidden_size"]
    assert (decoder.vocab_size, decoder.intermediate_size, decoder.num_heads) == (
        said["vocab_size"], said["intermediate_size"], said["num_attention_heads"],
    )  # fmt: skip
    assert (config.gamma, config.slot_semantics) == (
        said["block_size"],
        SlotSemantics.ANCHOR_FIRST,
    )
    assert list(config.target_layer_ids) == said["target_layer_ids"]
    assert (config.num_target_layers, config.mask_token_id, config.markov_rank) == (
        said["num_target_layers"], said["mask_token_id"], 256,
    )  # fmt: skip
    assert (decoder.rope.yarn_factor > 1) == (name == "kimi-k3")
    is_gemma = GemmaConfig(key_is_value=True, logit_softcap=30.0)
    assert decoder.gemma == (is_gemma if name == "gemma4-12b" else None)


def test_a_stage_of_deepseek_v4_is_read(tmp_path: Path, scale: ModuleType) -> None:
    draft, said = read(tmp_path, "deepseek-v4-flash", scale), PUBLISHED["deepseek-v4-flash"]
    config = draft.config
    assert (draft.format, config.gamma) == ("deepseek-v4", said["dspark_block_size"])
    assert list(config.target_layer_ids) == said["dspark_target_layer_ids"]
    assert (config.decoder.hidden_size, config.decoder.head_dim) == (4096, 512)


def operators(draft: DraftCheckpoint) -> set[str]:
    """Operators of the draft graph, traced from a checkpoint of full size."""
    module = draft_skeleton(draft.config)
    reserve(module, parameter_sources(module, draft_tensors(draft, None), torch.float16))
    graph = next(g for g in draft_graphs(module, "float16") if g.name == "draft")
    model = add_dspark_functions(onnx_from_module(graph))
    assert [value.name for value in model.graph.inputs] == list(graph.bindings.input_names)
    logits = next(value for value in model.graph.outputs if value.name == "logits")
    sizes = [draft.config.gamma, draft.config.decoder.vocab_size]
    assert list(logits.shape or ())[1:] == sizes
    assert "embed_tokens" in " ".join(model.graph.initializers)
    return {node.op_type for node in model.graph}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3.6-27b", "gemma4-12b"]
)  # the longest block, other layers
def test_published_widths_are_traced(tmp_path: Path, name: str, scale: ModuleType) -> None:
    found = operators(read(tmp_path, name, scale))
    assert found >= {"Attention", "TensorScatter", "RotaryEmbedding", "SampleDraft"}
    assert found >= {"Gelu", "Tanh"} or name != "gemma4-12b"
    # Shapes that depend on data cannot be built (docs/engines.md).
    assert not found & {"NonZero", "Loop", "If"}
