# SPDX-License-Identifier: Apache-2.0
"""Build the engines of a bundle, one process each, into `engines/<backend>-<arch>-<version>/`."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import onnx

from dspark_trt import __version__
from dspark_trt.bindings import Binding
from dspark_trt.bundle import Bundle
from dspark_trt.engine_manifest import (
    MANIFEST,
    EngineRecord,
    EngineSet,
    Profile,
    check_engine_file,
    engine_folder,
    read_engine_manifest,
    with_engine,
    write_engine_manifest,
)
from dspark_trt.errors import BuildError, BundleError
from dspark_trt.export.engines.engine_from_onnx import Job
from dspark_trt.export.engines.engine_graph import structure_sha256
from dspark_trt.export.engines.profiles import buckets, profiles_for, resolve_limits
from dspark_trt.export.engines.support import (
    check_bundle,
    check_options,
    choose_archs,
    choose_graphs,
)
from dspark_trt.export.tool_versions import tool_versions
from dspark_trt.files import new_file
from dspark_trt.gpu import visible_gpu
from dspark_trt.tensorrt_library import Library, load_library

_TOOLS = ("onnx", "polygraphy")
_QUOTED = 400  # characters of a library's own words


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What to build; None and empty take defaults (see `profiles` and `support`)."""

    backend: str
    graphs: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    max_batch: int | None = None
    max_tokens: int | None = None
    capacity: int | None = None
    strip_weights: bool = False
    version_compatible: bool = False
    refit: Path | None = (
        None  # a folder of engines without weights, to be filled from the bundle
    )


@dataclass(frozen=True, slots=True)
class Progress:
    """One report: the engine of `graph` is `fraction` done, busy with `phase`."""

    graph: str
    phase: str
    fraction: float


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """Everything decided before the first engine is built."""

    library: Library
    bundle: Bundle
    graphs: tuple[str, ...]
    engines: EngineSet  # without engines yet
    profiles: Mapping[str, tuple[Profile, ...]]  # of each graph
    stripped: EngineSet | None  # to be refitted


def plan_build(bundle: Bundle, options: BuildOptions) -> BuildPlan:
    """Resolve defaults and refuse what could only fail.

    Raises:
        BackendError: the backend's library is missing.
        BuildError: precision, head size, architecture, limit or option that cannot be built.
        BundleError: no such graph, or engines to refit that are damaged.
    """
    library, gpu = load_library(options.backend), visible_gpu()
    graphs = choose_graphs(bundle, options.graphs)
    check_bundle(bundle)
    stripped = None if options.refit is None else read_engine_manifest(options.refit)
    archs = choose_archs(library, options.archs, gpu) if stripped is None else stripped.archs
    check_options(
        library,
        archs,
        gpu,
        stripped=options.strip_weights,
        refit=stripped is not None,
        version_compatible=options.version_compatible,
    )
    limits = resolve_limits(
        bundle, batch=options.max_batch, tokens=options.max_tokens, capacity=options.capacity
    )
    limits = limits if stripped is None else stripped.limits
    engines = EngineSet(
        path=engine_folder(
            bundle, options.backend, archs, library.version, stripped=options.strip_weights
        ),
        backend=options.backend,
        version=library.version,
        archs=archs,
        gpu=gpu.name if gpu else f"none (built for {', '.join(archs)})",
        limits=limits,
        batch_buckets=buckets(limits.batch),
        token_buckets=buckets(limits.batch * (bundle.draft.gamma + 1)),
        bundle_fingerprint=bundle.fingerprint(),
        plugin_sha256=_plugin_sha256() if options.backend == "tensorrt" else None,
        stripped=options.strip_weights,
        version_compatible=options.version_compatible,
        tool_versions={"dspark-trt": __version__, **tool_versions(_TOOLS)},
    )
    profiles = {graph: profiles_for(bundle, graph, limits, options.backend) for graph in graphs}
    return BuildPlan(library, bundle, graphs, engines, profiles, stripped)


def build_engines(
    plan: BuildPlan, *, on_progress: Callable[[Progress], None] = lambda _: None
) -> EngineSet:
    """Build every engine of a plan. Each is in the manifest as soon as it is whole; engines that earlier
    builds of the same bundle, limits and options left there stay.

    Raises:
        BuildError: an engine could not be built, or not written.
    """
    engines = _with_earlier(plan.engines)
    try:
        engines.path.mkdir(parents=True, exist_ok=True)
        write_engine_manifest(engines)
        for graph in plan.graphs:
            on_progress(Progress(graph, "", 0.0))
            record = _build_one(plan, graph, on_progress)
            engines = with_engine(engines, graph, record)
            write_engine_manifest(engines)
    except OSError as error:
        raise BuildError(f"cannot write {engines.path}: {error.strerror or error}") from error
    return engines


