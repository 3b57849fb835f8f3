# SPDX-License-Identifier: Apache-2.0
"""What torch fails with, for want of memory as a rule, as the failure of one call that others survive."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from dspark_trt.errors import BackendError, first_line

P = ParamSpec("P")
R = TypeVar("R")


def fails_alone(call: Callable[P, R]) -> Callable[P, R]:
    """A call after whose failure others can be made: it raises BackendError where torch raises RuntimeError.

    Errors of the accelerator itself, such as an illegal access, pass as they are: no later call works either.
    """

    @wraps(call)
    def reporting(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:
            raise BackendError(f"{call.__name__} failed: {first_line(error)}") from bare(error)

    return reporting


def bare(error: RuntimeError) -> RuntimeError:
    """The error without its frames: they hold what the call had made until then, memory that is wanted again while
    the failure is dealt with.
    """
    return error.with_traceback(None)
