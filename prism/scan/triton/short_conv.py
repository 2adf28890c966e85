"""Short convolution, activation and L2 norm of heads as one operator: q, k, v and the anchor as used.

    y_t = sum_j weight[:, W - 1 - j] x_{t-j}      s = silu(y)      n = s / sqrt(|s|^2 + 1e-6)   per head

Forward reads x once and writes each head where it belongs; backward reads x and the gradients once. The same
in PyTorch moves five and seven times as much, compiled (benchmarks/NOTES.md). `prism.anchor.causal_conv` and
`prism.refinement.l2_norm` are the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from prism.scan.triton._launch import evenly, launch
from prism.scan.triton._short_conv_kernels import (
    short_conv_grad_kernel,
    short_conv_kernel,
    weight_grad_kernel,
)

CONTIGUOUS = torch.contiguous_format
LENGTH, GRAD_LENGTH, STEP = 32, 64, 4
"""Tokens of a program forward and backward, fewer where sequences are shorter, and how many of them it loads
at a time. Backward walks W - 1 tokens too far, and writes a row of sums."""


def short_conv(
    x: Float[Tensor, "B T R"],
    weight: Float[Tensor, "C W"],
    heads: Sequence[int],
    widths: Sequence[int],
    unit: Sequence[bool],
    silu: bool = True,
    again: Sequence[int] = (),
) -> list[Tensor]:
    """One tensor [B, T, heads[i], widths[i]], contiguous, for each i: the first C channels of x in order.

    Args:
        x: may be a view whose channels are contiguous. Channels behind the first C come back as one more
            result, copied: their gradient and that of the others are then one tensor.
        weight: taps as nn.Conv1d has them, its own dtype.
        unit: which results are L2-normalised head by head. silu: activation before that, or none.
        again: 0, 1 or -1 for each i, all 0 if left out. Other than 0: behind all other results comes one that
            stands for again[i] times result i. It has no values, only a gradient: for a reader that has the
            values from result i, so that the backward pass adds up both gradients as it reads them.

    Sums are float32, the results have the dtype of x. Differentiable once, in reverse; torch.func.vmap goes
    through the members one by one.

    Raises:
        ValueError: heads and widths that do not add up to C, x with fewer channels, or float64.
    """
    channels = sum(h * d for h, d in zip(heads, widths, strict=True))
    again = list(again) or [0 for _ in heads]
    if channels > x.shape[-1] or weight.shape[0] != channels or not len(unit) == len(again) == len(heads):
        came = f"x {list(x.shape)}, weight {list(weight.shape)}, unit {list(unit)}"
        raise ValueError(f"heads, widths: expected {channels} channels and a flag each, came {came}")
    if x.dtype == torch.float64:
        raise ValueError("x: expected float32, bfloat16 or float16, came float64")
    if weight.shape[1] == 1:  # the kernels keep at least one token
        weight = torch.nn.functional.pad(weight, (1, 0))
    return _short_conv(x, weight, list(heads), list(widths), list(unit), silu, again)


def _groups(heads: int, width: int, unit: bool) -> tuple[int, int]:
    """Heads and width of a launch: where nothing is normalised, channels can be cut as suits a warp."""
    if unit or width <= 128:
        return heads, width
    groups = next(
        g for g in range(1, heads * width + 1) if heads * width <= 128 * g and heads * width % g == 0
    )
    return groups, heads * width // groups


def _stand_ins(x: Tensor, made: Sequence[Tensor], again: Sequence[int]) -> list[Tensor]:
    """For each sign other than 0 a tensor of the shape of the result, without memory."""
    return [x.new_empty(1).expand(out.shape) for out, sign in zip(made, again, strict=True) if sign]


def _length(T: int, most: int) -> int:
    return max(STEP, min(most, STEP * triton.cdiv(T, STEP)))


def _launch(kernel: Any, arguments: tuple[Any, ...], heads: int, width: int, constants: dict) -> None:
    B, T, _ = arguments[0].shape
    constants = {"HEADS": heads, "D": width, **constants}
    key = (*(a.dtype for a in arguments if isinstance(a, Tensor)), *constants.values())
    grid = (B * triton.cdiv(T, constants["LENGTH"]), heads)
    launch(kernel, grid, key, (*arguments, T), constants, {"num_warps": 1})


@torch.library.custom_op("prism::short_conv", mutates_args=())
def _short_conv(
    x: Tensor,
    weight: Tensor,
    heads: list[int],
    widths: list[int],
    unit: list[bool],
    silu: bool,
    again: list[int],
) -> list[Tensor]:
    x, weight, T, first, made = evenly(x), weight.contiguous(), x.shape[1], 0, []
    for h, d, norm in zip(heads, widths, unit, strict=True):
        out = x.new_empty(*x.shape[:2], h, d)
        groups, width = _groups(h, d, norm)
        constants = {"W": weight.shape[1], "x_row": x.stride(1), "LENGTH": _length(T, LENGTH), "STEP": STEP}
        constants |= {"BD": triton.next_power_of_2(width), "SILU": silu, "UNIT": norm}
        _launch(short_conv_kernel, (x[..., first:], weight[first:], out), groups, width, constants)
        made.append(out)
        first += h * d
    rest = [] if first == x.shape[-1] else [x[..., first:].clone(memory_format=CONTIGUOUS)]
    return [*made, *rest, *_stand_ins(x, made, again)]


@torch.library.custom_op("prism::short_conv_backward", mutates_args=())
def _short_conv_backward(
    grads: list[Tensor],
    more: list[Tensor | None],
    x: Tensor,
    weight: Tensor,
    unit: list[bool],
    silu: bool,
    again: list[int],
) -> tuple[Tensor, Tensor]:
    (B, T, rows), (C, W) = x.shape, weight.shape
    x, weight, first = evenly(x), weight.contiguous(), 0
    d_x = x.new_empty(B, T, rows)
    if rows > C:
        *grads, d_rest = grads
        d_x[..., C:] = d_rest
    length = _length(T, GRAD_LENGTH)
    programs = B * triton.cdiv(T, length)
    parts = weight.new_empty(programs, W, C, dtype=torch.float32)
    for grad, other, norm, sign in zip(grads, more, unit, again, strict=True):
        h, d = grad.shape[2:]
        groups, width = _groups(h, d, norm)
        constants = {
            "W": W,
            "x_row": x.stride(1),
            "d_row": rows,
            "w_row": C,
            "LENGTH": length,
            "STEP": STEP,
        }
        constants |= {"BD": triton.next_power_of_2(width), "SILU": silu, "UNIT": norm}
        constants["SIGN"] = 0 if other is None else sign
        grad = grad.contiguous()
        given = x[..., first:], weight[first:], grad, grad if other is None else other.contiguous()
        arguments = (*given, d_x[..., first:], parts[..., first:])
        _launch(short_conv_grad_kernel, arguments, groups, width, constants)
        first += h * d
    d_weight = torch.empty_like(weight)
    constants = {"C": C, "W": W, "ROWS": 64, "BLOCK": 32}
    grid, key = (triton.cdiv(C, 32), W), (weight.dtype, *constants.values())
    launch(weight_grad_kernel, grid, key, (parts, d_weight, programs), constants, {"num_warps": 4})
    return d_x, d_weight


@_short_conv.register_fake
def _(x, weight, heads, widths, unit, silu, again):
    made = [x.new_empty(*x.shape[:2], h, d) for h, d in zip(heads, widths, strict=True)]
    behind = x.shape[-1] - weight.shape[0]
    rest = [x.new_empty(*x.shape[:2], behind)] if behind else []
    return [*made, *rest, *_stand_ins(x, made, again)]


@_short_conv_backward.register_fake
def _(grads, more, x, weight, unit, silu, again):
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weight, ctx.heads, ctx.widths, ctx.unit, ctx.silu, ctx.again = inputs
    ctx.set_materialize_grads(False)  # a stand-in that nothing reads costs nothing
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    shapes: list[tuple[int, ...]] = [(*x.shape[:2], h, d) for h, d in zip(ctx.heads, ctx.widths, strict=True)]
    rest = x.shape[-1] - weight.shape[0]
    shapes += [(*x.shape[:2], rest)] if rest else []
    further = iter(grads[len(shapes) :])
    more = [next(further) if sign else None for sign in ctx.again]
    grads = grads[: len(shapes)]
    grads = [x.new_zeros(shape) if g is None else g for g, shape in zip(grads, shapes, strict=True)]
    made = _short_conv_backward(grads, more, x, weight, ctx.unit, ctx.silu, ctx.again)
    return *made, *(None for _ in range(5))


_short_conv.register_autograd(_backward, setup_context=_setup_context)


def _members(info: Any, dims: Sequence[Any], tensors: Sequence[Tensor | None]) -> list[list[Any]]:
    """Each member's tensors; dims None: the same for all."""
    return [
        [x if x is None or dim is None else x.select(dim, e) for x, dim in zip(tensors, dims, strict=True)]
        for e in range(info.batch_size)
    ]


@_short_conv.register_vmap
def _(info, in_dims, x, weight, *options):
    made = [_short_conv(*member, *options) for member in _members(info, in_dims[:2], (x, weight))]
    return [torch.stack(parts) for parts in zip(*made, strict=True)], [0] * len(made[0])


@_short_conv_backward.register_vmap
def _(info, in_dims, grads, more, x, weight, *options):
    n = len(grads)
    each = _members(info, (*in_dims[0], *in_dims[1], *in_dims[2:4]), (*grads, *more, x, weight))
    made = [_short_conv_backward(m[:n], m[n:-2], *m[-2:], *options) for m in each]
    return tuple(torch.stack(parts) for parts in zip(*made, strict=True)), (0, 0)
