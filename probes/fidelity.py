"""Measure 5: are the predicted gains the derivative they are said to simulate, and are the writes those of a
solver?
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from prism.refinement import ACTIVATIONS
from probes import _factors, _figures
from probes._data import TOKEN_DIMS, dataset, nonzero
from probes.update import update_factors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REFERENCES = ("serial", "gradient")
WRITES = ("refinement", "update")


def activation_slope(name: str, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """phi'(x) by automatic differentiation of the activation that the model itself uses."""
    with torch.enable_grad():
        at = x.detach().clone().requires_grad_()
        return torch.autograd.grad(ACTIVATIONS[name](at).sum(), at)[0]


@torch.no_grad()
def gain_fidelity(model: Any, inputs: Int[Tensor, "B T"]) -> xr.Dataset:
    """The predicted gain p_t^l against phi'(S_{t-1} k_t), the derivative that it is said to simulate (math:
    Eq. 13).

    Variables
        cosine            cosine over the V components; dims layer, sample, token, head, refine_step
        relative_error    |p - phi'| / |phi'|, the same dims
        correlation       Pearson's, over all components, tokens and sequences; layer, head, refine_step
        baseline_cosine   cosine of phi' with a constant vector: what no prediction at all scores (phi' is
                          near 1/2 wherever the read is small, so this is high); layer, sample, token, head

    Raises ValueError where the gain is not learned.
    """
    found = {}
    for f in _factors.layers(model, inputs, ["gain"]):
        gain = f.extra["gain"].double()
        slope = activation_slope(model.config.activation, f.read_before().double())
        each = slope[..., None, :].expand_as(gain)
        size, ones = nonzero(slope.norm(dim=-1)), slope.shape[-1] ** 0.5
        centred = [x - x.mean((0, 1, 4), keepdim=True) for x in (gain, each)]
        covariance, *variances = (
            (a * b).sum((0, 1, 4)) for a, b in (centred, centred[:1] * 2, centred[1:] * 2)
        )
        found[f.layer] = {
            "cosine": (gain * each).sum(-1) / (nonzero(gain.norm(dim=-1)) * size[..., None]),
            "relative_error": (gain - each).norm(dim=-1) / size[..., None],
            "correlation": covariance / nonzero((variances[0] * variances[1]).sqrt()),
            "baseline_cosine": slope.sum(-1) / (size * ones),
        }
    steps = max(r["cosine"].shape[-1] for r in found.values())
    return dataset(
        found,
        {
            "cosine": (*TOKEN_DIMS, "refine_step"),
            "relative_error": (*TOKEN_DIMS, "refine_step"),
            "correlation": ("head", "refine_step"),
            "baseline_cosine": TOKEN_DIMS,
        },
        {"refine_step": range(1, steps + 1)},
        {"activation": model.config.activation},
    )


@torch.no_grad()
def solver_fidelity(model: Any, inputs: Int[Tensor, "B T"]) -> xr.Dataset:
    """What the model writes against what a solver that reads the state would write, at the same state, token
    and weights.

    write "refinement" is sum_l w^l kappa^l^T alone, "update" the whole S_t - alpha_t S_{t-1}. Each is
    compared, as a matrix and from factors, with two references:
        serial     the same with the true read Sbar_t k_t in the anchor's place ("state" anchor, same weights)
        gradient   the step of the ideal non-linear rule, -d/dS |v - phi(S k)|^2 / 2 = (phi'(x) * (v -
                   phi(x))) k^T at x = Sbar_t k_t, to which only the direction is compared: its step size is
                   free
    The model's own states are used throughout, so that errors do not accumulate and each token stands alone.

    Variables (dims layer, write, reference, sample, token, head): cosine (Frobenius), and relative_error
    |W - c W_ref|_F / |W|_F with c = 1 for serial and the best c for gradient, for which it equals sin of the
    angle. NaN where a matrix is zero. A model with the "state" anchor scores 1 and 0 against serial: the
    yardstick.
    """
    found = {}
    for f in _factors.layers(model, inputs, ["write_k", "write_v", "anchor"]):
        alpha = f.log_decay.exp()[..., None]
        read = alpha * f.read_before()
        serial, serial_update = _serial(model.blocks[f.layer].mixer, f, read, alpha)
        x = read.double()
        phi = ACTIVATIONS[model.config.activation]
        slope = activation_slope(model.config.activation, x)
        gradient = ((slope * (f.extra["v"].double() - phi(x)))[..., None, :], f.key[..., None, :])
        mine = (f.extra["write_v"], f.extra["write_k"])
        my_update = update_factors(f, "update")[:2]
        cosines, errors = [], []
        for own_write, solver in ((mine, serial), (my_update, serial_update)):
            own = _inner(own_write, own_write)
            for name, reference in (("serial", solver), ("gradient", gradient)):
                cross, other = _inner(own_write, reference), _inner(reference, reference)
                cosine = (cross / nonzero((own * other).sqrt())).clamp(-1, 1)
                difference = (own - 2 * cross + other).clamp_min(0) / nonzero(own)
                cosines.append(cosine)
                errors.append((difference if name == "serial" else 1 - cosine.square()).sqrt())
        shape = (len(WRITES), len(REFERENCES))
        found[f.layer] = {
            "cosine": torch.stack(cosines).unflatten(0, shape),
            "relative_error": torch.stack(errors).unflatten(0, shape),
        }
    dims = ("write", "reference", *TOKEN_DIMS)
    return dataset(
        found,
        {"cosine": dims, "relative_error": dims},
        {"write": list(WRITES), "reference": list(REFERENCES)},
        {"anchor": model.config.anchor, "activation": model.config.activation},
    )


