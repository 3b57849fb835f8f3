# SPDX-License-Identifier: Apache-2.0
"""One engine from one ONNX graph, in this process; `worker` gives it a process of its own."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import onnx

from dspark_trt.bindings import Binding
from dspark_trt.engine_manifest import AMPERE_PLUS, Profile, profile_from_json
from dspark_trt.errors import BuildError
from dspark_trt.export.engines.engine_graph import for_tensorrt, for_tensorrt_rtx
from dspark_trt.export.engines.libraries import polygraphy_loaders
from dspark_trt.export.engines.progress import PhaseTree
from dspark_trt.export.engines.support import FUSED_HEAD_DIMS
from dspark_trt.files import new_file
from dspark_trt.tensorrt_library import load_library

_REPORT_EVERY_S = 0.1

Send = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One engine to build, or to fill with weights (`refit`: the engine without them)."""

    backend: str
    graph: Path
    output: Path
    capacity: int
    gamma: int
    vocab_size: int
    profiles: tuple[Profile, ...]
    archs: tuple[str, ...]
    device_arch: str | None
    timing_cache: Path | None = None
    stripped: bool = False
    version_compatible: bool = False
    refit: Path | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> "Job":
        data = json.loads(text)
        for name in ("graph", "output", "timing_cache", "refit"):
            data[name] = data[name] and Path(data[name])
        data["profiles"] = tuple(profile_from_json(item) for item in data["profiles"])
        return cls(**{**data, "archs": tuple(data["archs"])})


def engine_from_onnx(job: Job, send: Send) -> dict[str, Any]:
    """Parse, build, write the plan; returns what only the builder knows of an engine.

    Raises:
        BuildError: the graph was not parsed or no engine came out of it.
        BackendError: the backend's library is missing.
    """
    started = time.perf_counter()
    trt, loaders = load_library(job.backend).module, polygraphy_loaders(job.backend)
    model = engine_model(job)
    if job.backend == "tensorrt":
        _register_plugins(job)
    from polygraphy.exception import PolygraphyException

    try:
        builder, network = loaders.create_network(strongly_typed=True)
        parser = trt.OnnxParser(network, loaders.get_trt_logger())
        if not parser.parse(model.SerializeToString(), str(job.graph)):
            raise BuildError(_parser_errors(parser))
        _allow_decomposition(trt, network)
        described = _describe(trt, network)
        config = _config(job, trt, loaders, _monitor(trt, send))(builder, network)
        written = _write_plan(trt, builder, network, config, job.output)
        _save_timing_cache(job, config)
    except PolygraphyException as error:
        raise BuildError(str(error)) from error
    return {**described, **written, **_cost(started)}


def engine_from_stripped(job: Job) -> dict[str, Any]:
    """Fill an engine without weights from the graph's; needs the GPU it was built for.

    Raises:
        BuildError: the engine does not load, or the graph's weights do not fit it.
    """
    started = time.perf_counter()
    trt, loaders = load_library(job.backend).module, polygraphy_loaders(job.backend)
    assert job.refit is not None
    logger = loaders.get_trt_logger()
    engine = trt.Runtime(logger).deserialize_cuda_engine(job.refit.read_bytes())
    if engine is None:
        raise BuildError(f"{job.refit} does not load on this GPU")
    refitter = trt.Refitter(engine, logger)
    filler = trt.OnnxParserRefitter(refitter, logger)
    model = engine_model(job).SerializeToString()
    if not filler.refit_from_bytes(model, str(job.graph)) or not refitter.refit_cuda_engine():
        raise BuildError(f"the weights of {job.graph} do not fit {job.refit}")
    serialization = engine.create_serialization_config()
    serialization.flags &= ~(1 << int(trt.SerializationFlag.EXCLUDE_WEIGHTS))
    plan = engine.serialize_with_config(serialization)
    with _writing(job.output) as writer:
        writer.write(memoryview(plan).cast("B"))
    return {**writer.record(), **_cost(started)}


def engine_model(job: Job) -> onnx.ModelProto:
    """The model handed to the library's parser; weights stay in the bundle's file."""
    model = onnx.load(job.graph, load_external_data=False)
    if job.backend == "tensorrt-rtx":
        return for_tensorrt_rtx(model, capacity=job.capacity)
    return for_tensorrt(
        model, capacity=job.capacity, gamma=job.gamma, vocab_size=job.vocab_size
    )


def _register_plugins(job: Job) -> None:
    from dspark_trt.plugins.tensorrt_plugin import register_plugins

    assert job.device_arch is not None  # `support` asked for a GPU
    register_plugins(int(job.device_arch.removeprefix("sm")))


def _config(job: Job, trt: Any, loaders: Any, monitor: Any) -> Any:
    """A loader of the builder's configuration."""
    common: dict[str, Any] = {
        "profiles": [_polygraphy_profile(loaders, profile) for profile in job.profiles],
        "refittable": job.stripped,
        "strip_plan": job.stripped,
        "version_compatible": job.version_compatible,
        "progress_monitor": monitor,
    }
    if job.backend == "tensorrt-rtx":
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        named = [arch.removeprefix("sm") for arch in job.archs if arch != AMPERE_PLUS]
        capabilities = [(int(arch[:-1]), int(arch[-1])) for arch in named]
        create = CreateConfigRTX(compute_capabilities=capabilities or None, **common)
    else:
        level = trt.HardwareCompatibilityLevel
        portable = AMPERE_PLUS in job.archs
        create = loaders.CreateConfig(
            hardware_compatibility_level=level.AMPERE_PLUS if portable else level.NONE,
            load_timing_cache=job.timing_cache and str(job.timing_cache),
            **common,
        )
    return loaders.PostprocessConfig(
        create, lambda _builder, _network, config: _set_flags(trt, config)
    )


