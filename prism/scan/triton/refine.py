"""The refinement behind its projection as one operator: keys normalised, gates squashed, the chain run.

    kappa^l = key^l / sqrt(|key^l|^2 + 1e-6)      b^l = sigmoid(gate^l)      r^1 = v - u
    delta^l = phi(p^l * r^l)      w^l = b^l delta^l      r^{l+1} = r^l - delta^l        (Eqs. 11 to 16)

Each tensor is read once and written once: 2 + 4 L of the size of v forward, 3 + 6 L backward, whose gradient
of the projection's rows is one tensor as the product before it wants it. `prism.refinement` is the
definition; `chain` is the part of it that other projections can use.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from prism.scan.triton._launch import evenly, launch
from prism.scan.triton._refine_kernels import refine_grad_kernel, refine_kernel
from prism.scan.triton._transforms import folded_call
from prism.scan.triton.chain import ACTIVATIONS

ELEMENTS = 1024
"""Elements of a tile, eight for each of 128 threads."""


def refine(
    rows: Float[Tensor, "B T R"],
    u: Float[Tensor, "B T HV V"] | None,
    v: Float[Tensor, "B T HV V"],
    steps: int,
    key_width: int,
    activation: str = "gelu",
    subtract: bool = True,
    unit: bool = True,
    minus_u: Float[Tensor, "B T HV V"] | None = None,
    v_again: Float[Tensor, "B T HV V"] | None = None,
) -> tuple[Float[Tensor, "B T HV L K"], Float[Tensor, "B T HV L V"]]:
    """write_k and write_v of `steps` = L refinement steps.

    Args:
        rows: keys [HV, L, K], gains [HV, L, V], gates [HV, L] of a token end to end, before norm and sigmoid,
            and then what is ignored (its gradient is 0).
        u: the anchor; None: r^1 = v. activation: phi. subtract: r^{l+1} = r^l - delta^l, or r^l if False.
        unit: keys are L2-normalised.
        minus_u, v_again: what `short_conv` gave to stand for -u and for v. Not read; they take the gradient
            of r^1 in the place of u and v, whose gradient here is then None.

    Sums are float32, results have the dtype of rows. Differentiable once, in reverse. Works under
    torch.compile and torch.func.vmap.

    Raises:
        ValueError: an unknown activation, L = 0, a shape that does not fit, rows that are too short, float64.
    """
    check_rows(rows, u, v, steps, key_width, activation, minus_u, v_again)
    if torch.float64 in (rows.dtype, v.dtype, v.dtype if u is None else u.dtype):
        raise ValueError("rows, u, v: expected float32, bfloat16 or float16, came float64")
    minus_u = None if u is None else minus_u
    made = _refine(rows, u, v, minus_u, v_again, steps, key_width, activation, subtract, unit)
    return made[0], made[1]


def check_rows(
    rows: Tensor, u: Tensor | None, v: Tensor, steps: int, key_width: int, activation: str,
    minus_u: Tensor | None, v_again: Tensor | None,
) -> None:  # fmt: skip
    """Raises ValueError for an activation or a shape that `refine` does not take."""
    HV, V = v.shape[2:]
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, came {activation!r}")
    least = HV * steps * (key_width + V + 1)
    if steps < 1 or rows.shape[-1] < least:
        raise ValueError(
            f"rows: expected steps >= 1 and at least {least} values a token, "
            f"came {steps} and {rows.shape[-1]}"
        )
    if rows.shape[:-1] != v.shape[:2]:
        expected = f"[{v.shape[0]}, {v.shape[1]}, R]"
        raise ValueError(f"rows: expected [B, T, R] = {expected}, came {list(rows.shape)}")
    if u is not None and u.shape != v.shape:
        raise ValueError(f"u: expected the shape of v, {list(v.shape)}, came {list(u.shape)}")
    for name, x in (("minus_u", minus_u), ("v_again", v_again)):
        if x is not None and x.shape != v.shape:
            raise ValueError(f"{name}: expected the shape of v, {list(v.shape)}, came {list(x.shape)}")


def run_rows(
    kernel: Any, rows: Tensor, u: Tensor | None, v: Tensor, others: tuple[Tensor | None, ...], steps: int,
    key_width: int, activation: str, subtract: bool, unit: bool, keys: bool = True,
) -> None:  # fmt: skip
    B, T, HV, V = v.shape
    count, BK, BV = B * T * HV, triton.next_power_of_2(key_width), triton.next_power_of_2(V)
    R = max(1, ELEMENTS // max(BK, BV))
    constants = {
        "HV": HV, "L": steps, "K": key_width, "V": V,
        "PAD": rows.shape[-1] - HV * steps * (key_width + V + 1), "R": R, "BK": BK, "BV": BV,
        "stride": rows.stride(1), "PHI": activation, "SUBTRACT": subtract, "ANCHORED": u is not None,
        "UNIT": unit, "KEYS": keys,
    }  # fmt: skip
    tensors = (rows, v if u is None else u, v, *others)
    key = (*(None if x is None else x.dtype for x in tensors), *constants.values())
    launch(kernel, (triton.cdiv(count, R), 1), key, (*tensors, count), constants, {"num_warps": 4})


def _dense(rows: Tensor, u: Tensor | None, v: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    return evenly(rows), None if u is None else u.contiguous(), v.contiguous()


@torch.library.custom_op("prism::refine", mutates_args=())
def _refine(
    rows: Tensor, u: Tensor | None, v: Tensor, minus_u: Tensor | None, v_again: Tensor | None, steps: int,
    key_width: int, activation: str, subtract: bool, unit: bool,
) -> list[Tensor]:  # fmt: skip
    rows, u, v = _dense(rows, u, v)
    made = [rows.new_empty(*v.shape[:3], steps, width) for width in (key_width, v.shape[3])]
    run_rows(refine_kernel, rows, u, v, (*made, None), steps, key_width, activation, subtract, unit)
    return made


@torch.library.custom_op("prism::refine_backward", mutates_args=())
def _refine_backward(
    d_write_k: Tensor, d_write_v: Tensor, rows: Tensor, u: Tensor | None, v: Tensor, steps: int,
    key_width: int, activation: str, subtract: bool, unit: bool,
) -> list[Tensor]:  # fmt: skip
    rows, u, v = _dense(rows, u, v)
    made = [rows.new_empty(rows.shape), v.new_empty(v.shape)]
    others = (d_write_k.contiguous(), d_write_v.contiguous(), None, *made)
    run_rows(refine_grad_kernel, rows, u, v, others, steps, key_width, activation, subtract, unit)
    return made


@_refine.register_fake
def _(rows, u, v, minus_u, v_again, steps, key_width, activation, subtract, unit):
    return [rows.new_empty(*v.shape[:3], steps, width) for width in (key_width, v.shape[3])]


@_refine_backward.register_fake
def _(d_write_k, d_write_v, rows, u, v, steps, key_width, activation, subtract, unit):
    return [rows.new_empty(rows.shape), v.new_empty(v.shape)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    rows, u, v, minus_u, v_again, *ctx.options = inputs
    ctx.others = minus_u is not None, v_again is not None
    ctx.save_for_backward(rows, u, v)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    rows, u, v = ctx.saved_tensors
    steps, key_width = ctx.options[:2]
    shapes = [(*v.shape[:3], steps, width) for width in (key_width, v.shape[3])]
    given = [rows.new_zeros(shape) if g is None else g for g, shape in zip(grads, shapes, strict=True)]
    d_rows, d_r = _refine_backward(*given, rows, u, v, *ctx.options)
    for_u, for_v = ctx.others
    d_u = None if u is None or for_u else -d_r
    others = d_r if for_u else None, d_r if for_v else None
    return d_rows, d_u, None if for_v else d_r, *others, *(None for _ in ctx.options)


_refine.register_autograd(_backward, setup_context=_setup_context)


_refine.register_vmap(lambda info, dims, *args: folded_call(_refine, info, dims, *args))
_refine_backward.register_vmap(lambda info, dims, *args: folded_call(_refine_backward, info, dims, *args))
