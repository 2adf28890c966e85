"""Measure 7: how an error in the transition or in the write grows with the length of the sequence (Appendix
D).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from probes import _factors, _figures
from probes._data import dataset

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TARGETS = ("transition", "write")
FORMS = {"constant": None, "ln T": np.log, "sqrt T": np.sqrt, "T": lambda t: t, "T^2": np.square}
"""Appendix D speaks of constant, ln T and T; the others keep a curve between or beyond them from being named
after the nearest.
"""


@torch.no_grad()
def perturbation_growth(
    model: Any,
    inputs: Int[Tensor, "B T"],
    *,
    targets: Sequence[str] = TARGETS,
    epsilon: float = 1e-3,
    noise: str = "independent",
    length: int | None = None,
    at: Sequence[int] | Tensor | None = None,
    trials: int = 4,
    persistent: bool = False,
    seed: int = 0,
) -> xr.Dataset:
    """Error of the state when every transition A_t, or every write B_t, carries relative noise of size
    epsilon.

    transition: A_t becomes (I - e_t x_t x_t^T) A_t, e_t = +-epsilon and x_t a random unit vector: an error of
                spectral size epsilon |A_t x_t| that touches nothing else. It is an extra token of the delta
                rule before each token, so one scan over 2T tokens carries it out exactly.
    write:      B_t becomes B_t + epsilon |B_t|_F y_t x_t^T with random unit vectors: an extra write.
    noise "independent" draws signs and directions anew for every token (the average case), "constant" keeps
    one sign and one pair of directions per trial (the worst case: errors add up). persistent=True sets every
    decay to 1, the setting of Appendix D's bounds on memory that does not fade. length > T continues the
    sequence by drawing its tokens' factors again at random (the layer's statistics without running the model
    on 64K tokens). Everything is float64.

    Variables
        error           |S'_t - S_t|_F / epsilon at the tokens `at` (default: powers of 2 and the last; all of
                        fewer than 12); dims layer, target, trial, token, head, with trial = sample x draw
        relative_error  the same over |S_t|_F
        and the fits of `fit_growth` on error, averaged over heads, from sqrt(length) tokens on (the last 4
        positions at least), so that the start from an empty state is not taken for growth.
    """
    unknown = [t for t in targets if t not in TARGETS]
    if unknown or not targets:
        raise ValueError(f"targets: expected some of {', '.join(TARGETS)}, got {list(targets)}")
    if noise not in ("independent", "constant"):
        raise ValueError(f"noise: expected 'independent' or 'constant', got {noise!r}")
    if not epsilon > 0 or trials < 1:
        raise ValueError(f"epsilon and trials: expected above 0, got {epsilon} and {trials}")
    length = inputs.shape[1] if length is None else length
    if length < 4:
        raise ValueError(f"length: expected at least 4 tokens for a fit of two coefficients, got {length}")
    at = _factors.positions([p - 1 for p in _powers(length)] if at is None else at, length)
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for f in _factors.layers(model, inputs):
        wide = _long(f, length, persistent, generator)
        clean = list(wide.replay(at))
        size = torch.stack([s.norm(dim=(-2, -1)) for s in clean], 1)
        errors = []
        for target in targets:
            draws = []
            for _ in range(trials):
                noisy, stride = _perturbed(wide, target, epsilon, noise == "constant", generator)
                states = noisy.replay([stride * p + stride - 1 for p in at])
                pairs = zip(states, clean, strict=True)
                draws.append(torch.stack([(a - b).norm(dim=(-2, -1)) for a, b in pairs], 1) / epsilon)
            errors.append(torch.cat(draws))
        error = torch.stack(errors)  # [target, trial, P, HV]
        found[f.layer] = {"error": error, "relative_error": error / size.repeat(trials, 1, 1)}
    ds = dataset(
        found,
        dict.fromkeys(("error", "relative_error"), ("target", "trial", "token", "head")),
        {"target": list(targets), "token": [p + 1 for p in at]},
        {"epsilon": epsilon, "noise": noise, "persistent": int(persistent), "length": length, "seed": seed},
    )
    settled = max(0, min(int((ds.token < length**0.5).sum()), len(at) - 4))
    return ds.merge(fit_growth(ds.error.mean("head").isel(token=slice(settled, None)), seed=seed))


def fit_growth(error: xr.DataArray, *, draws: int = 200, seed: int = 0) -> xr.Dataset:
    """Least-squares fits a + b g(T) of an error curve with g = nothing, ln T, sqrt T, T and T^2.

    error: dims trial, token (the coordinate holds T) and any others. Fits are to the mean over trials;
    intervals are the 2.5th and 97.5th percentiles over bootstrap draws of trials. Curves are divided by their
    own mean first, so that a, b and rmse are in units of the mean error and comparable.

    Returns fit_intercept, fit_slope, fit_rmse (dims ..., form), fit_slope_interval (..., form, edge), fit_bic
    (lower is better) and fit_best (...): the growing form with the lowest BIC where that is more than 6 below
    the constant's (strong evidence, Kass & Raftery 1995) and its slope's interval lies above 0, else
    "constant".
    """
    t = error.token.values.astype(float)
    if len(t) < 4:
        raise ValueError(f"at: expected at least 4 positions for a fit of two coefficients, got {len(t)}")
    others = [d for d in error.dims if d not in ("trial", "token")]
    values = error.transpose(*others, "trial", "token").values
    rng = np.random.default_rng(seed)
    picks = rng.integers(values.shape[-2], size=(draws, values.shape[-2]))
    curves = np.concatenate(
        [values.mean(-2)[..., None, :], values[..., picks, :].mean(-2)], -2
    )  # [..., 1 + draws, T]
    curves = curves / np.maximum(curves.mean(-1, keepdims=True), np.finfo(float).tiny)
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in ("intercept", "slope", "low", "high", "rmse", "bic")
    }
    for form in FORMS.values():
        design = np.ones((len(t), 1)) if form is None else np.stack([np.ones_like(t), form(t)], -1)
        solution = curves @ np.linalg.pinv(design).T
        slope = solution[..., 1] if form is not None else np.zeros(solution.shape[:-1])
        square = ((curves[..., 0, :] - solution[..., 0, :] @ design.T) ** 2).mean(-1)
        low, high = np.quantile(slope[..., 1:], [0.025, 0.975], axis=-1)
        rows = (solution[..., 0, 0], slope[..., 0], low, high, np.sqrt(square))
        for name, row in zip(columns, rows, strict=False):
            columns[name].append(row)
        columns["bic"].append(len(t) * np.log(np.maximum(square, 1e-30)) + design.shape[1] * np.log(len(t)))
    stack = {name: np.stack(rows, -1) for name, rows in columns.items()}
    dims = (*others, "form")
    winner = stack["bic"].argmin(-1)[..., None]
    better = np.take_along_axis(stack["bic"], winner, -1) < stack["bic"][..., :1] - 6
    grows = np.take_along_axis(stack["low"], winner, -1) > 0
    best = np.array(list(FORMS))[np.where(better & grows, winner, 0)[..., 0]]
    return xr.Dataset(
        {"fit_best": (others, best)}
        | {f"fit_{name}": (dims, stack[name]) for name in ("intercept", "slope", "rmse", "bic")}
        | {"fit_slope_interval": ((*dims, "edge"), np.stack([stack["low"], stack["high"]], -1))},
        coords={"form": list(FORMS), "edge": ["low", "high"]} | {d: error[d].values for d in others},
    )


def plot_perturbation_growth(ds: xr.Dataset, ax: Axes | None = None, *, layer: int | None = None) -> Axes:
    """Error over T on logarithmic axes, a line per target; the legend names the growth that describes it
    best.
    """
    ax = _figures.new_axes(ax)
    ds = ds.isel(layer=-1) if layer is None else ds.sel(layer=layer)
    t = ds.token.values.astype(float)
    for i, target in enumerate(ds.target.values):
        one = ds.sel(target=target)
        _figures.line_with_band(
            ax, t, one.error.mean("head"), "token", i, f"in {target}: {_most(one.fit_best)}"
        )
    shape = _figures.median(ds.error, "token")
    middle = float(np.exp(np.log(np.maximum(shape.values, 1e-30)).mean()))
    for power, style, name in (
        (1.0, ":", "slope of $T$"),
        (0.5, "-.", r"slope of $\\sqrt{T}$".replace("\\\\", "\\")),
    ):
        guide = middle * (t / np.exp(np.log(t).mean())) ** power
        ax.plot(t, guide, color="0.6", linewidth=0.8, linestyle=style, label=name, zorder=1)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    title = f"layer {int(ds.layer)}, {_figures.count_label(ds, 'trial', 'head')}"
    _figures.finish(ax, "tokens $T$", r"$|S'_T - S_T|_F \,/\, \varepsilon$", title, legend=False)
    kind = f"{ds.attrs['noise']} noise" + (", no decay" if ds.attrs["persistent"] else "")
    ax.legend(title=kind, fontsize=_figures.FONT - 1.5, title_fontsize=_figures.FONT - 1.5, frameon=False)
    return ax


def _most(names: xr.DataArray) -> str:
    """The name that most seeds agree on, with their share where they differ."""
    found, counts = np.unique(names.values, return_counts=True)
    best = str(found[counts.argmax()])
    return best if len(found) == 1 else f"{best} ({counts.max()} of {counts.sum()} seeds)"


def _powers(length: int) -> list[int]:
    if length < 12:
        return list(range(1, length + 1))  # fewer than 4 powers of 2
    return sorted({2**i for i in range(1, length.bit_length()) if 2**i <= length} | {length})


def _long(f: _factors.Factors, length: int, persistent: bool, generator: torch.Generator) -> _factors.Factors:
    T = f.k.shape[1]
    extra = torch.randint(T, (max(0, length - T),), generator=generator)
    index = torch.cat([torch.arange(min(T, length)), extra]).to(f.k.device)
    wide: dict[str, Any] = {name: getattr(f, name)[:, index].double() for name in _factors.SCAN_INPUTS}
    if persistent:
        wide["log_decay"] = torch.zeros_like(wide["log_decay"])
    return replace(f, **wide, extra={})


def _perturbed(
    f: _factors.Factors, target: str, epsilon: float, constant: bool, generator: torch.Generator
) -> tuple[_factors.Factors, int]:
    """The noisy factors and how many of their tokens stand for one of the original."""
    B, T, HV, V = f.v.shape
    K = f.k.shape[-1]
    draw = 1 if constant else T
    x = _directions((B, draw, HV, K), generator).to(f.k).expand(-1, T, -1, -1)
    if target == "write":
        left = torch.cat([(f.beta[..., None] * f.v)[..., None, :], f.write_v], -2)
        right = torch.cat([f.key[..., None, :], f.write_k], -2)
        size = ((left @ left.mT) * (right @ right.mT)).sum((-2, -1)).clamp_min(0).sqrt()
        y = _directions((B, draw, HV, V), generator).to(f.k).expand(-1, T, -1, -1)
        more_k, more_v = x[..., None, :], (epsilon * size[..., None] * y)[..., None, :]
        return replace(
            f, write_k=torch.cat([f.write_k, more_k], -2), write_v=torch.cat([f.write_v, more_v], -2)
        ), 1
    sign = (2 * torch.randint(2, (B, draw, HV), generator=generator) - 1).to(f.beta).expand(-1, T, -1)
    zeros = {name: torch.zeros_like(getattr(f, name)) for name in ("v", "log_decay", "write_k", "write_v")}
    noise = zeros | {"k": x, "beta": epsilon * sign}
    own = {name: getattr(f, name) for name in noise} | {"k": f.key}
    doubled: dict[str, Any] = {name: torch.stack([noise[name], own[name]], 2).flatten(1, 2) for name in noise}
    return replace(f, **doubled), 2


def _directions(shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, ...]:
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x / x.norm(dim=-1, keepdim=True)
