"""Measure 9: what each ingredient is worth: accuracy after taking it away from a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from probes import _figures
from probes.interventions import ingredients, without

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IGNORE = -100


@torch.no_grad()
def accuracy(
    model: Any, inputs: Int[Tensor, "B T"], targets: Int[Tensor, "B T"], batch_size: int = 256
) -> float:
    """Share of the scored positions (target not -100) whose arg max is the target."""
    device = next(model.parameters()).device
    right = scored = 0
    for tokens, wanted in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
        wanted = wanted.to(device)
        keep = wanted != IGNORE
        right += int(((model(tokens.to(device)).argmax(-1) == wanted) & keep).sum())
        scored += int(keep.sum())
    if scored == 0:
        raise ValueError("targets: expected at least one position that is not -100, got none")
    return right / scored


@torch.no_grad()
def causal_share(
    models: Any | Sequence[Any],
    inputs: Int[Tensor, "B T"],
    targets: Int[Tensor, "B T"],
    *,
    chance: float = 0.0,
    knockouts: Sequence[str] | None = None,
    each_layer: bool = False,
    draws: int = 2000,
    seed: int = 0,
) -> xr.Dataset:
    """Accuracy of trained models (one, or one per seed, same configuration) after each knock-out of
    `interventions.without`.

    The model is not retrained: this measures what it relies on, not what it would have learned without.

    Variables
        intact         accuracy of the whole model; dims seed
        accuracy       after the knock-out; dims seed, ingredient, layer ("all", then each layer with
                       each_layer=True)
        share          (intact - accuracy) / (intact - chance), the part of what was learned that is lost; NaN
                       where nothing was learned (intact <= chance)
        share_mean, share_interval over seeds (ingredient, layer; edge low, high): 95 % percentile bootstrap,
                       over the seeds that learned (attrs n_learned); NaN for fewer than 2, which have no
                       interval
    """
    models = list(models) if isinstance(models, Sequence) else [models]
    if not models or any(m.config != models[0].config for m in models):
        raise ValueError("models: expected at least one model, all of one configuration (seeds may differ)")
    if inputs.shape != targets.shape:
        raise ValueError(
            f"targets: expected the shape of inputs {list(inputs.shape)}, got {list(targets.shape)}"
        )
    config = models[0].config
    names = list(ingredients(config) if knockouts is None else knockouts)
    if not names:
        raise ValueError("knockouts: expected at least one ingredient, got none that this model has")
    places: dict[str, list[int] | None] = {"all": None}
    if each_layer:
        places |= {str(i): [i] for i in range(config.n_layers)}
    intact = np.array([accuracy(m, inputs, targets) for m in models])
    after = np.empty((len(models), len(names), len(places)))
    for s, model in enumerate(models):
        for n, name in enumerate(names):
            for p, layers in enumerate(places.values()):
                with without(model, name, layers) as cut:
                    after[s, n, p] = accuracy(cut, inputs, targets)
    learned = np.where(intact > chance, intact - chance, np.nan)[:, None, None]
    share = (intact[:, None, None] - after) / learned
    defined = share[intact > chance]
    mean, interval = np.full(share.shape[1:], np.nan), np.full((2, *share.shape[1:]), np.nan)
    if len(defined):
        mean = defined.mean(0)
    if len(defined) > 1:
        picks = np.random.default_rng(seed).integers(len(defined), size=(draws, len(defined)))
        interval = np.quantile(defined[picks].mean(1), [0.025, 0.975], axis=0)
    dims = ("seed", "ingredient", "layer")
    return xr.Dataset(
        {
            "intact": ("seed", intact),
            "accuracy": (dims, after),
            "share": (dims, share),
            "share_mean": (dims[1:], mean),
            "share_interval": (("edge", *dims[1:]), interval),
        },
        coords={
            "ingredient": names,
            "layer": list(places),
            "edge": ["low", "high"],
            "seed": range(len(models)),
        },
        attrs={
            "chance": chance,
            "n_seeds": len(models),
            "n_learned": len(defined),
            "n_scored": int((targets != IGNORE).sum()),
        },
    )


def plot_causal_share(ds: xr.Dataset, ax: Axes | None = None, *, ceiling: float = 1.0) -> Axes:
    """Accuracy after each knock-out in all layers: every seed a point, the mean a bar; chance, ceiling and
    the intact mean.
    """
    ax = _figures.new_axes(ax, height=2.6)
    values = ds.accuracy.sel(layer="all")
    names = list(ds.ingredient.values)
    for i in range(len(names)):
        points = values.isel(ingredient=i).values
        spread = np.linspace(-0.18, 0.18, len(points)) if len(points) > 1 else np.zeros(1)
        ax.plot(points, i + spread, "o", color=_figures.COLOURS[0], markersize=3, alpha=0.7, linestyle="none")
        ax.plot([points.mean()] * 2, [i - 0.3, i + 0.3], color="k", linewidth=1.5)
    lines = (
        (ds.attrs["chance"], ":", "chance"),
        (float(ds.intact.mean()), "-", "intact"),
        (ceiling, "--", "ceiling"),
    )
    for x, style, label in lines:
        ax.axvline(x, color="0.45", linewidth=0.9, linestyle=style, label=label, zorder=1)
    ax.set_yticks(range(len(names)), ["no MLP" if name == "mlp" else f"no {name}" for name in names])
    ax.invert_yaxis()
    ax.set_xlim(min(ds.attrs["chance"], float(values.min())) - 0.03, 1.03)
    n = ds.attrs["n_seeds"]
    _figures.finish(
        ax,
        "accuracy",
        "",
        f"n = {n} seed{'s' if n > 1 else ''}, {ds.attrs['n_scored']} answers",
        legend=False,
    )
    ax.legend(
        fontsize=_figures.FONT - 1.5, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.35, -0.2)
    )
    return ax
