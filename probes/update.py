"""Measure 1: the rank of what one token writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from probes import _factors, _figures, rank
from probes._data import TOKEN_DIMS, dataset, rank_attrs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MATRICES = ("write", "update")


def update_factors(
    f: _factors.Factors, matrix: str = "update", initial_state: Float[Tensor, "B HV K V"] | None = None
) -> tuple[Float[Tensor, "B T HV R V"], Float[Tensor, "B T HV R K"], Float[Tensor, "B T HV R"]]:
    """(left, right, norm) with sum_r left_r right_r^T the matrix that a token adds, R = L + 1.

    write:  B_t = beta_t v_t k_t^T + sum_l w_t^l kappa_t^l^T
    update: S_t - alpha_t S_{t-1} = beta_t (v_t - Sbar_t k_t) k_t^T + sum_l w_t^l kappa_t^l^T
    norm is |left_r|, except for the update's difference, where it is beta_t (|v_t| + |Sbar_t k_t|): the
    rounding of the two stays when they cancel.
    """
    if matrix not in MATRICES:
        raise ValueError(f"matrix: expected one of {', '.join(MATRICES)}, got {matrix!r}")
    value, size = f.v.double(), f.v.double().norm(dim=-1)
    if matrix == "update":
        wide = f.double()  # v and the read may cancel: what a float32 scan rounds would pass for rank
        read = wide.log_decay.exp()[..., None] * wide.read_before(initial_state=initial_state)
        value, size = value - read, size + read.norm(dim=-1)
    left = torch.cat([(f.beta[..., None] * value)[..., None, :], f.write_v], -2)
    right = torch.cat([f.key[..., None, :], f.write_k], -2)
    norm = torch.cat([(f.beta.abs() * size)[..., None], f.write_v.norm(dim=-1)], -1)
    return left, right, norm


def distinct_keys(config: Any, matrix: str = "update") -> int:
    """How many different right factors a token's matrix can have, hence its greatest rank.

    k counts where it writes or erases, the refinement's own keys L times, a shared one once, the base key not
    again. Where kappa^1 erases, the erase adds no key; where nothing is erased, write and update are the
    same.
    """
    refined = {"own": config.n_refine, "shared": 1, "base": 0}[config.refine_keys] if config.n_refine else 0
    erases = matrix == "update" and config.erase not in ("none", "step")
    keyed = erases or config.base_write or (config.n_refine > 0 and config.refine_keys == "base")
    if config.erase == "step":  # kappa^1 is the base write's key too
        return max(refined, 1)
    return refined + keyed


@torch.no_grad()
def update_rank(
    model: Any, inputs: Int[Tensor, "B T"], *, matrices: tuple[str, ...] = MATRICES
) -> xr.Dataset:
    """Rank of the matrix that each token adds to the state, by four measures and its singular values.

    matrix "write" is B_t (math: S_t = S_{t-1} A_t + B_t), "update" is S_t - alpha_t S_{t-1}, which also holds
    the erase. Both come from their L + 1 factors (rank.py), never from K x V matrices. rank <= min(L + 1, K,
    V); 2 where all refinement keys of a token coincide, 1 where they all equal k, L in the `paper` preset,
    which has no base write.

    Returns variables numerical, effective, stable, participation (dims layer, matrix, sample, token, head;
    float32), singular_value (with component, descending) and bound (layer, matrix): `distinct_keys`, at most
    K and V; attrs hold definitions, tolerance and the dtype behind it.
    """
    found, bounds = {}, {}
    for f in _factors.layers(model, inputs):
        parts = []
        for matrix in matrices:
            left, right, norm = update_factors(f, matrix)
            sigma = rank.factor_singular_values(left, right)
            threshold = rank.factor_threshold(left, right, f.stored, left_norm=norm)
            parts.append(rank.rank_measures(sigma, threshold) | {"singular_value": sigma})
        found[f.layer] = {name: torch.stack([p[name] for p in parts]) for name in parts[0]}
        bounds[f.layer] = [min(distinct_keys(model.config, m), *f.shape) for m in matrices]
    dims: dict[str, tuple[str, ...]] = dict.fromkeys(rank.MEASURES, ("matrix", *TOKEN_DIMS))
    dims["singular_value"] = ("matrix", *TOKEN_DIMS, "component")
    attrs = rank_attrs(rank.FACTOR_TOLERANCE, f.stored)
    ds = dataset(found, dims, {"matrix": list(matrices)}, attrs)
    return ds.assign(bound=(("layer", "matrix"), list(bounds.values())))


def plot_update_rank(
    ds: xr.Dataset,
    ax: Axes | None = None,
    *,
    matrix: str = "update",
    measure: str = "effective",
    max_layers: int = 4,
) -> Axes:
    """Rank of the update over tokens, a line per layer (at most max_layers, evenly spread), with the bound.

    Lines are medians over sequences and heads, bands their 10th to 90th percentile.
    """
    ax = _figures.new_axes(ax)
    values = ds[measure].sel(matrix=matrix)
    for i, layer in enumerate(_figures.pick(ds.layer.values, max_layers)):
        _figures.line_with_band(ax, ds.token.values, values.sel(layer=layer), "token", i, f"layer {layer}")
    _figures.reference(ax, int(ds.bound.sel(matrix=matrix).max()), "bound")
    _figures.from_zero(ax)
    name = {"write": "$B_t$", "update": r"$S_t - \alpha_t S_{t-1}$"}[matrix]
    return _figures.finish(
        ax, "token", f"{measure} rank of {name}", _figures.count_label(ds, "sample", "head")
    )
