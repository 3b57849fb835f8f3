# SPDX-License-Identifier: Apache-2.0
"""What the promised speeds are measured on: models, their bundles, prompts, and what a figure is."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from eager import EagerPair

from dspark_trt.bundle import Bundle, load_bundle
from dspark_trt.checkpoint import DraftCheckpoint, TargetCheckpoint, read_draft, read_target
from dspark_trt.runtime.backends import Backend, open_backend
from dspark_trt.runtime.backends.interface import BackendOptions
from dspark_trt.runtime.bench_turns import clock_for, medians, seconds_by_turns
from dspark_trt.runtime.engine import Engine
from dspark_trt.runtime.request import Completion, Request, SamplingParams
from dspark_trt.runtime.shipped_prompts import PROMPTS
from dspark_trt.runtime.text import TextCodec

ROOT = Path(__file__).parents[1]
CONTEXT = 256  # tokens before every measured step
NEW_ROWS = 4  # accepted the round before
NEW_TOKENS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One promise. `measured` None: it could not be measured here, `detail` says why."""

    group: str
    name: str
    measured: float | None
    bound: float
    is_floor: bool = False  # at least the bound, instead of at most
    detail: str = ""

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        kept = self.measured >= self.bound if self.is_floor else self.measured <= self.bound
        return "met" if kept else "MISSED"


@dataclass(frozen=True, slots=True)
class Models:
    """A drafter and its target: checkpoints, and the bundle made of them."""

    name: str
    draft: DraftCheckpoint
    target: TargetCheckpoint
    bundle: Bundle

    def eager(self, *, batch: int = 1, capacity: int = 2 * CONTEXT) -> EagerPair:
        return EagerPair.load(self.draft, self.target, batch=batch, capacity=capacity)

    def backend(self, bench: "Bench") -> Backend:
        return open_backend("onnxruntime", self.bundle, bench.options)


@dataclass
class Bench:
    """Models to measure on, exported when first asked for."""

    folder: Path
    seconds: float  # of each comparison
    threads: int  # for torch at most
    options: BackendOptions  # for the engine

    def compare(
        self, arms: Mapping[str, Callable[[], object]], threads: int | None
    ) -> dict[str, float]:
        """Median seconds of each arm."""
        clock = clock_for(threads)
        return medians(seconds_by_turns(arms, seconds=self.seconds, calls=3, clock=clock))

    @cached_property
    def tiny(self) -> Models:
        example = ROOT / "examples" / "tiny"
        return self._exported("tiny", example / "drafter", example / "target")

    @cached_property
    def wide(self) -> Models:
        """Hidden 1024, five layers, vocabulary 32,000, random weights; a target of six such layers."""
        return self._exported("wide", *wide_checkpoints(self.folder))

    def quantised(self, models: Models) -> Models:
        """The same with weights of eight bits."""
        return self._exported(
            f"{models.name}-int8", models.draft.path, models.target.path, weights="int8"
        )

    def _exported(self, name: str, draft: Path, target: Path, **options: str) -> Models:
        from dspark_trt.export.bundle_from_checkpoints import export_bundle

        checkpoints = read_draft(draft), read_target(target)
        path = self.folder / name
        if not path.exists():
            print(f"exporting {name}", file=sys.stderr)
            export_bundle(*checkpoints, path, **options)
        return Models(name, *checkpoints, load_bundle(path, verify_hashes=False))


def wide_checkpoints(folder: Path) -> tuple[Path, Path]:
    from tests.checkpoints import write_draft, write_target

    target, drafter = folder / "wide-target", folder / "wide-drafter"
    sizes = {
        "hidden": 1024, "intermediate": 3072, "heads": 16, "kv_heads": 8, "head_dim": 64,
        "vocab": 32_000, "max_positions": 4096,
    }  # fmt: skip
    if not target.exists():
        write_target(target, layers=6, **sizes)
    if not drafter.exists():
        write_draft(
            drafter, layout="specforge", layers=5, target_layers=6, target_hidden=1024, gamma=7,
            rank=256, mask=31_999, target_layer_ids=(0, 1, 2, 3, 4), **sizes,
        )  # fmt: skip
    return drafter, target


def prompts(bundle: Bundle, count: int) -> dict[str, list[tuple[int, ...]]]:
    codec = TextCodec(bundle)
    return {
        domain: [
            codec.encode_chat([{"role": "user", "content": text}]) for text in texts[:count]
        ]
        for domain, texts in PROMPTS.items()
    }


def ask(engine: Engine, ids: tuple[int, ...], temperature: float, seed: int) -> Completion:
    params = SamplingParams(
        temperature=temperature, max_new_tokens=NEW_TOKENS, seed=seed, ignore_eos=True
    )
    return engine.generate([Request(prompt_ids=ids, params=params)])[0]


def command(*arguments: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "dspark_trt", *map(str, arguments)],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