def _set_flags(trt: Any, config: Any) -> Any:
    # Float32 means float32: taps above 2e4 leave nothing to round away.
    config.clear_flag(trt.BuilderFlag.TF32)
    # A row with NaN is refused by verification, so NaN has to get there.
    config.set_flag(trt.BuilderFlag.STRICT_NANS)
    # CUDA graphs cannot be captured from an engine that allocates while it runs.
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    return config


def _polygraphy_profile(loaders: Any, profile: Profile) -> Any:
    made = loaders.Profile()
    for name, (low, usual, high) in profile.shapes.items():
        made.add(name, min=low, opt=usual, max=high)
    return made


def _monitor(trt: Any, send: Send) -> Any:
    """An `IProgressMonitor` that reports a few times a second."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._tree = PhaseTree()
            self._reported = 0.0

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self._tree.start(name, parent, steps)

        def step_complete(self, name: str, step: int) -> bool:
            self._tree.step(name, step)
            if time.monotonic() - self._reported >= _REPORT_EVERY_S:
                self._reported = time.monotonic()
                send({"phase": self._tree.current, "fraction": round(self._tree.fraction, 4)})
            return True

        def phase_finish(self, name: str) -> None:
            self._tree.finish(name)

    return Monitor()


def _describe(trt: Any, network: Any) -> dict[str, Any]:
    """Inputs, outputs and aliased caches of the parsed network."""
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    return {
        "inputs": [asdict(_binding(trt, tensor)) for tensor in inputs],
        "outputs": [asdict(_binding(trt, tensor)) for tensor in outputs],
        "aliases": dict(_aliases(trt, network)),
        "layers": dict(Counter(layer.type.name for layer in _layers(network)).most_common()),
    }


def _allow_decomposition(trt: Any, network: Any) -> None:
    """Attention over heads that no fused kernel takes may become matrix products and a softmax."""
    for layer in _layers(network):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # `get_layer` returns the base class
            query = layer.attention.get_input(0)
            layer.attention.decomposable = query.shape[-1] not in FUSED_HEAD_DIMS


def _layers(network: Any) -> Iterator[Any]:
    return (network.get_layer(index) for index in range(network.num_layers))


def _aliases(trt: Any, network: Any) -> Iterator[tuple[str, str]]:
    """Cache updates write into their input's memory: the library aliases output and input."""
    for layer in _layers(network):
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            yield layer.get_output(0).name, layer.get_input(0).name


def _binding(trt: Any, tensor: Any) -> Binding:
    dtypes = {
        trt.float32: "float32", trt.float16: "float16", trt.bfloat16: "bfloat16",
        trt.int64: "int64", trt.int32: "int32", trt.bool: "bool",
    }  # fmt: skip
    return Binding(tensor.name, dtypes[tensor.dtype], tuple(tensor.shape))


def _parser_errors(parser: Any) -> str:
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    shown = [f"node {e.node_name()} ({e.node_operator()}): {e.desc()}" for e in errors]
    return "its parser refuses " + "; ".join(dict.fromkeys(shown[:3]))


class _HashedFile:
    """Hashes what passes through to a file, so that no plan is read again."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._digest, self._bytes = stream, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> int:
        self._digest.update(data)
        self._bytes += len(data)
        return self._stream.write(data)

    def record(self) -> dict[str, Any]:
        return {"sha256": self._digest.hexdigest(), "size_bytes": self._bytes}


def _write_plan(
    trt: Any, builder: Any, network: Any, config: Any, path: Path
) -> dict[str, Any]:
    """Build into a file piece by piece: a plan held in memory would cost the weights once more.

    Raises:
        BuildError: no engine came out, or its file cannot be written.
    """
    with _writing(path) as file:
        # The library does not look at what a writer raises or returns.
        refused: list[OSError] = []

        class Writer(trt.IStreamWriter):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()

            def write(self, data: bytes) -> int:
                try:
                    return file.write(data)
                except OSError as error:
                    refused.append(error)
                    return 0

        is_built = builder.build_serialized_network_to_stream(network, config, Writer())
        if refused:
            raise refused[0]
        if not is_built:
            raise BuildError("no engine came out of the builder")
    return file.record()


@contextmanager
def _writing(path: Path) -> Iterator[_HashedFile]:
    try:
        with path.open("wb") as stream:
            yield _HashedFile(stream)
    except OSError as error:
        raise BuildError(f"its file cannot be written: {error.strerror or error}") from error


def _save_timing_cache(job: Job, config: Any) -> None:
    """Kernel timings speed up the next build; TensorRT-RTX times nothing while it builds."""
    if job.timing_cache is not None:
        with new_file(job.timing_cache) as temporary:
            temporary.write_bytes(config.get_timing_cache().serialize())


def _cost(started: float) -> dict[str, Any]:
    return {
        "seconds": round(time.perf_counter() - started, 3),
        "peak_bytes": _peak_bytes(),
    }


def _peak_bytes() -> int | None:
    """High-water mark of this process alone: `ru_maxrss` would start at that of the parent."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
