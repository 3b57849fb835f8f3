# SPDX-License-Identifier: Apache-2.0
"""``dspark-trt calibrate``: fit a bundle's confidence to what its target accepts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dspark_trt.cli.output import console, err_console, print_json
from dspark_trt.cli.prompts import PROMPTS_HELP, read_prompts
from dspark_trt.cli.running import BackendName, DeviceName, require_bundled_target
from dspark_trt.errors import RequestError

if TYPE_CHECKING:
    from dspark_trt.bundle import Bundle
    from dspark_trt.runtime.calibration import Calibration
    from dspark_trt.runtime.traces import Traces

_MOST_BINS = 1000
_SWEEP = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def command(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.", show_default=False)],
    traces: Annotated[
        Path | None,
        typer.Option(help="Recorded rounds (.npz, docs/calibration.md).", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help=f"Without --traces, prompts to answer: {PROMPTS_HELP[0].lower()}{PROMPTS_HELP[1:]}; "
            "default: shipped ones.",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of those answers.")] = 1.0,
    method: Annotated[
        str,
        typer.Option(help="sts (temperatures), affine (slope and offset), auto (the better)."),
    ] = "auto",
    bins: Annotated[int, typer.Option(help="Bins of the calibration error.")] = 10,
    backend: BackendName = "onnxruntime",
    device: DeviceName = None,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for PNG figures.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit calibration.json, which makes confidences true.

    Errors are reported on held-out requests. No new export: engines read the file when they start.
    """
    from dspark_trt.bundle import CALIBRATION, load_bundle
    from dspark_trt.files import make_folder, require_place
    from dspark_trt.runtime.calibration_fit import Method, fit_calibration

    if method not in set(Method):
        raise RequestError(f"--method {method!r} is unknown; expected {', '.join(Method)}")
    if not 2 <= bins <= _MOST_BINS:
        raise RequestError(f"--bins must lie in 2..{_MOST_BINS}, got {bins}")
    loaded = load_bundle(bundle, verify_hashes=False)
    written = bundle / CALIBRATION
    require_place(written)
    if plots is not None:
        make_folder(plots)
    rounds, estimator = _with_logits(
        loaded,
        _collect(loaded, prompts, temperature, backend, device)
        if traces is None
        else _read(loaded, traces),
    )
    calibration = fit_calibration(rounds, method=Method(method), bins=bins)
    if estimator is not None:
        calibration = calibration.with_estimator(estimator)
    calibration.save(written)
    report = _report(calibration, rounds)
    if plots is not None:
        from dspark_trt.runtime.plots import plot_calibration

        held_out = rounds.fully_verified()
        held_out = held_out.where(held_out.split == 1)
        report["plots"] = [str(path) for path in plot_calibration(calibration, held_out, plots)]
    if as_json:
        print_json({"written": str(written), **report})
    else:
        _print(report)
        console.print(f"written: {written}", highlight=False, soft_wrap=True)


def _read(bundle: "Bundle", traces: Path) -> "Traces":
    """Rounds to fit on, from a file."""
    from dspark_trt.runtime.traces import load_traces, models_of

    rounds = load_traces(traces)
    if rounds.gamma != bundle.draft.gamma:
        raise RequestError(
            f"{traces} holds rounds of {rounds.gamma} drafted tokens, {bundle.path} drafts "
            f"{bundle.draft.gamma}. Record them with this bundle"
        )
    if rounds.models not in (None, models_of(bundle)):  # other projects' files do not say
        raise RequestError(
            f"{traces} holds rounds of other models than {bundle.path}: drafter and target {rounds.models}, "
            f"here {models_of(bundle)}. Record them with this bundle: dspark-trt generate --trace"
        )
    return rounds


