# SPDX-License-Identifier: Apache-2.0
"""Damaged files give a CheckpointError or read as before, never another exception; full-size ones read."""

import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dspark_trt.checkpoint import draft_shapes, read_checkpoint, read_draft
from dspark_trt.config import DraftConfig
from dspark_trt.errors import CheckpointError
from tests.checkpoints import LAYOUTS, write_draft, write_gemma_target, write_target
from tests.checkpoints_deepseek import write_deepseek_draft
from tests.checkpoints_mtp import write_mtp

WRONG: list[Any] = [
    None, True, -1, 0, 1.5, 3, 10**400, 1e308, "x", [], [None], [10**30], {}, {"a": {}},
]  # fmt: skip


def survives(path: Path) -> None:
    try:
        read_checkpoint(path)
    except CheckpointError:
        return


def each_setting(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every key of ``config`` and of the objects in it, with the object that holds it."""
    for key, value in list(config.items()):
        yield config, key
        if isinstance(value, dict):
            yield from each_setting(value)


WRITERS: dict[str, Callable[[Path], Path]] = {
    **{layout: partial(write_draft, layout=layout) for layout in LAYOUTS},
    "target": write_target,
}


@pytest.mark.parametrize("layout", WRITERS)
def test_any_setting_may_be_wrong(tmp_path: Path, layout: str) -> None:
    path = WRITERS[layout](tmp_path / "checkpoint")
    file = path / "config.json"
    original = json.loads(file.read_text())
    place = original.get("transformer_layer_config", original)
    place["rope_parameters"] = {
        "rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0,
        "original_max_position_embeddings": 128, "beta_fast": 32, "attention_factor": 1.0,
    }  # fmt: skip
    file.write_text(json.dumps(original))
    each_may_be_wrong(path, original)


@pytest.mark.parametrize("write", [write_gemma_target, write_mtp, write_deepseek_draft])
def test_any_setting_of_other_families_may_be_wrong(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    path = write(tmp_path / "checkpoint")
    each_may_be_wrong(path, json.loads((path / "config.json").read_text()))


def each_may_be_wrong(path: Path, original: dict[str, Any]) -> None:
    read_checkpoint(path)  # the starting point is sound, so that every reader is reached
    file = path / "config.json"
    for position in range(len(list(each_setting(original)))):
        for value in WRONG:
            config = copy.deepcopy(original)
            place, key = list(each_setting(config))[position]
            place[key] = value
            file.write_text(json.dumps(config))
            survives(path)


def test_any_header_byte_may_be_wrong(tmp_path: Path) -> None:
    file = write_draft(tmp_path / "draft", layout="zlab-dflash", layers=1) / "model.safetensors"
    original = file.read_bytes()
    for position in range(0, 8 + int.from_bytes(original[:8], "little"), 3):
        for byte in (b"0", b"[", b"\xff"):
            file.write_bytes(original[:position] + byte + original[position + 1 :])
            survives(file.parent)


def test_endless_nesting_is_refused(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft")
    (path / "config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_draft(path)


def test_broken_link_is_refused(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_draft(path)


def write_hollow(
    path: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    """A bfloat16 checkpoint of full size that occupies no disk: the data is a hole in the file."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2
        for size in shape:
            end = offset + (end - offset) * size
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)


# (hidden, intermediate, heads, target layers, target layer ids, extra) of released drafters.
RELEASED = {
    "qwen3-4b": (2560, 9728, 32, 36, [1, 9, 17, 25, 33], {}),
    "qwen3-8b": (4096, 12288, 32, 36, [1, 9, 17, 25, 33], {}),
    "qwen3-14b": (5120, 17408, 40, 40, [1, 10, 19, 28, 37], {}),
    "long-context": (
        7168, 18432, 64, 93, [7, 23, 51, 67, 83],
        {"rope_theta": None, "rope_parameters": {
            "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096,
            "rope_theta": 10000.0}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_released_sizes(tmp_path: Path, name: str) -> None:
    hidden, intermediate, heads, depth, ids, extra = RELEASED[name]
    toy = read_draft(write_draft(tmp_path / "toy")).config.to_json()
    toy["decoder"] |= {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_layers": 5, "num_heads": heads,
        "num_kv_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_positions": 40960,
    }  # fmt: skip
    toy |= {"target_hidden_size": hidden, "num_target_layers": depth, "target_layer_ids": ids}
    toy |= {"block_slots": 7, "markov_rank": 256, "mask_token_id": 151669}
    shapes = draft_shapes(DraftConfig.from_json(toy))
    config = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": 5, "num_attention_heads": heads,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960, "rope_theta": 1000000, "num_target_layers": depth,
        "block_size": 7, "target_layer_ids": ids, "mask_token_id": 151669, "markov_rank": 256,
        "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True, "layer_types": ["full_attention"] * 5,
    } | extra  # fmt: skip
    write_hollow(tmp_path / "draft", config, shapes)
    checkpoint = read_draft(tmp_path / "draft")
    assert checkpoint.warnings == ()
    assert checkpoint.tensors["fc.weight"].shape == (hidden, 5 * hidden)
    assert checkpoint.tensors["confidence_head.proj.weight"].shape == (1, hidden + 256)
    assert checkpoint.config.target_layer_ids == tuple(ids)
    assert checkpoint.config.decoder.rope.yarn_factor == (16.0 if extra else 1.0)
