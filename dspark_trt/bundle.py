# SPDX-License-Identifier: Apache-2.0
"""The bundle: a folder that holds everything needed to run a drafter, and can be moved anywhere.

`bundle.json` names every file with its size and hash. Calibration, cost tables and engines may change
without a new export; they carry their own checks and are not listed.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark_trt.config import WEIGHT_BITS, DraftConfig, TargetConfig
from dspark_trt.errors import BundleError
from dspark_trt.files import sha256_of_file, write_json
from dspark_trt.verified_files import verified_sha256

FORMAT_VERSION = 1
DTYPES = ("float32", "float16", "bfloat16")
MANIFEST = "bundle.json"
WEIGHTS = "weights.bin"
CALIBRATION = "calibration.json"
COST_TABLE = "sps.json"
ENGINES = "engines"
TOKENIZER = "tokenizer"
GREEDY_DRAFT = "draft_greedy"  # the draft step of batches in which nobody samples
FUSED_TARGET = "target_verify"  # optional graph: the target with verification behind its logits
MOST_TOP_LOGPROBS = 20  # alternatives of `verify_processed.onnx`; OpenAI's API allows as many
_MUTABLE = frozenset({MANIFEST, CALIBRATION, COST_TABLE, ENGINES})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model came from; `name` is a folder name or hub id, never a path of the exporting machine."""

    name: str
    format: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    path: Path
    dtype: str  # of matrix products and caches: one of DTYPES
    draft: DraftConfig
    draft_source: Source
    target: TargetConfig | None  # None: the host owns the target
    target_source: Source | None
    files: Mapping[str, FileRecord]
    tool_versions: Mapping[str, str]
    # "int8" or "int4": matrices of the target, and of the drafter, where they have fewer bits.
    weights: str | None = None
    draft_weights: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        for weights in (self.weights, self.draft_weights):
            if weights not in (None, *WEIGHT_BITS):
                raise ValueError(f"weights {weights!r} is not one of {', '.join(WEIGHT_BITS)}")

    @property
    def precision(self) -> dict[str, str]:
        """How numbers are stored, for reports."""
        return {
            "dtype": self.dtype,
            "weights": self.weights or self.dtype,
            "draft_weights": self.draft_weights or self.dtype,
        }

    @property
    def max_context_tokens(self) -> int:
        """Positions both models were configured for: the most rows a cache may hold."""
        limits = [self.draft.decoder.max_positions]
        if self.target is not None:
            limits.append(self.target.decoder.max_positions)
        return min(limits)

    @property
    def graph_names(self) -> tuple[str, ...]:
        return tuple(sorted(name[:-5] for name in self.files if name.endswith(".onnx")))

    def graph_path(self, name: str) -> Path:
        """Path of a graph.

        Raises:
            BundleError: the bundle has no such graph.
        """
        if f"{name}.onnx" not in self.files:
            hint = (
                " Export again with --target to run the target from this bundle."
                if name == "target"
                else ""
            )
            raise BundleError(
                f"{self.path} has no graph {name}; it has {', '.join(self.graph_names)}.{hint}"
            )
        return self.path / f"{name}.onnx"

    @property
    def top_logprobs(self) -> int:
        """Alternatives whose log-probability `verify_processed.onnx` returns."""
        return min(MOST_TOP_LOGPROBS, self.draft.decoder.vocab_size)

    def fingerprint(self) -> str:
        """Short name of the exact graphs and weights, for engines and cost tables."""
        from hashlib import sha256

        listing = json.dumps(
            {name: record.sha256 for name, record in sorted(self.files.items())}
        )
        return sha256(listing.encode()).hexdigest()[:16]


