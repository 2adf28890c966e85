"""Look into the trained models of a run with the probes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import xarray as xr

import probes
import tasks
from ablations import figures, store

if TYPE_CHECKING:
    from prism import PrismConfig, PrismModel

DEFAULT = ("update_rank", "state_rank", "residual_decay")
_AT_LEAST = {"anchor_fidelity": 64, "readout": 256, "causal_share": 256}
"""Sequences of measures that fit or score: on fewer, R^2 and accuracies are noise."""
_OWN_AXES = {"step_cosines", "causal_share"}  # fields and categories, whose limits are not shared
_PLOT_OPTIONS = {"state_rank": {"measure": "effective"}}  # numerically, states reach their bound at once
_READS = {
    "residual_decay": "residual",
    "step_cosines": "delta",
    "anchor_fidelity": "anchor",
    "anchor_horizon": "anchor",
    "gain_fidelity": "gain",
    "solver_fidelity": "anchor",
    "readout": None,
    "causal_share": None,
}
"""What a measure reads of every mixer; those not named here read the scan's inputs."""


def load_models(run: Path | str, task: str, arm: str) -> list[tuple[int, PrismModel]]:
    """(seed, model) of the reported cells of an arm on a task, as saved by `run(..., save_models=True)`.

    Raises ValueError where there is no such cell, and FileNotFoundError where no model was saved.
    """
    from prism import PrismModel

    rows = _rows(run, task, arm)
    found = []
    for seed, key in zip(rows["seed"], rows["key"], strict=True):
        folder = Path(run) / "models" / key
        if folder.is_dir():
            found.append((int(seed), PrismModel.from_pretrained(folder)))
    if not found:
        raise FileNotFoundError(
            f"run: no trained model of {arm!r} on {task!r} under {run}/models (not saved, or failed)"
        )
    return found


def measure(run: Path | str, name: str, task: str, arm: str, sequences: int = 8) -> xr.Dataset:
    """A measure (a name of `probes.MEASURES`) over all seeds of an arm, along a dimension `seed`.

    Each seed's model reads the first `sequences` of the test sequences it was scored on. anchor_fidelity,
    which fits maps, reads at least 64. causal_share and readout (of the answers) read at least 256, all
    models the same ones: those of the first seed.
    """
    return _measure(load_models(run, task, arm), task_of(run, task, arm), name, sequences)


def _measure(models: list[tuple[int, PrismModel]], made: tasks.Task, name: str, sequences: int) -> xr.Dataset:
    _check_measure(name)
    needs = probes.MEASURES[name].needs
    sequences = max(sequences, _AT_LEAST.get(name, 0))
    if "targets" in needs:
        batch = made.batch(sequences, seed=models[0][0], step=0, split="test")
        whole = [model for _, model in models]
        return probes.measure(whole, batch.inputs, name, targets=batch.targets, chance=made.chance)
    parts = []
    for seed, model in models:
        first = models[0][0]  # labels stand at the same tokens for all
        batch = made.batch(sequences, seed=first if needs else seed, step=0, split="test")
        options = {"labels": batch.targets} if "labels" in needs else {}
        parts.append(probes.measure(model, batch.inputs, name, **options))
    return probes.join_seeds(parts, [seed for seed, _ in models])


def draw(run: Path | str, name: str, task: str, arms: Sequence[str], sequences: int = 8) -> Path:
    """Draw a measure, a panel per arm, into run/figures as PNG and PDF; returns the PNG's path."""
    with figures.paper_style():
        figure, axes = figures.panels(len(arms), sharey=False)
        for ax, arm in zip(axes, arms, strict=True):
            data = measure(run, name, task, arm, sequences)
            probes.plot(data, name, ax, **_PLOT_OPTIONS.get(name, {}))
            ax.set_title(f"{arm} on {task}\n{ax.get_title()}", fontsize=8)
        if name not in _OWN_AXES:
            # Limits are shared at the end: plots that set theirs would fix those of the panels after them.
            low, high = zip(*(ax.get_ylim() for ax in axes), strict=True)
            for ax in axes:
                ax.set_ylim(min(low), max(high))
            for ax in figures.inner(axes):
                ax.set_ylabel("")
        return figures.save(figure, Path(run) / "figures" / f"{name}_{_file_name(task)}")


