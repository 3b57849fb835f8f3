# SPDX-License-Identifier: Apache-2.0
"""Caches of prompt prefixes, so that a prompt that starts like an earlier one is not computed again.

An entry holds the target's and the drafter's cache rows of one prompt; it serves every prompt that
shares its beginning, in steps of `block_tokens`. Least recently used entries go first.
"""

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from dspark_trt.errors import RequestError
from dspark_trt.runtime.backends.interface import CacheRows

Key = bytes


class PrefixRows(NamedTuple):
    """Cache rows of the first `length` tokens of a prompt."""

    length: int
    target: CacheRows
    drafter: CacheRows


@dataclass(frozen=True, slots=True)
class _Entry:
    tokens: tuple[int, ...]
    rows: PrefixRows
    nbytes: int
    keys: tuple[Key, ...]  # of every block boundary, shortest first


class PrefixCache:
    """Bounded by the bytes of the rows it holds."""

    def __init__(self, *, max_bytes: int, block_tokens: int = 16) -> None:
        if max_bytes < 0 or block_tokens < 1:
            raise RequestError(
                f"a prefix cache needs max_bytes >= 0 and block_tokens >= 1, got {max_bytes}, {block_tokens}"
            )
        self.max_bytes = max_bytes
        self.block_tokens = block_tokens
        self.nbytes = 0
        self.hits = self.misses = self.hit_tokens = 0
        self._entries: OrderedDict[Key, _Entry] = (
            OrderedDict()
        )  # by its longest key, oldest first
        self._owner: dict[Key, Key] = {}  # block boundary -> entry

    def find(self, prompt: tuple[int, ...]) -> PrefixRows | None:
        """Rows of the longest known beginning that leaves at least one token to compute."""
        usable = (len(prompt) - 1) // self.block_tokens
        for blocks, key in reversed(
            list(enumerate(self._keys(prompt[: usable * self.block_tokens]), 1))
        ):
            entry = self._entries.get(self._owner.get(key, b""))
            length = blocks * self.block_tokens
            if entry is not None and entry.tokens[:length] == prompt[:length]:
                self._entries.move_to_end(entry.keys[-1])
                self.hits += 1
                self.hit_tokens += length
                return PrefixRows(
                    length,
                    _first(entry.rows.target, length),
                    _first(entry.rows.drafter, length),
                )
        self.misses += 1
        return None

    def usable_length(self, prompt: tuple[int, ...]) -> int:
        """Whole blocks of a prompt: how many rows `store` wants; 0 where they are known already."""
        length = len(prompt) // self.block_tokens * self.block_tokens
        keys = self._keys(prompt[:length])
        return 0 if not keys or keys[-1] in self._owner else length

    def store(self, prompt: tuple[int, ...], rows: PrefixRows) -> None:
        """Keep the rows of a prompt's beginning, dropping the least recently used until they fit."""
        tokens = prompt[: rows.length]
        keys = self._keys(tokens)
        nbytes = sum(array.nbytes for array in (*rows.target, *rows.drafter))
        if not keys or nbytes > self.max_bytes:
            return
        while self.nbytes + nbytes > self.max_bytes:
            self._drop(next(iter(self._entries)))
        self._entries[keys[-1]] = _Entry(tokens, rows, nbytes, tuple(keys))
        self.nbytes += nbytes
        for key in keys:
            self._owner[key] = keys[-1]

    def __len__(self) -> int:
        return len(self._entries)

    def check_integrity(self) -> None:
        """Raise AssertionError if bytes or owners do not add up."""
        assert self.nbytes == sum(entry.nbytes for entry in self._entries.values())
        assert self.nbytes <= self.max_bytes
        assert set(self._owner.values()) <= set(self._entries)

    def _drop(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self.nbytes -= entry.nbytes
        for each in entry.keys:
            if self._owner.get(each) == key:  # a later entry may have taken the boundary over
                del self._owner[each]

    def _keys(self, tokens: tuple[int, ...]) -> list[Key]:
        """A hash a block boundary, each over everything before it."""
        digest, keys = blake2b(digest_size=16), []
        for start in range(0, len(tokens), self.block_tokens):
            digest.update(
                np.array(tokens[start : start + self.block_tokens], np.int64).tobytes()
            )
            keys.append(digest.digest())
        return keys


def _first(rows: CacheRows, length: int) -> CacheRows:
    return [array[:, :length] for array in rows]
