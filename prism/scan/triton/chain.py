"""The refinement chain as one operator: from r^1, gains and step gates to the writes in one pass.

    delta^l = phi(p^l * r^l)      r^{l+1} = r^l - delta^l      w^l = b^l delta^l       (Eqs. 15, 16)

Each input is read once and each result written once, forward and backward; PyTorch, step by step, moves about
five times as much (benchmarks/NOTES.md). `prism.refinement` is the definition, and what runs wherever a hook
wants to see a residual or a delta.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from prism.scan.triton._chain_kernels import chain_grad_kernel, chain_kernel
from prism.scan.triton._launch import evenly, launch
from prism.scan.triton._transforms import differentiable_once, fold, folded_call, plain

ACTIVATIONS = ("gelu", "silu", "tanh", "identity")


def chain(
    r: Float[Tensor, "B T HV V"],
    gain: Float[Tensor, "B T HV L V"] | None,
    gate: Float[Tensor, "B T HV L"],
    activation: str = "gelu",
    subtract: bool = True,
) -> Float[Tensor, "B T HV L V"]:
    """write_v of L refinement steps from the first residual.

    Args:
        r: r^1. gain: p, None for the constant 1. gate: b. Dtypes may differ; sums are float32 and the result
            has the dtype to which PyTorch promotes them. r and gain may be views: only V must be contiguous.
        activation: phi, one of `ACTIVATIONS`. subtract: r^{l+1} = r^l - delta^l, or r^l if False.

    Differentiable once, in reverse, in every tensor. Works under torch.compile and torch.func.vmap.

    Raises:
        ValueError: an unknown activation, L = 0, a shape that does not fit, float64.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, came {activation!r}")
    if gate.shape[:-1] != r.shape[:-1] or gate.shape[-1] < 1:
        sizes = ", ".join(map(str, r.shape[:-1]))
        raise ValueError(f"gate: expected [B, T, HV, L] = [{sizes}, 1 or more], came {list(gate.shape)}")
    if gain is not None and gain.shape != (*gate.shape, r.shape[-1]):
        expected = [*gate.shape, r.shape[-1]]
        raise ValueError(f"gain: expected [B, T, HV, L, V] = {expected}, came {list(gain.shape)}")
    for name, x in (("r", r), ("gain", gain), ("gate", gate)):
        if x is not None and x.dtype == torch.float64:
            raise ValueError(f"{name}: expected float32, bfloat16 or float16, came float64")
    if torch.compiler.is_compiling():
        return _chain(r, gain, gate, activation, subtract)
    return _Chain.apply(r, gain, gate, activation, subtract)


WARPS = 4


def _dtype(r: Tensor, gain: Tensor | None, gate: Tensor) -> torch.dtype:
    found = torch.promote_types(r.dtype, gate.dtype)
    return found if gain is None else torch.promote_types(found, gain.dtype)


def _launch(
    kernel: Any, each: int, leading: tuple[Tensor, ...], r: Tensor, gain: Tensor | None, gate: Tensor,
    results: tuple[Tensor, ...], activation: str, subtract: bool,
) -> None:  # fmt: skip
    """`each`: elements of a thread."""
    B, T, HV, V = r.shape
    rows, BV = B * T * HV, triton.next_power_of_2(V)
    R = max(1, 32 * WARPS * each // BV)
    p = r.unsqueeze(3) if gain is None else gain
    constants = {
        "HV": HV, "L": gate.shape[-1], "V": V, "R": R, "BV": BV,
        "r_token": r.stride(1), "r_head": r.stride(2),
        "gain_token": p.stride(1), "gain_head": p.stride(2), "gain_step": p.stride(3),
        "PHI": activation, "SUBTRACT": subtract, "GAIN": gain is not None,
    }  # fmt: skip
    tensors = (*leading, r, p, gate, *results)
    key = (*(x.dtype for x in tensors), *constants.values())
    launch(kernel, (triton.cdiv(rows, R), 1), key, (*tensors, rows), constants, {"num_warps": WARPS})


def _run(r: Tensor, gain: Tensor | None, gate: Tensor, activation: str, subtract: bool) -> Tensor:
    r, gate = evenly(r), gate.contiguous()
    gain = None if gain is None else evenly(gain)
    write_v = r.new_empty(*gate.shape, r.shape[-1], dtype=_dtype(r, gain, gate))
    _launch(chain_kernel, 8, (), r, gain, gate, (write_v,), activation, subtract)
    return write_v


def _run_backward(
    d_write_v: Tensor, r: Tensor, gain: Tensor | None, gate: Tensor, activation: str, subtract: bool
) -> list[Tensor]:
    r, gate = evenly(r), gate.contiguous()
    gain = None if gain is None else evenly(gain)
    grads = [x.new_empty(x.shape) for x in (r, gain, gate) if x is not None]
    d_gain = grads[0] if gain is None else grads[1]
    results = (grads[0], d_gain, grads[-1])
    L = gate.shape[-1]
    each = 8 if L <= 2 else 4 if L <= 8 else 1  # three registers an element and step; none may spill
    _launch(chain_grad_kernel, each, (d_write_v.contiguous(),), r, gain, gate, results, activation, subtract)
    return grads


_chain = torch.library.custom_op("prism::chain", _run, mutates_args=())
_chain_backward = torch.library.custom_op("prism::chain_backward", _run_backward, mutates_args=())


@_chain.register_fake
def _(r, gain, gate, activation, subtract):
    return r.new_empty(*gate.shape, r.shape[-1], dtype=_dtype(r, gain, gate))


@_chain_backward.register_fake
def _(d_write_v, r, gain, gate, activation, subtract):
    return [x.new_empty(x.shape) for x in (r, gain, gate) if x is not None]


@_chain.register_vmap
def _(info, in_dims, *args):
    return _chain(*fold(info.batch_size, in_dims, args)).unflatten(0, (info.batch_size, -1)), 0


_chain_backward.register_vmap(lambda info, dims, *args: folded_call(_chain_backward, info, dims, *args))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    r, gain, gate, ctx.activation, ctx.subtract = inputs
    ctx.save_for_backward(r, gain, gate)


def _backward(ctx: Any, d_write_v: Tensor) -> tuple[Tensor | None, ...]:
    r, gain, gate = ctx.saved_tensors
    given = d_write_v, r, gain, gate

    def gradients() -> list[Tensor | None]:
        run = _run_backward if plain(*given) else _chain_backward
        d_r, *d_gain, d_gate = run(*given, ctx.activation, ctx.subtract)
        return [d_r, d_gain[0] if d_gain else None, d_gate]

    return *differentiable_once("chain: it can be differentiated once", gradients, given), None, None


# For torch.compile, which cannot trace an autograd.Function under vmap.
_chain.register_autograd(_backward, setup_context=_setup_context)


class _Chain(torch.autograd.Function):
    """Everywhere else: unlike the operator's own formula it can be vmapped and differentiated there."""

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)  # type: ignore[assignment]

    @staticmethod
    def forward(*args: Any) -> Tensor:
        # The operator's dispatch costs as much as a small chain: only where something else looks on.
        return (_run if plain(*args[:3]) else _chain)(*args)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        E = info.batch_size
        return _Chain.apply(*fold(E, in_dims, args)).unflatten(0, (E, -1)), 0