def draw_many(
    run: Path | str,
    names: Sequence[str] | None = None,
    task: str | None = None,
    arms: Sequence[str] | None = None,
    sequences: int = 8,
) -> list[Path]:
    """Draw several measures, a figure per measure and task; the default is ranks and residual decay of all
    arms.

    An arm whose mixer lacks what a measure reads (a residual without refinement, a gain that is not learned,
    a scan in attention) is left out of it. Raises ValueError for an unknown measure, task or arm, and where a
    measure that was asked for by name finds no arm at all.
    """
    wanted = [name.replace("-", "_") for name in names or DEFAULT]
    for name in wanted:
        _check_measure(name)
    rows = store.load(run)
    if task is not None and task not in set(rows["task"]):
        raise ValueError(f"task: expected one of {list(dict.fromkeys(rows['task']))}, got {task!r}")
    have = arms_with_models(run, task)
    if not have:
        raise FileNotFoundError(
            f"run: no trained models under {run}/models; train with save_models (--save-models)"
        )
    for arm in arms or []:
        if arm not in {name for _, name in have}:
            raise ValueError(
                f"arm: expected one of {list(dict.fromkeys(name for _, name in have))}, got {arm!r}"
            )
    drawn: list[Path] = []
    for name in wanted:
        before = len(drawn)
        for label in dict.fromkeys(found for found, _ in have):
            chosen = [arm for found, arm in have if found == label and (not arms or arm in arms)]
            chosen = [arm for arm in chosen if _has(run, label, arm, _READS.get(name, "log_decay"))]
            if chosen:
                drawn.append(draw(run, name, label, chosen, sequences))
        if names and len(drawn) == before:
            raise ValueError(
                f"measure: {name} reads {_READS.get(name, 'log_decay')!r}, which no mixer of these arms has: "
                f"{', '.join(dict.fromkeys(arm for _, arm in have if not arms or arm in arms))}"
            )
    return drawn


def draw_saved(
    folder: Path | str, task: str, names: Sequence[str] | None = None, sequences: int = 8
) -> list[Path]:
    """Draw measures of one model that `save_pretrained` wrote, on a task in words ("mqar length=24"), into
    folder/figures.

    Raises ValueError for a task whose token ids the model does not know, and for a measure that reads what
    the model's mixer does not have.
    """
    from ablations.grid import parse_task
    from prism import PrismModel

    model = PrismModel.from_pretrained(folder)
    _, params = parse_task(task)
    made = tasks.get(params.pop("task"), **params)
    if made.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"task: expected at most the model's {model.config.vocab_size} token ids, got {made.vocab_size}"
        )
    drawn = []
    for name in [name.replace("-", "_") for name in names or DEFAULT]:
        _check_measure(name)
        if not _reads(model.config, _READS.get(name, "log_decay")):
            if names:
                raise ValueError(f"measure: {name} reads {_READS[name]!r}, which this model's mixer lacks")
            continue
        with figures.paper_style():
            figure, (ax,) = figures.panels(1, sharey=False)
            probes.plot(
                _measure([(0, model)], made, name, sequences), name, ax, **_PLOT_OPTIONS.get(name, {})
            )
            drawn.append(figures.save(figure, Path(folder) / "figures" / f"{name}_{_file_name(made.name)}"))
    return drawn


def arms_with_models(run: Path | str, task: str | None = None) -> list[tuple[str, str]]:
    """(task, arm) of the reported cells that have a saved model, in the order of the run."""
    rows = store.load(run)
    rows = rows[rows["role"] == "report"]
    if task is not None:
        rows = rows[rows["task"] == task]
    has = [(Path(run) / "models" / key).is_dir() for key in rows["key"]]
    return list(dict.fromkeys(zip(rows["task"][has], rows["arm"][has], strict=True)))


def _rows(run: Path | str, task: str, arm: str) -> pd.DataFrame:
    rows = store.load(run)
    for column, wanted in (("task", task), ("arm", arm)):
        if wanted not in set(rows[column]):
            raise ValueError(f"{column}: expected one of {list(dict.fromkeys(rows[column]))}, got {wanted!r}")
    return rows[(rows["task"] == task) & (rows["arm"] == arm) & (rows["role"] == "report")]


def _has(run: Path | str, task: str, arm: str, tensor: str | None) -> bool:
    """Whether the mixers of an arm have this hook point (None: whatever they have will do)."""
    from prism import PrismConfig

    return _reads(PrismConfig.from_dict(json.loads(_rows(run, task, arm)["model"].iloc[0])), tensor)


def _reads(config: PrismConfig, tensor: str | None) -> bool:
    from prism import PrismModel

    names = PrismModel(config, seed=0).hook_shapes(1, 2)
    return tensor is None or any(name.endswith(f".mixer.{tensor}") for name in names)


def _check_measure(name: str) -> None:
    if name not in probes.MEASURES:
        raise ValueError(f"measure: expected one of {', '.join(probes.MEASURES)}, got {name!r}")


def task_of(run: Path | str, task: str, arm: str) -> tasks.Task:
    """The task object behind a label of a run."""
    rows = _rows(run, task, arm)
    return tasks.get(rows["task_name"].iloc[0], **json.loads(rows["task_params"].iloc[0]))


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in text)
