# SPDX-License-Identifier: Apache-2.0
"""Kernels that TensorRT-RTX compiled on this machine, kept in a file: the next start compiles none of them again.

The library itself refuses a file of another version, GPU or driver, and a damaged one; it is then written anew.
"""

import logging
from pathlib import Path
from typing import Any

from dspark_trt.files import new_file

_log = logging.getLogger(__name__)


class KernelCache:
    """One `IRuntimeCache`, shared by all contexts of a bundle's engines. It has to outlive them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._cache: Any = None
        self._saved_bytes = 0
        self._is_writable = True

    def attach(self, config: Any) -> None:
        """Make contexts of a runtime configuration use it."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            self._read()
        if not config.set_runtime_cache(self._cache):
            _log.warning("%s is not used: the library does not take it", self._file)

    def save(self) -> None:
        """Write the file if there are more kernels than it holds; where that fails, engines run all the same."""
        if self._cache is None or not self._is_writable:
            return
        kernels = self._cache.serialize()
        if kernels is None or kernels.nbytes == self._saved_bytes:
            return
        try:
            with new_file(self._file) as temporary:
                temporary.write_bytes(kernels)
        except OSError as error:
            self._is_writable = False
            _log.warning("compiled kernels are not kept: %s", error)
            return
        self._saved_bytes = kernels.nbytes

    def _read(self) -> None:
        try:
            kernels = self._file.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("%s cannot be read: %s", self._file, error.strerror)
            return
        if self._cache.deserialize(kernels):
            self._saved_bytes = len(kernels)
        else:
            _log.info("%s is of another machine or version: kernels are compiled", self._file)
