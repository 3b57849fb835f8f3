# SPDX-License-Identifier: Apache-2.0
"""Sliding windows: which layers see only the latest rows, said in four ways that may disagree."""

from dspark_trt.checkpoint.dialects import SPECULATORS, Dialect
from dspark_trt.checkpoint.fields import Fields, Setting
from dspark_trt.checkpoint.records import Notes
from dspark_trt.config import WindowRule

_WINDOWED = "sliding_attention"
_FULL = "full_attention"


def read_windows(
    fields: Fields, num_layers: int, max_positions: int, notes: Notes
) -> tuple[int | None, ...]:
    """The window of each layer; empty where no layer has one that a context can outgrow.

    Raises:
        CheckpointError: settings that contradict each other, or a window without a size.
    """
    types = _layer_types(fields, num_layers)
    use_swa, use_window = fields.flag("use_swa"), fields.flag("use_sliding_window")
    sliding = [index for index, kind in enumerate(types or ()) if kind == _WINDOWED]
    if use_swa is not None:
        if sliding and not use_swa.value:
            raise fields.error(
                f"{use_swa.where} is false, but layer_types holds {_WINDOWED!r}: remove the wrong one",
                "layer_types",
            )
        # The Model-Optimizer exporter leaves layer_types at full_attention (NVIDIA/Model-Optimizer#2149).
        windowed = (sliding or list(range(num_layers))) if use_swa.value else []
        reason = f"{use_swa.where} is {str(use_swa.value).lower()}"
    elif types is not None:
        windowed, reason = sliding, "layer_types"
    else:
        windowed, reason = _without_layer_types(fields, num_layers, use_window)
    if not windowed:
        return ()
    size = _size(fields, reason)
    if size.value >= max_positions:
        notes.decide(
            "sliding_window",
            None,
            f"{size.where} {size.value} covers all {max_positions} positions",
        )
        return ()
    where = "every layer" if len(windowed) == num_layers else f"layers {windowed}"
    notes.decide("sliding_window", size.value, f"{size.where}; {where} ({reason})")
    return tuple(size.value if index in windowed else None for index in range(num_layers))


def read_window_rule(
    fields: Fields, dialect: Dialect, windows: tuple[int | None, ...], notes: Notes
) -> WindowRule:
    """What a windowed layer of a drafter sees; noted only where there is one."""
    if not any(windows):
        return WindowRule.SLOT
    if dialect is not SPECULATORS:
        rule, reason = (
            WindowRule.SLOT,
            f"the {dialect.name} format windows every slot by itself",
        )
    else:
        # speculators counts the window from the anchor, and a window also makes the block causal.
        setting = fields.flag("sliding_window_non_causal")
        both_ways = setting is not None and setting.value
        rule = WindowRule.ANCHOR if both_ways else WindowRule.ANCHOR_CAUSAL
        said = "absent" if setting is None else str(setting.value).lower()
        reason = f"sliding_window_non_causal is {said}"
    notes.decide("window_rule", rule.value, reason)
    return rule


def _layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    types = fields.texts("layer_types")
    if types is None:
        return None
    if other := [kind for kind in types.value if kind not in (_WINDOWED, _FULL)]:
        raise fields.error(
            f"{types.where} holds {other[0]!r}, which is not supported "
            f"(only {_FULL!r} and {_WINDOWED!r})",
            "layer_types",
        )
    if _WINDOWED in types.value and len(types.value) != num_layers:
        raise fields.error(
            f"{types.where} has {len(types.value)} entries, expected {num_layers} "
            "(num_hidden_layers)",
            "layer_types",
        )
    return types.value


def _without_layer_types(
    fields: Fields, num_layers: int, use_window: Setting[bool] | None
) -> tuple[list[int], str]:
    """Files older than layer_types: Mistral windows every layer, Qwen those from max_window_layers on."""
    window, model_type = fields.find("sliding_window"), fields.text("model_type")
    if window is None:
        return [], ""
    is_qwen = model_type is not None and model_type.value.startswith("qwen")
    asked = not is_qwen if use_window is None else use_window.value
    if not asked:
        return [], ""
    first = fields.integer("max_window_layers") if is_qwen else None
    start = first.value if first else 0
    return list(range(start, num_layers)), window.where


def _size(fields: Fields, reason: str) -> Setting[int]:
    sizes = [fields.integer(key) for key in ("swa_window_size", "sliding_window")]
    given = [size for size in sizes if size is not None]
    if not given:
        raise fields.error(
            f"{reason} asks for a sliding window, but sliding_window is missing",
            "sliding_window",
        )
    if given[0].value != given[-1].value:
        raise fields.error(
            f"{given[0].where} is {given[0].value}, but {given[-1].where} is {given[-1].value}: "
            "remove the wrong one",
            "sliding_window",
        )
    return given[0]
