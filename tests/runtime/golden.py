# SPDX-License-Identifier: Apache-2.0
"""Rounds recorded from the official implementation (see tests/data/golden)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.conftest import DATA

PROMPTS = 3


@dataclass(frozen=True)
class GoldenRound:
    prompt: int
    start: int  # position of the anchor
    first_row: int  # position of the first new tap
    anchor: int
    taps: NDArray[np.float32]
    draft_tokens: NDArray[np.int64]
    corrected_logits: NDArray[np.float32]
    confidence_logits: NDArray[np.float32] | None
    num_accepted: int


def golden_rounds(drafter: str) -> Iterator[GoldenRound]:
    with np.load(DATA / "golden" / f"{drafter}.npz") as file:
        for prompt in range(PROMPTS):
            for number in file[f"p{prompt}_recorded_rounds"]:
                prefix = f"p{prompt}_r{number}_"
                confidence = f"{prefix}confidence_logits"
                yield GoldenRound(
                    prompt=prompt,
                    start=int(file[f"{prefix}start"]),
                    first_row=int(file[f"{prefix}cache_len_before"]),
                    anchor=int(file[f"{prefix}anchor"]),
                    taps=file[f"{prefix}target_hidden_states"],
                    draft_tokens=file[f"{prefix}draft_tokens"],
                    corrected_logits=file[f"{prefix}corrected_logits"],
                    confidence_logits=file[confidence] if confidence in file.files else None,
                    num_accepted=int(file[f"{prefix}num_accepted"]),
                )


def golden_json(name: str) -> Any:
    return json.loads((DATA / "golden" / f"{name}.json").read_text())
