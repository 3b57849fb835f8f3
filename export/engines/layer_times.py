# SPDX-License-Identifier: Apache-2.0
"""Which layers an engine's time goes to, measured on the GPU it runs on."""

from typing import TYPE_CHECKING, Any

from dspark_trt.engine_manifest import EngineRecord

if TYPE_CHECKING:
    import torch

_RUNS = 10  # behind one that warms up


class LayerTimes:
    """Milliseconds by layer, as the library's profiler reports them."""

    def __init__(self, trt: Any) -> None:
        milliseconds: dict[str, float] = {}

        class Profiler(trt.IProfiler):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.IProfiler.__init__(self)

            def report_layer_time(self, layer_name: str, ms: float) -> None:
                milliseconds[layer_name] = milliseconds.get(layer_name, 0.0) + ms

        self.milliseconds, self.profiler = milliseconds, Profiler()

    def shares(self) -> dict[str, float] | None:
        """Fractions of the whole, the largest first; None where nothing was reported."""
        total = sum(self.milliseconds.values())
        if not total:
            return None
        ranked = sorted(self.milliseconds.items(), key=lambda item: -item[1])
        return {name: round(spent / total, 4) for name, spent in ranked}


def layer_shares(trt: Any, engine: Any, record: EngineRecord) -> dict[str, float] | None:
    """Share of the time by layer, at the usual shapes of the first profile and with inputs of zeros: without
    context, attention counts for little. None where torch, for memory, is missing, or the library fails.
    """
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    stream: Any = torch.cuda.current_stream()
    user_managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
    context, times = engine.create_execution_context(user_managed), LayerTimes(trt)
    if context is None:
        return None
    size = max(int(engine.device_memory_size_v2), 1)
    scratch = torch.empty(size, dtype=torch.uint8, device="cuda")
    context.set_device_memory(scratch.data_ptr(), size)
    tensors = _bound(context, record, stream.cuda_stream)
    if tensors is None:
        return None
    for run in range(1 + _RUNS):
        if not context.execute_async_v3(stream.cuda_stream):
            return None
        stream.synchronize()
        if run == 0:
            context.profiler = times.profiler
    return times.shares()


def _bound(context: Any, record: EngineRecord, stream: int) -> "dict[str, torch.Tensor] | None":
    """The memory of all tensors; None where the library refuses the profile, a shape or an address."""
    import torch

    tensors: dict[str, torch.Tensor] = {}

    def place(name: str, shape: tuple[int, ...], dtype: str) -> bool:
        tensors[name] = torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")
        return bool(context.set_tensor_address(name, tensors[name].data_ptr()))

    taken = [context.set_optimization_profile_async(0, stream)]
    for binding in record.inputs:
        usual = record.profiles[0].shapes[binding.name][1]
        taken.append(context.set_input_shape(binding.name, usual))
        taken.append(place(binding.name, usual, binding.dtype))
    for binding in record.outputs:
        source = record.aliases.get(binding.name)
        if source is None:
            shape = tuple(context.get_tensor_shape(binding.name))
            taken.append(place(binding.name, shape, binding.dtype))
        else:  # a cache is one memory
            address = tensors[source].data_ptr()
            taken.append(context.set_tensor_address(binding.name, address))
    return tensors if all(taken) else None
