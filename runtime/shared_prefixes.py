# SPDX-License-Identifier: Apache-2.0
"""Beginnings of prompts that one request leaves for the next: rows of both caches, out of a row and into another."""

import logging
from typing import Any

from dspark_trt.errors import BackendError
from dspark_trt.runtime.prefix_cache import PrefixCache, PrefixRows
from dspark_trt.runtime.rounds import Rounds
from dspark_trt.runtime.sequence import Sequence

_log = logging.getLogger(__name__)


class SharedPrefixes:
    """The prefix cache of one engine.

    Args:
        rounds: whose caches rows come from and go to.
        max_bytes: that kept rows may take.
    """

    def __init__(self, rounds: Rounds, *, max_bytes: int) -> None:
        self._rounds = rounds
        self._cache = PrefixCache(max_bytes=max_bytes)

    def restore(self, sequence: Sequence, row: int) -> None:
        """Begin a request that has just joined with what is known of its prompt.

        Raises:
            BackendError: the caches of a device cannot take the rows.
        """
        found = self._cache.find(sequence.request.prompt_ids)
        if found is None:
            return
        rounds = self._rounds
        rounds.target.write_rows(row, found.target)
        rounds.drafter.write_rows(row, found.drafter)
        # A chain's last row was made with the token that stood behind it in another prompt.
        length = found.length - rounds.feed.is_chain
        rounds.table.target_len[row] = rounds.table.draft_len[row] = length
        sequence.prefilled = sequence.cached = length

    def store(self, sequence: Sequence) -> None:
        """Keep the rows of a prompt that has just been read; where a device does not give them, others go on without."""
        prompt = sequence.request.prompt_ids
        length = self._cache.usable_length(prompt)
        if not length:
            return
        rounds = self._rounds
        row = rounds.active.index(sequence)
        try:
            rounds.feed.settle(row)
            target = rounds.target.read_rows(row, length)
            drafter = rounds.drafter.read_rows(row, length)
        except BackendError as error:
            _log.warning(
                "the prompt of request %d is not kept for others: %s", sequence.id, error
            )
            return
        self._cache.store(prompt, PrefixRows(length, target, drafter))

    def status(self) -> dict[str, Any]:
        cache = self._cache
        return {
            "hits": cache.hits,
            "misses": cache.misses,
            "hit_tokens": cache.hit_tokens,
            "bytes": cache.nbytes,
        }

    def check_integrity(self) -> None:
        """Raise AssertionError if bytes or owners do not add up."""
        self._cache.check_integrity()
