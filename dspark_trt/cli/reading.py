# SPDX-License-Identifier: Apache-2.0
"""Options of commands that read a drafter: what to take it for, whatever its files say."""

from typing import Annotated

import typer

from dspark_trt.config import SlotSemantics

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
Gamma = Annotated[
    int | None, typer.Option(help="Draft fewer tokens than trained.", show_default=False)
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub id.", show_default=False)
]


def slot_semantics_from_flag(sample_from_anchor: bool | None) -> SlotSemantics | None:
    if sample_from_anchor is None:
        return None
    return SlotSemantics.ANCHOR_FIRST if sample_from_anchor else SlotSemantics.IN_PLACE
