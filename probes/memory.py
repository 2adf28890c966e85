"""Measure 6: forgetting: eigenvalues of the transition, half-lives, and how long a written pair can be read
back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from probes import _factors, _figures
from probes._data import TOKEN_DIMS, dataset, nonzero
from probes.update import update_factors

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@torch.no_grad()
def transition(model: Any, inputs: Int[Tensor, "B T"]) -> xr.Dataset:
    """Eigenvalues of A_t = alpha_t (I - beta_t k_t k_t^T) and the half-lives that follow.

    Variables
        decay              alpha_t, the eigenvalue off the key (K - 1 times); dims layer, sample, token, head
        along_key          alpha_t (1 - beta_t |k_t|^2), the eigenvalue along the key; below 0 where a write
                           flips a sign
        half_life          ln 2 / -mean_t(ln alpha_t): tokens until content that no key meets has halved;
                           layer, sample, head
        half_life_erased   the same for content in a random direction, erase included: ln 2 over minus half
                           the mean of ln E|A_t x|^2 = ln(alpha_t^2 (K - 1 + (1 - beta_t |k_t|^2)^2) / K)
    A half-life is inf where nothing fades; it is negative where content grows (raw ranges).
    """
    found = {}
    for f in _factors.layers(model, inputs):
        g = f.log_decay.double()
        along = 1 - f.beta.double() * f.key.double().square().sum(-1)
        K = f.k.shape[-1]
        spread = g + 0.5 * ((K - 1 + along.square()) / K).log()
        found[f.layer] = {
            "decay": g.exp(),
            "along_key": g.exp() * along,
            "half_life": math.log(2) / -g.mean(1),
            "half_life_erased": math.log(2) / -spread.mean(1),
        }
    per_head = ("sample", "head")
    return dataset(
        found,
        {"decay": TOKEN_DIMS, "along_key": TOKEN_DIMS, "half_life": per_head, "half_life_erased": per_head},
        attrs={"unit_half_life": "tokens"},
    )


@torch.no_grad()
def readback(
    model: Any,
    inputs: Int[Tensor, "B T"],
    at: Sequence[int] | Tensor | None = None,
    horizon: int | None = None,
) -> xr.Dataset:
    """How long what one token wrote can be read back with its own key while later tokens decay and erase it.

    D_0 = S_s - alpha_s S_{s-1} is the update of token s, D_n = D_0 A_{s+1} ... A_{s+n} what is left of it n
    tokens on.

        kept(n)      = <D_n k_s, D_0 k_s> / |D_0 k_s|^2        1 when written, 0 when gone
        recalled(n)  = cosine(S_{s+n} k_s, S_s k_s): does the full state, with all that was written since,
                     still
                       give the answer that it gave right after the write?
        lifetime     = the first n with kept(n) < 1/2 (inf: not within the horizon)

    Defaults: half the sequence, 64 tokens at most; up to 8 positions that leave the horizon room. Returns
    kept, recalled (dims layer, sample, token, head, distance; distance 0..horizon) and lifetime (layer,
    sample, token, head); NaN where D_0 k_s = 0. Forms K x V matrices for the positions `at` only.
    """
    tokens = inputs.shape[1]
    if tokens < 2:
        raise ValueError(f"inputs: expected at least 2 tokens (one to write, one to read back), got {tokens}")
    horizon = min(64, tokens // 2) if horizon is None else horizon
    if not 1 <= horizon < tokens:
        raise ValueError(f"horizon: expected 1..{tokens - 1} (T - 1), got {horizon}")
    at = _factors.positions(None, tokens - horizon, 8) if at is None else _factors.positions(at, tokens)
    if at[-1] + horizon >= tokens:
        raise ValueError(
            f"at: expected positions up to {tokens - 1 - horizon} (T - 1 - horizon), got {at[-1]}"
        )
    found = {}
    for f in _factors.layers(model, inputs):
        left, right, _ = update_factors(f, "update")
        kept, recalled = [], []
        for s, state in zip(at, f.replay(at), strict=True):
            written = (right[:, s].to(left).mT @ left[:, s]).to(state)  # [B, HV, K, V]
            later = f.slice(s + 1, s + 1 + horizon)
            key = f.key[:, s]
            query = f.k[:, s : s + 1].expand_as(later.k)
            alone = later.scan(query, written, v=torch.zeros_like(later.v), write_k=None, write_v=None)[0]
            whole = later.scan(query, state)[0]
            first = torch.einsum("bhkv,bhk->bhv", written, key)[:, None]
            answer = torch.einsum("bhkv,bhk->bhv", state, key)[:, None]
            alone, whole = torch.cat([first, alone], 1).double(), torch.cat([answer, whole], 1).double()
            power = first.double().square().sum(-1)
            kept.append((alone * first).sum(-1) / nonzero(power))
            sizes = whole.norm(dim=-1) * answer.double().norm(dim=-1)
            recalled.append((whole * answer).sum(-1) / nonzero(sizes))
        left_over = torch.stack(kept, 1).permute(0, 1, 3, 2)  # [B, P, HV, horizon + 1]
        below = left_over < 0.5
        lifetime = torch.where(below.any(-1), below.double().argmax(-1).double(), torch.inf)
        found[f.layer] = {
            "kept": left_over,
            "recalled": torch.stack(recalled, 1).permute(0, 1, 3, 2),
            "lifetime": torch.where(left_over[..., 0].isnan(), torch.nan, lifetime),
        }
    dims = dict.fromkeys(("kept", "recalled"), (*TOKEN_DIMS, "distance")) | {"lifetime": TOKEN_DIMS}
    return dataset(found, dims, {"token": at}, {"horizon": horizon, "unit_lifetime": "tokens"})


def plot_transition(ds: xr.Dataset, ax: Axes | None = None, *, max_layers: int = 4) -> Axes:
    """Distribution functions of both eigenvalues of A_t over all tokens: solid alpha_t, dashed along the
    key.
    """
    ax = _figures.new_axes(ax, height=2.8)
    for i, layer in enumerate(_figures.pick(ds.layer.values, max_layers)):
        life = float(ds.half_life.sel(layer=layer).median())
        text = f"layer {layer}, half-life {_figures.number(life)}"
        for name, style, label in (("decay", "-", text), ("along_key", "--", "_")):
            values = np.sort(ds[name].sel(layer=layer).values.ravel())
            share = np.linspace(0, 1, len(values))
            keep = _figures.pick(np.arange(len(values)), 400)
            look = _figures.look(i) | {"linestyle": style, "markevery": max(1, len(keep) // 6)}
            ax.plot(values[keep], share[keep], label=label, **look)
    ax.plot([], [], color="0.3", linewidth=1.1, label=r"$\alpha_t$")
    ax.plot([], [], color="0.3", linewidth=1.1, linestyle="--", label=r"$\alpha_t(1-\beta_t|k_t|^2)$")
    ax.axvline(0, color="0.8", linewidth=0.6, zorder=0)
    ax.set_ylim(0, 1.02)
    title = _figures.count_label(ds, "sample", "token", "head")
    _figures.finish(ax, "eigenvalue of $A_t$", "share of tokens below", title, legend=False)
    _figures.legend_below(ax, 2)
    return ax


def plot_readback(ds: xr.Dataset, ax: Axes | None = None, *, max_layers: int = 4) -> Axes:
    """kept(n) over the distance, a line per layer; medians over sequences, positions and heads, 10-90 %
    bands.
    """
    ax = _figures.new_axes(ax)
    for i, layer in enumerate(_figures.pick(ds.layer.values, max_layers)):
        life = float(ds.lifetime.sel(layer=layer).median())
        text = f"layer {layer}, lifetime " + (
            f"{life:.3g}" if np.isfinite(life) else f"> {ds.attrs['horizon']}"
        )
        _figures.line_with_band(ax, ds.distance.values, ds.kept.sel(layer=layer), "distance", i, text)
    _figures.reference(ax, 0.5, "half of it left")
    title = _figures.count_label(ds, "sample", "token", "head")
    return _figures.finish(ax, "tokens since the write", "share of the write read back", title)
