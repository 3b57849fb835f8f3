# SPDX-License-Identifier: Apache-2.0
"""Built engines of a bundle: where they are, what they were built from, and whether this machine may load them.

A set is one folder `engines/<backend>-<arch>-<version>[-stripped]/` with a `manifest.json`. Everything is
decided from the manifest and file hashes before TensorRT sees a byte: a plan of another version or a damaged
one would end the process at worst.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dspark_trt.bindings import Binding
from dspark_trt.bundle import ENGINES, Bundle
from dspark_trt.errors import BundleError
from dspark_trt.files import sha256_of_file, write_json

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
BACKENDS = ("tensorrt", "tensorrt-rtx")
AMPERE_PLUS = "ampere+"  # one plan for every architecture from Ampere (sm80) on

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest step an engine takes. Cache rows are fixed, everything else may be smaller."""

    batch: int
    tokens: int  # target rows a step: prompts and drafts of all requests together
    capacity: int  # rows of each request's caches


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Shapes an engine was tuned for: of each input the smallest, the usual and the largest."""

    name: str
    shapes: Mapping[str, tuple[Shape, Shape, Shape]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """One engine. Shapes of `inputs` and `outputs` have -1 where they vary within `profiles`."""

    file: str
    sha256: str
    size_bytes: int
    graph_sha256: str
    structure_sha256: str  # of the graph without weights: engines that may exchange theirs
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    aliases: Mapping[str, str]  # cache output -> the input whose memory it is
    profiles: tuple[Profile, ...]
    layers: Mapping[str, int]  # of the network, by type
    seconds: float
    peak_bytes: int | None  # resident memory of the building process; None: unknown here

    def __post_init__(self) -> None:
        if Path(self.file).name != self.file:
            raise ValueError(f"engine file {self.file!r} is not in this folder")
        if not isinstance(self.sha256, str) or not isinstance(self.size_bytes, int):
            raise TypeError(f"{self.file}: sha256 and size_bytes are of the wrong type")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSet:
    path: Path
    backend: str
    version: str  # of the library that built, and by default has to run, the engines
    archs: tuple[str, ...]
    gpu: str  # the one it was built on, or "none (built for …)"
    limits: Limits
    batch_buckets: tuple[int, ...]  # batch sizes worth a CUDA graph
    token_buckets: tuple[int, ...]  # verified rows a step worth one
    bundle_fingerprint: str
    plugin_sha256: str | None  # of the kernels embedded by `tensorrt`
    stripped: bool = False  # without weights: has to be refitted before use
    version_compatible: bool = False
    tool_versions: Mapping[str, str] = field(default_factory=dict)
    engines: Mapping[str, EngineRecord] = field(default_factory=dict)

    def rebuild_command(self, bundle: Bundle) -> str:
        return build_command(bundle, self.backend, self.archs, self.limits)


def build_command(
    bundle: Bundle, backend: str, archs: tuple[str, ...] = (), limits: Limits | None = None
) -> str:
    words = [f"dspark-trt build {bundle.path} --backend {backend}"]
    words += [f"--arch {arch}" for arch in archs]
    if limits is not None:
        words.append(f"--max-batch {limits.batch} --max-tokens {limits.tokens}")
        words.append(f"--capacity {limits.capacity}")
    return " ".join(words)


def engine_folder(
    bundle: Bundle,
    backend: str,
    archs: tuple[str, ...],
    version: str,
    *,
    stripped: bool = False,
) -> Path:
    name = f"{backend}-{'_'.join(archs)}-{version}{'-stripped' if stripped else ''}"
    return bundle.path / ENGINES / name


def covers(archs: tuple[str, ...], device_arch: str) -> bool:
    """Whether engines for `archs` run on a device such as "sm89"."""
    if device_arch in archs:
        return True
    return AMPERE_PLUS in archs and int(device_arch.removeprefix("sm")) >= 80


def write_engine_manifest(engines: EngineSet) -> None:
    value = {"format_version": FORMAT_VERSION, **asdict(engines)}
    del value["path"]
    write_json(engines.path / MANIFEST, value)


def read_engine_manifest(folder: Path) -> EngineSet:
    """Read the manifest of one folder of engines.

    Raises:
        BundleError: no manifest there, another format version, or a damaged one.
    """
    manifest = folder / MANIFEST
    again = (
        "Build it again: dspark-trt build BUNDLE"  # never "remove": the folder may be anything
    )
    try:
        data = json.loads(manifest.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BundleError(
            f"{folder} holds no engines: it has no {MANIFEST}. {again}"
        ) from error
    except (OSError, ValueError) as error:
        raise BundleError(f"{manifest} cannot be read: {error}. {again}") from error
    version = data.pop("format_version", None) if isinstance(data, dict) else None
    if version != FORMAT_VERSION:
        raise BundleError(
            f"{manifest} has format {version!r}, this version of dspark-trt reads {FORMAT_VERSION}. {again}"
        )
    try:
        return _set_from_json(folder, data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(
            f"{manifest} is damaged ({type(error).__name__}: {error}). {again}"
        ) from error


def find_engines(bundle: Bundle, backend: str, *, version: str, device_arch: str) -> EngineSet:
    """The engines of a bundle that this library version and device can run.

    Args:
        bundle: whose `engines/` to search.
        backend: `tensorrt` or `tensorrt-rtx`.
        version: of the installed library.
        device_arch: of the GPU, such as "sm89".

    Raises:
        BundleError: there are none; the message names those of other versions or architectures.
    """
    found = [engines for engines in _engine_sets(bundle) if engines.backend == backend]
    build = build_command(bundle, backend)
    if not found:
        raise BundleError(f"{bundle.path} has no {backend} engines. Build them with: {build}")
    same_version = [engines for engines in found if _runs_in(engines, version)]
    if not same_version:
        built = ", ".join(sorted({engines.version for engines in found}))
        raise BundleError(
            f"{bundle.path}: the {backend} engines were built by version {built}, "
            f"{version} is installed. Build them again with: {found[0].rebuild_command(bundle)}"
        )
    fitting = [engines for engines in same_version if covers(engines.archs, device_arch)]
    if not fitting:
        built = ", ".join(sorted({arch for engines in same_version for arch in engines.archs}))
        raise BundleError(
            f"{bundle.path}: the {backend} engines are for {built}, this GPU is {device_arch}. "
            f"Build them for it with: {build} --arch {device_arch}"
        )
    # Tuned for exactly this architecture before portable ones; whole ones before stripped ones.
    return min(fitting, key=lambda e: (e.stripped, e.archs != (device_arch,), e.path.name))


def check_engine(
    engines: EngineSet, graph: str, bundle: Bundle, *, plugin_sha256: str | None = None
) -> Path:
    """Path of an engine whose bytes are those that were built, from exactly this bundle.

    Args:
        engines: a set chosen by `find_engines`.
        graph: name of the graph.
        bundle: the bundle it will run for.
        plugin_sha256: of this package's kernels, where the caller knows it.

    Raises:
        BundleError: not built, missing, truncated, changed, stripped, or built from other graphs, weights
            or kernels.
    """
    again = f"Build it again with: {engines.rebuild_command(bundle)}"
    record = engines.engines.get(graph)
    if record is None:
        raise BundleError(f"{engines.path} has no engine for {graph}. {again}")
    file = engines.path / record.file
    if engines.bundle_fingerprint != bundle.fingerprint():
        raise BundleError(
            f"{file} was built from bundle {engines.bundle_fingerprint}, "
            f"{bundle.path} is {bundle.fingerprint()}. {again}"
        )
    if plugin_sha256 is not None and plugin_sha256 != engines.plugin_sha256:
        raise BundleError(f"{file} embeds kernels of another version of dspark-trt. {again}")
    if engines.stripped:
        raise BundleError(
            f"{file} holds no weights. Fill it with: "
            f"{build_command(bundle, engines.backend)} --refit {engines.path}"
        )
    check_engine_file(engines, graph, again)
    return file


def check_engine_file(engines: EngineSet, graph: str, again: str = "Build it again.") -> None:
    """Compare an engine's size and hash with its manifest.

    Raises:
        BundleError: missing, truncated or changed; `again` ends the message.
    """
    record = engines.engines[graph]
    file = engines.path / record.file
    if not file.is_file():
        raise BundleError(f"{file} is missing. {again}")
    size = file.stat().st_size
    if size != record.size_bytes:
        raise BundleError(f"{file} has {size} bytes, expected {record.size_bytes}. {again}")
    if (seen := sha256_of_file(file)) != record.sha256:
        raise BundleError(
            f"{file} was changed: sha256 {seen[:12]}…, expected {record.sha256[:12]}…. {again}"
        )


def with_engine(engines: EngineSet, graph: str, record: EngineRecord) -> EngineSet:
    return replace(engines, engines={**engines.engines, graph: record})


def _engine_sets(bundle: Bundle) -> Iterator[EngineSet]:
    for manifest in sorted((bundle.path / ENGINES).glob(f"*/{MANIFEST}")):
        yield read_engine_manifest(manifest.parent)


def _runs_in(engines: EngineSet, version: str) -> bool:
    """Plans run in the version that built them; version-compatible ones also in later ones of its major."""
    built, installed = (re.findall(r"\d+", v) for v in (engines.version, version))
    if engines.version_compatible:
        return built[:1] == installed[:1] and [*map(int, built)] <= [*map(int, installed)]
    return built == installed


def _set_from_json(folder: Path, data: dict[str, Any]) -> EngineSet:
    return EngineSet(
        **{
            **data,
            "path": folder,
            "archs": tuple(data["archs"]),
            "limits": Limits(**data["limits"]),
            "batch_buckets": tuple(data["batch_buckets"]),
            "token_buckets": tuple(data["token_buckets"]),
            "engines": {
                graph: _record_from_json(record) for graph, record in data["engines"].items()
            },
        }
    )


def _record_from_json(data: dict[str, Any]) -> EngineRecord:
    return EngineRecord(
        **{
            **data,
            "inputs": tuple(_binding_from_json(item) for item in data["inputs"]),
            "outputs": tuple(_binding_from_json(item) for item in data["outputs"]),
            "profiles": tuple(profile_from_json(item) for item in data["profiles"]),
        }
    )


def _binding_from_json(data: dict[str, Any]) -> Binding:
    return Binding(data["name"], data["dtype"], tuple(data["shape"]))


def profile_from_json(data: dict[str, Any]) -> Profile:
    shapes = {}
    for name, (low, usual, high) in data["shapes"].items():
        shapes[name] = (tuple(low), tuple(usual), tuple(high))
    return Profile(name=data["name"], shapes=shapes)
