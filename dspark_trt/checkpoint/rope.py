# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding settings in both spellings: ``rope_theta`` + ``rope_scaling``, or ``rope_parameters``."""

import math
from typing import Any

from dspark_trt.checkpoint.fields import Fields, is_number
from dspark_trt.config import RopeConfig

_SCALING = ("rope_scaling", "rope_parameters")
_YARN_NUMBERS = (
    "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim",
)  # fmt: skip
_LLAMA3_NUMBERS = (
    "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
)  # fmt: skip
_NAMES = frozenset({"rope_theta", "rope_type", "type"})
_KNOWN = {
    "linear": _NAMES | {"factor"},
    "llama3": _NAMES | {*_LLAMA3_NUMBERS},
    "yarn": _NAMES | {*_YARN_NUMBERS, "truncate"},
}
_REFUSED = {
    "dynamic": "its frequencies change with the length of a sequence, so cached keys would have to be "
    "rotated again",
    "longrope": "it has one table for short and another for long sequences",
}


def rope_from_fields(fields: Fields) -> RopeConfig:
    """The rotary embedding of a config.json: plain, linear, Llama 3's, YaRN (arXiv 2309.00071).

    Raises:
        CheckpointError: no theta, another RoPE type (named), or settings that contradict each other.
    """
    where, scaling = _scaling(fields)
    theta = _theta(fields, where, scaling)
    stated = scaling.get("rope_type") or scaling.get("type")
    kind, factor = str(stated or "default"), scaling.get("factor")
    if not stated and factor not in (None, 1):
        raise fields.error(
            f"{where} has factor {factor}, but no rope_type that says what it scales", where
        )
    if kind == "default" or (kind in ("linear", "yarn", "dynamic") and factor == 1):
        return RopeConfig(theta=theta)
    if kind not in _KNOWN:
        reason = f": {_REFUSED[kind]}" if kind in _REFUSED else ""
        raise fields.error(
            f"{where} asks for RoPE type {kind!r} (factor {factor}), which is not supported{reason}; "
            f"supported: default, {', '.join(_KNOWN)}",
            where,
        )
    if unknown := sorted(scaling.keys() - _KNOWN[kind] - {"partial_rotary_factor"}):
        raise fields.error(
            f"{where} has {kind} settings this reader does not know: {', '.join(unknown)}",
            where,
        )
    read = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}[kind]
    return read(fields, where, theta, scaling)


def _linear(fields: Fields, where: str, theta: float, scaling: dict[str, Any]) -> RopeConfig:
    factor = _number(fields, where, scaling, "factor")
    if factor is None:
        raise fields.error(f"{where}: linear RoPE scaling needs factor", where)
    return RopeConfig(theta=theta, linear_factor=factor)


def _llama3(fields: Fields, where: str, theta: float, scaling: dict[str, Any]) -> RopeConfig:
    numbers = {key: _number(fields, where, scaling, key) for key in _LLAMA3_NUMBERS}
    given = {key: value for key, value in numbers.items() if value is not None}
    if missing := [key for key in _LLAMA3_NUMBERS if key not in given]:
        raise fields.error(f"{where}: llama3 RoPE scaling needs {', '.join(missing)}", where)
    return RopeConfig(
        theta=theta,
        llama3_factor=given["factor"],
        original_positions=int(given["original_max_position_embeddings"]),
        low_freq_factor=given["low_freq_factor"],
        high_freq_factor=given["high_freq_factor"],
    )


def _yarn(fields: Fields, where: str, theta: float, scaling: dict[str, Any]) -> RopeConfig:
    numbers = {key: _number(fields, where, scaling, key) for key in _YARN_NUMBERS}
    factor, positions = numbers["factor"], numbers["original_max_position_embeddings"]
    if factor is None or positions is None:
        raise fields.error(
            f"{where}: YaRN needs factor and original_max_position_embeddings", where
        )
    attention = numbers["attention_factor"]
    mscale, mscale_all = numbers["mscale"], numbers["mscale_all_dim"]
    if attention is None and mscale and mscale_all and factor >= 1:
        # The DeepSeek form: the ratio of two scales instead of the paper's single one.
        log_factor = 0.1 * math.log(factor)
        attention = (mscale * log_factor + 1) / (mscale_all * log_factor + 1)
    return RopeConfig(
        theta=theta,
        yarn_factor=factor,
        original_positions=int(positions),
        beta_fast=numbers["beta_fast"] or 32.0,
        beta_slow=numbers["beta_slow"] or 1.0,
        attention_factor=attention,
        truncate=scaling.get("truncate") is not False,
    )


def _number(fields: Fields, where: str, scaling: dict[str, Any], key: str) -> float | None:
    value = scaling.get(key)
    if value is None:
        return None
    if not is_number(value):
        raise fields.error(f"{where}.{key} is {value!r}, expected a number", where)
    return float(value)


def _scaling(fields: Fields) -> tuple[str, dict[str, Any]]:
    """The one dictionary of RoPE settings and its key."""
    given = [setting for key in _SCALING if (setting := fields.mapping(key)) is not None]
    if len(given) == 2 and given[0].value.items() - given[1].value.items():
        raise fields.error(
            f"{given[0].where} {given[0].value} contradicts {given[1].where} {given[1].value}",
            "rope_scaling",
        )
    if not given:
        return "rope_scaling", {}
    where, scaling = given[-1].where, given[-1].value
    if any(isinstance(value, dict) for value in scaling.values()):
        raise fields.error(
            f"{where} has settings for each layer type ({', '.join(sorted(scaling))}), "
            "which are not supported yet",
            where,
        )
    if (
        scaling.get("rope_type")
        and scaling.get("type", scaling["rope_type"]) != scaling["rope_type"]
    ):
        raise fields.error(
            f"{where}: rope_type is {scaling['rope_type']!r} but type is {scaling['type']!r}",
            where,
        )
    if (partial := scaling.get("partial_rotary_factor", 1)) != 1:
        raise fields.error(
            f"{where}.partial_rotary_factor is {partial}, only 1 is supported", where
        )
    return where, scaling


def _theta(fields: Fields, where: str, scaling: dict[str, Any]) -> float:
    top = fields.number("rope_theta")
    inner = _number(fields, where, scaling, "rope_theta")
    if top is not None and inner is not None and top.value != inner:
        raise fields.error(
            f"{top.where} is {top.value} but {where}.rope_theta is {inner}", "rope_theta"
        )
    theta = inner if top is None else float(top.value)
    if theta is None:
        raise fields.error(
            "rope_theta is missing, both at the top and in rope_parameters", "rope_theta"
        )
    return theta
