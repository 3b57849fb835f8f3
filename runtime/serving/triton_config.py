# SPDX-License-Identifier: Apache-2.0
"""The text of `config.pbtxt`, for the engine's model and for parts."""

from collections.abc import Iterable
from dataclasses import dataclass

from dspark_trt.runtime.serving.triton_parts import Part, Platform
from dspark_trt.runtime.serving.triton_tensors import INPUTS, OUTPUTS, ModelState, ModelTensor

# Then the server forgets a sequence that was not ended. A server that stops waits for open ones, but for 30 s
# only; its default of one second is short for a host at work.
_IDLE_S = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Of the engine's model; the repository's `config.pbtxt` holds them as parameters."""

    max_batch: int = 8
    prefix_cache_mib: int = 256
    threads: int | None = None  # None: all usable
    scheduler: str = "auto"
    backend: str = "onnxruntime"
    on_gpu: bool = False


def engine_config(name: str, settings: EngineSettings) -> str:
    parameters: dict[str, str | int] = {
        "max_batch": settings.max_batch,
        "prefix_cache_mib": settings.prefix_cache_mib,
        "scheduler": settings.scheduler,
        "backend": settings.backend,
        "threads": "" if settings.threads is None else settings.threads,
    }
    return "".join(
        [
            f'name: "{name}"\nbackend: "python"\n',
            "max_batch_size: 0  # the engine batches\n",
            "model_transaction_policy { decoupled: true }\n",
            _instances(on_gpu=settings.on_gpu),
            *(_parameter(key, value) for key, value in parameters.items()),
            _tensors("input", INPUTS),
            _tensors("output", OUTPUTS),
        ]
    )


def part_config(name: str, part: Part, settings: EngineSettings) -> str:
    """Of the engine's settings a part has the batch, and as a graph the threads and the kind of device."""
    is_plan = part.platform is Platform.PLAN
    return "".join(
        [
            f'name: "{name}"\nplatform: "{part.platform}"\n',
            f"max_batch_size: {part.max_batch}\n{_batching(part, settings.max_batch)}",
            _instances(on_gpu=settings.on_gpu or is_plan, profiles=part.profiles),
            ""
            if is_plan or settings.threads is None
            else _parameter("intra_op_thread_count", settings.threads),
            *(
                f'cc_model_filenames {{ key: "{capability}" value: "{file}" }}\n'
                for capability, file in part.plans.items()
            ),
            _tensors("input", part.inputs),
            _tensors("output", part.outputs),
        ]
    )


def _parameter(key: str, value: str | int) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def _batching(part: Part, sequences: int) -> str:
    if part.states:
        states = "".join(map(_state, part.states))
        return (
            f"sequence_batching {{\n  max_sequence_idle_microseconds: {_IDLE_S}000000\n"
            f"  oldest {{ max_candidate_sequences: {sequences} }}\n{states}}}\n"
        )
    return "dynamic_batching { }\n" if part.max_batch else ""


def _state(state: ModelState) -> str:
    kind = f"data_type: {state.data_type} dims: {_shape(state.dims)}"
    return (
        f'  state {{ input_name: "{state.input_name}" output_name: "{state.output_name}" {kind} '
        f'initial_state {{ name: "empty" {kind} zero_data: true }} }}\n'
    )


def _instances(*, on_gpu: bool, profiles: int = 0) -> str:
    """One instance. Of an engine's profiles the server takes the first alone, unless all are named."""
    names = ", ".join(f'"{number}"' for number in range(profiles))
    chosen = f" profile: [ {names} ]" if names else ""
    return f"instance_group [ {{ count: 1 kind: {'KIND_GPU' if on_gpu else 'KIND_CPU'}{chosen} }} ]\n"


def _tensors(field: str, tensors: Iterable[ModelTensor]) -> str:
    return "".join(
        f'{field} {{ name: "{t.name}" data_type: {t.data_type} dims: {_shape(t.dims)}'
        f"{'' if t.reshape is None else f' reshape {{ shape: {_shape(t.reshape)} }}'}"
        f"{' optional: true' if t.is_optional else ''} }}\n"
        for t in tensors
    )


def _shape(sizes: tuple[int, ...]) -> str:
    return f"[ {', '.join(map(str, sizes))} ]"
