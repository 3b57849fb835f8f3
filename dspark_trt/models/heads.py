# SPDX-License-Identifier: Apache-2.0
"""Sequential heads (paper section 3.1; DeepSpec `markov_head.py`) and the confidence head.

Every head maps (previous token, hidden state of the slot, state) to a bias on the slot's base logits.
`W1` is one embedding per head, shared with the confidence head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from dspark_trt.config import ConfidenceInput, DraftConfig, HeadType
from dspark_trt.models.layers import Projection


class SequentialHead(nn.Module):
    """One step k: logits_k = U_k + B(x_{k-1}, h_k, s). `state` is `[B, r]` for `rnn`, `[B, 0]` otherwise;
    it starts at zero in every block. Vd: tokens that can be drafted.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_type = config.head_type
        vocab, hidden = config.decoder.vocab_size, config.decoder.hidden_size
        rank = config.markov_rank
        self.state_size = rank if self.head_type is HeadType.RNN else 0
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = Projection(rank, config.head_vocab_size, bias=False)
        if self.head_type is HeadType.GATED:
            self.gate_proj = Projection(hidden + rank, rank)
        elif self.head_type is HeadType.RNN:
            self.joint_proj = Projection(2 * rank + hidden, 3 * rank)

    def previous(self, token_ids: Tensor) -> Tensor:  # int64 [..] -> float32 [.., r]
        return self.markov_w1(token_ids).float()

    def forward(
        self, base_logits: Tensor, previous: Tensor, hidden: Tensor, state: Tensor
    ) -> tuple[
        Tensor, Tensor
    ]:  # [.., Vd], [.., r], [.., H], [.., state] -> [.., Vd], [.., state]
        if self.head_type is HeadType.GATED:
            gate = self.gate_proj(torch.cat((hidden, previous), -1)).sigmoid()
            return base_logits + self.markov_w2(gate * previous), state
        if self.head_type is HeadType.RNN:
            joint = self.joint_proj(torch.cat((state, previous, hidden), -1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            keep = gate.sigmoid()
            next_state = keep * state + (1 - keep) * candidate.tanh()
            return base_logits + self.markov_w2(output.tanh()), next_state
        return base_logits + self.markov_w2(previous), state


class ConfidenceHead(nn.Module):
    """Logit of P(x_k accepted | x_<k accepted) from h_k, or [h_k ; W1[x_{k-1}]]."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence is ConfidenceInput.HIDDEN_MARKOV
        width = config.decoder.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1, bias=config.confidence_bias)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Float32 `[B, K, H]` and `[B, K, r]` (ignored without Markov features) -> `[B, K]`."""
        features = torch.cat((hidden, previous), -1) if self.with_markov else hidden
        bias = None if self.proj.bias is None else self.proj.bias.float()
        return functional.linear(features, self.proj.weight.float(), bias).squeeze(-1)
