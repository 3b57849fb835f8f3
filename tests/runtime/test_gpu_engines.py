# SPDX-License-Identifier: Apache-2.0
"""Engines at run time, as far as a machine without a GPU goes: refusals, buckets, and what is bound and checked."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark_trt.bindings import Binding
from dspark_trt.bundle import Bundle
from dspark_trt.engine_manifest import EngineRecord, EngineSet, Limits, Profile
from dspark_trt.errors import BackendError, CapacityError
from dspark_trt.gpu import visible_gpu
from dspark_trt.runtime.backends import open_backend
from dspark_trt.runtime.backends.engine_backend import engine_buckets
from dspark_trt.runtime.backends.engine_contexts import EngineContexts, EngineLoader
from dspark_trt.runtime.backends.interface import BackendOptions
from dspark_trt.runtime.backends.kernel_cache import KernelCache
from dspark_trt.runtime.backends.torch_caches import DeviceCaches
from dspark_trt.tensorrt_library import Library, load_library

needs_no_gpu = pytest.mark.skipif(
    visible_gpu() is not None, reason="says what a GPU-less machine says"
)


@needs_no_gpu
@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_without_a_gpu_engines_are_refused_in_one_sentence(
    backend: str, tiny_bundle: Bundle
) -> None:
    with pytest.raises(
        BackendError,
        match=f"backend {backend} runs engines on a GPU, and no CUDA device is visible",
    ):
        open_backend(backend, tiny_bundle)


@needs_no_gpu
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cpu", "on a GPU, and device cpu was asked for"),
        ("cuda:3", "no device cuda:3 is visible here"),
        ("gpu", "device 'gpu' is unknown; expected cpu, cuda or cuda:N"),
    ],
)
def test_engines_are_refused_the_devices_they_cannot_have(
    device: str, message: str, tiny_bundle: Bundle
) -> None:
    with pytest.raises(BackendError, match=message):
        open_backend("tensorrt-rtx", tiny_bundle, BackendOptions(device=device))


@needs_no_gpu
@pytest.mark.trt
def test_the_library_itself_refuses_without_a_crash(tmp_path: Path) -> None:
    """The real runtime, on a plan that it built here, and on half of one."""
    library = load_library("tensorrt-rtx")
    plan, loader = small_plan(library.module), EngineLoader(library)
    for name, data in {
        "whole": plan,
        "half": plan[: len(plan) // 2],
        "noise": b"x" * 4096,
    }.items():
        file = tmp_path / f"{name}.engine"
        file.write_bytes(data)
        with pytest.raises(
            BackendError, match=rf"{name}\.engine does not load: \w.*Error Code"
        ):
            loader.load(file)


def small_plan(trt: Any) -> bytes:
    """One addition, built without a GPU."""
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    value = network.add_input("x", trt.float32, (4,))
    doubled = network.add_elementwise(value, value, trt.ElementWiseOperation.SUM)
    network.mark_output(doubled.get_output(0))
    return bytes(builder.build_serialized_network(network, builder.create_builder_config()))


# What is bound, and what is checked -----------------------------------------------------------------


class Context:
    """Records calls in the place of the library's context; `failing` returns what a failure returns."""

    def __init__(self, failing: str | None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> bool:
            self.calls.append((name, *arguments))
            return name != self._failing

        return call

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


def contexts(made: list[Context], failing: str | None = None) -> EngineContexts:
    """Over TensorRT, which has no runtime configurations."""
    strategies = SimpleNamespace(USER_MANAGED="mine")
    trt = SimpleNamespace(ExecutionContextAllocationStrategy=strategies)

    def create(strategy: str) -> Context | None:
        if failing == "create_execution_context":
            return None
        made.append(Context(failing))
        return made[-1]

    engine = SimpleNamespace(create_execution_context=create, device_memory_size_v2=1 << 20)
    library = Library("tensorrt", trt)  # type: ignore[arg-type]
    loader = EngineLoader.__new__(EngineLoader)  # without the library's runtime
    loader.library, loader.kernels = library, None
    loader.reason = lambda: "out of memory"  # type: ignore[method-assign]
    run = EngineContexts("draft", engine, record(), loader)
    run.use_memory(4096, 1 << 20)
    return run


class RuntimeCache:
    """Stands in for the library's cache: holds a kernel for each context, and takes its own files only."""

    MARK = b"kernels:"

    def __init__(self) -> None:
        self.kernels = b""

    def deserialize(self, data: bytes) -> bool:
        if not data.startswith(self.MARK):
            return False
        self.kernels = data.removeprefix(self.MARK)
        return True

    def serialize(self) -> memoryview:
        return memoryview(self.MARK + self.kernels)


class Rtx:
    """Stands in for an engine of TensorRT-RTX, and counts what it had to compile."""

    def __init__(self) -> None:
        self.configs: list[SimpleNamespace] = []
        self.compiled = 0
        self.device_memory_size_v2 = 1 << 20

    def create_runtime_config(self) -> SimpleNamespace:
        def set_runtime_cache(cache: RuntimeCache) -> bool:
            config.cache = cache
            return True

        config = SimpleNamespace(
            cache=None,
            create_runtime_cache=RuntimeCache,
            set_runtime_cache=set_runtime_cache,
            set_execution_context_allocation_strategy=lambda _strategy: None,
        )
        self.configs.append(config)
        return config

    def create_execution_context(self, config: SimpleNamespace) -> Context:
        kernel = b"%d" % len(self.configs)
        if kernel not in config.cache.kernels:
            self.compiled += 1
            config.cache.kernels += kernel
        return Context(None)


def rtx_contexts(engine: Rtx, file: Path, *, captures: bool = False) -> EngineContexts:
    """With the library's own names of strategies."""
    loader = EngineLoader(load_library("tensorrt-rtx"), KernelCache(file), captures=captures)
    run = EngineContexts("draft", engine, record(), loader)
    run.use_memory(4096, 1 << 20)
    return run


def record() -> EngineRecord:
    ids, cache = (-1,), (-1, 2, 8, 4)
    small = {"ids": ((1,), (1,), (1,)), "past_key_0": ((1, 2, 8, 4),) * 3}
    large = {
        "ids": ((1,), (4,), (4,)),
        "past_key_0": ((1, 2, 8, 4), (4, 2, 8, 4), (4, 2, 8, 4)),
    }
    return EngineRecord(
        file="draft.engine", sha256="0", size_bytes=1, graph_sha256="0", structure_sha256="0",
        inputs=(Binding("ids", "int64", ids), Binding("past_key_0", "float16", cache)),
        outputs=(Binding("tokens", "int64", ids), Binding("present_key_0", "float16", cache)),
        aliases={"present_key_0": "past_key_0"},
        profiles=(Profile(name="single", shapes=small), Profile(name="batch", shapes=large)),
        layers={}, seconds=0.0, peak_bytes=None,
    )  # fmt: skip


def tensors(batch: int) -> dict[str, torch.Tensor]:
    return {
        "ids": torch.zeros(batch, dtype=torch.int64),
        "tokens": torch.zeros(batch, dtype=torch.int64),
        "past_key_0": torch.zeros((batch, 2, 8, 4), dtype=torch.float16),
    }


def test_a_key_has_a_context_of_its_own_bound_once() -> None:
    made: list[Context] = []
    run, bound = contexts(made), tensors(3)
    for _ in range(3):
        run.run(bound, stream=7, key="3")
    run.run(tensors(1), stream=7, key="1")
    first, second = made
    assert first.named("execute_async_v3") == [(7,)] * 3
    assert (
        first.named("set_device_memory")
        == second.named("set_device_memory")
        == [(4096, 1 << 20)]
    )
    assert first.named("set_optimization_profile_async") == [(1, 7)]
    assert second.named("set_optimization_profile_async") == [(0, 7)]  # the most specific one
    addresses = dict(first.named("set_tensor_address"))
    assert (
        addresses["past_key_0"] == addresses["present_key_0"] == bound["past_key_0"].data_ptr()
    )
    assert len(first.named("set_tensor_address")) == 4
    assert dict(first.named("set_input_shape"))["ids"] == (3,)


def test_prompts_share_one_context_bound_anew() -> None:
    made: list[Context] = []
    run = contexts(made)
    run.run(tensors(2), stream=0)
    run.run(tensors(4), stream=0)
    assert len(made) == 1
    assert [dict([shape])["ids"] for shape in made[0].named("set_input_shape")[::2]] == [
        (2,),
        (4,),
    ]


@pytest.mark.trt
@pytest.mark.parametrize("captures", [False, True])
def test_strategies_of_steps_and_of_prompts(captures: bool, tmp_path: Path) -> None:
    engine = Rtx()
    run = rtx_contexts(engine, tmp_path / "kernels.cache", captures=captures)
    run.run(tensors(1), stream=0, key=1)
    run.run(tensors(2), stream=0)
    trt = load_library("tensorrt-rtx").module
    specialise, graphs = trt.DynamicShapesKernelSpecializationStrategy, trt.CudaGraphStrategy
    found = [
        (c.dynamic_shapes_kernel_specialization_strategy, c.cuda_graph_strategy)
        for c in engine.configs
    ]
    own = graphs.WHOLE_GRAPH_CAPTURE if captures else graphs.DISABLED
    assert found == [(specialise.EAGER, own), (specialise.NONE, graphs.DISABLED)]
    assert engine.configs[0].cache is engine.configs[1].cache


@pytest.mark.trt
def test_compiled_kernels_are_kept_for_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "kernels-sm120.cache"
    compiled = []
    for damage in (False, False, True):
        if damage:
            file.write_bytes(b"noise")
        engine = Rtx()
        run = rtx_contexts(engine, file)
        with caplog.at_level("INFO"):
            for batch in (1, 2, 2):
                run.run(tensors(batch), stream=0, key=batch)
        compiled.append(engine.compiled)
        assert file.read_bytes() == b"kernels:12"
    assert compiled == [2, 0, 2]
    assert caplog.text.count("is of another machine or version: kernels are compiled") == 1
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


@pytest.mark.trt
def test_engines_run_where_kernels_cannot_be_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Rtx()
    run = rtx_contexts(engine, tmp_path / "absent" / "kernels.cache")
    for batch in (1, 2):
        run.run(tensors(batch), stream=0, key=batch)
    assert engine.compiled == 2
    assert caplog.text.count("compiled kernels are not kept") == 1


@pytest.mark.trt
def test_the_library_has_what_is_asked_of_it() -> None:
    trt = load_library("tensorrt-rtx").module
    asked = {
        trt.ICudaEngine: ["create_runtime_config", "device_memory_size_v2"],
        trt.IRuntimeConfig: [
            "set_execution_context_allocation_strategy", "create_runtime_cache", "set_runtime_cache",
            "dynamic_shapes_kernel_specialization_strategy", "cuda_graph_strategy",
        ],
        trt.IRuntimeCache: ["serialize", "deserialize"],
        trt.IHostMemory: ["nbytes"],
        trt.IExecutionContext: [
            "set_device_memory", "set_optimization_profile_async", "set_input_shape",
            "set_tensor_address", "execute_async_v3",
        ],
    }  # fmt: skip
    for owner, names in asked.items():
        assert [name for name in names if not hasattr(owner, name)] == []


@pytest.mark.parametrize(
    "call",
    [
        "create_execution_context", "set_optimization_profile_async", "set_input_shape",
        "set_tensor_address", "execute_async_v3",
    ],
)  # fmt: skip
def test_every_refusal_of_the_library_becomes_a_sentence(call: str) -> None:
    named = call.removesuffix("_async") if "profile" in call else call
    with pytest.raises(BackendError, match=f"engine draft: {named}.* failed: out of memory"):
        contexts([], failing=call).run(tensors(1), stream=0, key=1)


def test_shapes_outside_all_profiles_are_named() -> None:
    with pytest.raises(BackendError, match=r"engine draft: ids \(5,\) is outside its profiles"):
        contexts([]).run(tensors(5), stream=0, key=5)


# Limits ---------------------------------------------------------------------------------------------


def engine_set(path: Path) -> EngineSet:
    return EngineSet(
        path=path, backend="tensorrt-rtx", version="1", archs=("ampere+",), gpu="none",
        limits=Limits(batch=6, tokens=64, capacity=128), batch_buckets=(1, 2, 4, 6),
        token_buckets=(1, 2, 4, 8, 16, 32, 48), bundle_fingerprint="0", plugin_sha256=None,
    )  # fmt: skip


def test_graphs_take_the_engines_buckets(tiny_bundle: Bundle, tmp_path: Path) -> None:
    engines = engine_set(tmp_path)
    assert engine_buckets(engines, 6, tiny_bundle).rows == (1, 2, 4, 8, 16, 32, 48)
    fewer = engine_buckets(engines, 3, tiny_bundle)
    assert (fewer.batch, fewer.rows) == ((1, 2, 3), (1, 2, 4, 8, 16, 24))
    with pytest.raises(CapacityError, match=r"holds 6 requests, 7 are wanted.*--max-batch 7"):
        engine_buckets(engines, 7, tiny_bundle)


def test_a_context_beyond_fixed_caches_is_refused(tiny_bundle: Bundle) -> None:
    decoder = replace(tiny_bundle.draft.decoder, num_layers=1)
    caches = DeviceCaches(
        decoder,
        requests=1,
        dtype=torch.float16,
        device=torch.device("cpu"),
        scratch=15,
        fixed=64,
    )
    caches.reserve(49)
    assert caches.capacity_rows == 64
    with pytest.raises(
        BackendError, match=r"a context of 50 tokens does not fit .* --capacity"
    ):
        caches.reserve(50)
