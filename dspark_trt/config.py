# SPDX-License-Identifier: Apache-2.0
"""Frozen descriptions of a drafter and a target: every format is read into these, and the modules,
exporters and runtime know nothing else about a model.

Legend used throughout the package: B requests, T flattened rows, K = γ drafted tokens, V vocabulary,
H hidden size, m tapped layers, r Markov rank, S cache capacity (rows).
"""

import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Self

MOST_CHAIN_TOKENS = 1 << 24  # integers that float32 holds exactly
MOST_DRAFTS = 256  # a corrupt block size must not make graphs endless

FINAL_NORM = -2  # among tapped layers: the output of the target's final norm

WEIGHT_BITS = {"int8": 8, "int4": 4}  # by the name that `export --weights` takes


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


class WindowRule(StrEnum):
    """What a drafter's layer with a sliding window of W rows sees.

    SLOT: each slot the rows less than W away on either side (attention of transformers, not causal).
    ANCHOR: every slot the W context rows before the anchor and the whole block (speculators).
    ANCHOR_CAUSAL: the same without later slots (speculators unless ``sliding_window_non_causal``).
    """

    SLOT = "slot"
    ANCHOR = "anchor"
    ANCHOR_CAUSAL = "anchor_causal"


class TargetFamily(StrEnum):
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    LLAMA = "llama"
    GEMMA4 = "gemma4_text"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. At most one factor is above 1: YaRN's (arXiv 2309.00071), Llama 3's, or the
    linear one, which divides every position.
    """

    theta: float
    rotary_fraction: float = 1.0  # share of the pairs that turn, the fastest ones (Gemma4)
    linear_factor: float = 1.0
    llama3_factor: float = 1.0
    low_freq_factor: float = (
        1.0  # Llama 3: slower than so many turns over the training length: scaled
    )
    high_freq_factor: float = 4.0  # Llama 3: faster than so many turns: left alone
    yarn_factor: float = 1.0
    original_positions: int | None = None  # training length before scaling; YaRN and Llama 3
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1 ln(factor) + 1
    truncate: bool = True  # round the correction range outward to whole dimensions

    def __post_init__(self) -> None:
        if not self.theta > 1:
            raise ValueError(f"rope theta must be above 1, got {self.theta}")
        if not 0 < self.rotary_fraction <= 1:
            raise ValueError(f"rotary fraction must lie in (0, 1], got {self.rotary_fraction}")
        factors = {
            "YaRN": self.yarn_factor,
            "Llama 3": self.llama3_factor,
            "linear": self.linear_factor,
        }
        for name, factor in factors.items():
            if factor < 1:
                raise ValueError(f"{name} factor must be at least 1, got {factor}")
        if len(asked := [name for name, factor in factors.items() if factor > 1]) > 1:
            raise ValueError(f"RoPE is scaled twice: {' and '.join(asked)}")
        if asked in (["YaRN"], ["Llama 3"]) and (self.original_positions or 0) < 1:
            raise ValueError(
                f"{asked[0]} needs original_max_position_embeddings of at least 1, "
                f"got {self.original_positions}"
            )
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"beta_slow {self.beta_slow} must be above 0 and not above beta_fast {self.beta_fast}"
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} must be above 0 and below high_freq_factor "
                f"{self.high_freq_factor}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Mixture of experts in the MLPs of ``layers``: a softmax router takes ``per_token`` of ``count``."""

    count: int
    per_token: int
    intermediate_size: int
    normalised: bool  # the weights of the experts taken are scaled to sum to 1
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ValueError(f"{self.per_token} of {self.count} experts a token is impossible")
        if self.intermediate_size < 1:
            raise ValueError(
                f"moe_intermediate_size must be at least 1, got {self.intermediate_size}"
            )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**{**data, "layers": tuple(data["layers"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingSizes:
    """Sizes of a Gemma4 target's windowed layers, where they differ from those of full attention."""

    num_kv_heads: int
    head_dim: int
    rope: RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig:
    """What makes a decoder Gemma4's: embeddings times sqrt(H), attention scale 1, a norm without weight
    on the values, norms on both sides of attention and MLP, a scalar on each layer's output, tanh GELU.
    """

    key_is_value: (
        bool  # full attention: values are the keys' projection, before norm and rotation
    )
    logit_softcap: float | None = None  # on the head's logits, before a sequential head's bias
    sliding: SlidingSizes | None = None  # of layers with a window

    def __post_init__(self) -> None:
        if self.logit_softcap is not None and not self.logit_softcap > 0:
            raise ValueError(f"logit soft cap must be positive, got {self.logit_softcap}")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        sliding = data.get("sliding")
        if sliding is not None:
            sliding = SlidingSizes(**{**sliding, "rope": RopeConfig(**sliding["rope"])})
        return cls(**{**data, "sliding": sliding})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig:
    """What makes a drafter's layers DeepSeek-V4's: keys that are values, queries and outputs of low rank,
    attention sinks, a residual of several streams (hyper-connections, arXiv 2512.24880), experts.
    """

    rotary_size: int  # last elements of each head that turn, in neighbouring pairs
    query_rank: int
    output_groups: int
    output_rank: int  # of each group of heads
    streams: int
    sinkhorn_steps: int
    stream_eps: float
    routed_scale: float  # on the experts' weights, after they were scaled to sum to 1
    swiglu_limit: float | None  # of an expert's gate and up products; None: none

    def __post_init__(self) -> None:
        for name in ("query_rank", "output_groups", "output_rank", "streams", "sinkhorn_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.rotary_size < 2 or self.rotary_size % 2:
            raise ValueError(f"rotary size must be even and positive, got {self.rotary_size}")
        if self.swiglu_limit is not None and not self.swiglu_limit > 0:
            raise ValueError(f"swiglu_limit must be positive, got {self.swiglu_limit}")


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
    output_bias: bool = True  # attention_bias covers o_proj; not so in Qwen2
    windows: tuple[
        int | None, ...
    ] = ()  # rows each layer's attention sees; empty: all, everywhere
    experts: ExpertsConfig | None = None
    gemma: GemmaConfig | None = None
    deepseek: DeepseekConfig | None = None
    keys_are_values: bool = False  # one cache a layer, of one head

    def __post_init__(self) -> None:
        for name in (
            "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
            "head_dim", "vocab_size", "max_positions",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        sliding = None if self.gemma is None else self.gemma.sliding
        for kind in (self,) if sliding is None else (self, sliding):
            if self.num_heads % kind.num_kv_heads:
                raise ValueError(
                    f"num_heads {self.num_heads} must be a multiple of num_kv_heads {kind.num_kv_heads}"
                )
            if kind.head_dim % 2:
                raise ValueError(
                    f"head_dim must be even for rotary embedding, got {kind.head_dim}"
                )
        if not 0 <= self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps must lie in [0, 1), got {self.rms_norm_eps}")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} windows for {self.num_layers} layers")
        for window in self.windows:
            if window is not None and window < 1:
                raise ValueError(f"a sliding window must be at least 1, got {window}")
        if self.deepseek is not None:
            self._check_deepseek(self.deepseek)

    def _check_deepseek(self, deepseek: DeepseekConfig) -> None:
        if not self.keys_are_values or self.num_kv_heads != 1:
            raise ValueError("DeepSeek-V4 layers have one key head, whose keys are the values")
        if self.num_heads % deepseek.output_groups:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of {deepseek.output_groups} groups"
            )
        if deepseek.rotary_size > self.head_dim:
            raise ValueError(
                f"rotary size {deepseek.rotary_size} exceeds head_dim {self.head_dim}"
            )
        if self.experts is None or not all(map(self.window, range(self.num_layers))):
            raise ValueError("DeepSeek-V4 layers have experts and a sliding window each")

    def window(self, layer: int) -> int | None:
        """Rows that the attention of ``layer`` sees, its own included; None: all."""
        return self.windows[layer] if self.windows else None

    @property
    def cache_kinds(self) -> tuple[str, ...]:
        """What each layer caches: keys and values, or keys that are the values."""
        return ("key",) if self.keys_are_values else ("key", "value")

    @property
    def cache_sizes(self) -> tuple[tuple[int, int], ...]:
        """Key-value heads and head size of each cache: the kinds of each layer in turn."""
        layers = map(self.of_layer, range(self.num_layers))
        sizes = [(layer.num_kv_heads, layer.head_dim) for layer in layers]
        return tuple(size for size in sizes for _ in self.cache_kinds)

    def of_layer(self, layer: int) -> Self:
        """The sizes of one layer, in the place of the decoder's."""
        if self.gemma is None or self.gemma.sliding is None or self.window(layer) is None:
            return self
        sizes = self.gemma.sliding
        return replace(
            self,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            rope=sizes.rope,
            gemma=replace(self.gemma, key_is_value=False),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """A target's own layer for the token after next (DeepSeek-V3, arXiv 2412.19437, section 2.2), whose
    attention caches latents (section 2.1.1).
    """

    query_rank: int | None  # None: queries of full rank
    latent_rank: int  # of keys and values
    plain_size: int  # of each head of queries and keys: what does not turn, and what does
    rotary_size: int
    value_size: int
    attention_scale: float
    shared_size: int  # width of the expert that is always there
    groups: int  # experts are taken from the best few groups
    groups_taken: int
    routed_scale: float

    def __post_init__(self) -> None:
        for name in ("latent_rank", "plain_size", "value_size", "shared_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.rotary_size < 2 or self.rotary_size % 2:
            raise ValueError(f"rotary size must be even and positive, got {self.rotary_size}")
        if not 1 <= self.groups_taken <= self.groups:
            raise ValueError(f"{self.groups_taken} of {self.groups} groups is impossible")
        if not 0 < self.attention_scale < math.inf:
            raise ValueError(
                f"attention scale must be positive and finite, got {self.attention_scale}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainConfig:
    """Drafters of one layer that draft token by token, each step from the hidden state of the one before:
    Eagle3, or (`mtp`) one token with a target's own layer.
    """

    normed_residual: bool = False  # Eagle3: the layer's residual is the normed hidden state
    mtp: MtpConfig | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        mtp = data.get("mtp")
        return cls(**{**data, "mtp": None if mtp is None else MtpConfig(**mtp)})


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """A DSpark, DFlash or Eagle3 drafter, whatever format it came from."""

    decoder: DecoderConfig
    block_slots: int  # backbone inputs a round: anchor + masks
    slot_semantics: SlotSemantics
    mask_token_id: int
    # Id i: output of decoder layer i; -1: embedding output; FINAL_NORM: what the head reads.
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    target_hidden_size: int
    head_type: HeadType
    markov_rank: int
    confidence: ConfidenceInput
    confidence_bias: bool = True
    window_rule: WindowRule = WindowRule.SLOT  # where decoder.windows has one
    draft_vocab_size: int | None = None  # tokens it can draft; None: all of decoder.vocab_size
    chain: ChainConfig | None = None  # None: a block of slots

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise ValueError(f"block of {self.block_slots} slots proposes no token")
        if self.gamma > MOST_DRAFTS:
            raise ValueError(
                f"{self.gamma} drafts a round are more than the {MOST_DRAFTS} that graphs are made for"
            )
        if (self.head_type is HeadType.NONE) != (self.markov_rank == 0):
            raise ValueError(
                f"head {self.head_type} contradicts markov_rank {self.markov_rank}"
            )
        if self.confidence is ConfidenceInput.HIDDEN_MARKOV and self.markov_rank == 0:
            raise ValueError("a confidence head with Markov features needs markov_rank > 0")
        if self.chain is not None and self.chain.mtp is not None and self.gamma != 1:
            raise ValueError(f"an MTP layer drafts 1 token, gamma is {self.gamma}")
        if self.chain is not None and self.decoder.vocab_size > MOST_CHAIN_TOKENS:
            raise ValueError(
                f"vocab_size {self.decoder.vocab_size} exceeds the {MOST_CHAIN_TOKENS} ids that context "
                "rows of a chain can hold"
            )
        if not 1 <= self.head_vocab_size <= self.decoder.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} must lie in 1..{self.decoder.vocab_size}"
            )
        if not 0 <= self.mask_token_id < self.decoder.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.decoder.vocab_size}"
            )

    @property
    def gamma(self) -> int:
        """γ: tokens proposed a round."""
        return self.block_slots - (self.slot_semantics is SlotSemantics.IN_PLACE)

    @property
    def head_vocab_size(self) -> int:
        """Rows of the head: tokens that can be drafted."""
        return self.draft_vocab_size or self.decoder.vocab_size

    @property
    def tap_size(self) -> int:
        """m·H: width of one row of taps."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def context_size(self) -> int:
        """Width of one context row: taps, and for a chain the id of the token behind the row."""
        return self.tap_size + (self.chain is not None)

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
                "chain": None
                if data.get("chain") is None
                else ChainConfig.from_json(data["chain"]),
                "window_rule": WindowRule(data.get("window_rule", WindowRule.SLOT)),
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
    experts, gemma, deepseek = data.get("experts"), data.get("gemma"), data.get("deepseek")
    return DecoderConfig(
        **{
            **data,
            "rope": RopeConfig(**data["rope"]),
            "windows": tuple(data.get("windows", ())),
            "experts": None if experts is None else ExpertsConfig.from_json(experts),
            "gemma": None if gemma is None else GemmaConfig.from_json(gemma),
            "deepseek": None if deepseek is None else DeepseekConfig(**deepseek),
        }
    )
