# SPDX-License-Identifier: Apache-2.0
"""Figures of a bench report."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dspark_trt.files import make_folder
from dspark_trt.runtime.bench import PARTS
from dspark_trt.runtime.bench_report import Report, is_whole
from dspark_trt.runtime.plots import new_figure, save_figure


def plot_bench(report: Report, folder: Path) -> list[Path]:
    """Speed over the first scheduler by load, where the time of a round goes, and what the last scheduler
    verifies by domain and load.

    Raises:
        RequestError: matplotlib is not installed.
    """
    make_folder(folder)
    cells = [cell for cell in report["cells"] if is_whole(report, cell)]
    heats = report["sampling"]["temperatures"]
    last = [c for c in report["cells"] if c["scheduler"] == report["cells"][-1]["scheduler"]]
    return [
        _speeds(cells, heats, folder / "bench_speed.png"),
        _parts(cells, heats, folder / "bench_parts.png"),
        _lengths(last, heats, folder / "bench_lengths.png"),
    ]


def _speeds(cells: Sequence[Report], heats: Sequence[float], path: Path) -> Path:
    figure, panels = new_figure(len(heats))
    loads = sorted({cell["requests"] for cell in cells})
    for axes, heat in zip(panels, heats, strict=True):
        for name in dict.fromkeys(cell["scheduler"] for cell in cells):
            own = [c for c in cells if c["scheduler"] == name and c["temperature"] == heat]
            speeds = [c["over_first"] for c in sorted(own, key=lambda c: c["requests"])]
            axes.plot(loads, speeds, marker="o", label=name)
        axes.set(xscale="log", xlabel="requests", title=f"T = {heat:g}")
        axes.set_xticks(loads, map(str, loads))
    panels[0].set(ylabel="tokens/s, first scheduler = 1")
    panels[0].legend(fontsize=7)
    return save_figure(figure, path)


def _parts(cells: Sequence[Report], heats: Sequence[float], path: Path) -> Path:
    figure, panels = new_figure(len(heats))
    for axes, heat in zip(panels, heats, strict=True):
        own = [cell for cell in cells if cell["temperature"] == heat]
        names = [f"{cell['scheduler']}, {cell['requests']}" for cell in own]
        left = np.zeros(len(own))
        for part in PARTS:
            shares = np.array([cell["parts_ms"][part] / cell["round_ms"] for cell in own])
            axes.barh(names, shares, left=left, label=part)
            left += shares
        axes.set(xlabel="share of a round", title=f"T = {heat:g}")
        axes.tick_params(labelsize=6)
    panels[0].legend(fontsize=6)
    return save_figure(figure, path)


def _lengths(cells: Sequence[Report], heats: Sequence[float], path: Path) -> Path:
    """Of one scheduler. A request that does not draft counts with length 0."""
    figure, panels = new_figure(len(heats))
    loads = sorted({cell["requests"] for cell in cells})
    for axes, heat in zip(panels, heats, strict=True):
        for domain in dict.fromkeys(cell["domain"] for cell in cells):
            own = [c for c in cells if c["domain"] == domain and c["temperature"] == heat]
            lengths = [c["mean_verified"] for c in sorted(own, key=lambda c: c["requests"])]
            axes.plot(loads, lengths, marker="o", label=domain or "prompts")
        axes.set(
            xscale="log", xlabel="requests", title=f"{cells[0]['scheduler']}, T = {heat:g}"
        )
        axes.set_xticks(loads, map(str, loads))
        axes.set_ylim(bottom=0)
    panels[0].set(ylabel="drafts verified a request and round")
    panels[0].legend(fontsize=7)
    return save_figure(figure, path)
