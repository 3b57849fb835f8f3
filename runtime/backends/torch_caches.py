# SPDX-License-Identifier: Apache-2.0
"""Key and value caches on a device: one row per request, grown as contexts grow, written in place.

The last `scratch` rows of every request belong to nobody: requests that only fill a graph's batch up write
there (`cuda_graphs.padding`).
"""

import torch

from dspark_trt.config import DecoderConfig
from dspark_trt.errors import BackendError, first_line
from dspark_trt.runtime.backends.interface import CacheRows

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
        self._fixed = fixed
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
        capacity = -(-int(wanted * factor) // quantum) * quantum
        before, self.version = self.capacity_rows, self.version + 1
        try:
            for i, old in enumerate(self.tensors):
                grown = old.new_zeros((*old.shape[:2], capacity, old.shape[3]))
                grown[:, :, :before] = old
                self.tensors[i] = grown  # one at a time: the peak is one tensor above the total
        except RuntimeError as error:
            self.tensors = [tensor[:, :, :before] for tensor in self.tensors]
            raise BackendError(
                f"no memory for caches of {capacity} rows instead of {before}: {first_line(error)}"
            ) from error

    def clear(self, request: int) -> None:
        """Forget a previous owner: a NaN it left behind a mask would still poison a sum."""
        for tensor in self.tensors:
            tensor[request].zero_()

    def swap(self, first: int, second: int) -> None:
        for tensor in self.tensors:
            kept = tensor[first].clone()
            tensor[first] = tensor[second]
            tensor[second] = kept

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


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """NumPy knows no bfloat16."""
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
