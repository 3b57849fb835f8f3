# SPDX-License-Identifier: Apache-2.0
"""From a reduced draft vocabulary into the target's: every token that cannot be drafted gets
probability zero, exactly.
"""

import torch
from torch import Tensor, nn

from dspark_trt.config import DraftConfig

# Finite, so that no backend meets an infinity minus itself; a softmax at any temperature makes it zero.
UNDRAFTABLE = -1e30


class DraftVocabulary(nn.Module):
    """`index` int64 `[V]`: the column of each target token among the draft's, or one past the last."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        index = torch.empty(config.decoder.vocab_size, dtype=torch.int64)
        self.index = nn.Parameter(index, requires_grad=False)

    def spread(self, x: Tensor, fill: float) -> Tensor:  # [.., Vd] -> [.., V]
        missing = torch.full_like(x[..., :1], fill)
        return torch.cat((x, missing), -1).index_select(-1, self.index)


def column_index(offsets: Tensor, vocab_size: int) -> Tensor:  # int [Vd] -> int64 [V]
    """`DraftVocabulary.index` of a map of offsets: draft token i is target token i + offsets[i]."""
    columns = torch.arange(len(offsets))
    index = torch.full((vocab_size,), len(offsets), dtype=torch.int64)
    index[columns + offsets] = columns
    return index
