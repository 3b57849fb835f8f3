# SPDX-License-Identifier: Apache-2.0
"""Toy bundles, exported once per test run: between them every head, every confidence head, both slot
semantics, both target families, YaRN, borrowed embeddings and the three precisions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from dspark_trt.bundle import Bundle, load_bundle
from dspark_trt.checkpoint import DraftCheckpoint, TargetCheckpoint, read_draft, read_target
from dspark_trt.export.bundle_from_checkpoints import export_bundle
from tests.checkpoints import write_draft, write_target

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@dataclass(frozen=True)
class Toy:
    """A bundle and the checkpoints it came from."""

    draft: DraftCheckpoint
    target: TargetCheckpoint | None
    bundle: Bundle


@dataclass(frozen=True)
class Recipe:
    draft: dict[str, Any]
    target: dict[str, Any] | None
    dtype: str = "float32"


RECIPES = {
    "gated-in-place-llama-yarn": Recipe(
        draft={
            "layout": "speculators", "in_place": True, "head": "gated", "confidence": "hidden",
            "layers": 1, "gamma": 2, "target_layers": 3, "target_layer_ids": (-1, 1),
        },
        target={
            "family": "llama", "tied": False, "attention_bias": True, "layers": 3,
            "config": {"rope_scaling": YARN},
        },
    ),
    "rnn-borrowing-float16": Recipe(
        draft={
            "layout": "specforge", "head": "rnn", "confidence": "hidden+markov", "gamma": 3,
            "layers": 1, "target_layers": 3, "target_layer_ids": (1,),
            "config": {"rope_theta": None, "rope_parameters": YARN | {"rope_theta": 1e5}},
        },
        target={"layers": 3, "tied": True},
        dtype="float16",
    ),
    "no-head-bfloat16": Recipe(
        draft={"head": "none", "confidence": "hidden", "layers": 1, "gamma": 2},
        target=None,
        dtype="bfloat16",
    ),
}  # fmt: skip

ToyBundle = Callable[[str], Toy]


@pytest.fixture(scope="session", autouse=True)
def _exports_share_traces(traced_once: None) -> None:
    """Of this folder too."""


@pytest.fixture(scope="session")
def toy_bundle(shared_folder: Path) -> ToyBundle:
    def make(name: str) -> Toy:
        recipe, folder = RECIPES[name], shared_folder / f"toy-{name}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                write_draft(folder / "draft", dtype="mixed", **recipe.draft)
                if recipe.target is not None:
                    write_target(folder / "target", **recipe.target)
            draft = read_draft(folder / "draft")
            target = None if recipe.target is None else read_target(folder / "target")
            if not (folder / "bundle").exists():
                export_bundle(draft, target, folder / "bundle", dtype=recipe.dtype)
        return Toy(draft, target, load_bundle(folder / "bundle", verify_hashes=False))

    return make


@pytest.fixture(params=RECIPES, scope="session")
def toy(request: pytest.FixtureRequest, toy_bundle: ToyBundle) -> Toy:
    return toy_bundle(request.param)
