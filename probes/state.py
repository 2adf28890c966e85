"""Measure 2: how rank accumulates: the state over tokens, and the sum of the writes in a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from probes import _factors, _figures, rank
from probes._data import TOKEN_DIMS, dataset, rank_attrs
from probes.update import update_factors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SPECTRUM_DIMS = (*TOKEN_DIMS, "component")


@torch.no_grad()
def state_rank(
    model: Any, inputs: Int[Tensor, "B T"], at: Sequence[int] | Tensor | None = None
) -> xr.Dataset:
    """Rank and spectrum of the state S_t after the tokens `at` (default: up to 64, evenly spread over the
    sequence).

    States are replayed from the cached factors at these tokens only. Each token adds a matrix of rank L + 1
    at most and the decayed state keeps its rank or loses some, so rank(S_t) <= min(K, V, (L + 1)(t + 1)) with
    tokens counted from 0.

    Returns numerical, effective, stable, participation (dims layer, sample, token, head), singular_value (and
    component, descending), bound (layer, token). Tolerance (rank.matrix_threshold) and dtype are in attrs.
    """
    at = _factors.positions(at, inputs.shape[1])
    found, bounds = {}, {}
    for f in _factors.layers(model, inputs):
        states = f.states(at)
        sigma = rank.matrix_singular_values(states)
        threshold = rank.matrix_threshold(sigma, f.shape, states.dtype, f.stored)
        found[f.layer] = rank.rank_measures(sigma, threshold) | {"singular_value": sigma}
        terms = f.write_k.shape[-2] + 1
        bounds[f.layer] = [min(*f.shape, terms * (t + 1)) for t in at]
    dims = dict.fromkeys(rank.MEASURES, TOKEN_DIMS) | {"singular_value": _SPECTRUM_DIMS}
    attrs = rank_attrs(rank.MATRIX_TOLERANCE, f.stored)
    ds = dataset(found, dims, {"token": at}, attrs)
    return ds.assign(bound=(("layer", "token"), list(bounds.values())))


@torch.no_grad()
def window_rank(
    model: Any, inputs: Int[Tensor, "B T"], window: int = 8, at: Sequence[int] | Tensor | None = None
) -> xr.Dataset:
    """Rank of sum_{s=t-window+1..t} B_s, the writes of a window before any decay or erase acts on them.

    From the (L + 1) * window factors where these are fewer than the widths, else from the K x V sum itself.
    Windows reach back to the first token at most. Variables and dims as for `state_rank`; bound is min(K, V,
    (L + 1) min(window, t + 1)).
    """
    if window < 1:
        raise ValueError(f"window: expected at least 1 token, got {window}")
    at = _factors.positions(at, inputs.shape[1])
    found, bounds = {}, {}
    for f in _factors.layers(model, inputs):
        left, right, _ = update_factors(f, "write")
        parts = []
        for t in at:
            span = slice(max(0, t - window + 1), t + 1)
            a, b = (
                x[:, span].transpose(1, 2).flatten(2, 3) for x in (left, right)
            )  # [B, HV, window * R, V or K]
            threshold = rank.factor_threshold(a, b, f.stored)
            if a.shape[-2] < min(f.shape):
                sigma = rank.factor_singular_values(a, b)
            else:
                sigma = rank.matrix_singular_values(b.double().mT @ a.double())
            measures = rank.rank_measures(sigma, threshold)
            full = sigma.new_zeros(*sigma.shape[:-1], min(f.shape))
            full[..., : sigma.shape[-1]] = sigma
            parts.append(measures | {"singular_value": full})
        found[f.layer] = {name: torch.stack([p[name] for p in parts], 1) for name in parts[0]}
        terms = f.write_k.shape[-2] + 1
        bounds[f.layer] = [min(*f.shape, terms * min(window, t + 1)) for t in at]
    dims = dict.fromkeys(rank.MEASURES, TOKEN_DIMS) | {"singular_value": _SPECTRUM_DIMS}
    attrs = rank_attrs(rank.FACTOR_TOLERANCE, f.stored) | {"window": window}
    ds = dataset(found, dims, {"token": at}, attrs)
    return ds.assign(bound=(("layer", "token"), list(bounds.values())))


def plot_state_rank(
    ds: xr.Dataset, ax: Axes | None = None, *, measure: str = "numerical", max_layers: int = 4
) -> Axes:
    """Rank over tokens with its bound, a line per layer; medians over sequences and heads, 10-90 % bands.

    Takes what `state_rank` or `window_rank` returns.
    """
    ax = _figures.new_axes(ax)
    for i, layer in enumerate(_figures.pick(ds.layer.values, max_layers)):
        _figures.line_with_band(
            ax, ds.token.values, ds[measure].sel(layer=layer), "token", i, f"layer {layer}"
        )
    _figures.reference(
        ax, ds.bound.max([dim for dim in ds.bound.dims if dim != "token"]).values, "bound", ds.token.values
    )
    _figures.from_zero(ax)
    what = f", sum of {ds.attrs['window']} writes" if "window" in ds.attrs else " of the state"
    return _figures.finish(ax, "token", f"{measure} rank{what}", _figures.count_label(ds, "sample", "head"))


def plot_spectrum(
    ds: xr.Dataset, ax: Axes | None = None, *, layer: int | None = None, max_components: int = 64
) -> Axes:
    """Singular values of the state over tokens as a field: log10(sigma_i / sigma_1), median over sequences
    and heads.
    """

    ax = _figures.new_axes(ax)
    values = ds.singular_value.isel(layer=-1) if layer is None else ds.singular_value.sel(layer=layer)
    shown = int(values.layer)
    values = values.isel(component=slice(max_components))
    top = values.isel(component=0)
    relative = _figures.median(values / top.where(top > 0), "component", "token").transpose(
        "component", "token"
    )
    floor = -8.0
    field = np.log10(np.maximum(relative.values, 10**floor))
    rows = np.arange(1, len(field) + 1)
    style: dict[str, Any] = {
        "vmin": floor,
        "vmax": 0,
        "cmap": "viridis",
        "shading": "nearest",
        "rasterized": True,
    }
    mesh = ax.pcolormesh(ds.token.values, rows, field, **style)
    ax.invert_yaxis()
    bar = ax.figure.colorbar(mesh, ax=ax)
    bar.set_label(r"$\log_{10}\,\sigma_i / \sigma_1$", fontsize=_figures.FONT)
    bar.ax.tick_params(labelsize=_figures.FONT - 1)
    title = f"layer {shown}, {_figures.count_label(ds, 'sample', 'head')}"
    return _figures.finish(ax, "token", "singular value $i$", title, legend=False)
