"""One registered operator for every implementation: where compile, capture, vmap and autograd meet kernels.

Two opaque operators, `prism::triton_scan` and `prism::triton_scan_backward`, launch the kernels, and an
autograd.Function joins them. The operators are what torch.compile and FakeTensor see; the Function is what
lets torch.func transform the call, which an operator with `register_autograd` refuses.

An implementation is a module with three functions. Tensors reach them contiguous, on one device, shapes and
dtypes checked, never float64; write_k and write_v are both None or both have L >= 1; cu_seqlens is None or
holds N + 1 offsets whose values nobody has checked: kernels clamp them and never leave memory.

    allocate(q, v, write_k, cu_seqlens) -> list[Tensor]
        Uninitialised tensors for what backward needs beyond the inputs, by shapes alone (no values are read).
    forward(q, k, v, log_decay, beta, write_k, write_v, scale, initial_state, cu_seqlens, saved)
        -> (o [B, T, HV, V] in the dtype of q, final_state [N, HV, K, V] float32)
        `saved` is what `allocate` returned, to be filled, or [] where no backward will follow.
    backward(do, dstate, q, k, v, log_decay, beta, write_k, write_v, scale, initial_state, cu_seqlens, saved)
        -> (dq, dk, dv, dlog_decay, dbeta, dwrite_k, dwrite_v, dinitial_state)
        do [B, T, HV, V] or None, dstate [N, HV, K, V] float32 or None (None is zero); each gradient in the
        shape and dtype of its input, None for an input that is None. The same bits in every call.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from prism.scan.triton import resident
from prism.scan.triton._resident_kernels import forward_kernel

INTERPRETED: bool = not isinstance(forward_kernel, triton.runtime.JITFunction)
"""True where TRITON_INTERPRET=1 was set before triton was imported."""


def choose(T: int, N: int, HV: int, K: int, V: int, L: int) -> ModuleType:
    """The implementation for T tokens in all, N sequences, HV value heads, widths K and V, L writes a token.

    Every answer is right; which one is faster was measured (benchmarks/NOTES.md).
    """
    return resident


def _choose(q: Tensor, v: Tensor, write_k: Tensor | None, cu_seqlens: Tensor | None) -> ModuleType:
    B, T, _, K = q.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return choose(B * T, N, v.shape[2], K, v.shape[3], 0 if write_k is None else write_k.shape[3])


@torch.library.custom_op("prism::triton_scan", mutates_args=())
def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    write_k: Tensor | None,
    write_v: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    save: bool,
) -> list[Tensor]:
    inputs = [_dense(x) for x in (q, k, v, log_decay, beta, write_k, write_v)]
    implementation = _choose(q, v, write_k, cu_seqlens)
    saved = implementation.allocate(q, v, write_k, cu_seqlens) if save else []
    o, state = implementation.forward(*inputs, scale, _dense(initial_state), _dense(cu_seqlens), saved)
    return [o, state, *saved]


@_scan.register_fake
def _(q, k, v, log_decay, beta, write_k, write_v, scale, initial_state, cu_seqlens, save):
    saved = _choose(q, v, write_k, cu_seqlens).allocate(q, v, write_k, cu_seqlens) if save else []
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = q.new_empty(N, v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
    return [v.new_empty(v.shape), state, *saved]


@torch.library.custom_op("prism::triton_scan_backward", mutates_args=())
def _scan_backward(
    do: Tensor | None,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    write_k: Tensor | None,
    write_v: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
) -> list[Tensor]:
    inputs = [_dense(x) for x in (do, dstate, q, k, v, log_decay, beta, write_k, write_v)]
    implementation = _choose(q, v, write_k, cu_seqlens)
    grads = implementation.backward(*inputs, scale, _dense(initial_state), _dense(cu_seqlens), saved)
    return [g for g in grads if g is not None]


@_scan_backward.register_fake
def _(
    do, dstate, q, k, v, log_decay, beta, write_k, write_v, scale, initial_state, cu_seqlens, saved
):  # fmt: skip
    inputs = (q, k, v, log_decay, beta, write_k, write_v, initial_state)
    return [x.new_empty(x.shape) for x in inputs if x is not None]


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return tuple(_scan(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, scale, initial_state, cu_seqlens, _ = inputs
        _, _, *saved = output
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*saved)
        ctx.save_for_backward(*tensors, initial_state, cu_seqlens, *saved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        *tensors, initial_state, cu_seqlens = ctx.saved_tensors[:9]
        saved = list(ctx.saved_tensors[9:])
        if do is None and dstate is None:
            return (None,) * 11
        found = iter(_scan_backward(do, dstate, *tensors, ctx.scale, initial_state, cu_seqlens, saved))
        grads = [None if x is None else next(found) for x in (*tensors, initial_state)]
        return *grads[:7], None, grads[7], None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], Any]:
        """Members become sequences: folded into B, or laid end to end where sequences are packed."""
        *tensors, scale, initial_state, cu_seqlens, save = args
        E, packed = info.batch_size, cu_seqlens is not None
        if in_dims[9] is not None:
            raise ValueError("prism_scan: cu_seqlens must be the same for every member under vmap")

        def fold(x: Tensor | None, dim: int | None, axis: int) -> Tensor | None:
            """Merges the members' dimension into `axis` of the tensor without it."""
            if x is None:
                return None
            x = x.unsqueeze(0).expand(E, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.movedim(0, axis).flatten(axis, axis + 1)

        T = tensors[0].shape[1] if in_dims[0] is None else tensors[0].movedim(in_dims[0], 0).shape[2]
        tensors = [fold(x, dim, 1 if packed else 0) for x, dim in zip(tensors, in_dims, strict=False)]
        initial_state = fold(initial_state, in_dims[8], 0)
        if packed:
            starts = T * torch.arange(E, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
            ends = cu_seqlens.new_full((1,), E * T)
            cu_seqlens = torch.cat([(starts[:, None] + cu_seqlens[:-1]).flatten(), ends])
        o, state, *saved = _Scan.apply(*tensors, scale, initial_state, cu_seqlens, save)
        o = o.unflatten(1 if packed else 0, (E, -1)).movedim(1 if packed else 0, 0)
        # What backward needs is the folded call's own; nobody reads it outside.
        return (o, state.unflatten(0, (E, -1)), *saved), (0, 0, *(None for _ in saved))


def apply(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The canonical inputs of `prism.scan._inputs`; returns o and the final state."""
    grad = torch.is_grad_enabled() and any(_tracked(x) for x in inputs if isinstance(x, Tensor))
    o, state, *_ = _Scan.apply(*inputs, grad)
    return o, state


def _tracked(x: Tensor) -> bool:
    # Under torch.func.vmap a member's requires_grad is its own level's; what lies below may need gradients.
    return x.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(x)
