# SPDX-License-Identifier: Apache-2.0
"""Options of commands that read a drafter: what to take it for, whatever its files say."""

import json
from typing import Annotated, Any

import typer

from dspark_trt.checkpoint import DraftOverrides
from dspark_trt.config import SlotSemantics
from dspark_trt.errors import CheckpointError

_TARGET = "target."
_SAME = {  # flag -> the settings of config.json that it stands for
    "--mask-token-id": ("mask_token_id", "noise_token_id"),
    "--target-layer-ids": (
        "target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids",
    ),
    "--sample-from-anchor": ("sample_from_anchor", "shift_label"),
}  # fmt: skip

SampleFromAnchor = Annotated[
    bool | None,
    typer.Option(
        "--sample-from-anchor/--no-sample-from-anchor",
        help="Read slot 0 as a prediction, or as discarded, whatever the files say.",
        show_default=False,
    ),
]
MaskTokenId = Annotated[
    int | None,
    typer.Option(help="Mask token, where the files lack it.", show_default=False),
]
TargetLayerIds = Annotated[
    str | None,
    typer.Option(
        help="Tapped layers, as 1,9,17, whatever the files say: i is the output of decoder layer i, -1 the "
        "embedding.",
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting of config.json that counts instead of the file's; VALUE is JSON, null: absent. "
        "target.KEY is one of the target's. May be repeated.",
        show_default=False,
    ),
]
Gamma = Annotated[
    int | None, typer.Option(help="Draft fewer tokens than trained.", show_default=False)
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub id.", show_default=False)
]


def overrides_from_flags(
    *,
    sample_from_anchor: bool | None,
    mask_token_id: int | None,
    target_layer_ids: str | None,
    settings: list[str] | None,
    revision: str | None,
    gamma: int | None = None,
) -> DraftOverrides:
    """What these options state.

    Raises:
        CheckpointError: one cannot be read.
    """
    stated = [*map(_setting, settings or ())]
    _refuse_twice(
        [key for key, _ in stated],
        {
            "--mask-token-id": mask_token_id,
            "--target-layer-ids": target_layer_ids,
            "--sample-from-anchor": sample_from_anchor,
        },
    )
    semantics = None
    if sample_from_anchor is not None:
        semantics = SlotSemantics.ANCHOR_FIRST if sample_from_anchor else SlotSemantics.IN_PLACE
    return DraftOverrides(
        slot_semantics=semantics,
        mask_token_id=mask_token_id,
        target_layer_ids=None if target_layer_ids is None else _layers(target_layer_ids),
        gamma=gamma,
        settings=_settings(stated, of_target=False),
        target_settings=_settings(stated, of_target=True),
        revision=revision,
    )


def require_target(overrides: DraftOverrides, target: str | None) -> None:
    """Refuse settings of a target that is not read.

    Raises:
        CheckpointError: names them.
    """
    if target is None and overrides.target_settings:
        names = ", ".join(_TARGET + key for key in overrides.target_settings)
        raise CheckpointError(f"--set {names}: no target is read; give it with --target")


def _refuse_twice(keys: list[str], flags: dict[str, Any]) -> None:
    """One setting stated by two flags: one would be dropped in silence."""
    for key in keys:
        if keys.count(key) > 1:
            raise CheckpointError(f"--set {key} is given {keys.count(key)} times: leave one")
        for flag, value in flags.items():
            if value is not None and key in _SAME[flag]:
                raise CheckpointError(f"{flag} and --set {key} state the same: leave one out")


def _settings(stated: list[tuple[str, Any]], *, of_target: bool) -> dict[str, Any]:
    return {
        key.removeprefix(_TARGET): value
        for key, value in stated
        if key.startswith(_TARGET) == of_target
    }


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise CheckpointError(
            f"--target-layer-ids is {text!r}, expected layers such as 1,9,17"
        ) from error


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise CheckpointError(f"--set is {text!r}, expected KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value  # a string needs no quotes