def write_manifest(bundle: Bundle) -> None:
    def source(value: Source | None) -> dict[str, str] | None:
        return None if value is None else asdict(value)

    write_json(
        bundle.path / MANIFEST,
        {
            "format_version": FORMAT_VERSION,
            **bundle.precision,
            "gamma": bundle.draft.gamma,
            "max_context_tokens": bundle.max_context_tokens,
            "draft": {"source": source(bundle.draft_source), "config": bundle.draft.to_json()},
            "target": bundle.target
            and {"source": source(bundle.target_source), "config": bundle.target.to_json()},
            "files": {
                name: {"sha256": record.sha256, "bytes": record.size_bytes}
                for name, record in sorted(bundle.files.items())
            },
            "tool_versions": dict(bundle.tool_versions),
        },
    )


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Every file below `folder`, hashed, by its name relative to it."""
    return {
        file.relative_to(folder).as_posix(): FileRecord(
            sha256=sha256_of_file(file), size_bytes=file.stat().st_size
        )
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def load_bundle(
    path: str | Path, *, verify_hashes: bool = True, trust_earlier: bool = True
) -> Bundle:
    """Read and check a bundle.

    Args:
        path: the bundle's folder.
        verify_hashes: also hash every file; sizes and names are always checked.
        trust_earlier: large files that were hashed here before, and not written to since, are not read again.

    Raises:
        BundleError: no bundle there, another format version, or a changed, missing or foreign file.
    """
    path = Path(path)
    bundle = _read_manifest(path)
    hash_of = verified_sha256 if trust_earlier else sha256_of_file
    _check_files(bundle, hash_of if verify_hashes else None)
    return bundle


def _read_manifest(path: Path) -> Bundle:
    manifest = path / MANIFEST
    try:
        data = json.loads(manifest.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BundleError(
            f"{path} is no bundle: it has no {MANIFEST}. "
            "Make one with: dspark-trt export --draft DRAFTER --target TARGET -o BUNDLE"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(
            f"{manifest} cannot be read: {error}. Export the bundle again."
        ) from error
    version = data.get("format_version") if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise BundleError(
            f"{path} has bundle format {version!r}, this version of dspark-trt reads {FORMAT_VERSION}. "
            "Export the bundle again."
        )
    try:
        return _bundle_from_json(path, data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(
            f"{manifest} is damaged ({type(error).__name__}: {error}). Export the bundle again."
        ) from error


def _bundle_from_json(path: Path, data: Mapping[str, Any]) -> Bundle:
    target = data["target"]
    draft = DraftConfig.from_json(data["draft"]["config"])
    if data["gamma"] != draft.gamma:
        raise ValueError(f"gamma {data['gamma']}, but the block proposes {draft.gamma} tokens")
    return Bundle(
        path=path,
        dtype=data["dtype"],
        weights=_fewer_bits(data, "weights"),
        draft_weights=_fewer_bits(
            data, "draft_weights" if "draft_weights" in data else "weights"
        ),
        draft=draft,
        draft_source=Source(**data["draft"]["source"]),
        target=TargetConfig.from_json(target["config"]) if target else None,
        target_source=Source(**target["source"]) if target else None,
        files={
            name: FileRecord(sha256=record["sha256"], size_bytes=record["bytes"])
            for name, record in data["files"].items()
        },
        tool_versions=data["tool_versions"],
    )


def _fewer_bits(data: Mapping[str, Any], key: str) -> str | None:
    weights: str | None = data.get(key)
    return None if weights == data["dtype"] else weights


def _check_files(bundle: Bundle, hash_of: Callable[[Path], str] | None) -> None:
    mend = "Restore it, or export the bundle again."
    for name, record in bundle.files.items():
        file = bundle.path / name
        if not file.is_file():
            raise BundleError(f"{bundle.path}: {name} is missing. {mend}")
        size = file.stat().st_size
        if size != record.size_bytes:
            raise BundleError(
                f"{bundle.path}: {name} has {size} bytes, expected {record.size_bytes}. {mend}"
            )
        if hash_of is not None and (seen := hash_of(file)) != record.sha256:
            raise BundleError(
                f"{bundle.path}: {name} was changed: sha256 {seen[:12]}…, "
                f"expected {record.sha256[:12]}…. {mend}"
            )
    for file in bundle.path.rglob("*"):
        name = file.relative_to(bundle.path).as_posix()
        known = name in bundle.files or name.split("/")[0] in _MUTABLE
        if file.is_file() and not known and not file.name.startswith("."):
            raise BundleError(
                f"{bundle.path}: {name} does not belong to this bundle. Move it out of the folder."
            )
