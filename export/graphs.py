# SPDX-License-Identifier: Apache-2.0
"""Which graphs a bundle has: for each, the torch module behind it and its bindings."""

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark_trt import bindings
from dspark_trt.bindings import Binding, GraphBindings
from dspark_trt.bundle import GREEDY_DRAFT
from dspark_trt.config import ConfidenceInput, DraftConfig, HeadType
from dspark_trt.models.chain import ChainDrafter
from dspark_trt.models.drafter import Drafter
from dspark_trt.models.target import Target
from dspark_trt.models.vocabulary import UNDRAFTABLE

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
}


@dataclass(frozen=True, slots=True)
class Graph:
    name: str
    module: nn.Module
    bindings: GraphBindings


class _Context(nn.Module):
    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.backbone = drafter.backbone

    def forward(self, taps: Tensor, context_len: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.backbone.append_context(taps, context_len, *caches))


class _Backbone(nn.Module):
    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.backbone, self.lm_head = drafter.backbone, drafter.lm_head
        self.vocabulary = drafter.vocabulary

    def forward(
        self,
        anchor_ids: Tensor,
        new_taps: Tensor,
        new_len: Tensor,
        context_len: Tensor,
        *caches: Tensor,
    ) -> tuple[Tensor, ...]:
        hidden, updated = self.backbone(anchor_ids, new_taps, new_len, context_len, *caches)
        logits = self.lm_head(hidden)
        if self.vocabulary is not None:
            logits = self.vocabulary.spread(logits, UNDRAFTABLE)
        return (hidden, logits, *updated)


class _SequentialHead(nn.Module):
    """Inputs in the order of `sequential_head_bindings`: those that the head does not read are absent."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.markov_head = drafter.markov_head
        self.vocabulary = drafter.vocabulary

    def forward(
        self, base_logits: Tensor, previous_ids: Tensor, *read: Tensor
    ) -> tuple[Tensor, ...]:
        previous = self.markov_head.previous(previous_ids)
        hidden = read[0] if read else previous
        state = read[1] if len(read) > 1 else previous.new_zeros((previous.shape[0], 0))
        if self.vocabulary is None:
            logits, state = self.markov_head(base_logits, previous, hidden, state)
        else:
            none = previous.new_zeros(())  # the head's bias alone, in the draft vocabulary
            bias, state = self.markov_head(none, previous, hidden, state)
            logits = base_logits + self.vocabulary.spread(bias, 0.0)
        return (logits, state) if len(read) > 1 else (logits,)


class _ConfidenceHead(nn.Module):
    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.confidence_head = drafter.confidence_head
        if drafter.config.confidence is ConfidenceInput.HIDDEN_MARKOV:
            self.markov_head = drafter.markov_head

    def forward(self, hidden: Tensor, *previous_ids: Tensor) -> tuple[Tensor]:
        features = self.markov_head.previous(previous_ids[0]) if previous_ids else hidden
        return (self.confidence_head(hidden, features),)


def _chain_context(drafter: ChainDrafter) -> nn.Module:
    """A chain's modules under their own names, of which only what context rows need is used."""
    twin = copy(drafter)

    def forward(taps: Tensor, context_len: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        return tuple(twin.append_context(taps, context_len, *caches))

    twin.forward = forward  # type: ignore[method-assign, assignment]
    return twin


class _GreedyDraft(nn.Module):
    def __init__(self, drafter: Drafter | ChainDrafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(
        self,
        anchor_ids: Tensor,
        new_taps: Tensor,
        new_len: Tensor,
        context_len: Tensor,
        *caches: Tensor,
    ) -> tuple[Tensor, ...]:
        temperature = new_taps.new_zeros(len(anchor_ids))
        uniforms = new_taps.new_zeros((len(anchor_ids), self.drafter.config.gamma))
        block = (anchor_ids, new_taps, new_len, context_len, temperature, uniforms)
        return tuple(self.drafter(*block, *caches))


def greedy_draft_graph(drafter: Drafter | ChainDrafter, dtype: str) -> Graph:
    """The draft step without sampling; it is made from the traced `draft`, not traced itself."""
    contract = bindings.greedy_draft_bindings(drafter.config, dtype)
    return Graph(GREEDY_DRAFT, _GreedyDraft(drafter), contract)


def draft_graphs(drafter: Drafter | ChainDrafter, dtype: str) -> list[Graph]:
    """The drafter's graphs, fused and in parts; a head the drafter lacks has no graph, and a chain has no
    parts.
    """
    config = drafter.config
    if isinstance(drafter, ChainDrafter):
        context = bindings.context_bindings(config, dtype)
        return [
            Graph("context", _chain_context(drafter), context),
            Graph("draft", drafter, bindings.draft_bindings(config, dtype)),
        ]
    graphs = [
        Graph("context", _Context(drafter), bindings.context_bindings(config, dtype)),
        Graph("draft", drafter, bindings.draft_bindings(config, dtype)),
        Graph("backbone", _Backbone(drafter), bindings.backbone_bindings(config, dtype)),
    ]
    if config.head_type is not HeadType.NONE:
        graphs.append(
            Graph(
                "sequential_head",
                _SequentialHead(drafter),
                bindings.sequential_head_bindings(config),
            )
        )
    if config.confidence is not ConfidenceInput.NONE:
        graphs.append(
            Graph(
                "confidence_head",
                _ConfidenceHead(drafter),
                bindings.confidence_head_bindings(config),
            )
        )
    return graphs


def target_graph(target: Target, config: DraftConfig, dtype: str) -> Graph:
    return Graph(
        "target", target, bindings.target_bindings(target.config, config.tap_size, dtype)
    )


# Distinct sizes above 1, so that torch.export ties no two symbolic dimensions together.
_EXAMPLE_SIZES = {
    "batch": 3, "capacity": 48, "rows": 10, "padded": 5, "logit_rows": 6, "context_rows": 7, "slots": 4,
}  # fmt: skip


def example_inputs(graph: Graph) -> tuple[Tensor, ...]:
    """Zeros of the right shapes: export traces them, nobody reads the results."""
    return tuple(
        torch.zeros(
            [d if isinstance(d, int) else _EXAMPLE_SIZES[d] for d in binding.shape],
            dtype=TORCH_DTYPES[binding.dtype],
        )
        for binding in graph.bindings.inputs
    )


def symbolic_dims(binding: Binding) -> dict[int, str]:
    """Axis -> symbolic dimension."""
    return {axis: d for axis, d in enumerate(binding.shape) if isinstance(d, str)}
