# SPDX-License-Identifier: Apache-2.0
"""Toy language models with exactly known laws, and a drafter that differs from its target.

A chain is a finite automaton: in state s the next token is drawn from logits ``[S, V]`` and moves to
``step[s, x]``. With the states being all prefixes the model may depend on the whole block; with the last token
as state, it is a Markov chain that a vocabulary of 64 can afford.

Legend: S states, V vocabulary, G groups of tokens (for V = 64 outcomes are counted by group), R rounds.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]


@dataclass(frozen=True)
class Chain:
    target: NDArray[np.float32]  # [S, V] logits
    draft: NDArray[np.float32]  # [S, V] logits
    step: NDArray[np.int64]  # [S, V]
    group: NDArray[np.int64]  # [V] -> G
    prefix: tuple[tuple[int, ...], ...]  # [S], for a chain of prefixes

    @cached_property
    def counts(self) -> NDArray[np.int32]:
        """[S, V]: how often each token occurs in a state's prefix."""
        rows = [
            np.bincount(np.array(prefix, int), minlength=self.target.shape[1])
            for prefix in self.prefix
        ]
        return np.stack(rows).astype(np.int32)

    @property
    def groups(self) -> int:
        return int(self.group.max()) + 1


def prefix_chain(rng: np.random.Generator, vocab_size: int, depth: int) -> Chain:
    """States are all token sequences shorter than ``depth`` + 1, state 0 the empty one."""
    prefixes: list[tuple[int, ...]] = [()]
    for prefix in prefixes:
        if len(prefix) < depth:
            prefixes += [(*prefix, x) for x in range(vocab_size)]
    index = {prefix: s for s, prefix in enumerate(prefixes)}
    step = [[index.get((*p, x), 0) for x in range(vocab_size)] for p in prefixes]
    target = rng.normal(0, 1, (len(prefixes), vocab_size))
    draft = target + rng.normal(0, 1, target.shape)
    return Chain(
        target.astype(np.float32), draft.astype(np.float32), np.array(step),
        np.arange(vocab_size), tuple(prefixes),
    )  # fmt: skip


def markov_chain(rng: np.random.Generator, vocab_size: int, groups: int) -> Chain:
    """The state is the last token."""
    target = rng.normal(0, 1.5, (vocab_size, vocab_size))
    draft = target + rng.normal(0, 1, target.shape)
    step = np.tile(np.arange(vocab_size), (vocab_size, 1))
    group = np.arange(vocab_size) % groups
    return Chain(target.astype(np.float32), draft.astype(np.float32), step, group, ())


def sequence_law(chain: Chain, p: Floats, length: int) -> Floats:
    """Probability of each sequence of groups ``[G^length]`` when the target samples alone with p [S, V]."""
    moves = _moves(chain, p)
    reached = _start(chain)
    for _ in range(length):
        reached = np.einsum("ns,gst->ngt", reached, moves).reshape(-1, reached.shape[1])
    return np.asarray(reached.sum(axis=1))


def block_law(chain: Chain, p: Floats, q: Floats, gamma: int) -> list[Floats]:
    """Joint law of one exact round: for n = 0 .. γ accepted drafts, the probability of the n + 1 groups.

    A draft x is proposed and kept with probability min(p, q)(x); a rejection at a place and the residual
    token y have probability max(p - q, 0)(y) together; the bonus token comes from p.
    """
    kept = _moves(chain, np.minimum(p, q))
    rejected = _by_group(chain, np.maximum(p - q, 0))
    bonus = _by_group(chain, p)
    reached = _start(chain)
    laws = []
    for n in range(gamma + 1):
        laws.append((reached @ (bonus if n == gamma else rejected)).reshape(-1))
        reached = np.einsum("ns,gst->ngt", reached, kept).reshape(-1, reached.shape[1])
    return laws


def outcome(chain: Chain, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index into a law of the groups of tokens [R, length]."""
    number = np.zeros(len(tokens), np.int64)
    for column in chain.group[tokens].T:
        number = number * chain.groups + column
    return number


def chi_square_p_value(counts: Floats, law: Floats) -> float:
    """p-value of counts under a law; cells expected fewer than 8 times are put together."""
    expected = law / law.sum() * counts.sum()
    assert counts[expected == 0].sum() == 0, "an impossible outcome was seen"
    large = expected >= 8
    seen = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    if wanted[-1] < 8:
        seen[-2] += seen[-1]
        wanted[-2] += wanted[-1]
        seen, wanted = seen[:-1], wanted[:-1]
    return _chi_square_tail(float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1)


def _chi_square_tail(statistic: float, degrees: int) -> float:
    """P(X >= statistic): regularised upper incomplete gamma function, in float64 by torch."""
    import torch

    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _start(chain: Chain) -> Floats:
    return np.eye(1, len(chain.target), dtype=np.float64)


def _moves(chain: Chain, weights: Floats) -> Floats:
    """[G, S, S]: weight of going from state to state by a token of a group."""
    moves = np.zeros((chain.groups, *2 * (len(chain.target),)))
    states = np.arange(len(chain.target))
    for x, group in enumerate(chain.group):
        np.add.at(moves[group], (states, chain.step[:, x]), weights[:, x])
    return moves


def _by_group(chain: Chain, weights: Floats) -> Floats:
    """[S, G]."""
    return np.stack(
        [weights[:, chain.group == g].sum(axis=1) for g in range(chain.groups)], axis=1
    )
