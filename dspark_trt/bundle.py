# SPDX-License-Identifier: Apache-2.0
"""The bundle: a folder that holds everything needed to run a drafter, and can be moved anywhere.

`bundle.json` names every file with its size and hash. Calibration, cost tables and engines may change
without a new export; they carry their own checks and are not listed.
"""

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dspark_trt.checksums import checksums_of, digests_of
from dspark_trt.config import WEIGHT_BITS, DraftConfig, TargetConfig
from dspark_trt.errors import BundleError
from dspark_trt.files import write_json
from dspark_trt.verified_files import verify_once

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
_XXH3 = "xxh3_16mib"  # in a manifest: the size of its pieces belongs to the definition
_MEND = "Restore it, or export the bundle again."


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    sha256: str
    size_bytes: int
    xxh3: str | None = None  # `checksums.Digests.xxh3`; None: the bundle is from before it


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
                name: _record_to_json(record) for name, record in sorted(bundle.files.items())
            },
            "tool_versions": dict(bundle.tool_versions),
        },
    )


def _record_to_json(record: FileRecord) -> dict[str, str | int]:
    quick = {} if record.xxh3 is None else {_XXH3: record.xxh3}
    return {"sha256": record.sha256, **quick, "bytes": record.size_bytes}


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Every file below `folder`, hashed, by its name relative to it."""
    return {
        file.relative_to(folder).as_posix(): FileRecord(
            size_bytes=file.stat().st_size, **digests_of(file)._asdict()
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
        verify_hashes: also compare what files hold, by the quick checksums of the manifest, unless that was
            done here before and nothing was written to since; sizes and names are always checked.
        trust_earlier: False reads everything whatever was done before, and compares SHA-256 too.

    Raises:
        BundleError: no bundle there, another format version, or a changed, missing or foreign file.
    """
    path = Path(path)
    bundle = _read_manifest(path)
    try:
        _check_sizes(bundle)
        _refuse_foreign_files(bundle)
        if verify_hashes:
            expected = {
                os.path.join(path, name): f"{record.sha256} {record.xxh3}"
                for name, record in bundle.files.items()
            }
            check = partial(_check_contents, bundle, fully=not trust_earlier)
            verify_once(expected, check, again=not trust_earlier)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error}. {_MEND}") from error
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
        is_newer = isinstance(version, int) and version > FORMAT_VERSION
        raise BundleError(
            f"{path} has bundle format {version!r}, this version of dspark-trt reads {FORMAT_VERSION}. "
            f"{'Install a newer dspark-trt, or export' if is_newer else 'Export'} the bundle again."
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
            name: FileRecord(
                sha256=record["sha256"], size_bytes=record["bytes"], xxh3=record.get(_XXH3)
            )
            for name, record in data["files"].items()
        },
        tool_versions=data["tool_versions"],
    )


def _fewer_bits(data: Mapping[str, Any], key: str) -> str | None:
    weights: str | None = data.get(key)
    return None if weights == data["dtype"] else weights


def _check_sizes(bundle: Bundle) -> None:
    for name, record in bundle.files.items():
        try:
            found = os.stat(os.path.join(bundle.path, name))
        except (FileNotFoundError, NotADirectoryError, ValueError):  # no name for a file
            found = None
        if found is None or not stat.S_ISREG(found.st_mode):
            raise BundleError(f"{bundle.path}: {name} is missing. {_MEND}")
        if found.st_size != record.size_bytes:
            raise BundleError(
                f"{bundle.path}: {name} has {found.st_size} bytes, expected {record.size_bytes}. {_MEND}"
            )


def _refuse_foreign_files(bundle: Bundle) -> None:
    for folder, folders, files in os.walk(bundle.path):
        inside = Path(folder).relative_to(bundle.path)
        if not inside.parts:
            folders[:] = set(folders) - _MUTABLE
        prefix = f"{inside.as_posix()}/" if inside.parts else ""
        for name in (prefix + file for file in files if not file.startswith(".")):
            known = name in bundle.files or name in _MUTABLE
            if not known and (bundle.path / name).is_file():
                raise BundleError(
                    f"{bundle.path}: {name} does not belong to this bundle. Move it out of the folder."
                )


def _check_contents(bundle: Bundle, *, fully: bool) -> None:
    """By checksums; by SHA-256 files that have none, or `fully` all."""
    quick = [
        name for name, record in bundle.files.items() if not fully and record.xxh3 is not None
    ]
    checksums = checksums_of([bundle.path / name for name in quick])
    for name, checksum in zip(quick, checksums, strict=True):
        _compare(bundle, name, "xxh3", checksum, bundle.files[name].xxh3)
    for name in [name for name in bundle.files if name not in quick]:
        record, digests = bundle.files[name], digests_of(bundle.path / name)
        _compare(bundle, name, "sha256", digests.sha256, record.sha256)
        if record.xxh3 is not None:
            _compare(bundle, name, "xxh3", digests.xxh3, record.xxh3)


def _compare(bundle: Bundle, name: str, kind: str, seen: str, expected: object) -> None:
    if seen != expected:
        raise BundleError(
            f"{bundle.path}: {name} was changed: {kind} {seen[:12]}…, "
            f"expected {str(expected)[:12]}…. {_MEND}"
        )