def plot_gain_fidelity(ds: xr.Dataset, ax: Axes | None = None, *, layer: int | None = None) -> Axes:
    """Cosine of p^l and phi' over tokens, a line per step, against what a constant gain would score."""
    ax = _figures.new_axes(ax)
    ds = ds.isel(layer=-1) if layer is None else ds.sel(layer=layer)
    for i, step in enumerate(_figures.pick(ds.refine_step.values, 4)):
        r = float(ds.correlation.sel(refine_step=step).mean())
        label = f"$p^{{{step}}}$, correlation {r:.2f}"
        _figures.line_with_band(ax, ds.token.values, ds.cosine.sel(refine_step=step), "token", i, label)
    constant = _figures.median(ds.baseline_cosine, "token")
    _figures.reference(ax, constant.values, "constant gain", ds.token.values)
    ax.axhline(0, color="0.8", linewidth=0.6, zorder=0)
    ax.set_ylim(-1.05, 1.1)
    title = f"layer {int(ds.layer)}, {_figures.count_label(ds, 'sample', 'head')}"
    return _figures.finish(
        ax, "token", r"cosine of $p^l$ and $\\phi'(S_{t-1}k_t)$".replace("\\\\", "\\"), title
    )


def plot_solver_fidelity(ds: xr.Dataset, ax: Axes | None = None, *, write: str = "refinement") -> Axes:
    """Cosine between the model's write and each solver's over tokens: a colour per layer (at most 3), dashed:
    gradient.
    """
    ax = _figures.new_axes(ax)
    i = 0
    for reference in ds.reference.values:
        for layer in _figures.pick(ds.layer.values, 3):
            values = ds.cosine.sel(layer=layer, reference=reference, write=write)
            _figures.line_with_band(ax, ds.token.values, values, "token", i, f"{reference}, layer {layer}")
            i += 1
    _figures.reference(ax, 1.0, "the solver's own write")
    ax.axhline(0, color="0.8", linewidth=0.6, zorder=0)
    ax.set_ylim(-1.05, 1.1)
    title = _figures.count_label(ds, "sample", "head")
    return _figures.finish(ax, "token", f"cosine of {write} and solver", title)


def _serial(
    mixer: Any, f: _factors.Factors, read: Float[Tensor, "B T HV V"], alpha: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(left, right) of the refinement's writes and of the whole update with the true read as the anchor."""
    weights = next(mixer.parameters()).dtype
    v, k, beta = f.extra["v"].to(weights), f.extra.get("k"), f.extra.get("beta")
    k, beta = (None if x is None else x.to(weights) for x in (k, beta))
    refined = mixer.refine(read.to(weights), v, k)
    key, value, gate, write_k, write_v = mixer._assemble(k, v, beta, refined)
    serial = replace(
        f, k=key.to(f.k), v=value.to(f.v), beta=gate.to(f.beta), write_k=write_k, write_v=write_v
    )
    held = alpha * f.read_before(serial.key)
    left = torch.cat([(serial.beta[..., None] * (serial.v - held))[..., None, :], write_v.to(f.v)], -2)
    right = torch.cat([serial.key[..., None, :], write_k.to(f.k)], -2)
    return (refined.write_v, refined.write_k), (left, right)


def _inner(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Float[Tensor, "B T HV"]:
    """Frobenius product of sum_r left_r right_r^T and another such sum, from their factors."""
    (left, right), (other_left, other_right) = ([x.double() for x in pair] for pair in (a, b))
    return ((left @ other_left.mT) * (right @ other_right.mT)).sum((-2, -1))
