# SPDX-License-Identifier: Apache-2.0
"""The paper's figures, from our own numbers. matplotlib is loaded only when one is drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_trt.errors import RequestError
from dspark_trt.files import make_folder, new_file
from dspark_trt.runtime.calibration import Calibration
from dspark_trt.runtime.calibration_fit import replay_online
from dspark_trt.runtime.calibration_metrics import (
    conditional_acceptance,
    reliability,
    threshold_sweep,
)
from dspark_trt.runtime.comparison import DrafterResult
from dspark_trt.runtime.cost_table import CostTable
from dspark_trt.runtime.simulation import Outcome
from dspark_trt.runtime.survival import survival_from_confidence
from dspark_trt.runtime.traces import Traces

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_calibration(calibration: Calibration, held_out: Traces, folder: Path) -> list[Path]:
    """Reliability (figure 6), threshold sweep (figure 5), conditional acceptance (figure 2)."""
    make_folder(folder)
    return [
        save_figure(_reliability(calibration, held_out), folder / "reliability.png"),
        save_figure(_threshold_sweep(calibration, held_out), folder / "threshold_sweep.png"),
        save_figure(_conditional_acceptance(held_out), folder / "conditional_acceptance.png"),
    ]


def plot_simulation(outcomes: Mapping[str, Mapping[str, Outcome]], folder: Path) -> list[Path]:
    """Throughput against speed a user (figure 7); throughput and budget against load (figure 8)."""
    make_folder(folder)
    return [
        save_figure(_throughput_and_speed(outcomes), folder / "throughput_user_speed.png"),
        save_figure(_throughput_and_budget(outcomes), folder / "throughput_budget.png"),
    ]


def plot_comparison(results: Sequence[DrafterResult], path: Path) -> Path:
    """Conditional acceptance by position (figure 2), accepted length with its interval, and speed."""
    figure, panels = new_figure(3)
    names = [Path(result.bundle).name for result in results]
    for result, name in zip(results, names, strict=True):
        positions = np.arange(1, result.gamma + 1)
        acceptance = [np.nan if c is None else c for c in result.conditional_acceptance]
        panels[0].plot(positions, acceptance, marker="o", markersize=3, label=name)
    panels[0].set(xlabel="drafted position", ylabel="accepted, if reached", ylim=(0, 1))
    panels[0].legend(fontsize=7)
    lengths = np.array([result.accepted_length for result in results])
    intervals = np.array([result.accepted_length_interval for result in results]).T
    panels[1].bar(names, lengths, yerr=np.abs(intervals - lengths), capsize=3)
    panels[1].set(ylabel="tokens a round")
    panels[2].bar(names, [result.speed_up for result in results])
    panels[2].axhline(1.0, color="0.5", linewidth=0.8)
    panels[2].set(ylabel="speed, plain decoding = 1")
    for axes in panels[1:]:
        axes.tick_params(axis="x", labelrotation=20)
    return save_figure(figure, path)


def plot_cost_table(table: CostTable, path: Path) -> Path:
    """Milliseconds of a round over the tokens of its step, a line for each context bucket."""
    figure, (axes,) = new_figure(1)
    tokens = np.arange(1, table.max_tokens + 1)
    for context in table.context_tokens or (None,):
        seconds = table.seconds(1, table.max_tokens, context_tokens=context)
        label = None if context is None else f"context up to {context}"
        axes.plot(tokens, 1e3 * seconds, drawstyle="steps-pre", label=label)
    axes.set(
        xlabel="tokens of a target step", ylabel="ms", title=table.origin.get("machine", "")
    )
    if table.context_tokens:
        axes.legend()
    return save_figure(figure, path)


def new_figure(panels: int) -> tuple["Figure", Sequence[Any]]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError(
            "plots need matplotlib, which is not installed: pip install 'dspark-trt[plot]'"
        ) from error
    figure = Figure(figsize=(4.2 * panels, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def save_figure(figure: "Figure", path: Path) -> Path:
    with new_file(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    return path


def _many_lines(axes: Any) -> None:
    from matplotlib import colormaps

    axes.set_prop_cycle(color=colormaps["tab20"](np.arange(20)))


def _reliability(calibration: Calibration, held_out: Traces) -> "Figure":
    mask = held_out.accept_prefix_mask
    said = {
        "before": Calibration.identity(calibration.gamma).confidence(held_out.conf_logits),
        calibration.method: calibration.confidence(held_out.conf_logits),
        "and online": replay_online(calibration, held_out),
    }
    positions = sorted({0, 1, calibration.gamma // 2})
    figure, panels = new_figure(len(positions))
    for axes, k in zip(panels, positions, strict=True):
        axes.plot([0, 1], [0, 1], color="0.7")
        for name, confidence in said.items():
            survival = survival_from_confidence(confidence)[:, k]
            bins = reliability(survival, mask[:, k])
            axes.plot(bins.predicted, bins.observed, marker="o", markersize=3, label=name)
        axes.set(xlabel="predicted survival", ylabel="observed", title=f"first {k + 1} drafts")
    panels[0].legend()
    return figure


def _threshold_sweep(calibration: Calibration, held_out: Traces) -> "Figure":
    sweep = threshold_sweep(
        calibration.confidence(held_out.conf_logits),
        held_out.accept_prefix_mask,
        np.linspace(0.0, 0.95, 20),
    )
    figure, (axes,) = new_figure(1)
    axes.plot(sweep["threshold"], sweep["verified_per_round"], label="verified a round")
    axes.plot(sweep["threshold"], sweep["accepted_per_round"], label="accepted a round")
    axes.set(xlabel="confidence threshold", ylabel="drafts")
    rate = axes.twinx()
    rate.plot(sweep["threshold"], sweep["acceptance_rate"], color="0.5", linestyle="--")
    rate.set(ylabel="acceptance rate (dashed)", ylim=(0, 1))
    axes.legend()
    return figure


def _conditional_acceptance(held_out: Traces) -> "Figure":
    figure, (axes,) = new_figure(1)
    positions = np.arange(1, held_out.gamma + 1)
    for index, name in enumerate(held_out.domain_names):
        rows = held_out.domain == index
        if rows.any():
            acceptance = conditional_acceptance(held_out.accept_prefix_mask[rows])
            axes.plot(positions, acceptance, marker="o", label=name)
    axes.set(xlabel="drafted position", ylabel="accepted, if reached", ylim=(0, 1))
    axes.legend()
    return figure


def _throughput_and_speed(outcomes: Mapping[str, Mapping[str, Outcome]]) -> "Figure":
    figure, (axes,) = new_figure(1)
    _many_lines(axes)
    for name, by_load in outcomes.items():
        axes.plot(
            [outcome.tokens_per_second_per_user for outcome in by_load.values()],
            [outcome.tokens_per_second for outcome in by_load.values()],
            marker="o", markersize=3, label=name,
        )  # fmt: skip
    axes.set(xlabel="tokens/s/user", ylabel="tokens/s")
    axes.legend(fontsize=7)
    return figure


def _throughput_and_budget(outcomes: Mapping[str, Mapping[str, Outcome]]) -> "Figure":
    figure, panels = new_figure(2)
    for axes in panels:
        _many_lines(axes)
    for name, by_load in outcomes.items():
        running = [outcome.running for outcome in by_load.values()]
        for axes, figures in (
            (panels[0], [outcome.tokens_per_second for outcome in by_load.values()]),
            (panels[1], [outcome.drafts_verified_per_round for outcome in by_load.values()]),
        ):
            axes.plot(running, figures, marker="o", markersize=3, label=name)
    panels[0].set(xscale="log", xlabel="running requests", ylabel="tokens/s")
    panels[1].set(xscale="log", xlabel="running requests", ylabel="drafts verified a round")
    panels[0].legend(fontsize=7)
    return figure
