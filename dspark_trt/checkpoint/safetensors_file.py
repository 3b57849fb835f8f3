# SPDX-License-Identifier: Apache-2.0
"""Writing safetensors: the bytes of tensors as they lie in other files, under new names."""

import json
from collections.abc import Mapping
from pathlib import Path

from dspark_trt.checkpoint.tensors import DTYPE_CODES, TensorRef

_ALIGNMENT = 8  # of the data behind the header, as the reference implementation pads it


def write_safetensors(path: Path, tensors: Mapping[str, TensorRef | bytes]) -> None:
    """One file with every tensor, bit for bit; plain bytes are stored as a bool vector.

    Raises:
        OSError: the disk is full, or a source file has gone.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        if isinstance(tensor, bytes):
            code, shape, size = "BOOL", [len(tensor)], len(tensor)
        else:
            code, shape, size = DTYPE_CODES[tensor.dtype], list(tensor.shape), tensor.nbytes
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            stream.writelines((tensor,) if isinstance(tensor, bytes) else tensor.chunks())
