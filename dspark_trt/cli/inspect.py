# SPDX-License-Identifier: Apache-2.0
"""``dspark-trt inspect``: what a checkpoint is, and why it is read so."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from dspark_trt.bundle import (
    CALIBRATION,
    COST_TABLE,
    ENGINES,
    MANIFEST,
    Bundle,
    Source,
    load_bundle,
)
from dspark_trt.checkpoint import (
    Decision,
    DraftCheckpoint,
    DraftOverrides,
    TargetCheckpoint,
    TensorRef,
    check_pair,
    read_checkpoint,
    read_target,
)
from dspark_trt.cli.output import console, print_json
from dspark_trt.cli.reading import (
    Gamma,
    MaskTokenId,
    Revision,
    SampleFromAnchor,
    Settings,
    TargetLayerIds,
    overrides_from_flags,
    require_target,
)
from dspark_trt.config import DecoderConfig
from dspark_trt.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What ``inspect`` shows of anything: plain facts, decisions with reasons, warnings."""

    kind: str
    path: str
    facts: dict[str, Any]
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        decisions = {
            item.name: {"value": item.value, "reason": item.reason} for item in self.decisions
        }
        return {**asdict(self), "decisions": decisions, "warnings": list(self.warnings)}


def command(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="Drafter or target (folder or hub id), bundle, or .engine file.",
            show_default=False,
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(help="Target to check the drafter against.", show_default=False),
    ] = None,
    sample_from_anchor: SampleFromAnchor = None,
    mask_token_id: MaskTokenId = None,
    target_layer_ids: TargetLayerIds = None,
    settings: Settings = None,
    gamma: Gamma = None,
    revision: Revision = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Of a bundle: read every file, compare its SHA-256."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a bundle, engine or checkpoint holds, and why.

    Of a checkpoint: format, heads, slots, tapped layers, and every decision made in reading it.
    """
    overrides = overrides_from_flags(
        sample_from_anchor=sample_from_anchor,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids,
        settings=settings,
        gamma=gamma,
        revision=revision,
    )
    if verify:
        load_bundle(checkpoint, trust_earlier=False)
    report = describe(checkpoint, overrides=overrides, target=target)
    if as_json:
        print_json(report.to_json())
    else:
        _print_report(report)


def describe(source: str, *, overrides: DraftOverrides, target: str | None) -> Report:
    """The report on ``source``, checked against ``target`` if one is given.

    Raises:
        CheckpointError: it cannot be read, or the two do not belong together.
    """
    path = Path(source)
    is_bundle = (path / MANIFEST).is_file()
    if is_bundle or path.suffix == ".engine":
        if target is not None or overrides != DraftOverrides():
            raise CheckpointError(
                f"{source} is no checkpoint: --target, and what states settings of one, change nothing here"
            )
        return (
            _bundle_report(load_bundle(path, verify_hashes=False))
            if is_bundle
            else _engine_report(path)
        )
    if path.is_file():
        raise CheckpointError(
            f"{source} is a file; inspect takes the folder of a bundle, a drafter or a target, a hub id, "
            "or an .engine file"
        )
    checkpoint = read_checkpoint(source, overrides=overrides)
    if isinstance(checkpoint, DraftCheckpoint):
        require_target(overrides, target)
        return _draft_report(checkpoint, target, overrides)
    if target is not None:
        raise CheckpointError(f"{source} is a target; --target goes with a drafter")
    stated = replace(overrides, target_settings={}, revision=None)
    if stated != DraftOverrides():
        raise CheckpointError(
            f"{source} is a target; what states settings of a drafter changes nothing here "
            "(its own settings: --set target.KEY=VALUE)"
        )
    return _target_report(checkpoint)


def _bundle_report(bundle: Bundle) -> Report:
    def source(value: Source | None) -> str | None:
        if value is None:
            return None
        return f"{value.name} ({value.format}, sha256 {value.sha256[:12]}…)"

    facts = {
        "draft": source(bundle.draft_source),
        "target": source(bundle.target_source),
        **bundle.precision,
        "gamma": bundle.draft.gamma,
        "head": bundle.draft.head_type.value,
        "confidence": bundle.draft.confidence.value,
        "slot_semantics": bundle.draft.slot_semantics.value,
        "target_layer_ids": list(bundle.draft.target_layer_ids),
        "max_context_tokens": bundle.max_context_tokens,
        "graphs": list(bundle.graph_names),
        "bytes": sum(record.size_bytes for record in bundle.files.values()),
        "calibrated": (bundle.path / CALIBRATION).is_file(),
        "cost_table": (bundle.path / COST_TABLE).is_file(),
        "engines": sorted(p.name for p in (bundle.path / ENGINES).glob("*") if p.is_dir()),
        "tool_versions": dict(bundle.tool_versions),
    }
    return Report(kind="bundle", path=str(bundle.path), facts=facts, decisions=(), warnings=())


def _engine_report(path: Path) -> Report:
    from dspark_trt.export.engines.describe import describe_engine

    facts = describe_engine(path)
    return Report(kind="engine", path=str(path), facts=facts, decisions=(), warnings=())


def _draft_report(
    draft: DraftCheckpoint, target: str | None, overrides: DraftOverrides
) -> Report:
    facts = _sizes(draft.config.decoder, draft.tensors.values())
    warnings = draft.warnings
    if target is not None:
        served = read_target(target, settings=overrides.target_settings)
        warnings += check_pair(draft, served)
        facts["target"] = str(served.path)
        facts["fits_target"] = True
    return Report(
        kind="drafter",
        path=str(draft.path),
        facts=facts,
        decisions=draft.decisions,
        warnings=warnings,
    )


def _target_report(target: TargetCheckpoint) -> Report:
    facts = _sizes(target.config.decoder, target.tensors.values())
    facts["tokenizer_files"] = [path.name for path in target.tokenizer_files]
    return Report(
        kind="target",
        path=str(target.path),
        facts=facts,
        decisions=target.decisions,
        warnings=target.warnings,
    )


def _sizes(decoder: DecoderConfig, tensors: Iterable[TensorRef]) -> dict[str, Any]:
    refs = list(tensors)
    experts = decoder.experts
    return {
        "parameters": sum(ref.num_elements for ref in refs),
        "weight_bytes": sum(ref.nbytes for ref in refs),
        "layers": decoder.num_layers,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "heads": decoder.num_heads,
        "kv_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "vocab_size": decoder.vocab_size,
        "max_positions": decoder.max_positions,
        **({"experts": f"{experts.per_token} of {experts.count}"} if experts else {}),
    }


def _print_report(report: Report) -> None:
    table = Table(title=f"{report.kind} {escape(report.path)}", title_justify="left")
    table.add_column("")
    table.add_column("value", overflow="fold")
    if report.decisions:  # of a bundle or an engine nothing was decided in reading it
        table.add_column("because", style="dim", overflow="fold")
    for name, value in report.facts.items():
        table.add_row(name, _shown(value))
    table.add_section()
    for item in report.decisions:
        table.add_row(item.name, _shown(item.value), escape(item.reason))
    console.print(table)
    for text in report.warnings:
        console.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return escape(
            ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)
        )
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return escape("\n".join(map(_tensor, value)))
    if isinstance(value, list):
        return escape(", ".join(map(str, value))) or "none"
    return "none" if value is None else escape(str(value))


def _tensor(facts: dict[str, Any]) -> str:
    """A line of one of an engine's tensors: a dimension that varies is `?`, and has a range a profile."""
    shape = ["?" if size < 0 else str(size) for size in facts["shape"]]
    words = [facts["name"], facts["dtype"], f"[{', '.join(shape)}]"]
    for profile, (least, _, most) in facts.get("profiles", {}).items():
        ranges = [
            f"{low}..{high}"
            for size, low, high in zip(facts["shape"], least, most, strict=True)
            if size < 0
        ]
        words.append(f"{profile}: {', '.join(ranges) or 'fixed'}")
    if cache := facts.get("in_place_of"):
        words.append(f"in place of {cache}")
    return " ".join(words)
