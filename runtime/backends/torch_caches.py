# SPDX-License-Identifier: Apache-2.0
"""Key and value caches on a device: one row per request, grown as contexts grow, written in place.

The last `scratch` rows of every request belong to nobody: requests that only fill a graph's batch up write
there (`cuda_graphs.padding`).
"""

import torch

from dspark_trt.config import DecoderConfig
from dspark_trt.errors import BackendError, first_line
from dspark_trt.runtime.backends.interface import CacheRows
from dspark_trt.runtime.backends.torch_failures import bare

# On a CPU attention pays for the rows there are, so they grow in small steps. On a GPU growing also means
# capturing every graph again.
_GROWTH = {"cpu": (1.25, 64), "cuda": (2.0, 512)}  # factor, rows


class DeviceCaches:
    """`2L` tensors `[requests, Hkv, S, D]`. Addresses change only in `reserve`, which counts `version` up.

    A `fixed` number of rows, as engines have, never grows.
    """

    def __init__(
        self,
        decoder: DecoderConfig,
        *,
        requests: int,
        dtype: torch.dtype,
        device: torch.device,
        scratch: int,
        fixed: int | None = None,
    ) -> None:
        self.version = 0
        self.scratch = scratch
        self._fixed, self._device = fixed, device
        self.tensors = [
            torch.zeros((requests, heads, fixed or 0, size), dtype=dtype, device=device)
            for heads, size in decoder.cache_sizes
        ]

    @property
    def capacity_rows(self) -> int:
        return int(self.tensors[0].shape[2])

    @property
    def scratch_start(self) -> int:
        """First row that belongs to nobody."""
        return self.capacity_rows - self.scratch

    def reserve(self, rows: int) -> None:
        """Make room for `rows` a request, scratch rows not counted.

        Raises:
            BackendError: the number of rows is fixed, or there is no memory: what caches hold is kept.
        """
        wanted = rows + self.scratch
        if wanted <= self.capacity_rows:
            return
        if self._fixed is not None:
            raise BackendError(
                f"a context of {rows} tokens does not fit the engines' caches of {self._fixed} rows, "
                f"{self.scratch} of which belong to nobody. Build engines with a larger --capacity."
            )
        factor, quantum = _GROWTH[self.tensors[0].device.type]
        self._grow(-(-int(wanted * factor) // quantum) * quantum)

    def _grow(self, capacity: int) -> None:
        before, self.version = self.capacity_rows, self.version + 1
        places = range(len(self.tensors))
        try:
            for i in places:  # one at a time: the peak is one tensor above the total
                self.tensors[i] = _grown(self.tensors[i], capacity)
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:
            failure = bare(error)
        else:
            return
        for i in places:
            if self.tensors[i].shape[2] > before:
                self.tensors[i] = _on_host(self.tensors[i], before)  # frees what comes back
                self.tensors[i] = self.tensors[i].to(self._device)
        raise BackendError(
            f"no memory for caches of {capacity} rows instead of {before}: {first_line(failure)}"
        ) from failure

    def clear(self, request: int) -> None:
        """Forget a previous owner: a NaN it left behind a mask would still poison a sum."""
        for tensor in self.tensors:
            tensor[request].zero_()

    def swap(self, first: int, second: int) -> None:
        """In place, bit by bit: it needs no memory, so it cannot end half way and mix two requests up."""
        if first == second:
            return
        for tensor in self.tensors:
            bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
            one, other = bits[first], bits[second]
            one ^= other
            other ^= one
            one ^= other

    def read_rows(self, request: int, rows: int) -> CacheRows:
        """Copies of the first `rows` rows of one request, `2L x [Hkv, rows, D]`; bfloat16 as its bits."""
        return [
            _bits(tensor[request, :, :rows]).cpu().numpy().copy() for tensor in self.tensors
        ]

    def write_rows(self, request: int, saved: CacheRows) -> None:
        """Put back what `read_rows` gave, possibly into another request."""
        self.reserve(saved[0].shape[1])
        self.clear(request)
        for tensor, rows in zip(self.tensors, saved, strict=True):
            _bits(tensor[request, :, : rows.shape[1]]).copy_(torch.from_numpy(rows))

    def close(self) -> None:
        self.tensors.clear()


def _grown(old: torch.Tensor, capacity: int) -> torch.Tensor:
    grown = old.new_zeros((*old.shape[:2], capacity, old.shape[3]))
    grown[:, :, : old.shape[2]] = old
    return grown


def _on_host(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The first rows of every head; head by head, since a device without memory has no room to collect them."""
    kept = torch.empty((*tensor.shape[:2], rows, tensor.shape[3]), dtype=tensor.dtype)
    for own, place in zip(tensor.flatten(0, 1), kept.flatten(0, 1), strict=True):
        place.copy_(own[:rows])
    return kept


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """NumPy knows no bfloat16."""
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
