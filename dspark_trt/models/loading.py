# SPDX-License-Identifier: Apache-2.0
"""Where each module parameter comes from in a checkpoint, and modules filled from it.

The only difference between the names of a module and the canonical names of a checkpoint are products
fused into one (`qkv_proj`, `kv_proj`, `gate_up_proj`, a layer's experts) and the drafter's `backbone.`
prefix.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from dspark_trt.checkpoint import DraftCheckpoint, TargetCheckpoint, TensorRef
from dspark_trt.config import DraftConfig, TargetConfig
from dspark_trt.errors import CheckpointError
from dspark_trt.models.chain import ChainDrafter
from dspark_trt.models.drafter import Drafter
from dspark_trt.models.mtp import MtpDrafter
from dspark_trt.models.target import Target
from dspark_trt.models.vocabulary import column_index

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "qk_proj": ("q_proj", "k_proj"),
    "kv_proj": ("k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_EXPERTS = ".experts"  # their matrices are side by side in a module
_FLOAT32_PARTS = (
    "norm",
    "confidence_head",
    "mlp.gate.",
    "layer_scalar",
    ".attn_sink",
    "hc_",
)  # tiny, and where 16 bits hurt


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """A parameter as the concatenation, along `axis`, of checkpoint tensors."""

    parts: tuple[TensorRef, ...]
    dtype: torch.dtype
    axis: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def load(self, *, transposed: bool = False) -> Tensor:
        """The parameter: a view of the mapped file where nothing changes, else one allocation."""
        if len(self.parts) == 1 and not transposed:
            return self.parts[0].load().to(self.dtype)
        whole = torch.empty(self.shape[::-1] if transposed else self.shape, dtype=self.dtype)
        sizes = [part.shape[self.axis] for part in self.parts]
        places = (whole.t() if transposed else whole).split(sizes, dim=self.axis)
        for place, part in zip(places, self.parts, strict=True):
            place.copy_(part.load())
        return whole


@dataclass(frozen=True, slots=True)
class VocabularySource(ParameterSource):
    """Where each of `vocab_size` target tokens is in a reduced draft vocabulary."""

    vocab_size: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.vocab_size,)

    def load(self, *, transposed: bool = False) -> Tensor:
        return column_index(self.parts[0].load(), self.vocab_size)


def draft_skeleton(config: DraftConfig) -> Drafter | ChainDrafter:
    """A drafter's modules without weights (meta device; rotary tables are real)."""
    with torch.device("meta"):
        if config.chain is not None:
            kind = ChainDrafter if config.chain.mtp is None else MtpDrafter
            return kind(config).eval().requires_grad_(False)
        return Drafter(config).eval().requires_grad_(False)


def target_skeleton(config: TargetConfig, target_layer_ids: tuple[int, ...]) -> Target:
    with torch.device("meta"):
        return Target(config, target_layer_ids).eval().requires_grad_(False)


def draft_tensors(
    draft: DraftCheckpoint, target: TargetCheckpoint | None
) -> Mapping[str, TensorRef]:
    """The drafter's tensors, with embeddings and head borrowed from the target where it has none.

    Raises:
        CheckpointError: the drafter borrows from a target that was not given.
    """
    if not draft.borrowed:
        return draft.tensors
    if target is None:
        names = ", ".join(sorted(draft.borrowed))
        raise CheckpointError(
            f"{draft.path} has no {names}: the drafter borrows them from its target. Give it with --target."
        )
    tensors = dict(draft.tensors)
    for name in draft.borrowed:
        tied = name == "lm_head.weight" and name not in target.tensors
        tensors[name] = target.tensors["embed_tokens.weight" if tied else name]
    return tensors


def parameter_sources(
    module: nn.Module, tensors: Mapping[str, TensorRef], dtype: torch.dtype
) -> dict[str, ParameterSource]:
    """Sources of all parameters, by the module's names."""
    sources: dict[str, ParameterSource] = {}
    for name, _ in module.named_parameters(remove_duplicate=False):
        canonical = name.removeprefix("backbone.")
        if canonical == "vocabulary.index":
            sources[name] = VocabularySource(
                (tensors["d2t"],), torch.int64, vocab_size=module.get_parameter(name).shape[0]
            )
            continue
        if canonical == "lm_head.weight" and canonical not in tensors:  # tied
            canonical = "embed_tokens.weight"
        stem, kind = canonical.rsplit(".", 1)
        parent, _, leaf = stem.rpartition(".")
        parts = _FUSED.get(leaf, (leaf,))
        axis = 0
        if parent.endswith(_EXPERTS):
            count = sum(n.startswith(f"{parent}.") for n in tensors) // 3
            names = [f"{parent}.{e}.{part}.{kind}" for part in parts for e in range(count)]
            axis = int(leaf == "down_proj")
        else:
            names = [f"{parent}.{part}.{kind}".lstrip(".") for part in parts]
        full = any(part in canonical for part in _FLOAT32_PARTS)
        sources[name] = ParameterSource(
            tuple(tensors[n] for n in names), torch.float32 if full else dtype, axis
        )
    return sources


def reserve(module: nn.Module, sources: Mapping[str, ParameterSource]) -> None:
    """Give a skeleton untouched memory instead of weights: enough to trace it, costing nothing."""
    fill(module, {name: torch.empty(s.shape, dtype=s.dtype) for name, s in sources.items()})


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a skeleton its parameters, in place; a tied head is a second name for the embedding."""
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))


def _loaded(sources: Mapping[str, ParameterSource]) -> dict[str, Tensor]:
    tensors = {source: source.load() for source in set(sources.values())}
    return {name: tensors[source] for name, source in sources.items()}


def load_draft(
    draft: DraftCheckpoint,
    target: TargetCheckpoint | None = None,
    dtype: torch.dtype = torch.float32,
) -> Drafter | ChainDrafter:
    """A drafter with its weights, on the CPU."""
    module = draft_skeleton(draft.config)
    sources = parameter_sources(module, draft_tensors(draft, target), dtype)
    fill(module, _loaded(sources))
    return module


def load_drafter(
    draft: DraftCheckpoint,
    target: TargetCheckpoint | None = None,
    dtype: torch.dtype = torch.float32,
) -> Drafter:
    """`load_draft` of a drafter that drafts blocks."""
    module = load_draft(draft, target, dtype)
    assert isinstance(module, Drafter)
    return module


def load_target(
    checkpoint: TargetCheckpoint,
    target_layer_ids: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> Target:
    """The target with its weights, on the CPU; a tied head shares the embedding's storage."""
    module = target_skeleton(checkpoint.config, target_layer_ids)
    sources = parameter_sources(module, checkpoint.tensors, dtype)
    fill(module, _loaded(sources))
    return module
