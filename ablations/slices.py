"""Accuracy of trained models by a task's slices: by position, word length, distance, pair ..."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

import tasks
from ablations import figures, probing
from ablations.statistics import bootstrap_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROWS_AT_ONCE = 128


def accuracy_by(
    run: Path | str,
    by: str,
    task: str | None = None,
    arms: Sequence[str] | None = None,
    rows: int = 512,
    split: str = "test",
    device: str = "cpu",
) -> pd.DataFrame:
    """A row per (task, arm, seed, value of the slice): accuracy, chance-corrected accuracy, and how many
    answers it is of.

    by: a slice of the task ("position", "length", "distance", "pair", ...). The models are those that
    `run(..., save_models=True)` kept; each reads `rows` sequences of the split, drawn with its own seed.

    Raises ValueError where the task has no such slice, FileNotFoundError where no model was saved.
    """
    found = []
    for label, arm in probing.arms_with_models(run, task):
        if arms is not None and arm not in arms:
            continue
        made = probing.task_of(run, label, arm)
        for seed, model in probing.load_models(run, label, arm):
            model = model.to(device).eval()
            batch = made.batch(rows, seed=seed, step=0, split=split, device=device)
            if by not in batch.slices:
                raise ValueError(f"by: expected one of {', '.join(batch.slices)} on {label}, got {by!r}")
            with torch.no_grad():
                guesses = torch.cat([model(part).argmax(-1) for part in batch.inputs.split(_ROWS_AT_ONCE)])
            for value, (accuracy, n) in tasks.metrics.by_slice(guesses, batch)[by].items():
                corrected = tasks.metrics.chance_corrected(accuracy, made)
                found.append((label, arm, seed, value, accuracy, corrected, n))
    columns = ["task", "arm", "seed", by, "accuracy", "chance_corrected", "answers"]
    return pd.DataFrame(found, columns=columns)


def beyond(scores: pd.DataFrame, by: str, low: int, high: int | None = None) -> pd.DataFrame:
    """Per (task, arm, seed): accuracy over the slice values low .. high, each answer counted once."""
    chosen = scores[(scores[by] >= low) & (scores[by] <= (high if high is not None else scores[by].max()))]
    weighted = chosen.assign(
        accuracy=chosen["accuracy"] * chosen["answers"],
        chance_corrected=chosen["chance_corrected"] * chosen["answers"],
    )
    sums = weighted.groupby(["task", "arm", "seed"], sort=False)[
        ["accuracy", "chance_corrected", "answers"]
    ].sum()
    sums["accuracy"] /= sums["answers"]
    sums["chance_corrected"] /= sums["answers"]
    return sums.reset_index()


def plot_by(
    scores: pd.DataFrame,
    by: str,
    task: str,
    trained_to: int | None = None,
    bins: int = 24,
    ax: Axes | None = None,
) -> Axes:
    """Chance-corrected accuracy against a slice: mean over seeds, bootstrap interval as a band, n in the
    labels.

    Slice values are gathered in at most `bins` equal intervals. trained_to: the longest training length, a
    vertical line.
    """
    import matplotlib.pyplot as plt

    if ax is None:
        _, ax = plt.subplots(figsize=(3.25, 2.5), layout="constrained")
    of_task = scores[scores["task"] == task]
    looks = figures.look_of(list(dict.fromkeys(scores["arm"])))
    edges = np.unique(np.linspace(of_task[by].min(), of_task[by].max() + 1, bins + 1).round().astype(int))
    for arm, of_arm in of_task.groupby("arm", sort=False):
        middles, estimates = [], []
        for low, high in pairwise(edges):
            part = beyond(of_arm, by, int(low), int(high) - 1)
            if len(part):
                middles.append((low + high - 1) / 2)
                estimates.append(bootstrap_mean(part["chance_corrected"].to_numpy(), resamples=999))
        look = looks[str(arm)]
        seeds = of_arm["seed"].nunique()
        ax.plot(middles, [e.value for e in estimates], label=f"{arm} (n = {seeds})", markevery=3, **look)  # type: ignore[arg-type]
        if seeds > 1:
            low_line, high_line = [e.low for e in estimates], [e.high for e in estimates]
            ax.fill_between(middles, low_line, high_line, color=str(look["color"]), alpha=0.12, linewidth=0)
    for level, name in ((0.0, "chance"), (1.0, "ceiling")):
        ax.axhline(
            level,
            color="0.45",
            linewidth=0.8,
            linestyle=":" if name == "chance" else "--",
            label=name,
            zorder=1,
        )
    if trained_to is not None:
        ax.axvline(trained_to, color="0.6", linewidth=0.8, label="longest training word", zorder=1)
    ax.set(xlabel=by, ylabel="chance-corrected accuracy", title=task)
    return ax


def plot_by_state(rows: pd.DataFrame, task: str, families: Sequence[str], ax: Axes | None = None) -> Axes:
    """Chance-corrected test accuracy against the size of the state: a line per family, a point per seed.

    families: beginnings of the arms' names; an arm belongs to the first family that its name starts with.
    """
    import matplotlib.pyplot as plt

    if ax is None:
        _, ax = plt.subplots(figsize=(3.25, 2.5), layout="constrained")
    of_task = rows[(rows["task"] == task) & (rows["role"] == "report") & (rows["status"] == "ok")]
    corrected = (of_task["test_accuracy"] - of_task["chance"]) / (of_task["ceiling"] - of_task["chance"])
    for family, look in figures.look_of(families).items():
        own = of_task["arm"].str.startswith(family)
        groups = corrected[own].groupby(of_task["state_size"][own])
        estimates = {size: bootstrap_mean(values.to_numpy(), resamples=999) for size, values in groups}
        sizes, colour = list(estimates), str(look["color"])
        label = f"{family} (n = {min(e.n for e in estimates.values())} each)"
        ax.plot(sizes, [e.value for e in estimates.values()], label=label, **look)  # type: ignore[arg-type]
        low, high = [e.low for e in estimates.values()], [e.high for e in estimates.values()]
        ax.fill_between(sizes, low, high, color=colour, alpha=0.12, linewidth=0)
        ax.scatter(of_task["state_size"][own], corrected[own], s=5, color=colour, alpha=0.5, linewidths=0)
    for level, name in ((0.0, "chance"), (1.0, "ceiling")):
        style = ":" if name == "chance" else "--"
        ax.axhline(level, color="0.45", linewidth=0.8, linestyle=style, label=name, zorder=1)
    ax.set_xscale("log", base=2)
    ax.set(xlabel="floats of recurrent state", ylabel="chance-corrected accuracy", title=task)
    return ax
