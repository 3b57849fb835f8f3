# SPDX-License-Identifier: Apache-2.0
"""Rounds as a host drives them that calls the graphs itself: caches go in and come back, and every graph
of the bundle is called with what the others said.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark_trt.bindings import cache_bindings
from dspark_trt.bundle import (
    FUSED_TARGET,
    GREEDY_DRAFT,
    Bundle,
    load_bundle,
    record_files,
    write_manifest,
)
from dspark_trt.config import DecoderConfig
from dspark_trt.plugins.attach import attach_to_file
from dspark_trt.plugins.contract import VerifyMode
from dspark_trt.runtime.ragged import RaggedRows, block_rows, ragged_rows

Arrays = dict[str, NDArray[Any]]
Run = Callable[[str, Arrays], Arrays]  # graph, inputs -> outputs

_CAPACITY = 128
_SEED = 5


def with_fused_target(bundle: Bundle, path: Path) -> Bundle:
    """A copy as `export --fused-verify` writes it."""
    shutil.copytree(bundle.path, path)
    attach_to_file(
        path / "target.onnx",
        path / f"{FUSED_TARGET}.onnx",
        mode=VerifyMode.REJECTION,
        gamma=bundle.draft.gamma,
        logits="logits",
    )
    (path / "bundle.json").unlink()
    write_manifest(replace(bundle, path=path, files=record_files(path)))
    return load_bundle(path)


def committed_tokens(
    bundle: Bundle, run: Run, prompts: Sequence[Sequence[int]], temperature: float, rounds: int
) -> list[list[int]]:
    """Tokens of a batch, its first ones greedy."""
    gamma, batch = bundle.draft.gamma, len(prompts)
    assert bundle.target is not None
    random = np.random.default_rng(_SEED)
    target_caches = _empty(bundle.target.decoder, batch)
    draft_caches = _empty(bundle.draft.decoder, batch)

    lengths = np.zeros(batch, np.int64)
    rows = ragged_rows(prompts, lengths, np.zeros(batch, np.bool_))
    out = run("target", _target_inputs(rows) | target_caches)
    target_caches = _next(out)
    anchors = out["logits"].argmax(-1)
    found = [[int(token)] for token in anchors]
    lengths = np.array([len(prompt) for prompt in prompts])
    taps = np.zeros((batch, lengths.max(), out["taps"].shape[1]), np.float32)
    for row, own in enumerate(np.split(out["taps"], rows.offsets[1:-1])):
        taps[row, : len(own)] = own
    context = {"taps": taps, "context_len": np.zeros(batch, np.int64)}
    draft_caches = _next(run("context", context | draft_caches))

    new_taps = np.zeros((batch, gamma + 1, taps.shape[2]), np.float32)
    new_len = np.zeros(batch, np.int64)
    for _ in range(rounds):
        block = {
            "anchor_ids": anchors,
            "new_taps": new_taps,
            "new_len": new_len,
            "context_len": lengths - new_len,
        }
        draft = _drafts(bundle, run, block, draft_caches, temperature, random)
        draft_caches = _next(draft)
        blocks = np.column_stack((anchors, draft["tokens"]))
        rows = block_rows(blocks, np.full(batch, gamma), lengths)
        out = run("target", _target_inputs(rows) | target_caches)
        target_caches = _next(out)
        verified = _verified(run, out["logits"], rows.offsets, draft, temperature, random)
        accepted, tokens = verified["accepted"], verified["tokens"]
        assert accepted.min() >= 0
        new_len = accepted + 1
        lengths = lengths + new_len
        anchors = tokens[np.arange(batch), accepted]
        new_taps = np.zeros_like(new_taps)
        for row, count in enumerate(new_len):
            start = rows.offsets[row]
            new_taps[row, :count] = out["taps"][start : start + count]
            found[row] += tokens[row, :count].tolist()
    return found


def call_the_other_parts(bundle: Bundle, run: Run) -> None:
    """Backbone and heads, which hosts call that sample for themselves; verification with processors, and
    behind the target.
    """
    assert bundle.target is not None
    batch, gamma, random = 2, bundle.draft.gamma, np.random.default_rng(_SEED)
    vocab = bundle.draft.decoder.vocab_size
    block = {
        "anchor_ids": np.array([5, 6]),
        "new_taps": random.standard_normal(
            (batch, gamma + 1, bundle.draft.context_size), np.float32
        ),
        "new_len": np.array([3, gamma + 1]),
        "context_len": np.array([0, 0]),
    }
    hidden = run("backbone", block | _empty(bundle.draft.decoder, batch))
    previous = np.arange(batch * gamma).reshape(batch, gamma)
    run("confidence_head", {"hidden": hidden["hidden"], "previous_ids": previous})
    head = {"base_logits": hidden["base_logits"][:, 0], "previous_ids": block["anchor_ids"]}
    logits = run("sequential_head", head)["logits"]
    drafts = {
        **_sampling(batch, 0.7),
        "draft_tokens": np.full((batch, gamma), logits[0].argmax()),
        "draft_logits": hidden["base_logits"],
        "uniforms": random.random((batch, gamma + 1), np.float32),
    }
    processors = {
        "logit_bias": random.standard_normal((batch, vocab), np.float32),
        "repetition_penalty": np.array([1.2, 1.0], np.float32),
        "presence_penalty": np.array([0.0, 0.3], np.float32),
        "frequency_penalty": np.array([0.1, 0.0], np.float32),
        "prompt_mask": random.random((batch, vocab)) < 0.1,
        "output_counts": random.integers(0, 3, (batch, vocab), np.int32),
        "allowed": random.random((batch, vocab)) < 0.5,
    }
    verified = {"target_logits": logits, "offsets": np.array([0, 1, 2])}
    run("verify_processed", drafts | processors | verified)
    blocks = np.column_stack((block["anchor_ids"], drafts["draft_tokens"]))
    rows = block_rows(blocks, np.full(batch, gamma), np.zeros(batch, np.int64))
    caches = _empty(bundle.target.decoder, batch)
    run(FUSED_TARGET, _target_inputs(rows) | drafts | {"offsets": rows.offsets} | caches)


def _drafts(
    bundle: Bundle,
    run: Run,
    block: Arrays,
    caches: Arrays,
    temperature: float,
    random: np.random.Generator,
) -> Arrays:
    if temperature == 0:
        return run(GREEDY_DRAFT, block | caches)
    batch = len(block["anchor_ids"])
    sampling = {
        "temperature": np.full(batch, temperature, np.float32),
        "uniforms": random.random((batch, bundle.draft.gamma), np.float32),
    }
    return run("draft", block | sampling | caches)


def _verified(
    run: Run,
    logits: NDArray[Any],
    offsets: NDArray[Any],
    draft: Arrays,
    temperature: float,
    random: np.random.Generator,
) -> Arrays:
    inputs = {
        "target_logits": logits,
        "offsets": offsets,
        "draft_tokens": draft["tokens"],
    }
    if temperature == 0:
        return run("verify_greedy", inputs)
    batch, gamma = draft["tokens"].shape
    inputs |= _sampling(batch, temperature)
    inputs["draft_logits"] = draft["logits"]
    inputs["uniforms"] = random.random((batch, gamma + 1), np.float32)
    return run("verify", inputs)


def _sampling(batch: int, temperature: float) -> Arrays:
    return {
        "draft_temperature": np.full(batch, temperature, np.float32),
        "temperature": np.full(batch, temperature, np.float32),
        "top_k": np.zeros(batch, np.int64),
        "top_p": np.ones(batch, np.float32),
        "min_p": np.zeros(batch, np.float32),
    }


def _target_inputs(rows: RaggedRows) -> Arrays:
    names = (
        "token_ids",
        "positions",
        "pad_index",
        "unpad_index",
        "logit_rows",
        "context_len",
    )
    return {name: getattr(rows, name) for name in names}


def _empty(decoder: DecoderConfig, batch: int) -> Arrays:
    sizes: dict[int | str, int | str] = {"batch": batch, "capacity": _CAPACITY}
    return {
        cache.name: np.zeros([int(sizes.get(size, size)) for size in cache.shape], np.float32)
        for cache in cache_bindings(decoder, "float32", "past")
    }


def _next(outputs: Mapping[str, NDArray[Any]]) -> Arrays:
    return {
        name.replace("present_", "past_"): array
        for name, array in outputs.items()
        if name.startswith("present_")
    }
