# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint folder, known from the safetensors headers; data is mapped only by ``load``.

The header (little-endian uint64 length, then JSON) is parsed here so that reading a checkpoint needs
neither torch nor numpy, and so that a truncated file is found before anything is built from it.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_trt.checkpoint.source import read_json
from dspark_trt.errors import CheckpointError

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

FLOAT_DTYPES = ("float32", "float16", "bfloat16")

# safetensors code -> (name as torch spells it, bytes an element)
_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}  # fmt: skip

DTYPE_CODES = {name: code for code, (name, _) in _DTYPES.items()}

_MAX_HEADER_BYTES = 100 << 20  # the limit of the reference implementation


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """Where one tensor lies. ``name`` is canonical, ``key`` the name inside ``file``."""

    name: str
    file: Path
    key: str
    dtype: str  # as torch spells it
    shape: tuple[int, ...]
    offset: int  # of the first byte in ``file``
    nbytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def kind(self) -> str:
        """How the elements are stored."""
        return self.dtype

    @property
    def files(self) -> frozenset[Path]:
        """Every file that ``load`` reads."""
        return frozenset({self.file})

    def load(self) -> "torch.Tensor":
        """What the tensor stands for."""
        return self.stored()

    def stored(self) -> "torch.Tensor":
        """The tensor, memory-mapped: pages are read when touched, and let go with the tensor.

        Each tensor has its own map: one for all would keep every page in memory that was ever read.
        """
        from safetensors import safe_open

        handle: Any = safe_open(self.file, framework="pt")
        tensor: torch.Tensor = handle.get_tensor(self.key)
        return tensor

    def chunks(self, chunk_bytes: int = 16 << 20) -> Iterator[bytes]:
        """The raw bytes in order, for checks that must not need torch."""
        with self.file.open("rb") as file:
            file.seek(self.offset)
            for start in range(0, self.nbytes, chunk_bytes):
                yield file.read(min(chunk_bytes, self.nbytes - start))


def read_tensors(folder: Path) -> dict[str, TensorRef]:
    """Every tensor in ``folder`` by its name in the files, single or sharded.

    Raises:
        CheckpointError: no weights, ambiguous weights, a missing, truncated or malformed file, or an
            index that disagrees with its shards.
    """
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.exists():
        return _read_sharded(folder, index)
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file")
    single = folder / "model.safetensors"
    if single not in files and len(files) > 1:
        raise CheckpointError(
            f"{folder} holds {len(files)} safetensors files and no {index.name} that says which "
            f"belong together: {', '.join(file.name for file in files)}"
        )
    return read_header(single if single in files else files[0])


def _read_sharded(folder: Path, index: Path) -> dict[str, TensorRef]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: shard {name!r} is not a plain file name")
    names = sorted(set(weight_map.values()))
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{folder}: shards named in {index.name} are missing: {', '.join(absent)}. "
            "Download the checkpoint again."
        )
    placed = {
        (key, name): ref for name in names for key, ref in read_header(folder / name).items()
    }
    listed = set(weight_map.items())
    if lost := sorted(listed - placed.keys()):
        raise CheckpointError(f"{index}: tensors are not in their shards: {_places(lost)}")
    if extra := sorted(placed.keys() - listed):
        raise CheckpointError(f"{index}: shards hold tensors the index lacks: {_places(extra)}")
    return {key: ref for (key, _), ref in placed.items()}


def _places(places: list[tuple[str, str]]) -> str:
    return ", ".join(f"{key} ({name})" for key, name in places)


def read_header(file: Path) -> dict[str, TensorRef]:
    """The tensors of one safetensors file, checked against the file's real size.

    Raises:
        CheckpointError: truncated file, broken header, or offsets that contradict dtype and shape.
    """
    size_bytes, raw = _raw_header(file)
    header_bytes = len(raw)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        refs = {key: _ref(file, 8 + header_bytes, key, entry) for key, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: malformed safetensors header: {error}") from error
    end = max((ref.offset + ref.nbytes for ref in refs.values()), default=8 + header_bytes)
    if end != size_bytes:
        raise CheckpointError(
            f"{file}: {'truncated' if size_bytes < end else 'has trailing bytes'}: "
            f"{size_bytes} bytes, expected {end} from its header. Download the file again."
        )
    return refs


def _raw_header(file: Path) -> tuple[int, bytes]:
    """Size of the whole file, and the JSON of its header."""
    try:
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if size_bytes < 8 or header_bytes > min(size_bytes - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file}: truncated or not safetensors: {size_bytes} bytes cannot hold a header "
                    f"of {header_bytes}. Download the file again."
                )
            return size_bytes, stream.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def _ref(file: Path, data_start: int, key: str, entry: dict[str, Any]) -> TensorRef:
    dtype, item_bytes = _DTYPES.get(entry["dtype"], (str(entry["dtype"]), None))
    shape = tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    if begin < 0 or (item_bytes is not None and end - begin != math.prod(shape) * item_bytes):
        raise ValueError(f"{key} ({dtype} {list(shape)}) cannot occupy bytes {begin} to {end}")
    return TensorRef(
        name=key, file=file, key=key, dtype=dtype, shape=shape,
        offset=data_start + begin, nbytes=end - begin,
    )  # fmt: skip
