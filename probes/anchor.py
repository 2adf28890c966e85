"""Measure 4: does the anchor stand for the state? The anchor u_t against the true read, and how far back a
read reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
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

READS = ("decayed", "previous")
_DIRECTIONS = ("anchor_to_read", "read_to_anchor")


@torch.no_grad()
def anchor_fidelity(model: Any, inputs: Int[Tensor, "B T"]) -> xr.Dataset:
    """The anchor u_t against the true reads Sbar_t k_t ("decayed") and S_{t-1} k_t ("previous"), same space,
    same token.

    Variables
        cosine          dims layer, read, sample, token, head
        relative_error  |u - read| / |read|, the same dims
        r2              dims layer, read, direction, head: variance explained by the best affine map (least
                        squares with a relative ridge of 1e-8), fitted on the even sequences and scored on the
                        odd ones, so that width cannot pass for fidelity; 1 - SSE / SST over all components
                        together
        baseline_r2     the same for the map from (or to) the value v_t in the anchor's place: what the token
                        alone says
    NaN where a read or an anchor is zero (the first token reads an empty state). The kernel width is in
    attrs.

    Raises ValueError for a model without anchors or for fewer than 2 sequences.
    """
    _need_two(inputs)
    found = {}
    for f in _factors.layers(model, inputs, ["anchor"]):
        u = f.extra["anchor"].double()
        previous = f.read_before().double()
        reads = {"decayed": f.log_decay.double().exp()[..., None] * previous, "previous": previous}
        parts = []
        for name in READS:
            read = reads[name]
            size = nonzero(read.norm(dim=-1))
            parts.append(
                {
                    "cosine": (u * read).sum(-1) / (nonzero(u.norm(dim=-1)) * size),
                    "relative_error": (u - read).norm(dim=-1) / size,
                    "r2": torch.stack([linear_r2(u, read), linear_r2(read, u)]),
                    "baseline_r2": torch.stack(
                        [linear_r2(f.extra["v"], read), linear_r2(read, f.extra["v"])]
                    ),
                }
            )
        found[f.layer] = {name: torch.stack([p[name] for p in parts]) for name in parts[0]}
    token, share = ("read", *TOKEN_DIMS), ("read", "direction", "head")
    config = model.config
    return dataset(
        found,
        {"cosine": token, "relative_error": token, "r2": share, "baseline_r2": share},
        {"read": list(READS), "direction": list(_DIRECTIONS)},
        {"anchor": config.anchor, "anchor_width": config.anchor_width if config.anchor == "shortconv" else 1},
    )


def linear_r2(x: Float[Tensor, "B T H D"], y: Float[Tensor, "B T H E"]) -> Float[Tensor, " H"]:
    """Held-out R^2, per head, of the best affine map from x to y: fitted on even sequences, scored on odd
    ones.
    """
    x, y = (z.double().movedim(2, 0) for z in (x, y))
    fit_x, fit_y, test_x, test_y = (z[:, half::2].flatten(1, 2) for half in (0, 1) for z in (x, y))
    mean_x, mean_y = fit_x.mean(1, keepdim=True), fit_y.mean(1, keepdim=True)
    centred = fit_x - mean_x
    gram = centred.mT @ centred
    ridge = 1e-8 * gram.diagonal(dim1=-2, dim2=-1).mean(-1) + torch.finfo(gram.dtype).tiny
    gram = gram + ridge[:, None, None] * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    weight = torch.linalg.lstsq(gram, centred.mT @ (fit_y - mean_y)).solution
    error = test_y - mean_y - (test_x - mean_x) @ weight
    spread = test_y - test_y.mean(1, keepdim=True)
    return 1 - error.square().sum((1, 2)) / nonzero(spread.square().sum((1, 2)))


@torch.no_grad()
def anchor_horizon(
    model: Any,
    inputs: Int[Tensor, "B T"],
    widths: Sequence[int] | None = None,
    at: Sequence[int] | Tensor | None = None,
) -> xr.Dataset:
    """How much of the true read S_{t-1} k_t comes from further back than n tokens: what no anchor of width n
    can see.

    error(n) = |S_{t-1} k_t - S^(n)_{t-1} k_t| / |S_{t-1} k_t| with S^(n) built from an empty state by tokens
    t-n .. t-1 alone. What is missing is S_{t-n-1} A_{t-n} ... A_{t-1} k_t, so (Appendix E's argument with
    this model's numbers)

        bound(n) = |S_{t-n-1}|_F prod_{s=t-n}^{t-1} |A_s|_2 |k_t| / |S_{t-1} k_t|,
        |A_s|_2 = alpha_s max(1, |1 - beta_s |k_s|^2|),

    which falls exponentially in n where memory fades (alpha < 1). Defaults: powers of 2 up to 32
    and to half the sequence; up to 16 tokens beyond the
    largest width.

    Returns error and bound, dims layer, sample, token, head, width; NaN where a read is zero.
    """
    tokens = inputs.shape[1]
    if tokens < 2:
        raise ValueError(f"inputs: expected at least 2 tokens (a read needs a past), got {tokens}")
    widths = [n for n in (1, 2, 4, 8, 16, 32) if n <= tokens // 2] if widths is None else widths
    widths = sorted({int(n) for n in widths})
    if not widths or widths[0] < 1 or widths[-1] >= tokens:
        raise ValueError(f"widths: expected widths in 1..{tokens - 1} (T - 1), got {widths}")
    if at is None:
        at = [widths[-1] + p for p in _factors.positions(None, tokens - widths[-1], 16)]
    at = _factors.positions(at, tokens)
    if at[0] < widths[-1]:
        raise ValueError(f"at: expected positions from {widths[-1]} (the largest width) on, got {at[0]}")
    found = {}
    for f in _factors.layers(model, inputs):
        read = f.read_before()[:, at].double()
        size = nonzero(read.norm(dim=-1))
        log_norm = _log_transition_norm(f).cumsum(1)
        key = f.key[:, at].double()
        needed = sorted({t - n - 1 for t in at for n in widths if t > n})
        state_norm = dict(zip(needed, (s.double().norm(dim=(-2, -1)) for s in f.replay(needed)), strict=True))
        error, bound = [], []
        for n in widths:
            near = torch.stack([_read_of_window(f, t, n) for t in at], 1).double()
            error.append((read - near).norm(dim=-1) / size)
            empty = torch.zeros_like(size[:, 0])
            start = torch.stack([state_norm.get(t - n - 1, empty) for t in at], 1)
            spans = [log_norm[:, t - 1] - (log_norm[:, t - n - 1] if t > n else 0) for t in at]
            bound.append(start * torch.stack(spans, 1).exp() * key.norm(dim=-1) / size)
        found[f.layer] = {"error": torch.stack(error, -1), "bound": torch.stack(bound, -1)}
    config = model.config
    width = config.anchor_width if config.n_refine and config.anchor == "shortconv" else 1
    return dataset(
        found,
        dict.fromkeys(("error", "bound"), (*TOKEN_DIMS, "width")),
        {"token": at, "width": widths},
        {"anchor_width": width},
    )


def anchor_by_width(models: Sequence[Any], inputs: Int[Tensor, "B T"]) -> xr.Dataset:
    """Anchors of different kernel widths against what their width allows, from models trained with those
    widths.

    Variables, dims layer, anchor_width
        anchor   sqrt(1 - R^2) of the best affine map from the anchor to S_{t-1} k_t (mean R^2 over heads, 0
                 at least): the relative error that is left when scale and rotation are forgiven
        window   median error(n) of `anchor_horizon` at n = the width: the error of the exact read of that
                 window
        bound    the median of its bound, which falls exponentially with the width (Appendix E)
    An anchor may lie below `window`, never by right: what lies further back can be predictable from the
    window.

    Raises ValueError for fewer than 2 models, equal widths, or models of different depth.
    """
    found: dict[int, xr.Dataset] = {}
    for model in models:
        fidelity = anchor_fidelity(model, inputs)
        width = int(fidelity.attrs["anchor_width"])
        if width in found:
            raise ValueError(f"models: expected anchors of different widths, got two of width {width}")
        r2 = fidelity.r2.sel(read="previous", direction="anchor_to_read", drop=True).mean("head")
        horizon = anchor_horizon(model, inputs, widths=[width]).isel(width=0, drop=True)
        found[width] = xr.Dataset(
            {
                "anchor": np.sqrt(1 - r2.clip(0, 1)),
                "window": horizon.error.median(TOKEN_DIMS),
                "bound": horizon.bound.median(TOKEN_DIMS),
            }
        )
    depths = {ds.sizes["layer"] for ds in found.values()}
    if len(found) < 2 or len(depths) > 1:
        raise ValueError(
            f"models: expected at least 2 of one depth, got {len(found)} of depths {sorted(depths)}"
        )
    widths = sorted(found)
    joined = xr.concat([found[w] for w in widths], xr.Variable("anchor_width", widths))
    return joined.assign_attrs(n_sequences=inputs.shape[0])


def plot_anchor_by_width(ds: xr.Dataset, ax: Axes | None = None, *, layer: int | None = None) -> Axes:
    """Error of the anchor, of the exact window and the exponential bound over the kernel's width, for one
    layer.
    """
    ax = _figures.new_axes(ax)
    ds = ds.isel(layer=-1) if layer is None else ds.sel(layer=layer)
    widths = ds.anchor_width.values
    ax.plot(widths, ds.anchor, label=r"anchor, $\sqrt{1-R^2}$", **_figures.look(0))
    ax.plot(widths, ds.window, label="exact read of the window", **_figures.look(1))
    _figures.reference(ax, ds.bound.values, "bound", widths)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    title = f"layer {int(ds.layer)}, n = {ds.attrs['n_sequences']} sequences"
    return _figures.finish(ax, "anchor's kernel width [tokens]", "relative error", title)


def plot_anchor_fidelity(
    ds: xr.Dataset, ax: Axes | None = None, *, read: str = "decayed", max_layers: int = 4
) -> Axes:
    """Cosine between anchor and true read over tokens, a line per layer, R^2 of the affine map in the legend.

    Medians over sequences and heads, 10-90 % bands.
    """
    ax = _figures.new_axes(ax)
    for i, layer in enumerate(_figures.pick(ds.layer.values, max_layers)):
        values = ds.cosine.sel(layer=layer, read=read)
        r2 = float(ds.r2.sel(layer=layer, read=read, direction="anchor_to_read").mean())
        label = f"layer {layer}, $R^2$ = {r2:.2f}"
        _figures.line_with_band(ax, ds.token.values, values, "token", i, label)
    _figures.reference(ax, 1.0, "anchor = read")
    ax.axhline(0, color="0.8", linewidth=0.6, zorder=0)
    ax.set_ylim(-1.05, 1.1)
    name = {"decayed": r"$\bar S_t k_t$", "previous": r"$S_{t-1} k_t$"}[read]
    return _figures.finish(
        ax, "token", f"cosine of $u_t$ and {name}", _figures.count_label(ds, "sample", "head")
    )


def plot_anchor_horizon(ds: xr.Dataset, ax: Axes | None = None, *, max_layers: int = 3) -> Axes:
    """Share of the read that lies further back than n tokens, with its exponential bound (thin) and the
    kernel's width.
    """
    ax = _figures.new_axes(ax)
    for i, layer in enumerate(_figures.pick(ds.layer.values, max_layers)):
        _figures.line_with_band(ax, ds.width.values, ds.error.sel(layer=layer), "width", i, f"layer {layer}")
        bound = _figures.median(ds.bound.sel(layer=layer), "width")
        _figures.reference(ax, bound.values, "_bound", ds.width.values, _figures.COLOURS[i])
    ax.plot([], [], color="0.35", linewidth=0.9, linestyle=(0, (4, 2)), label="bound")
    ax.axvline(ds.attrs["anchor_width"], color="0.7", linewidth=0.9, linestyle=":", label="anchor's width")
    ax.set_xscale("log", base=2)
    ax.set_yscale("symlog", linthresh=1e-3)
    _figures.from_zero(ax)
    title = _figures.count_label(ds, "sample", "token", "head")
    return _figures.finish(ax, "window $n$ [tokens]", "error of the read from $n$ tokens", title)


def _log_transition_norm(f: _factors.Factors) -> Float[Tensor, "B T HV"]:
    along = (1 - f.beta * f.key.square().sum(-1)).abs()
    return f.log_decay.double() + along.double().clamp_min(1.0).log()


def _read_of_window(f: _factors.Factors, t: int, n: int) -> Float[Tensor, "B HV V"]:
    part = f.slice(t - n, t)
    return part.scan(f.k[:, t : t + 1].expand_as(part.k))[0][:, -1]


def _need_two(inputs: Tensor) -> None:
    if inputs.ndim != 2 or inputs.shape[0] < 2:
        raise ValueError(
            f"inputs: expected [B, T] with B >= 2 (one half fits, one scores), got {list(inputs.shape)}"
        )
