"""Figures of a run. Every function draws on an Axes that it is given (or makes) and returns it.

Colours and markers are the probes', in an order that starts with black; line styles repeat them. Arms keep
their look in every figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

import probes
from ablations.statistics import bootstrap_mean
from probes._figures import MARKERS, OKABE_ITO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ORDER = ("black", "orange", "sky", "green", "purple", "blue", "vermilion", "grey")
COLOURS = tuple(OKABE_ITO[name] for name in _ORDER)
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (4, 2, 1, 2, 1, 2)))
PANEL = (3.1, 2.6)
"""Inches of one panel: three fit the width of a page at their printed size."""
PER_ROW = 4


def look_of(arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Arm -> colour, marker and line style, in the order of the arms."""
    return {
        arm: {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": LINES[i % len(LINES)],
        }
        for i, arm in enumerate(arms)
    }


@contextmanager
def paper_style() -> Iterator[None]:
    """matplotlib settings for a printed page: 8 point text, thin frames."""
    import matplotlib

    settings: Any = {
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.labelsize": 8,
        "legend.fontsize": 7,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.7,
        "lines.linewidth": 1.2,
        "lines.markersize": 3.5,
    }
    # Not rc_context: it also restores `interactive`, which a notebook's backend sets with its first figure.
    before = {key: matplotlib.rcParams[key] for key in settings}
    matplotlib.rcParams.update(settings)
    try:
        yield
    finally:
        matplotlib.rcParams.update(before)


