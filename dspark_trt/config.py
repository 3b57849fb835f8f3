# SPDX-License-Identifier: Apache-2.0
"""Frozen descriptions of a drafter and a target: every format is read into these, and the modules,
exporters and runtime know nothing else about a model.

Legend used throughout the package: B requests, T flattened rows, K = γ drafted tokens, V vocabulary,
H hidden size, m tapped layers, r Markov rank, S cache capacity (rows).
"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self


class HeadType(StrEnum):
    """Sequential heads of the paper (section 3.1); NONE is plain DFlash (``markov_rank`` 0)."""

    NONE = "none"
    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


class ConfidenceInput(StrEnum):
    """What the confidence head reads: nothing (no head), h_k, or [h_k ; W1[x_{k-1}]]."""

    NONE = "none"
    HIDDEN = "hidden"
    HIDDEN_MARKOV = "hidden+markov"


class SlotSemantics(StrEnum):
    """What block slot j predicts.

    ANCHOR_FIRST: γ slots [anchor, masks]; slot j predicts position anchor+1+j (DeepSpec).
    IN_PLACE: γ+1 slots [anchor, masks]; slot j predicts position anchor+j, slot 0 is discarded (z-lab).
    """

    ANCHOR_FIRST = "anchor_first"
    IN_PLACE = "in_place"


class TargetFamily(StrEnum):
    QWEN3 = "qwen3"
    LLAMA = "llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. ``yarn_factor`` above 1 switches YaRN (arXiv 2309.00071) on."""

    theta: float
    yarn_factor: float = 1.0
    original_positions: int | None = None  # training length before YaRN; required with it
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1 ln(factor) + 1
    truncate: bool = True  # round the correction range outward to whole dimensions

    def __post_init__(self) -> None:
        if not self.theta > 0:
            raise ValueError(f"rope theta must be positive, got {self.theta}")
        if self.yarn_factor < 1:
            raise ValueError(f"YaRN factor must be at least 1, got {self.yarn_factor}")
        if self.yarn_factor > 1 and not self.original_positions:
            raise ValueError("YaRN needs original_max_position_embeddings")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The dimensions that drafter backbone and target share."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    qk_norm: bool
    attention_bias: bool = False

    def __post_init__(self) -> None:
        for name in (
            "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
            "head_dim", "vocab_size", "max_positions",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """A DSpark or DFlash drafter, whatever format it came from."""

    decoder: DecoderConfig
    block_slots: int  # backbone inputs a round: anchor + masks
    slot_semantics: SlotSemantics
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # id i: output of decoder layer i; -1: embedding output
    num_target_layers: int
    target_hidden_size: int
    head_type: HeadType
    markov_rank: int
    confidence: ConfidenceInput
    confidence_bias: bool = True

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise ValueError(f"block of {self.block_slots} slots proposes no token")
        if (self.head_type is HeadType.NONE) != (self.markov_rank == 0):
            raise ValueError(
                f"head {self.head_type} contradicts markov_rank {self.markov_rank}"
            )
        if self.confidence is ConfidenceInput.HIDDEN_MARKOV and self.markov_rank == 0:
            raise ValueError("a confidence head with Markov features needs markov_rank > 0")
        if not 0 <= self.mask_token_id < self.decoder.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.decoder.vocab_size}"
            )

    @property
    def gamma(self) -> int:
        """γ: tokens proposed a round."""
        return self.block_slots - (self.slot_semantics is SlotSemantics.IN_PLACE)

    @property
    def tap_size(self) -> int:
        """m·H: width of one row of taps."""
        return len(self.target_layer_ids) * self.target_hidden_size

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(
            **{
                **data,
                "decoder": _decoder_from_json(data["decoder"]),
                "slot_semantics": SlotSemantics(data["slot_semantics"]),
                "target_layer_ids": tuple(data["target_layer_ids"]),
                "head_type": HeadType(data["head_type"]),
                "confidence": ConfidenceInput(data["confidence"]),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """A target language model."""

    family: TargetFamily
    decoder: DecoderConfig
    tie_word_embeddings: bool
    stop_token_ids: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(
            **{
                **data,
                "family": TargetFamily(data["family"]),
                "decoder": _decoder_from_json(data["decoder"]),
                "stop_token_ids": tuple(data["stop_token_ids"]),
            }
        )


def _decoder_from_json(data: dict[str, Any]) -> DecoderConfig:
    return DecoderConfig(**{**data, "rope": RopeConfig(**data["rope"])})
