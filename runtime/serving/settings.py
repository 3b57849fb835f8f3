# SPDX-License-Identifier: Apache-2.0
"""What an operator decides about a server: names, keys, limits."""

import os
from dataclasses import dataclass

from dspark_trt.errors import RequestError

KEYS_VARIABLE = "DSPARK_API_KEYS"


def keys_of_environment() -> tuple[str, ...]:
    """API keys separated by commas; none where the variable is not set.

    Raises:
        RequestError: it is set without a key, as a secret that did not arrive: nobody wants an open server then.
    """
    listed = os.environ.get(KEYS_VARIABLE)
    if listed is None:
        return ()
    keys = tuple(key.strip() for key in listed.split(",") if key.strip())
    if not keys:
        raise RequestError(
            f"{KEYS_VARIABLE} is set and holds no API key. Give keys separated by commas, or unset it to "
            "serve everyone"
        )
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits hold a process, whatever its number of clients, unless they say otherwise."""

    model_name: str | None = None  # None: the bundle's folder name
    api_keys: tuple[str, ...] = ()  # none: everyone may ask
    max_body_bytes: int = 1 << 20
    max_prompt_tokens: int | None = None  # None: what the context holds
    max_output_tokens: int | None = None  # None: what the context holds; also for each choice
    max_choices: int = 16  # sequences of one request: prompts times n
    max_concurrent_requests: int = 256  # running and waiting; beyond it 503
    requests_per_minute: float | None = (
        None  # of a key, or of an address where there are no keys
    )
    request_timeout_s: float | None = None  # from arrival to the last token
    drain_s: float = 30.0  # how long running requests may go on after SIGTERM
    log_prompts: bool = False  # texts in the access log
    access_log: bool = True

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_choices", "max_concurrent_requests"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("max_prompt_tokens", "max_output_tokens"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "at least 1")
        for name in ("requests_per_minute", "request_timeout_s"):
            value = getattr(self, name)
            self._require(name, value is None or 0 < value < float("inf"), "above 0")
        self._require("drain_s", 0 <= self.drain_s < float("inf"), "at least 0")
        if isinstance(self.api_keys, str):  # whose letters would be the keys
            raise RequestError("api_keys must be a sequence of strings, got one string")
        if any(not key or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise RequestError("an API key is empty or has characters that no header carries")

    def _require(self, name: str, is_fine: bool, expected: str) -> None:
        if not is_fine:
            raise RequestError(f"{name} must be {expected}, got {getattr(self, name)}")
