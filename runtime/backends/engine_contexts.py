# SPDX-License-Identifier: Apache-2.0
"""One engine of TensorRT or TensorRT-RTX at run time: a context for each set of shapes, all on one memory.

A captured graph holds what its context was bound to, so a context is never bound again once it has a key.
Shapes without a key (prompts) share one context, bound anew for each step.
"""

import mmap
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_trt.engine_manifest import EngineRecord, Shape
from dspark_trt.errors import BackendError
from dspark_trt.runtime.backends.kernel_cache import KernelCache
from dspark_trt.tensorrt_library import Library

if TYPE_CHECKING:
    from torch import Tensor


class EngineLoader:
    """The library's runtime, which has to outlive its engines, and what it says while it fails.

    Args:
        library: TensorRT or TensorRT-RTX.
        kernels: what TensorRT-RTX has compiled on this machine.
        captures: whether the library captures CUDA graphs itself, because nobody else does (TensorRT-RTX).
    """

    def __init__(
        self, library: Library, kernels: KernelCache | None = None, *, captures: bool = False
    ) -> None:
        self.library, self.kernels = library, kernels
        self._captures = captures
        trt, lines = library.module, list[str]()

        class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.Logger.ERROR, trt.Logger.INTERNAL_ERROR):
                    lines.append(message)

        self._logger, self._lines = Logger(), lines
        self._runtime: Any = trt.Runtime(self._logger)

    def load(self, file: Path) -> Any:
        """Deserialise a plan whose manifest was checked before.

        Raises:
            BackendError: the library does not load it.
        """
        with (
            file.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as plan,
        ):
            engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise BackendError(f"{file} does not load: {self.reason()}")
        return engine

    def new_context(self, engine: Any, *, is_fixed: bool) -> Any:
        """An execution context whose scratch memory is given to it; None where the library fails.

        Args:
            engine: the library's.
            is_fixed: shapes and addresses will never change. TensorRT-RTX then specialises its kernels at once,
                since later would be too late for a captured graph; shapes that change with every step, as
                those of prompts do, take the kernels that fit all.
        """
        trt = self.library.module
        user_managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        kernels = getattr(trt, "DynamicShapesKernelSpecializationStrategy", None)
        if kernels is None:
            return engine.create_execution_context(user_managed)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(user_managed)
        strategy = kernels.EAGER if is_fixed else kernels.NONE
        config.dynamic_shapes_kernel_specialization_strategy = strategy
        graphs = trt.CudaGraphStrategy
        captured = (
            graphs.WHOLE_GRAPH_CAPTURE if is_fixed and self._captures else graphs.DISABLED
        )
        config.cuda_graph_strategy = captured
        if self.kernels is not None:
            self.kernels.attach(config)
        return engine.create_execution_context(config)

    def reason(self) -> str:
        """The first error since the last call, the others follow from it: return values give none."""
        found = self._lines[0].strip() if self._lines else "the library gives no reason"
        self._lines.clear()
        return found


class EngineContexts:
    """Runs one engine on tensors of the device, on the stream given."""

    def __init__(
        self, name: str, engine: Any, record: EngineRecord, loader: EngineLoader
    ) -> None:
        self.name = name
        self._engine, self._record, self._loader = engine, record, loader
        self._contexts: dict[Hashable, Any] = {}
        self._memory: tuple[int, int] = (0, 0)

    @property
    def memory_bytes(self) -> int:
        """Scratch memory of one step; engines that run one after the other share it."""
        return int(self._engine.device_memory_size_v2)

    def use_memory(self, address: int, size_bytes: int) -> None:
        self._memory = (address, size_bytes)

    def run(
        self, tensors: Mapping[str, "Tensor"], *, stream: int, key: Hashable | None = None
    ) -> None:
        """Enqueue one step; returns before it is done.

        Args:
            tensors: by name, every input and output; caches under the name of their input.
            stream: handle of a CUDA stream.
            key: of the shapes and addresses, which are then bound on the first run only.

        Raises:
            BackendError: shapes no profile takes, or the library refused a call.
        """
        context = self._contexts.get(key)
        is_new = context is None
        if context is None:
            context = self._contexts[key] = self._new_context(is_fixed=key is not None)
        if is_new or key is None:
            self._bind(context, tensors, stream)
        self._check(context.execute_async_v3(stream), "execute_async_v3")
        if is_new and self._loader.kernels is not None:
            self._loader.kernels.save()

    def _new_context(self, *, is_fixed: bool) -> Any:
        context = self._loader.new_context(self._engine, is_fixed=is_fixed)
        self._check(context is not None, "create_execution_context")
        context.set_device_memory(*self._memory)
        return context

    def _bind(self, context: Any, tensors: Mapping[str, "Tensor"], stream: int) -> None:
        shapes = {b.name: tuple(tensors[b.name].shape) for b in self._record.inputs}
        profile = self._profile_for(shapes)
        self._check(
            context.set_optimization_profile_async(profile, stream), "set_optimization_profile"
        )
        for name, shape in shapes.items():
            self._check(context.set_input_shape(name, shape), f"set_input_shape {name} {shape}")
        for name, tensor in tensors.items():
            self._set_address(context, name, tensor)
        for output, source in self._record.aliases.items():  # a cache is one memory
            self._set_address(context, output, tensors[source])

    def _set_address(self, context: Any, name: str, tensor: "Tensor") -> None:
        assert tensor.is_contiguous(), name
        self._check(
            context.set_tensor_address(name, tensor.data_ptr()), f"set_tensor_address {name}"
        )

    def _profile_for(self, shapes: Mapping[str, Shape]) -> int:
        """The first profile, the most specific one, that takes all shapes."""
        for index, profile in enumerate(self._record.profiles):
            if all(
                _is_within(shape, *_range(profile.shapes[n])) for n, shape in shapes.items()
            ):
                return index
        outside = next(
            (n, shape)
            for n, shape in shapes.items()
            if not any(_is_within(shape, *_range(p.shapes[n])) for p in self._record.profiles)
        )
        raise BackendError(
            f"engine {self.name}: {outside[0]} {outside[1]} is outside its profiles. Build engines for "
            "larger steps with --max-batch, --max-tokens or --capacity."
        )

    def _check(self, succeeded: bool, call: str) -> None:
        if not succeeded:
            raise BackendError(f"engine {self.name}: {call} failed: {self._loader.reason()}")


def _range(shapes: tuple[Shape, Shape, Shape]) -> tuple[Shape, Shape]:
    return shapes[0], shapes[2]


def _is_within(shape: Shape, low: Shape, high: Shape) -> bool:
    return len(shape) == len(low) and all(
        a <= d <= b for d, a, b in zip(shape, low, high, strict=True)
    )
