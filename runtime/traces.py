# SPDX-License-Identifier: Apache-2.0
"""Rounds that were run: what the drafter believed and what the target accepted.

The file is an ``.npz``. N rounds, K = γ drafted tokens:

| key | shape | meaning |
|---|---|---|
| ``conf_logits`` | [N, K] float | raw confidence logits (an estimator's, if there is no head) |
| ``accept_prefix_mask`` | [N, K] 0/1 | first k drafts all accepted; 0 beyond the verified ones |
| ``request_id`` | [N] int | rounds of a request stand in the order they ran |
| ``lengths`` | [N] int, optional | verified drafts; absent: K |
| ``domain``, ``domain_names`` | [N] int, [D] str, optional | kind of prompt |
| ``split`` | [N] 0/1, optional | 0 calibration, 1 held-out; absent: prompts alternate |
| ``prompt_index`` | [N] int, optional | keeps samples of one prompt in one half |
| ``drafted_prob``, ``top_prob`` | [N, K], optional | drafter's probability of x_k, and its largest |
| ``draft_seconds``, ``step_seconds`` | [N], optional | measured time of the round's batch |
| ``models`` | [] str, optional | whose rounds they are: `models_of` the bundle |
"""

import zlib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile, is_zipfile

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark_trt.bundle import Bundle
from dspark_trt.errors import TableError
from dspark_trt.files import new_file

_MOST_DOMAINS = 10_000  # each has a name
_MOST = 2**53  # integers that float64 holds exactly

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Traces:
    """Rounds in memory; the module says what each array means."""

    conf_logits: Floats  # [N, K]
    accept_prefix_mask: NDArray[np.bool_]  # [N, K]
    request_id: Ints  # [N]
    lengths: Ints  # [N]
    split: Ints  # [N]
    domain: Ints  # [N]
    domain_names: tuple[str, ...]
    drafted_prob: Floats | None = None  # [N, K]
    top_prob: Floats | None = None  # [N, K]
    draft_seconds: Floats | None = None  # [N]
    step_seconds: Floats | None = None  # [N]
    models: str | None = None

    @property
    def gamma(self) -> int:
        return int(self.conf_logits.shape[1])

    @property
    def accepted(self) -> Ints:  # [N]
        """Accepted drafts of each round."""
        return np.asarray(self.accept_prefix_mask.sum(axis=1), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.conf_logits)

    def where(self, rows: NDArray[np.bool_]) -> Self:  # [N]
        """The rounds marked in ``rows``."""
        chosen: dict[str, Any] = {
            item.name: value[rows]
            for item in fields(self)
            if isinstance(value := getattr(self, item.name), np.ndarray)
        }
        return replace(self, **chosen)

    def fully_verified(self) -> Self:
        """Rounds whose every draft was verified: their mask says all, whatever the scheduler did."""
        return self.where(self.lengths == self.gamma)

    def save(self, path: Path) -> None:
        """Write the ``.npz``; nothing half-written stays behind."""
        arrays = {item.name: getattr(self, item.name) for item in fields(self)}
        with new_file(Path(path)) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **{k: v for k, v in arrays.items() if v is not None})


def models_of(bundle: Bundle) -> str:
    """A name of drafter and target, whatever precision they were exported in."""
    sources = (bundle.draft_source, bundle.target_source)
    return "+".join("" if each is None else each.sha256[:16] for each in sources)