def _collect(
    bundle: "Bundle", file: Path | None, temperature: float, backend: str, device: str | None
) -> "Traces":
    """Rounds to fit on, from prompts that the engine answers now."""
    from dspark_trt.runtime.backends.interface import BackendOptions
    from dspark_trt.runtime.engine import Engine, EngineOptions
    from dspark_trt.runtime.trace_collection import collect_traces

    require_bundled_target(bundle)
    prompts = read_prompts(bundle, file)
    samples = 2 if temperature > 0 else 1
    options = EngineOptions(max_batch=8, max_waiting=samples * len(prompts))
    scheduler = f"fixed:{bundle.draft.gamma}"
    with (
        Engine.load(
            bundle,
            backend=backend,
            backend_options=BackendOptions(device=device),
            options=options,
            scheduler=scheduler,
        ) as engine,
        err_console.status("collecting rounds") as status,
    ):
        return collect_traces(
            engine,
            prompts,
            temperature=temperature,
            samples=samples,
            progress=lambda done, of: status.update(
                f"collecting rounds: {done} of {of} answers"
            ),
        )


def _with_logits(bundle: "Bundle", rounds: "Traces") -> "tuple[Traces, Any]":
    """The rounds with confidence logits, and the estimator that made them if there is no head."""
    from dspark_trt.config import ConfidenceInput
    from dspark_trt.runtime.calibration_fit import fit_estimator, with_estimated_logits

    if bundle.draft.confidence is not ConfidenceInput.NONE:
        return rounds, None
    estimator = fit_estimator(rounds)
    return with_estimated_logits(rounds, estimator), estimator


def _report(calibration: "Calibration", rounds: "Traces") -> dict[str, Any]:
    import numpy as np

    from dspark_trt.runtime.calibration_metrics import conditional_acceptance, threshold_sweep

    held_out = rounds.fully_verified()
    held_out = held_out.where(held_out.split == 1)
    mask = held_out.accept_prefix_mask
    confidence = calibration.confidence(held_out.conf_logits)
    by_domain = {
        name: _finite(conditional_acceptance(mask[held_out.domain == index]).tolist())
        for index, name in enumerate(held_out.domain_names)
        if np.any(held_out.domain == index)
    }
    figures = {
        key: {name: _finite(row) for name, row in value.items()}
        if isinstance(value, dict)
        else value
        for key, value in calibration.figures.items()
    }
    return {
        "method": calibration.method,
        "slope": calibration.slope.tolist(),
        "offset": calibration.offset.tolist(),
        "temperatures": calibration.temperatures.tolist(),
        "held_out": figures,
        "threshold_sweep": threshold_sweep(confidence, mask, np.array(_SWEEP)),
        "conditional_acceptance": by_domain,
    }


def _finite(values: list[float]) -> list[float | None]:
    """NaN (a position that no round reached) as null: JSON knows no NaN."""
    return [None if value != value else value for value in values]


def _print(report: dict[str, Any]) -> None:
    """Within 80 columns."""
    held_out = report["held_out"]
    table = Table(
        title=f"{report['method']}: held-out error of survival, {held_out['rounds']} rounds of "
        f"{held_out['requests']} requests, {held_out['bins']} bins"
    )
    for column in ("k", "ECE % before", "after", "online", "Brier before", "after", "AUC",
                   "slope", "offset", "T"):  # fmt: skip
        table.add_column(column, justify="right")
    before, after, online = (held_out[key] for key in ("before", "after", "online"))
    for k in range(len(report["slope"])):
        auc = after["auc"][k]
        table.add_row(
            str(k + 1),
            f"{100 * before['ece'][k]:.1f}",
            f"{100 * after['ece'][k]:.1f}",
            f"{100 * online['ece'][k]:.1f}",
            f"{before['brier'][k]:.3f}",
            f"{after['brier'][k]:.3f}",
            "-" if auc is None else f"{auc:.3f}",
            f"{report['slope'][k]:.2f}",
            f"{report['offset'][k]:+.2f}",
            f"{report['temperatures'][k]:.2f}",
        )
    console.print(table)
    console.print(
        "k: position; ECE: calibration error, with the online correction too; slope, offset: what is applied; "
        "T: temperature alone"
    )
