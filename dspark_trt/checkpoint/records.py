# SPDX-License-Identifier: Apache-2.0
"""What reading a checkpoint yields: configuration, tensors by canonical name, and why it was read so."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dspark_trt.checkpoint.fields import Fields
from dspark_trt.checkpoint.tensors import TensorRef
from dspark_trt.config import (
    DecoderConfig,
    DraftConfig,
    RopeConfig,
    SlotSemantics,
    TargetConfig,
)

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
MAX_LAYERS = 1000  # a corrupt count must not make the list of expected tensors endless


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice the reader made: ``value`` is plain JSON, ``reason`` names the key or tensor behind it."""

    name: str
    value: Any
    reason: str


@dataclass(slots=True)
class Notes:
    """Decisions and warnings collected while one checkpoint is read."""

    decisions: list[Decision] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def decide(self, name: str, value: Any, reason: str) -> None:
        self.decisions.append(Decision(name, value, reason))

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def note_numbers(
        self, fields: Fields, decoder: DecoderConfig, tensors: Iterable[TensorRef]
    ) -> None:
        """What holds for drafters and targets alike; call once every tensor is known to be dense.

        Drafters inherit ``quantization_config`` from their target (vllm-project/vllm#51758), so the
        tensors decide, not the key.
        """
        elements: Counter[str] = Counter()
        for ref in tensors:
            elements[ref.dtype] += ref.num_elements
        dtypes = [dtype for dtype, _ in elements.most_common()]
        self.decide("dtype", "+".join(dtypes), "the tensors, the dtype of most elements first")
        self.note_rope(decoder.rope)
        if (setting := fields.find("quantization_config")) is not None:
            self.decide("quantization", None, f"{setting.where} ignored: every tensor is dense")
            self.warn(f"{setting.where} is set, but every tensor is dense: it was ignored")

    def note_rope(self, rope: RopeConfig) -> None:
        self.decide("rope", *_rope(rope))

    def note_storage(self, tensors: Iterable[TensorRef]) -> None:
        """Dtypes of files whose matrices may be of few bits."""
        elements: Counter[str] = Counter()
        for ref in tensors:
            elements[ref.kind] += ref.num_elements
        kinds = [kind for kind, _ in elements.most_common()]
        self.decide("dtype", "+".join(kinds), "the tensors, the kind of most elements first")
        if few := [kind for kind in kinds if kind.startswith("FP")]:
            reason = "dequantised; activations are not rounded"
            self.decide("quantization", "+".join(few), reason)


def _rope(rope: RopeConfig) -> tuple[dict[str, Any], str]:
    """The settings that count, and the kind they make."""
    shown: dict[str, Any] = {"theta": rope.theta}
    for kind, factor in (("YaRN", "yarn_factor"), ("Llama 3", "llama3_factor")):
        if getattr(rope, factor) > 1:
            prefix = ("beta", "attention", "trunc") if kind == "YaRN" else ("low", "high")
            names = (factor, "original_positions")
            shown |= {
                key: value
                for key, value in asdict(rope).items()
                if key in names or key.startswith(prefix)
            }
            return shown, kind
    if rope.rotary_fraction < 1:
        shown |= {"rotary_fraction": rope.rotary_fraction, "linear_factor": rope.linear_factor}
        return shown, "only the fastest pairs turn"
    if rope.linear_factor > 1:
        return shown | {"linear_factor": rope.linear_factor}, "every position is divided"
    return shown, "plain rotary embedding"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOverrides:
    """What the user states instead of the files. None: the files decide.

    ``target_layer_ids`` are ours: i is the output of decoder layer i, -1 the embedding output. ``gamma``
    below the checkpoint's own drafts fewer tokens, above it is refused. ``settings`` are keys of
    config.json with other values, ``target_settings`` of its target's. ``revision`` is a branch, tag or
    commit of a hub repository.
    """

    slot_semantics: SlotSemantics | None = None
    mask_token_id: int | None = None
    target_layer_ids: tuple[int, ...] | None = None
    gamma: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    target_settings: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCheckpoint:
    """A drafter. ``borrowed`` names the tensors that must come from the target."""

    path: Path
    format: str
    config: DraftConfig
    tensors: Mapping[str, TensorRef]
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    borrowed: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCheckpoint:
    """A target. ``tensors`` has no ``lm_head.weight`` when the head is tied to the embedding."""

    path: Path
    config: TargetConfig
    tensors: Mapping[str, TensorRef]
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    tokenizer_files: tuple[Path, ...]