def traces_from_arrays(
    *,
    conf_logits: ArrayLike,
    accept_prefix_mask: ArrayLike,
    request_id: ArrayLike,
    lengths: ArrayLike | None = None,
    split: ArrayLike | None = None,
    domain: ArrayLike | None = None,
    domain_names: ArrayLike | None = None,
    prompt_index: ArrayLike | None = None,
    models: ArrayLike | None = None,
    **optional: ArrayLike,
) -> Traces:
    """Check the arrays of the file format and fill in what is optional; unknown keys are ignored.

    Raises TableError for wrong shapes, logits that are not finite, or masks that are no prefixes.
    """
    given = np.asarray(conf_logits)
    if given.ndim != 2 or not given.size:
        raise TableError(f"conf_logits must be [rounds, drafted], got shape {given.shape}")
    rounds, gamma = given.shape
    logits = _shaped(given, "conf_logits", (rounds, gamma)).astype(np.float64)
    usable = np.abs(logits) <= np.finfo(np.float32).max  # as graphs give them; not so of NaN
    if not np.all(usable):
        bad = int(np.flatnonzero(~usable.all(axis=1))[0])
        raise TableError(f"conf_logits of round {bad} are not finite: {logits[bad].tolist()}")
    mask = _flags(accept_prefix_mask, "accept_prefix_mask", (rounds, gamma)).astype(bool)
    if np.any(mask[:, 1:] > mask[:, :-1]):
        bad = int(np.flatnonzero((mask[:, 1:] > mask[:, :-1]).any(axis=1))[0])
        raise TableError(
            f"accept_prefix_mask of round {bad} is no prefix: {mask[bad].astype(int)}"
        )
    verified = (
        np.full(rounds, gamma) if lengths is None else _whole(lengths, "lengths", (rounds,))
    )
    if np.any((verified < mask.sum(axis=1)) | (verified > gamma)):
        raise TableError(f"lengths must lie between the accepted drafts and {gamma}")
    requests = _whole(request_id, "request_id", (rounds,))
    prompts = (
        requests if prompt_index is None else _whole(prompt_index, "prompt_index", (rounds,))
    )
    halves = (
        np.unique(prompts, return_inverse=True)[1] % 2
        if split is None
        else _flags(split, "split", (rounds,))
    )
    kinds = (
        np.zeros(rounds, np.int64) if domain is None else _whole(domain, "domain", (rounds,))
    )
    if kinds.min() < 0 or kinds.max() > _MOST_DOMAINS:
        raise TableError(
            f"domain must lie in 0..{_MOST_DOMAINS}, got {kinds.min()}..{kinds.max()}"
        )
    names = [
        str(name) for name in np.atleast_1d(["all"] if domain_names is None else domain_names)
    ]
    names += [f"domain {index}" for index in range(len(names), int(kinds.max()) + 1)]
    per_draft = {"drafted_prob": (rounds, gamma), "top_prob": (rounds, gamma)}
    per_round = {"draft_seconds": (rounds,), "step_seconds": (rounds,)}
    extra: dict[str, Any] = {
        name: _shaped(optional[name], name, shape).astype(np.float64)
        for name, shape in {**per_draft, **per_round}.items()
        if name in optional
    }
    return Traces(
        conf_logits=logits,
        accept_prefix_mask=mask,
        request_id=requests,
        lengths=verified,
        split=halves.astype(np.int64),
        domain=kinds,
        domain_names=tuple(names),
        models=None if models is None else str(models),
        **extra,
    )


def load_traces(path: Path) -> Traces:
    """Read the file format above; TableError if it cannot be read or lacks a required key."""
    try:
        with Path(path).open("rb") as stream:
            if not is_zipfile(stream):
                raise TableError(
                    f"{path} is no .npz file, or was cut off. Record rounds: "
                    "dspark-trt generate BUNDLE --trace FILE"
                )
            with np.load(stream, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, BadZipFile, zlib.error) as error:
        raise TableError(f"cannot read traces {path}: {error}") from error
    missing = {"conf_logits", "accept_prefix_mask", "request_id"} - arrays.keys()
    if missing:
        raise TableError(
            f"traces {path} lack {', '.join(sorted(missing))}; has {sorted(arrays)}"
        )
    return traces_from_arrays(**arrays)


def _shaped(values: ArrayLike, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    array = np.asarray(values)
    if array.shape != shape or array.dtype.kind not in "biuf":
        raise TableError(
            f"{name} must be numbers {list(shape)}, got {array.dtype} {list(array.shape)}"
        )
    return array


def _whole(values: ArrayLike, name: str, shape: tuple[int, ...]) -> Ints:
    array = _shaped(values, name, shape)
    whole = (np.abs(array) <= _MOST) & (np.floor(array) == array)
    if not np.all(whole):
        raise TableError(f"{name} must be whole numbers, got {array[~whole][0]}")
    return array.astype(np.int64)


def _flags(values: ArrayLike, name: str, shape: tuple[int, ...]) -> Ints:
    array = _whole(values, name, shape)
    if np.any((array != 0) & (array != 1)):
        raise TableError(f"{name} must be 0 or 1, got {array[(array != 0) & (array != 1)][0]}")
    return array
