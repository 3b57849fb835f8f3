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
    """`call_alone` under the name of the function."""

    @wraps(call)
    def reporting(*args: P.args, **kwargs: P.kwargs) -> R:
        return call_alone(call.__name__, call, *args, **kwargs)

    return reporting


def call_alone(name: str, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """A call after whose failure others can be made.

    Raises:
        BackendError: torch raised RuntimeError. Errors of the accelerator itself, such as an illegal access, pass as
            they are: no later call works either.
    """
    try:
        return call(*args, **kwargs)
    except torch.AcceleratorError:
        raise
    except RuntimeError as error:
        raise BackendError(f"{name} failed: {first_line(error)}") from bare(error)


def bare(error: RuntimeError) -> RuntimeError:
    """The error without its frames: they hold what the call had made until then, memory that is wanted again while
    the failure is dealt with.
    """
    return error.with_traceback(None)
