# SPDX-License-Identifier: Apache-2.0
"""Typed look-up in a config.json whose keys sit in different places under different spellings.

Formats nest the same keys in ``dflash_config``, ``dspark_config``, ``text_config`` or
``transformer_layer_config``, or prefix them with ``dspark_``. One look-up reads them all; two places
that disagree are an error, so no precedence is needed. ``null`` counts as absent.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeGuard, TypeVar

from dspark_trt.errors import CheckpointError

T = TypeVar("T")

DRAFT_PLACES = (
    "dflash_config", "dspark_config", "eagle_config", "text_config", "transformer_layer_config",
)  # fmt: skip

# Beyond it a size is no dimension of a tensor, and no float can stand for some.
_MOST_SIZE = 2**31 - 1

# Flags of their own; every other setting has --set.
_FLAGS = {
    "mask_token_id": "--mask-token-id ID",
    "target_layer_ids": "--target-layer-ids I,J,..",
    "aux_hidden_state_layer_ids": "--target-layer-ids I,J,..",
    "eagle_aux_hidden_state_layer_ids": "--target-layer-ids I,J,..",
}

_SPELLINGS = {
    "enable_confidence_head": ("use_confidence_head",),
    "mask_token_id": ("noise_token_id",),
}


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """A value and the key it was read from, for reasons and errors."""

    value: T
    where: str


class Fields:
    """The settings of one config.json; ``path`` is named in every error.

    ``stated`` are settings that count instead of those in the file, wherever it has them; None where none
    can be stated, so that errors name no flag. ``owner`` is what flags put before a key ("target.").
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        path: Path,
        *,
        nested: tuple[str, ...] = (),
        stated: Mapping[str, Any] | None = None,
        owner: str = "",
    ) -> None:
        self.path = path
        self.stated = stated
        self._owner = owner
        self._asked: set[str] = set()
        self.places: dict[str, Mapping[str, Any]] = {"": config}
        for place in nested:
            if isinstance(inner := config.get(place), dict):
                self.places[f"{place}."] = inner

    def find(self, key: str) -> Setting[Any] | None:
        """The setting, wherever it is.

        Raises:
            CheckpointError: two places hold different values.
        """
        spellings = _spellings(key)
        self._asked.update(spellings)
        for spelling in spellings:
            if self.stated and spelling in self.stated:
                value = self.stated[spelling]
                return (
                    None if value is None else Setting(value, f"--set {self._owner}{spelling}")
                )
        found = self.said(key)
        for other in found[1:]:
            if other.value != found[0].value:
                raise self.error(
                    f"{found[0].where} is {found[0].value!r} but {other.where} is {other.value!r}: "
                    "remove the wrong one",
                    key,
                )
        return found[0] if found else None

    def said(self, key: str) -> list[Setting[Any]]:
        """What the file says of a setting, in every place."""
        return [
            Setting(place[spelling], prefix + spelling)
            for prefix, place in self.places.items()
            for spelling in _spellings(key)
            if place.get(spelling) is not None
        ]

    def integer(self, key: str) -> Setting[int] | None:
        return self._typed(key, _is_int, "an integer")

    def number(self, key: str) -> Setting[float] | None:
        return self._typed(key, is_number, "a finite number")

    def flag(self, key: str) -> Setting[bool] | None:
        return self._typed(key, lambda value: isinstance(value, bool), "true or false")

    def text(self, key: str) -> Setting[str] | None:
        return self._typed(key, lambda value: isinstance(value, str), "a string")

    def integers(self, key: str) -> Setting[list[int]] | None:
        return self._typed(
            key,
            lambda value: isinstance(value, list) and all(map(_is_int, value)),
            "a list of integers",
        )

    def texts(self, key: str) -> Setting[list[str]] | None:
        return self._typed(
            key,
            lambda value: (
                isinstance(value, list) and all(isinstance(item, str) for item in value)
            ),
            "a list of strings",
        )

    def mapping(self, key: str) -> Setting[dict[str, Any]] | None:
        return self._typed(key, lambda value: isinstance(value, dict), "an object")

    def required_integer(self, key: str, *, most: int = _MOST_SIZE) -> int:
        """A size: at least 1."""
        setting = self.require(key, self.integer(key))
        if setting.value < 1:
            raise self.error(f"{setting.where} is {setting.value}, expected at least 1", key)
        if setting.value > most:
            raise self.error(
                f"{setting.where} is {setting.value}, expected at most {most}", key
            )
        return setting.value

    def required_number(self, key: str) -> float:
        return float(self.require(key, self.number(key)).value)

    @contextmanager
    def consistent(self) -> Iterator[None]:
        """Settings that contradict each other, as descriptions say by ValueError, are an error about this file."""
        try:
            yield
        except ValueError as error:
            raise self.error(str(error), "KEY") from error

    def require(self, key: str, setting: Setting[T] | None) -> Setting[T]:
        if setting is None:
            raise self.error(f"{key} is missing", key)
        return setting

    def require_asked(self) -> None:
        """Refuse stated settings that no reader asked for: a misspelt one would change nothing.

        Raises:
            CheckpointError: names them.
        """
        if unasked := sorted(set(self.stated or ()) - self._asked):
            names = ", ".join(self._owner + name for name in unasked)
            raise self.error(f"--set {names}: no setting of this format is called so")

    def require_neutral(self, neutral: Mapping[str, Any]) -> None:
        """Refuse settings that are there with another value than the one that changes nothing.

        Raises:
            CheckpointError: one has.
        """
        for key, value in neutral.items():
            setting = self.find(key)
            if setting is not None and setting.value != value:
                raise self.error(
                    f"{setting.where} is {setting.value!r}, which is not supported yet (only {value!r})",
                    key,
                )

    def error(self, text: str, key: str | None = None) -> CheckpointError:
        """An error about this file. ``key`` is the setting that would mend it, "KEY" if it may be any."""
        return CheckpointError(f"{self.path}: {text}{self.flag_for(key)}")

    def flag_for(self, key: str | None) -> str:
        """How the command line overrides a setting, to be put behind a sentence."""
        if key is None or self.stated is None:
            return ""
        # A place, or the flag it was stated with, may stand before the key.
        return override_flag(key.rpartition(" ")[2].rpartition(".")[2], owner=self._owner)

    def _typed(
        self, key: str, accepts: Callable[[Any], bool], expected: str
    ) -> Setting[Any] | None:
        setting = self.find(key)
        if setting is not None and not accepts(setting.value):
            raise self.error(f"{setting.where} is {setting.value!r}, expected {expected}", key)
        return setting


def override_flag(key: str, *, owner: str = "") -> str:
    """The flag that states a setting of a drafter, or of its target, to be put behind a sentence."""
    stated = f"--set {owner}{key}=VALUE"
    return f" (override: {stated if owner else _FLAGS.get(key, stated)})"


def _spellings(key: str) -> list[str]:
    names = (key, *_SPELLINGS.get(key, ()))
    return [spelling for name in names for spelling in (name, f"dspark_{name}")]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max  # not so of NaN, and integers have no end
    )
