# SPDX-License-Identifier: Apache-2.0
"""What a command needs beyond the base install."""

from importlib.util import find_spec

from dspark_trt.errors import DSparkError


def require_extra(extra: str, modules: tuple[str, ...]) -> None:
    """Say which extra to install, before an import says less.

    Raises:
        DSparkError: one of ``modules`` is not installed.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise DSparkError(
            f"this command needs {', '.join(missing)}. Install it with: pip install 'dspark-trt[{extra}]'"
        )