def learning_curves(rows: pd.DataFrame, task: str, ax: Axes | None = None) -> Axes:
    """Validation accuracy over steps: mean over seeds, bootstrap interval as a band, chance, ceiling."""
    ax = _axes(ax)
    of_task = _of_task(rows, task)
    looks = look_of(list(dict.fromkeys(rows["arm"])))
    for arm, of_arm in of_task.groupby("arm", sort=False):
        finished = of_arm[of_arm["status"] == "ok"]
        if finished.empty:
            continue
        steps = np.asarray(finished["curve_step"].iloc[0])
        curves = np.stack([np.asarray(curve, dtype=float) for curve in finished["curve_val_accuracy"]])
        estimates = [bootstrap_mean(column, resamples=999) for column in curves.T]
        look = looks[str(arm)]
        ax.plot(
            steps,
            [estimate.value for estimate in estimates],
            label=f"{arm} (n = {len(finished)})",
            markevery=max(1, len(steps) // 6),
            **look,
        )
        if len(finished) > 1:
            low, high = [e.low for e in estimates], [e.high for e in estimates]
            ax.fill_between(steps, low, high, color=str(look["color"]), alpha=0.12, linewidth=0)
    _levels(ax, of_task)
    ax.set(xlabel="training step", ylabel="validation accuracy", title=task)
    return ax


def accuracy_points(rows: pd.DataFrame, task: str, ax: Axes | None = None) -> Axes:
    """Test accuracy per arm: a point per seed, the mean with its bootstrap interval, chance, ceiling."""
    ax = _axes(ax)
    of_task = _of_task(rows, task)
    arms = list(dict.fromkeys(of_task["arm"]))
    looks = look_of(list(dict.fromkeys(rows["arm"])))
    for place, arm in enumerate(arms):
        of_arm = of_task[of_task["arm"] == arm]
        accuracy = of_arm["test_accuracy"].to_numpy(dtype=float)
        accuracy = accuracy[np.isfinite(accuracy)]
        look = looks[str(arm)]
        if len(accuracy):
            spread = (np.arange(len(accuracy)) - (len(accuracy) - 1) / 2) * (0.4 / max(1, len(accuracy) - 1))
            ax.scatter(
                accuracy,
                place + spread,
                s=11,
                color=str(look["color"]),
                marker=str(look["marker"]),
                alpha=0.75,
                linewidths=0,
                zorder=3,
            )
            mean = bootstrap_mean(accuracy)
            ax.plot([mean.value] * 2, [place - 0.33, place + 0.33], color=str(look["color"]), zorder=4)
            if mean.n > 1:
                ax.plot([mean.low, mean.high], [place] * 2, color=str(look["color"]), linewidth=3, alpha=0.35)
        failed = len(of_arm) - len(accuracy)
        if failed:
            ax.annotate(
                f"{failed} failed", (0.02, place), xycoords=("axes fraction", "data"), fontsize=6, va="center"
            )
    _levels(ax, of_task, vertical=True)
    counts = of_task.groupby("arm", sort=False).size()
    ax.set_yticks(range(len(arms)), [f"{arm} (n = {counts[arm]})" for arm in arms])
    ax.set_ylim(len(arms) - 0.5, -0.5)
    ax.set(xlabel="test accuracy", title=task)
    return ax


def draw_all(rows: pd.DataFrame, run: Path | str) -> list[Path]:
    """Draw learning curves and accuracies of all tasks into run/figures; returns the paths of the PNGs."""
    tasks = list(dict.fromkeys(rows["task"]))
    folder = Path(run) / "figures"
    with paper_style():
        curves, axes = panels(len(tasks), sharey=True)
        for ax, task in zip(axes, tasks, strict=True):
            learning_curves(rows, task, ax)
        for ax in inner(axes):
            ax.set_ylabel("")
        legend_below(curves, axes, title="mean over n seeds; band: 95% bootstrap interval of the mean")
        points, axes = panels(len(tasks), sharey=False, height=0.6 + 0.27 * rows["arm"].nunique())
        for ax, task in zip(axes, tasks, strict=True):
            accuracy_points(rows, task, ax)
        same = all(
            [t.get_text() for t in ax.get_yticklabels()] == [t.get_text() for t in axes[0].get_yticklabels()]
            for ax in axes
        )
        for ax in inner(axes) if same else []:
            ax.set_yticklabels([])
        points.supxlabel(
            "a point per seed; bar: mean of n seeds; band: its 95% bootstrap interval", fontsize=8
        )
        return [save(curves, folder / "learning_curves"), save(points, folder / "accuracy")]


def panels(count: int, sharey: bool, height: float = PANEL[1]) -> tuple[Figure, list[Axes]]:
    """A figure with panels in rows of PER_ROW at most, drawn without a display; height is a row's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns, rows = min(count, PER_ROW), -(-count // PER_ROW)
    size = (PANEL[0] * columns if count > 1 else 4.2, height * rows)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, sharey=sharey, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def inner(axes: Sequence[Axes]) -> list[Axes]:
    """The panels that have another one of their row on their left."""
    return [ax for i, ax in enumerate(axes) if i % PER_ROW]


def legend_below(figure: Figure, axes: Sequence[Axes], columns: int = 4, title: str = "") -> None:
    """One legend for all panels, under them."""
    named: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    columns = min(columns, max(1, 2 * len(axes)))
    figure.legend(
        list(named.values()),
        list(named),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        title=title,
    )


def save(figure: Figure, stem: Path) -> Path:
    """Write stem.png (200 dpi) and stem.pdf; returns the PNG's path."""
    return probes.save(figure, stem, dpi=200)[1]


def _axes(ax: Axes | None) -> Axes:
    return panels(1, sharey=False)[1][0] if ax is None else ax


def _of_task(rows: pd.DataFrame, task: str) -> pd.DataFrame:
    found = rows[(rows["task"] == task) & (rows["role"] == "report")]
    if found.empty:
        raise ValueError(
            f"task: expected one of {sorted(set(rows['task']))} with reported rows, got {task!r}"
        )
    return found


def _levels(ax: Axes, of_task: pd.DataFrame, vertical: bool = False) -> None:
    """Chance and ceiling as thin lines with their names."""
    for name, style in (("chance", ":"), ("ceiling", "--")):
        value = float(of_task[name].iloc[0])
        line = ax.axvline if vertical else ax.axhline
        line(value, color="0.45", linewidth=0.7, linestyle=style, zorder=0)
        if vertical:
            ax.annotate(
                name,
                (value, 1.0),
                xycoords=("data", "axes fraction"),
                fontsize=6,
                color="0.35",
                ha="center",
                va="bottom",
            )
        else:
            ax.annotate(
                name,
                (1.0, value),
                xycoords=("axes fraction", "data"),
                fontsize=6,
                color="0.35",
                ha="right",
                va="bottom",
            )
