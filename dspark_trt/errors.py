# SPDX-License-Identifier: Apache-2.0
"""Every error a user can cause. Each message says what is wrong, the value seen, what was expected
and, where one exists, the command that mends it.
"""


class DSparkError(Exception):
    """Base of all errors this package raises on purpose; the CLI turns it into exit code 2."""


class CheckpointError(DSparkError):
    """A checkpoint cannot be read, contradicts itself, or does not fit its partner."""


class BundleError(DSparkError):
    """A bundle is incomplete, changed, foreign, or written for another version."""


class ExportError(DSparkError):
    """A graph cannot be exported as asked."""


class BuildError(DSparkError):
    """An engine cannot be built as asked."""


class BackendError(DSparkError):
    """A backend is missing, refuses a graph, or failed while running one."""


class RequestError(DSparkError):
    """A request asks for something that this model, bundle or engine cannot do."""


class CapacityError(RequestError):
    """A sequence, batch or budget is larger than what was allocated or exported."""


class QueueFullError(RequestError):
    """As many requests wait as the engine accepts; try again later."""


class MissingContextError(RequestError):
    """A proposal would attend to context rows that were never appended."""


class OutputError(DSparkError, OSError):
    """A file cannot be written where it was asked for."""


class TableError(DSparkError):
    """A cost table, calibration or trace file is degenerate, foreign, or malformed.

    `reason` is the message without `mend`, for whoever knows a better one.
    """

    def __init__(self, reason: str, mend: str = "") -> None:
        super().__init__(f"{reason}. {mend}" if mend else reason)
        self.reason, self.mend = reason, mend


class EngineClosedError(DSparkError):
    """The engine was closed, or its thread failed."""


def first_line(error: Exception) -> str:
    """What an error of another library says, without the pages that some add; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
