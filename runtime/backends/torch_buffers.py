# SPDX-License-Identifier: Apache-2.0
"""Static buffers on a device, what the host writes into and reads from them, and arrays that stay there."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark_trt.runtime.cuda_graphs.buffers import BufferPlan, Placement, Traffic

Array = NDArray[Any]


class Waits:
    """How often the host waited for the device. On a CPU nothing has to be waited for, and it is counted alike."""

    count = 0


class StaticBuffers:
    """Tensors that captured graphs point at: addresses never change, results last until the next step.

    On a CUDA device the host has pinned copies, and copies run on the current stream: what was uploaded is
    read by kernels launched afterwards, what is downloaded may be read after `wait`. On a CPU both are one
    memory and nothing is copied.
    """

    def __init__(self, plan: BufferPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self._device = {
            traffic: torch.zeros(size, dtype=torch.uint8, device=device)
            for traffic, size in plan.sizes.items()
        }
        self._host = {
            traffic: torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            if device.type == "cuda" and traffic is not Traffic.RESIDENT
            else self._device[traffic]
            for traffic, size in plan.sizes.items()
        }
        self._tensors = {
            name: _view(self._device[placement.traffic], placement)
            for name, placement in plan.placements.items()
        }
        self.waits = Waits()
        self._uploads: dict[str, Arrival] = {}
        self.host: Mapping[str, Array] = {
            name: _view(self._host[placement.traffic], placement).numpy()
            for name, placement in plan.placements.items()
            if placement.traffic is not Traffic.RESIDENT
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def settle(self, first: str) -> None:
        """Wait until the host may write again what it uploaded from buffer `first` on."""
        upload = self._uploads.pop(first, None)
        if upload is not None and not upload.is_over:
            upload.wait()

    def upload(self, first: str, last: str, count: int) -> None:
        """Copy what the host wrote, from buffer `first` to the first `count` entries of buffer `last`."""
        if self.device.type == "cpu":
            return
        start, end = self.plan.placements[first], self.plan.placements[last]
        stop = end.offset + end.nbytes // end.shape[0] * count
        place = self._device[start.traffic][start.offset : stop]
        place.copy_(self._host[start.traffic][start.offset : stop], non_blocking=True)
        self._uploads[first] = self.arrival()

    def download(self, *names: str, count: int) -> "Arrival":
        """Start copying the first `count` entries of each buffer to `host`."""
        if self.device.type == "cpu":
            return self.arrival()
        for name in names:
            placement = self.plan.placements[name]
            host = _view(self._host[placement.traffic], placement)
            host[:count].copy_(self._tensors[name][:count], non_blocking=True)
        return self.arrival()

    def arrival(self) -> "Arrival":
        """Of everything that was put on the current stream so far."""
        on_gpu = self.device.type == "cuda"
        event = torch.cuda.current_stream().record_event() if on_gpu else None
        return Arrival(event, self.waits)

    def on_demand(self, name: str, count: int) -> "DeviceArray":
        """The first `count` entries of a buffer, which come to the host when somebody reads them."""
        return DeviceArray(self._tensors[name][:count], waits=self.waits)


class Arrival:
    """A copy between host and device on its way."""

    def __init__(self, event: torch.cuda.Event | None, waits: Waits) -> None:
        self._event, self._waits = event, waits
        self._is_waited_for = False

    @property
    def is_over(self) -> bool:
        event: Any = self._event
        return event is None or bool(event.query())

    def wait(self) -> None:
        """Wait once; further calls return."""
        if self._is_waited_for:
            return
        self._is_waited_for = True
        self._waits.count += 1
        if self._event is not None:
            self._event.synchronize()


class DeviceArray:
    """A tensor in the place of a NumPy array: it comes to the host when NumPy reads it, and not before.

    Slices stay on the device. Where a copy to the host is on its way, reading waits for it.
    """

    def __init__(
        self,
        tensor: Tensor,
        host: Array | None = None,
        arrival: Arrival | None = None,
        *,
        waits: Waits,
    ) -> None:
        self.tensor = tensor
        self._host, self._arrival, self._waits = host, arrival, waits

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __len__(self) -> int:
        return len(self.tensor)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if self._host is None:
            self._waits.count += 1
            self._host = self.tensor.numpy(force=True)
        elif self._arrival is not None:
            self._arrival.wait()
        return np.array(self._host, dtype, copy=copy)

    def __getitem__(self, index: Any) -> "Self | Array":
        if not isinstance(index, slice):
            read: Array = np.asarray(self)[index]
            return read
        host = None if self._host is None else self._host[index]
        return type(self)(self.tensor[index], host, self._arrival, waits=self._waits)

    def __setitem__(self, index: Any, values: Any) -> None:
        if index is not Ellipsis:
            index = torch.as_tensor(index)
        self.tensor[index] = torch.as_tensor(values, device=self.tensor.device)
        self._host = self._arrival = None

    def copy(self) -> Array:
        return np.array(self)


def _view(arena: Tensor, placement: Placement) -> Tensor:
    dtype = getattr(torch, placement.dtype)
    stop = placement.offset + placement.nbytes
    return arena[placement.offset : stop].view(dtype).view(placement.shape)
