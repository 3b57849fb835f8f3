# SPDX-License-Identifier: Apache-2.0
"""What one does without this project: an eager loop over the reference modules, one request at a time.

The rounds are those of the official evaluation: draft γ tokens, run the target on anchor and drafts, accept
by rejection, keep the taps of what was accepted. Tokens are drawn with torch's own generator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dspark_trt.checkpoint import DraftCheckpoint, TargetCheckpoint
from dspark_trt.config import DecoderConfig, HeadType
from dspark_trt.models.drafter import Drafter
from dspark_trt.models.loading import load_drafter, load_target
from dspark_trt.models.target import Target
from dspark_trt.runtime.bench_turns import medians, seconds_by_turns


class Drafted(NamedTuple):
    tokens: Tensor  # int64 [B, γ]
    logits: Tensor  # float32 [B, γ, V]
    confidence: Tensor | None  # float32 [B, γ]


@dataclass
class EagerPair:
    """Drafter and target as torch modules in float32, and their caches.

    The modules cut caches to the longest context, so their capacity costs nothing.
    """

    drafter: Drafter
    target: Target
    draft_caches: list[Tensor]
    target_caches: list[Tensor]

    @classmethod
    def load(
        cls, draft: DraftCheckpoint, target: TargetCheckpoint, *, batch: int = 1, capacity: int
    ) -> "EagerPair":
        config = draft.config
        return cls(
            load_drafter(draft, target),
            load_target(target, config.target_layer_ids),
            _caches(config.decoder, batch, capacity),
            _caches(target.config.decoder, batch, capacity),
        )

    @torch.inference_mode()
    def draft(
        self,
        anchors: Tensor,
        taps: Tensor,
        new_len: Tensor,
        context_len: Tensor,
        temperature: float,
    ) -> Drafted:
        """One draft step: anchors [B], taps [B, N, m*H] of which `new_len [B]` rows count."""
        drafter = self.drafter
        hidden, _ = drafter.backbone(anchors, taps, new_len, context_len, *self.draft_caches)
        base = drafter.lm_head(hidden)
        is_sequential = drafter.config.head_type is not HeadType.NONE
        token, state = anchors, None
        if is_sequential:
            state = hidden.new_zeros((len(hidden), drafter.markov_head.state_size))
        tokens, logits, previous = [], [], []
        for k in range(drafter.config.gamma):
            step = base[:, k]
            if is_sequential:
                previous.append(drafter.markov_head.previous(token))
                step, state = drafter.markov_head(step, previous[-1], hidden[:, k], state)
            step = drafter.spread(step)
            token = choose(step, temperature)
            tokens.append(token)
            logits.append(step)
        confidence = None
        if hasattr(drafter, "confidence_head"):
            features = torch.stack(previous, 1) if previous else hidden
            confidence = drafter.confidence_head(hidden, features)
        return Drafted(torch.stack(tokens, 1), torch.stack(logits, 1), confidence)

    @torch.inference_mode()
    def target_step(
        self, tokens: Sequence[int], context: int, *, is_prompt: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Tokens of one request from position `context` on: logits of all rows (of a prompt: the last one's)
        and taps [T, m*H].
        """
        places = torch.arange(len(tokens))
        logits, taps, *_ = self.target(
            torch.tensor(tokens),
            context + places,
            places[None],
            places,
            places[-1:] if is_prompt else places,
            torch.tensor([context]),
            *self.target_caches,
        )
        return logits, taps

    def generate(
        self, prompt: tuple[int, ...], new_tokens: int, *, temperature: float, length: int
    ) -> tuple[list[int], int]:
        """At least `new_tokens` tokens, stop tokens ignored, and the number of rounds; `length` drafts are
        verified a round (0: the target alone).
        """
        logits, taps = self.target_step(prompt, 0, is_prompt=True)
        output = [int(choose(logits, temperature))]
        context, drafted_context, rounds = len(prompt), 0, 0
        while len(output) < new_tokens:
            rounds += 1
            drafts: list[int] = []
            if length:
                draft = self.draft(
                    torch.tensor(output[-1:]),
                    taps[None],
                    torch.tensor([len(taps)]),
                    torch.tensor([drafted_context]),
                    temperature,
                )
                drafted_context += len(taps)
                drafts = draft.tokens[0, :length].tolist()
            logits, taps = self.target_step((output[-1], *drafts), context)
            accepted, last = 0, None
            if drafts:
                accepted, last = verify(draft, logits, length, temperature)
            output += drafts[:accepted]
            output.append(
                int(choose(logits[accepted : accepted + 1], temperature))
                if last is None
                else last
            )
            context += accepted + 1
            taps = taps[: accepted + 1]
        return output, rounds


@torch.inference_mode()
def choose(logits: Tensor, temperature: float) -> Tensor:  # [B, V] -> int64 [B]
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial(torch.softmax(logits / temperature, -1), 1).squeeze(-1)


@torch.inference_mode()
def verify(
    draft: Drafted, logits: Tensor, length: int, temperature: float
) -> tuple[int, int | None]:
    """Accepted drafts, and the token in place of the first rejected one (None: the target's own is next)."""
    tokens = draft.tokens[0, :length]
    if temperature == 0:
        return int((logits[:length].argmax(-1) == tokens).int().cumprod(0).sum()), None
    p = torch.softmax(logits[:length] / temperature, -1)
    q = torch.softmax(draft.logits[0, :length] / temperature, -1)
    at = tokens[:, None]
    kept = torch.rand(length) * q.gather(1, at)[:, 0] < p.gather(1, at)[:, 0]
    accepted = int(kept.int().cumprod(0).sum())
    if accepted == length:
        return accepted, None
    rest = (p[accepted] - q[accepted]).clamp(min=0)
    return accepted, int(torch.multinomial(rest, 1))


def choose_threads(step: Callable[[], object], most: int) -> int:
    """The number of torch threads, one or `most`, that a step is faster with; it is left set."""
    taken = {}
    for threads in {1, most}:
        torch.set_num_threads(threads)
        taken[threads] = medians(seconds_by_turns({"": step}, seconds=0.2, calls=3))[""]
    best = min(taken, key=taken.__getitem__)
    torch.set_num_threads(best)
    return best


def _caches(decoder: DecoderConfig, batch: int, rows: int) -> list[Tensor]:
    shape = (batch, decoder.num_kv_heads, rows, decoder.head_dim)
    return [torch.zeros(shape) for _ in range(2 * decoder.num_layers)]
