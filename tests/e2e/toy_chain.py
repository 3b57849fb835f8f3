# SPDX-License-Identifier: Apache-2.0
"""A target and a drafter that are Markov chains with known laws, as checkpoints that are exported like any.

The target's layers add nothing, so its logits are a function of the last token; the drafter's backbone says
nothing, so its logits are the sequential head's, and its confidence is a function of the token before.
Tokens 0..7 are a random chain. Tokens 8..10 play the paper's appendix A: from S the target goes to A or B
with 0.7 and 0.3, the drafter with 0.5 and 0.5; behind A the drafter is always right, behind B never.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dspark_trt.bundle import CALIBRATION, Bundle
from dspark_trt.runtime.calibration import Calibration
from tests.checkpoints import Weights, edit_tensors, write_draft, write_target

RANDOM, S, A, B, WRONG = 8, 8, 9, 10, 11
VOCAB, GAMMA, HIDDEN = 12, 3, 64
_NEVER = -60.0

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ToyChain:
    bundle: Bundle
    target: Floats  # [V, V] probability of the next token, by the last one
    acceptance: Floats  # [V] Σ min(p, q) behind each token: the confidence head tells the truth


def chain_logits(rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Target and drafter logits [V, V] by last token.

    Behind an even token the drafter is always right; behind an odd one it says the rarest token half of the
    time. So behind an odd anchor it depends on the first draft whether the block is worth verifying.
    """
    target, draft = np.full((2, VOCAB, VOCAB), _NEVER)
    own = _distribution(rng.normal(0, 0.5, (RANDOM, RANDOM)))
    rarest = np.eye(RANDOM)[own.argmin(axis=1)]
    share = 0.55 * (np.arange(RANDOM) % 2)[:, None]
    target[:RANDOM, :RANDOM] = np.log(own)
    draft[:RANDOM, :RANDOM] = np.log((1 - share) * own + share * rarest)
    target[S, [A, B]] = np.log([0.7, 0.3])
    draft[S, [A, B]] = np.log([0.5, 0.5])
    target[[A, B, WRONG], S] = 0.0
    draft[[A, B, WRONG], [S, WRONG, S]] = 0.0
    return target, draft


def toy_chain(bundle: Bundle) -> ToyChain:
    """The laws of an exported toy chain."""
    target, draft = chain_logits(np.random.default_rng(3))
    p, q = _distribution(target), _distribution(draft)
    return ToyChain(bundle, p, np.minimum(p, q).sum(axis=1))


def _distribution(logits: Floats) -> Floats:
    weights = np.exp(logits)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def export_toy_chain(folder: Path) -> None:
    """Write checkpoints and bundle below ``folder``."""
    from dspark_trt.checkpoint import read_draft, read_target
    from dspark_trt.export.bundle_from_checkpoints import export_bundle

    target, draft = chain_logits(np.random.default_rng(3))
    acceptance = np.minimum(_distribution(target), _distribution(draft)).sum(axis=1)
    sizes: dict[str, Any] = {"hidden": HIDDEN, "vocab": VOCAB, "max_positions": 512}
    write_target(folder / "target", tied=False, stop_token_ids=(WRONG,), **sizes)
    edit_tensors(folder / "target", lambda weights: _target(weights, target))
    write_draft(
        folder / "draft", gamma=GAMMA, rank=VOCAB, mask=WRONG, target_hidden=HIDDEN,
        target=folder / "target", **sizes,
    )  # fmt: skip
    edit_tensors(folder / "draft", lambda weights: _draft(weights, draft, acceptance))
    bundle = export_bundle(
        read_draft(folder / "draft"), read_target(folder / "target"), folder / "bundle"
    )
    # Requests correct their own confidences: what they learn must not bias them either.
    Calibration(np.ones(GAMMA), method="identity", request_variance=0.1).save(
        bundle.path / CALIBRATION
    )


def _target(weights: Weights, logits: Floats) -> None:
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] = torch.zeros_like(weights[name])
    weights["model.embed_tokens.weight"] = torch.eye(VOCAB, HIDDEN)
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    head = torch.zeros(VOCAB, HIDDEN)
    head[:, :VOCAB] = torch.from_numpy(logits.T) / HIDDEN**0.5  # the norm makes √H of a one
    weights["lm_head.weight"] = head


def _draft(weights: Weights, logits: Floats, acceptance: Floats) -> None:
    weights["norm.weight"] = torch.zeros_like(weights["norm.weight"])
    weights["markov_head.markov_w1.weight"] = torch.eye(VOCAB)
    weights["markov_head.markov_w2.weight"] = torch.from_numpy(logits.T.copy()).float()
    said = np.clip(acceptance, 0.002, 0.998)
    head = torch.zeros(1, HIDDEN + VOCAB)
    head[0, HIDDEN:] = torch.from_numpy(np.log(said) - np.log1p(-said))
    weights["confidence_head.proj.weight"] = head
    weights["confidence_head.proj.bias"] = torch.zeros(1)
