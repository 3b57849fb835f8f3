# SPDX-License-Identifier: Apache-2.0
"""Read a drafter of any supported dialect into one description.

Every setting is taken from config.json, compared with what the tensors show, and noted with its
reason; then every tensor is accounted for. Nothing is defaulted that the files leave open in a way
that would change the proposals.
"""

from collections.abc import Mapping
from pathlib import Path

from dspark_trt.checkpoint.accounting import account_for, rename
from dspark_trt.checkpoint.block import read_block
from dspark_trt.checkpoint.decoder import decoder_from_fields, decoder_shapes
from dspark_trt.checkpoint.deepseek import deepseek_sign, read_deepseek
from dspark_trt.checkpoint.dialects import SPECULATORS, Dialect, recognise
from dspark_trt.checkpoint.eagle3 import eagle3_sign, read_eagle3
from dspark_trt.checkpoint.fields import DRAFT_PLACES, Fields
from dspark_trt.checkpoint.gemma import gemma_draft_decoder, is_gemma
from dspark_trt.checkpoint.heads import (
    confidence_shapes,
    head_shapes,
    read_confidence,
    read_head,
)
from dspark_trt.checkpoint.mtp import mtp_sign, read_mtp
from dspark_trt.checkpoint.records import (
    EMBEDDING,
    LM_HEAD,
    DraftCheckpoint,
    DraftOverrides,
    Notes,
)
from dspark_trt.checkpoint.source import read_json, resolve_source
from dspark_trt.checkpoint.tensors import Shape, TensorRef, read_tensors
from dspark_trt.checkpoint.vocabulary import MAPS, Vocabulary, read_vocabulary
from dspark_trt.checkpoint.windows import read_window_rule
from dspark_trt.config import DraftConfig


def read_draft(
    source: str | Path,
    *,
    overrides: DraftOverrides = DraftOverrides(),  # noqa: B008 (frozen)
) -> DraftCheckpoint:
    """Read the drafter in a folder or hub repository; no tensor data is loaded.

    Raises:
        CheckpointError: one sentence for what is unreadable, contradictory or not supported; for the
            tensors, one error that lists every missing, unexpected or misshapen one.
    """
    folder = resolve_source(source, revision=overrides.revision)
    fields = Fields(
        read_json(folder / "config.json"),
        folder / "config.json",
        nested=DRAFT_PLACES,
        stated=overrides.settings,
    )
    checkpoint = _read_dialect(folder, fields, overrides)
    fields.require_asked()
    return checkpoint


def _read_dialect(folder: Path, fields: Fields, overrides: DraftOverrides) -> DraftCheckpoint:
    files = read_tensors(folder)
    if (stage := deepseek_sign(files)) is not None:
        return read_deepseek(folder, fields, files, stage, overrides)
    if (layer := mtp_sign(files)) is not None:
        return read_mtp(folder, fields, files, layer, overrides)
    if (shown := eagle3_sign(fields, files)) is not None:
        return read_eagle3(folder, fields, files, shown, overrides)
    dialect, sign = recognise(fields, files)
    notes = Notes()
    notes.decide("format", dialect.name, sign)
    tensors = rename(files, dialect.canonical, folder, notes, unused=dialect.unused)
    vocabulary = Vocabulary()
    if dialect is SPECULATORS:
        vocabulary = read_vocabulary(fields, tensors, notes)
        tensors = {name: ref for name, ref in tensors.items() if name not in MAPS}
    config = _read_config(fields, dialect, tensors, vocabulary.size, overrides, notes)
    borrowed = _borrowed(tensors, notes)
    expected = {
        name: shape for name, shape in draft_shapes(config).items() if name not in borrowed
    }
    account_for(tensors, expected, folder, override=fields.flag_for("KEY"))
    notes.note_numbers(fields, config.decoder, tensors.values())
    return DraftCheckpoint(
        path=folder,
        format=dialect.name,
        config=config,
        tensors={**tensors, **vocabulary.maps},
        decisions=tuple(notes.decisions),
        warnings=tuple(notes.warnings),
        borrowed=borrowed,
    )


def draft_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Every tensor of a drafter, embedding and head included, by canonical name."""
    decoder = config.decoder
    return {
        EMBEDDING: (decoder.vocab_size, decoder.hidden_size),
        LM_HEAD: (config.head_vocab_size, decoder.hidden_size),
        "fc.weight": (decoder.hidden_size, config.tap_size),
        "hidden_norm.weight": (decoder.hidden_size,),
        **decoder_shapes(decoder),
        **head_shapes(config),
        **confidence_shapes(config.confidence, config.markov_rank, decoder),
    }


def _read_config(
    fields: Fields,
    dialect: Dialect,
    tensors: Mapping[str, TensorRef],
    draft_vocab_size: int | None,
    overrides: DraftOverrides,
    notes: Notes,
) -> DraftConfig:
    if is_gemma(tensors):
        decoder = gemma_draft_decoder(fields, notes)
    else:
        decoder = decoder_from_fields(fields, notes, qk_norm=True)
    block = read_block(fields, dialect, decoder, overrides, notes)
    head_type, markov_rank = read_head(fields, tensors, notes)
    confidence = read_confidence(fields, dialect, tensors, decoder, markov_rank, notes)
    target_hidden = fields.integer("target_hidden_size")
    with fields.consistent():
        return DraftConfig(
            decoder=decoder,
            block_slots=block.slots,
            slot_semantics=block.semantics,
            mask_token_id=block.mask_token_id,
            target_layer_ids=block.target_layer_ids,
            num_target_layers=block.num_target_layers,
            target_hidden_size=target_hidden.value if target_hidden else decoder.hidden_size,
            head_type=head_type,
            markov_rank=markov_rank,
            confidence=confidence,
            draft_vocab_size=draft_vocab_size,
            window_rule=read_window_rule(fields, dialect, decoder.windows, notes),
        )


def _borrowed(tensors: Mapping[str, TensorRef], notes: Notes) -> frozenset[str]:
    """Both of embedding and head come from the target, or none: one alone is a lost tensor."""
    both = frozenset({EMBEDDING, LM_HEAD})
    if both & tensors.keys():
        notes.decide("borrowed", [], "embedding and head are in the files")
        return frozenset()
    notes.decide("borrowed", sorted(both), "the files hold neither embedding nor head")
    return both
