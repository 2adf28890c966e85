"""Measure 3: what each refinement step removes from v - u, and how orthogonal the steps are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from probes import _factors, _figures
from probes._data import TOKEN_DIMS, dataset, nonzero

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@torch.no_grad()
def residual_decay(model: Any, inputs: Int[Tensor, "B T"]) -> xr.Dataset:
    """|r^l| / |r^1| before each step and after the last, and the share of |v - u| that each step removes.

    r^1 = v - u and r^{l+1} = r^l - delta^l (math: Eq. 14 to 16). removed^l = (|r^l| - |r^{l+1}|) / |r^1|,
    negative where a step makes the residual longer; over the steps it sums to 1 - |r^{L+1}| / |r^1|.

    Returns ratio (dims layer, sample, token, head, step; L + 1 steps from 1), removed (..., refine_step; L
    steps from 1) and initial_norm |r^1|. Where r^1 = 0 both are undefined and NaN, which xarray's reductions
    skip.
    """
    found = {}
    for f in _factors.layers(model, inputs, ["residual"]):
        norm = f.extra["residual"].double().norm(dim=-1)
        ratio = norm / nonzero(norm[..., :1])
        found[f.layer] = {"ratio": ratio, "removed": -ratio.diff(dim=-1), "initial_norm": norm[..., 0]}
    steps = max(r["ratio"].shape[-1] for r in found.values())
    return dataset(
        found,
        {"ratio": (*TOKEN_DIMS, "step"), "removed": (*TOKEN_DIMS, "refine_step"), "initial_norm": TOKEN_DIMS},
        {"step": range(1, steps + 1), "refine_step": range(1, steps)},
        {"definition": "ratio = |r^l| / |r^1|, removed = (|r^l| - |r^{l+1}|) / |r^1|, r^1 = v - u"},
    )


def plot_residual_decay(ds: xr.Dataset, ax: Axes | None = None, *, max_layers: int = 4) -> Axes:
    """|r^l| / |r^1| over the steps, a line per layer; medians over sequences, tokens and heads, 10-90 %
    bands.
    """
    ax = _figures.new_axes(ax)
    for i, layer in enumerate(_figures.pick(ds.layer.values, max_layers)):
        _figures.line_with_band(ax, ds.step.values, ds.ratio.sel(layer=layer), "step", i, f"layer {layer}")
    _figures.reference(ax, 1.0, "nothing removed")
    ax.set_xticks(ds.step.values)
    _figures.from_zero(ax)
    title = _figures.count_label(ds, "sample", "token", "head")
    return _figures.finish(ax, "step $l$", r"$|r^l| \,/\, |r^1|$", title)


@torch.no_grad()
def step_cosines(model: Any, inputs: Int[Tensor, "B T"]) -> xr.Dataset:
    """How orthogonal the steps are: cosines between the deltas and between the keys of one token's steps.

    The paper says in words that the deltas are orthogonal; nothing enforces it. delta has steps 1..L, key has
    0..L, step 0 being the erasing key k (kappa^1 itself in the `paper` preset); `value` is the cosine of v
    with every delta.

    Returns delta (dims layer, sample, token, head, refine_step, other_refine_step), key (..., term,
    other_term) and value (..., refine_step), in [-1, 1]; NaN where a vector is zero.
    """
    found = {}
    for f in _factors.layers(model, inputs, ["delta", "write_k"]):
        delta = _unit(f.extra["delta"])
        keys = _unit(torch.cat([f.key[..., None, :], f.extra["write_k"]], -2))
        found[f.layer] = {
            "delta": delta @ delta.mT,
            "key": keys @ keys.mT,
            "value": (delta @ _unit(f.extra["v"])[..., None]).squeeze(-1),
        }
    L = max(r["value"].shape[-1] for r in found.values())
    return dataset(
        found,
        {
            "delta": (*TOKEN_DIMS, "refine_step", "other_refine_step"),
            "key": (*TOKEN_DIMS, "term", "other_term"),
            "value": (*TOKEN_DIMS, "refine_step"),
        },
        {"refine_step": range(1, L + 1), "other_refine_step": range(1, L + 1)},
        {"definition": "cosine of the angle; term 0 is the base key k, terms 1..L the refinement keys"},
    )


def plot_step_cosines(
    ds: xr.Dataset, ax: Axes | None = None, *, which: str = "delta", layer: int | None = None
) -> Axes:
    """Median |cosine| between the steps of a token as a field; 0 is orthogonal, 1 is the same direction."""
    pairs = {"delta": ("refine_step", "other_refine_step"), "key": ("term", "other_term")}
    if which not in pairs:
        raise ValueError(f"which: expected 'delta' or 'key', got {which!r}")
    ax = _figures.new_axes(ax, height=2.7)
    values = abs(ds[which].isel(layer=-1) if layer is None else ds[which].sel(layer=layer))
    shown = int(values.layer)
    values = _figures.median(values, *pairs[which]).transpose(*pairs[which])
    image = ax.imshow(values.values, vmin=0, vmax=1, cmap="viridis")
    if max(values.shape) <= 6:
        for (i, j), value in np.ndenumerate(values.values):
            ax.text(
                j,
                i,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=6.5,
                color="w" if value < 0.6 else "k",
            )
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.85)
    bar.set_label("median |cosine|", fontsize=_figures.FONT)
    bar.ax.tick_params(labelsize=_figures.FONT - 1)
    labels = ["base" if which == "key" and s == 0 else str(s) for s in ds[pairs[which][0]].values]
    ax.set_xticks(range(len(labels)), labels)
    ax.set_yticks(range(len(labels)), labels)
    title = f"layer {shown}, {_figures.count_label(ds, 'sample', 'token', 'head')}"
    return _figures.finish(ax, f"step ({which}s)", "step", title, legend=False)


def _unit(vectors: Float[Tensor, "*shape D"]) -> Float[Tensor, "*shape D"]:
    return vectors.double() / nonzero(vectors.double().norm(dim=-1, keepdim=True))
