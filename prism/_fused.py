"""Where a mixer takes fused kernels in the place of formulas, and products that suit a GPU's matrix units."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with x: autocast's where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def padded_rows(rows: int) -> int:
    """`rows`, rounded up to what a product in half precision should have (`padded_linear`).

    Rows of results that do not start on 16 bytes feed the matrix units by slower copies: a multiple of 8.
    And where a stride is above 1,024 and no multiple of 128 bytes, torch.compile spreads a product's rows to
    one (inductor's `comprehensive_padding`) and then copies all of it for an operator that was promised
    contiguous rows, once forward and once backward: a multiple of 64.
    """
    multiple = 64 if rows > 1024 else 8
    return rows + -rows % multiple


def padded_linear(x: Float[Tensor, "*batch d"], weight: Float[Tensor, "R d"]) -> Float[Tensor, "*batch R1"]:
    """F.linear, in half precision on a GPU with zeros behind the R results, `padded_rows` in all."""
    rows = weight.shape[0]
    missing = padded_rows(rows) - rows if x.is_cuda and working_dtype(x) in HALF else 0
    return F.linear(x, F.pad(weight, (0, 0, 0, missing)) if missing else weight)


def split_linear(
    x: Float[Tensor, "*batch d"], weight: Float[Tensor, "R d"], sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """F.linear(x, weight).split(sizes, -1) of a `padded_linear`."""
    product = padded_linear(x, weight)
    # Split off rather than cut off: the gradient is then put together in one step, zeros included.
    return product.split([*sizes, product.shape[-1] - sum(sizes)], -1)[:-1]
