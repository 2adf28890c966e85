"""Where a mixer takes fused kernels in the place of formulas, and products that suit a GPU's matrix units."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with x: autocast's where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def aligned_linear(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "R d"]) -> Float[Tensor, "*batch R"]:
    """F.linear, in half precision on a GPU with rows of zeros up to a multiple of eight.

    Rows of results then start on 16 bytes, without which the matrix units are fed by slower copies.
    """
    rows = weight.shape[0]
    if not x.is_cuda or working_dtype(x) not in HALF or rows % 8 == 0:
        return F.linear(x, weight)
    return F.linear(x, F.pad(weight, (0, 0, 0, -rows % 8)))[..., :rows]
