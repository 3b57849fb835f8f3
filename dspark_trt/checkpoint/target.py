# SPDX-License-Identifier: Apache-2.0
"""Read a target in the Hugging Face layout: Qwen2, Qwen3, Qwen3-MoE, the Llama family (Llama, Mistral),
the text part of Gemma4.
"""

from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dspark_trt.checkpoint.accounting import account_for, rename
from dspark_trt.checkpoint.decoder import decoder_from_fields, decoder_shapes
from dspark_trt.checkpoint.fields import Fields
from dspark_trt.checkpoint.gemma import gemma_target_decoder
from dspark_trt.checkpoint.records import EMBEDDING, LM_HEAD, Notes, TargetCheckpoint
from dspark_trt.checkpoint.source import read_json, resolve_source
from dspark_trt.checkpoint.tensors import TensorRef, read_tensors
from dspark_trt.config import DecoderConfig, TargetConfig, TargetFamily
from dspark_trt.errors import CheckpointError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)

_FAMILIES = {
    "qwen2": TargetFamily.QWEN2,
    "qwen3": TargetFamily.QWEN3,
    "qwen3_moe": TargetFamily.QWEN3_MOE,
    "gemma4_text": TargetFamily.GEMMA4,
    "gemma4_unified_text": TargetFamily.GEMMA4,
    "llama": TargetFamily.LLAMA,
    "mistral": TargetFamily.LLAMA,
}


_OTHER_MODALITIES = (
    "model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.",
)  # fmt: skip


def read_target(
    source: str | Path,
    *,
    revision: str | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> TargetCheckpoint:
    """Read the target in a folder or hub repository; no tensor data is loaded. ``settings`` are keys of
    config.json that count instead of the file's.

    Raises:
        CheckpointError: one sentence for what is unreadable, contradictory or not supported; for the
            tensors, one error that lists every missing, unexpected or misshapen one.
    """
    folder = resolve_source(source, revision=revision)
    config = read_json(folder / "config.json")
    text = config.get("text_config")  # beside the settings of vision and audio
    fields = Fields(
        text if isinstance(text, dict) else config,
        folder / "config.json",
        stated=settings,
        owner="target.",
    )
    notes = Notes()
    files = read_tensors(folder)
    other = frozenset(key for key in files if key.startswith(_OTHER_MODALITIES))
    tensors = rename(files, _canonical, folder, notes, unused=other)
    if "fc.weight" in tensors:
        raise CheckpointError(
            f"{folder} holds a drafter (it has the tensor fc.weight), not a target"
        )
    family = _family(fields, tensors, notes)
    decoder = _decoder(fields, family, notes)
    tied = _is_tied(fields, tensors, notes)
    head_shape = (decoder.vocab_size, decoder.hidden_size)
    expected = {EMBEDDING: head_shape, **decoder_shapes(decoder)}
    account_for(
        tensors,
        expected | ({LM_HEAD: head_shape} if LM_HEAD in tensors or not tied else {}),
        folder,
        override=fields.flag_for("KEY"),
    )
    if tied and LM_HEAD in tensors:
        tensors = _without_copied_head(tensors, folder, notes)
    notes.note_numbers(fields, decoder, tensors.values())
    stop_tokens = _stop_tokens(fields, folder, decoder.vocab_size, notes)
    fields.require_asked()
    return TargetCheckpoint(
        path=folder,
        config=TargetConfig(
            family=family,
            decoder=decoder,
            tie_word_embeddings=tied,
            stop_token_ids=stop_tokens,
        ),
        tensors=tensors,
        decisions=tuple(notes.decisions),
        warnings=tuple(notes.warnings),
        tokenizer_files=tuple(
            path for name in TOKENIZER_FILES if (path := folder / name).is_file()
        ),
    )


def _canonical(key: str) -> str:
    return key.removeprefix("model.").removeprefix("language_model.")


def _decoder(fields: Fields, family: TargetFamily, notes: Notes) -> DecoderConfig:
    if family is TargetFamily.GEMMA4:
        return gemma_target_decoder(fields, notes)
    return decoder_from_fields(
        fields,
        notes,
        qk_norm=family in (TargetFamily.QWEN3, TargetFamily.QWEN3_MOE),
        attention_bias=family is TargetFamily.QWEN2,
        output_bias=family is not TargetFamily.QWEN2,
        has_experts=family is TargetFamily.QWEN3_MOE,
    )


def _family(fields: Fields, tensors: Mapping[str, TensorRef], notes: Notes) -> TargetFamily:
    model_type = fields.text("model_type")
    if model_type is not None:
        if model_type.value not in _FAMILIES:
            raise fields.error(
                f"targets of model_type {model_type.value!r} are not supported yet; "
                f"supported: {', '.join(_FAMILIES)}",
                "model_type",
            )
        family, reason = _FAMILIES[model_type.value], f"model_type is {model_type.value}"
    else:
        qk_norm = any(name.endswith("self_attn.q_norm.weight") for name in tensors)
        family = TargetFamily.QWEN3 if qk_norm else TargetFamily.LLAMA
        if qk_norm and any(".mlp.experts." in name for name in tensors):
            family = TargetFamily.QWEN3_MOE
        reason = f"no model_type; the tensors {'have' if qk_norm else 'lack'} q_norm"
    notes.decide("family", family.value, reason)
    return family


def _is_tied(fields: Fields, tensors: Mapping[str, TensorRef], notes: Notes) -> bool:
    said = fields.flag("tie_word_embeddings")
    if said is not None:
        notes.decide("tie_word_embeddings", said.value, said.where)
        return said.value
    tied = LM_HEAD not in tensors
    notes.decide(
        "tie_word_embeddings", tied, f"no key; {LM_HEAD} is {'absent' if tied else 'present'}"
    )
    return tied


def _without_copied_head(
    tensors: Mapping[str, TensorRef], folder: Path, notes: Notes
) -> dict[str, TensorRef]:
    head, embedding = tensors[LM_HEAD], tensors[EMBEDDING]
    pairs = zip_longest(head.chunks(), embedding.chunks())
    if head.dtype != embedding.dtype or any(left != right for left, right in pairs):
        raise CheckpointError(
            f"{folder}: config.json ties head and embedding, but {head.key} differs from "
            f"{embedding.key}; set tie_word_embeddings to false if the head is its own"
        )
    notes.decide(
        "unused_tensors", [head.key], f"a copy of {embedding.key}, to which it is tied"
    )
    return {name: ref for name, ref in tensors.items() if name != LM_HEAD}


def _stop_tokens(
    fields: Fields, folder: Path, vocab_size: int, notes: Notes
) -> tuple[int, ...]:
    """generation_config.json first, as Hugging Face's generate does."""
    path = folder / "generation_config.json"
    sources = [fields]
    if path.is_file() and "eos_token_id" not in (fields.stated or ()):
        sources.insert(0, Fields(read_json(path), path))
    for source in sources:
        if (setting := source.find("eos_token_id")) is None:
            continue
        ids = setting.value if isinstance(setting.value, list) else [setting.value]
        for token in ids:
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise source.error(
                    f"eos_token_id {token!r} is not a token of the vocabulary of {vocab_size}"
                    + fields.flag_for("eos_token_id")
                )
        notes.decide("stop_token_ids", ids, f"eos_token_id of {source.path.name}")
        return tuple(ids)
    notes.decide("stop_token_ids", [], "no eos_token_id")
    notes.warn("no eos_token_id: generation ends by length only")
    return ()
