"""Short convolution, activation and L2 norm of heads as one operator: q, k, v and the anchor as used.

    y_t = sum_j weight[:, W - 1 - j] x_{t-j}      s = silu(y)      n = s / sqrt(|s|^2 + 1e-6)   per head

Forward reads x once and writes each head where it belongs; backward moves five times x. The same in PyTorch
moves five and eleven times as much, compiled (benchmarks/NOTES.md). `prism.anchor.causal_conv` and
`prism.refinement.l2_norm` are the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from prism.scan.triton._launch import launch
from prism.scan.triton._short_conv_kernels import (
    short_conv_grad_kernel,
    short_conv_input_grad_kernel,
    short_conv_kernel,
)

ELEMENTS = 1024
"""Elements of a tile, eight for each of 128 threads."""
TURNS = 8
"""Tiles of a program: so many times fewer reads of the taps, and partial sums of their gradient."""


def short_conv(
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    heads: Sequence[int],
    widths: Sequence[int],
    unit: Sequence[bool],
    silu: bool = True,
) -> list[Tensor]:
    """One tensor [B, T, heads[i], widths[i]], contiguous, for each i: the channels of x in order.

    Args:
        x: may be a view whose channels are contiguous. weight: taps as nn.Conv1d has them, its own dtype.
        unit: which results are L2-normalised head by head. silu: activation before that, or none.

    Sums are float32, the results have the dtype of x. Differentiable once, in reverse; torch.func.vmap goes
    through the members one by one.

    Raises:
        ValueError: heads and widths that do not add up to the channels, or float64.
    """
    channels = sum(h * d for h, d in zip(heads, widths, strict=True))
    if channels != x.shape[-1] or weight.shape[0] != channels or len(unit) != len(heads):
        came = f"x {list(x.shape)}, weight {list(weight.shape)}, unit {list(unit)}"
        raise ValueError(f"heads, widths: expected {channels} channels and a flag each, came {came}")
    if x.dtype == torch.float64:
        raise ValueError("x: expected float32, bfloat16 or float16, came float64")
    return _short_conv(x, weight, list(heads), list(widths), list(unit), silu)


def _even(x: Tensor) -> Tensor:
    """x with the rows of all sequences evenly apart; a copy only where they are not."""
    even = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x if even and x.stride(-1) == 1 else x.contiguous()


def _tile(width: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    columns = triton.next_power_of_2(width)
    return max(1, ELEMENTS // columns), columns


def _launch(kernel: Any, grid: tuple[int, int], arguments: tuple[Any, ...], constants: dict) -> None:
    key = (*(a.dtype for a in arguments if isinstance(a, Tensor)), *constants.values())
    launch(kernel, grid, key, arguments, constants, {"num_warps": 4})


@torch.library.custom_op("prism::short_conv", mutates_args=())
def _short_conv(
    x: Tensor, weight: Tensor, heads: list[int], widths: list[int], unit: list[bool], silu: bool
) -> list[Tensor]:
    B, T, _ = x.shape
    x, weight, first, made = _even(x), weight.contiguous(), 0, []
    for h, d, norm in zip(heads, widths, unit, strict=True):
        out = x.new_empty(B, T, h, d)
        R, BD = _tile(d)
        constants = {"HEADS": h, "D": d, "W": weight.shape[1], "x_row": x.stride(1), "R": R}
        constants |= {"TURNS": TURNS, "BD": BD, "SILU": silu, "UNIT": norm}
        arguments = (x[..., first:], weight[first:], out, B * T, T)
        _launch(short_conv_kernel, (triton.cdiv(B * T, R * TURNS), h), arguments, constants)
        made.append(out)
        first += h * d
    return made


@torch.library.custom_op("prism::short_conv_backward", mutates_args=())
def _short_conv_backward(
    grads: list[Tensor], x: Tensor, weight: Tensor, unit: list[bool], silu: bool
) -> tuple[Tensor, Tensor]:
    (B, T, C), W = x.shape, weight.shape[1]
    x, weight, first = _even(x), weight.contiguous(), 0
    d_y = x.new_empty(B, T, C)
    # One row of partial sums for every program along the tokens, whatever the tile of a head.
    most = max(triton.cdiv(B * T, _tile(g.shape[-1])[0] * TURNS) for g in grads)
    d_weight = weight.new_zeros(most, W, C, dtype=torch.float32)
    for grad, norm in zip(grads, unit, strict=True):
        h, d = grad.shape[2:]
        R, BD = _tile(d)
        constants = {"HEADS": h, "D": d, "W": W, "x_row": x.stride(1), "y_row": C, "R": R}
        constants |= {"TURNS": TURNS, "BD": BD, "SILU": silu, "UNIT": norm}
        given = x[..., first:], weight[first:], grad.contiguous()
        arguments = (*given, d_y[..., first:], d_weight[..., first:], B * T, T)
        grid = (triton.cdiv(B * T, R * TURNS), h)
        _launch(short_conv_grad_kernel, grid, arguments, constants)
        first += h * d
    d_x = x.new_empty(B, T, C)
    R, BD = _tile(min(C, 128))
    grid = (triton.cdiv(B * T, R * TURNS), triton.cdiv(C, BD))
    constants = {"C": C, "W": W, "R": R, "TURNS": TURNS, "BD": BD}
    _launch(short_conv_input_grad_kernel, grid, (d_y, weight, d_x, B * T, T), constants)
    return d_x, d_weight.sum(0).t().contiguous().to(weight.dtype)


@_short_conv.register_fake
def _(x, weight, heads, widths, unit, silu):
    return [x.new_empty(*x.shape[:2], h, d) for h, d in zip(heads, widths, strict=True)]


@_short_conv_backward.register_fake
def _(grads, x, weight, unit, silu):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, ctx.heads, ctx.widths, ctx.unit, ctx.silu = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    shapes = [(*x.shape[:2], h, d) for h, d in zip(ctx.heads, ctx.widths, strict=True)]
    grads = [x.new_zeros(shape) if g is None else g for g, shape in zip(grads, shapes, strict=True)]
    return *_short_conv_backward(grads, x, weight, ctx.unit, ctx.silu), None, None, None, None


_short_conv.register_autograd(_backward, setup_context=_setup_context)


def _members(info: Any, dims: Sequence[Any], tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Each member's tensors; dims None: the same for all."""
    return [
        [x if dim is None else x.select(dim, e) for x, dim in zip(tensors, dims, strict=True)]
        for e in range(info.batch_size)
    ]


@_short_conv.register_vmap
def _(info, in_dims, x, weight, *options):
    made = [_short_conv(*member, *options) for member in _members(info, in_dims[:2], (x, weight))]
    return [torch.stack(parts) for parts in zip(*made, strict=True)], [0] * len(made[0])


@_short_conv_backward.register_vmap
def _(info, in_dims, grads, x, weight, *options):
    each = _members(info, (*in_dims[0], *in_dims[1:3]), (*grads, x, weight))
    made = [_short_conv_backward(member[:-2], *member[-2:], *options) for member in each]
    return tuple(torch.stack(parts) for parts in zip(*made, strict=True)), (0, 0)
