# SPDX-License-Identifier: Apache-2.0
"""Strict accounting: canonical names, every expected tensor with its shape, none besides, all faults in one error."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from dspark_trt.checkpoint.records import Notes
from dspark_trt.checkpoint.tensors import FLOAT_DTYPES, Shape, TensorRef
from dspark_trt.errors import CheckpointError


def rename(
    files: Mapping[str, TensorRef],
    canonical: Callable[[str], str],
    folder: Path,
    notes: Notes,
    *,
    unused: frozenset[str] = frozenset(),
) -> dict[str, TensorRef]:
    """Tensors by canonical name, less the ``unused`` ones and stored rotary frequencies.

    Raises:
        CheckpointError: two tensors are the same one.
    """
    tensors: dict[str, TensorRef] = {}
    left_out = []
    for key, ref in files.items():
        name = canonical(key)
        if key in unused or key.endswith("rotary_emb.inv_freq"):
            left_out.append(key)
        elif name in tensors:
            raise CheckpointError(f"{folder}: {tensors[name].key} and {key} are both {name}")
        else:
            tensors[name] = replace(ref, name=name)
    if left_out:
        notes.decide("unused_tensors", sorted(left_out), "read by training only, or computed")
    return tensors


def account_for(
    tensors: Mapping[str, TensorRef],
    expected: Mapping[str, Shape],
    folder: Path,
    *,
    override: str = "",
) -> None:
    """Compare what is there with what config.json implies; names are canonical. ``override`` is how the
    command line changes a setting.

    Raises:
        CheckpointError: lists every missing and unexpected tensor, wrong shape and unsupported dtype.
    """
    known = [ref for name, ref in tensors.items() if name in expected]
    faults = {
        "missing": sorted(expected.keys() - tensors.keys()),
        "unexpected": sorted(tensors[name].key for name in tensors.keys() - expected.keys()),
        "wrong shape": [
            f"{ref.key} is {ref.shape}, expected {expected[ref.name]}"
            for ref in known
            if ref.shape != expected[ref.name]
        ],
        f"dtype other than {', '.join(FLOAT_DTYPES)}": [
            f"{ref.key} is {ref.dtype}"
            for ref in tensors.values()
            if ref.dtype not in FLOAT_DTYPES
        ],
    }
    if lines := [f"{kind}: {', '.join(items)}" for kind, items in faults.items() if items]:
        raise CheckpointError(
            f"{folder}: the tensors do not fit config.json. " + "; ".join(lines) + ". "
            f"Check that weights and config.json come from the same release{override}."
        )
