"""From tensors per layer to one labelled dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from probes.rank import DEFINITIONS

TOKEN_DIMS = ("sample", "token", "head")


def dataset(
    per_layer: Mapping[int, Mapping[str, Tensor]],
    dims: Mapping[str, Sequence[str]],
    coords: Mapping[str, Any] | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """One variable per name with dims (layer, *dims[name]); float32, NaN-padded where layers differ in size.

    coords: label arrays for any dimension; the others count from 0.
    """
    if not per_layer:
        raise ValueError("model: expected at least one layer whose mixer feeds the scan, got none")
    variables = {}
    for name, names in dims.items():
        arrays = [_array(tensors[name]) for tensors in per_layer.values()]
        size = tuple(max(sizes) for sizes in zip(*(a.shape for a in arrays), strict=True))
        stacked = np.full((len(arrays), *size), np.nan, dtype=np.result_type(*arrays))
        for slot, a in zip(stacked, arrays, strict=True):
            slot[tuple(slice(n) for n in a.shape)] = a
        variables[name] = (("layer", *names), stacked)
    ds = xr.Dataset(variables, attrs=dict(attrs or {}))
    labels = (
        {dim: np.arange(size) for dim, size in ds.sizes.items()}
        | {"layer": list(per_layer)}
        | dict(coords or {})
    )
    return ds.assign_coords(labels)


def nonzero(size: Tensor) -> Tensor:
    """A norm to divide by: NaN where it is 0 and the quotient undefined."""
    return torch.where(size > 0, size, torch.nan)


def rank_attrs(tolerance: str, stored: torch.dtype) -> dict[str, str]:
    """The definition of a rank, which travels with it."""
    return {f"measure_{name}": text for name, text in DEFINITIONS.items()} | {
        "tolerance": tolerance,
        "dtype": str(stored).removeprefix("torch."),
        "zero": "a matrix whose largest singular value is within the tolerance has rank 0 by every measure",
    }


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