def _with_earlier(engines: EngineSet) -> EngineSet:
    """Take over engines that differ in nothing but the graph; remove the files of any other."""
    try:
        earlier = read_engine_manifest(engines.path)
    except BundleError:
        return engines
    if replace(earlier, engines={}, tool_versions={}) == replace(engines, tool_versions={}):
        return replace(engines, engines=earlier.engines)
    (engines.path / MANIFEST).unlink()
    for record in earlier.engines.values():
        (engines.path / record.file).unlink(missing_ok=True)
    return engines


def _build_one(
    plan: BuildPlan, graph: str, on_progress: Callable[[Progress], None]
) -> EngineRecord:
    bundle, engines = plan.bundle, plan.engines
    file = f"{graph}.engine"
    structure = structure_sha256(onnx.load(bundle.graph_path(graph), load_external_data=False))
    refitted = (
        None if plan.stripped is None else _stripped_record(plan.stripped, graph, structure)
    )
    gpu = visible_gpu()
    with new_file(engines.path / file) as temporary:
        job = Job(
            backend=engines.backend,
            graph=bundle.graph_path(graph).absolute(),
            output=temporary.absolute(),
            capacity=engines.limits.capacity,
            gamma=bundle.draft.gamma,
            vocab_size=bundle.draft.decoder.vocab_size,
            profiles=plan.profiles[graph],
            archs=engines.archs,
            device_arch=gpu.arch if gpu else None,
            timing_cache=(
                engines.path.absolute() / "timing.cache"
                if engines.backend == "tensorrt"
                else None
            ),
            stripped=engines.stripped,
            version_compatible=engines.version_compatible,
            refit=plan.stripped.path.absolute() / file if plan.stripped else None,
        )
        built = run_job(job, graph, on_progress)
    if refitted is not None:
        return replace(refitted, graph_sha256=bundle.files[f"{graph}.onnx"].sha256, **built)
    for side in ("inputs", "outputs"):
        built[side] = tuple(
            Binding(item["name"], item["dtype"], tuple(item["shape"])) for item in built[side]
        )
    return EngineRecord(
        file=file,
        graph_sha256=bundle.files[f"{graph}.onnx"].sha256,
        structure_sha256=structure,
        profiles=job.profiles,
        **built,
    )


def _stripped_record(stripped: EngineSet, graph: str, structure: str) -> EngineRecord:
    """The engine without weights that fits a graph.

    Raises:
        BuildError: there is none, or it was built from a graph of another structure.
        BundleError: its file is damaged.
    """
    record = stripped.engines.get(graph)
    if record is None or not stripped.stripped:
        raise BuildError(f"{stripped.path} has no engine without weights for {graph}")
    if record.structure_sha256 != structure:
        raise BuildError(
            f"{stripped.path / record.file} was built from a graph of another structure than this bundle's "
            f"{graph}: only drafters of one architecture share engines. Build without --refit."
        )
    check_engine_file(stripped, graph)
    return record


def run_job(job: Job, graph: str, on_progress: Callable[[Progress], None]) -> dict[str, Any]:
    """Let a worker do a job; returns its result (see `engine_from_onnx`).

    Raises:
        BuildError: it failed, or its process ended.
    """
    result: dict[str, Any] = {}
    reason = ""
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        with _worker(printed) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(job.to_json())
            process.stdin.close()
            for line in process.stdout:
                message = json.loads(line)
                if "fraction" in message:
                    on_progress(Progress(graph, message["phase"], message["fraction"]))
                result = message.get("result", result)
                reason = message.get("error", reason)
        if result and process.returncode == 0:
            return result
        printed.seek(0)
        raise BuildError(_failure(job, graph, process.returncode, reason, printed.read()))


@contextmanager
def _worker(stderr: IO[str]) -> Iterator["subprocess.Popen[str]"]:
    """The worker process; it never outlives the block."""
    # The worker imports this very package, however it was found.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "dspark_trt.export.engines.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        yield process
    except BaseException:
        process.kill()
        raise
    finally:
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _failure(job: Job, graph: str, returncode: int, reason: str, printed: str) -> str:
    """One sentence on what went wrong, from the worker's own words, its signal and what it printed."""
    words = [f"the {job.backend} engine of graph {graph} could not be built"]
    if returncode < 0:
        name = signal.Signals(-returncode).name
        words.append(
            f"the building process ended with {name}"
            + (" (out of memory?)" if name == "SIGKILL" else "")
        )
    words += [reason] if reason else []
    if not reason.startswith("its parser"):
        words += _first_error(printed)
    return ": ".join(words)


def _first_error(printed: str) -> list[str]:
    """What a library said first, without the complaint about a missing driver that it has on any CPU."""
    lines = (
        line.strip().removeprefix("[E] ") for line in printed.splitlines() if "Error" in line
    )
    return [line[:_QUOTED] for line in lines if "CUDA driver version" not in line][:1]


def _plugin_sha256() -> str:
    """Hash of the sources of the kernels that TensorRT engines embed."""
    from hashlib import sha256

    import dspark_trt.plugins

    folder = Path(dspark_trt.plugins.__path__[0])
    sources = sorted([*folder.glob("kernel_*.py"), folder / "tensorrt_plugin.py"])
    return sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
