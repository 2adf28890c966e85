"""One registered operator for every implementation: where compile, capture, vmap and autograd meet kernels.

Two opaque operators, `prism::triton_scan` and `prism::triton_scan_backward`, launch the kernels.
torch.compile takes them with the formula of their derivative, because Dynamo cannot trace an
autograd.Function under vmap; torch.func takes them inside an autograd.Function, because it cannot
differentiate an operator's formula; plain eager mode goes around them, because their dispatch costs as
much as everything else that a small scan costs.

An implementation is a module with three functions. Tensors reach them contiguous, on one device, shapes
and dtypes checked, never float64; write_k and write_v are both None or both have L >= 1; cu_seqlens is
None or holds N + 1 offsets whose values nobody has checked: kernels clamp them and never leave memory.

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

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from prism.scan.triton import chunkwise, resident
from prism.scan.triton._resident_kernels import forward_kernel
from prism.scan.triton._transforms import differentiable_once, plain

INTERPRETED: bool = not isinstance(forward_kernel, triton.runtime.JITFunction)
"""True where TRITON_INTERPRET=1 was set before triton was imported."""


def choose(
    T: int, N: int, HV: int, K: int, V: int, L: int, dtype: torch.dtype = torch.bfloat16
) -> ModuleType:
    """The implementation for T tokens in all, N sequences, HV value heads, widths K, V and L writes a token.

    | dtype    | wider of K, V | mean length T / N | pairs N * HV | implementation |
    |----------|---------------|-------------------|--------------|----------------|
    | bfloat16 | 33 to 128     | from 512          | any          | chunkwise      |
    | bfloat16 | 33 to 128     | from 128          | from 256     | chunkwise      |
    | bfloat16 | up to 32      | from 2048         | up to 128    | chunkwise      |
    | others   |               |                   |              | resident       |

    `resident` takes a step a token and needs many pairs to fill a GPU; `chunkwise` takes a step a chunk and
    pays for products of tiles, least where heads are wide. In float32 those have no matrix instructions to
    gain from, and `resident` is faster at every shape measured (benchmarks/NOTES.md). In float16 they round
    the state to a dtype whose range it can leave where q, v and o do not; `resident` keeps it in float32.
    Triton's interpreter, which has float32 alone, takes it as if it were bfloat16. GPUs whose blocks have
    less shared memory than `ROOM` take `resident` for everything.
    """
    width, pairs, length = max(K, V), N * HV, T // max(N, 1)
    if width > chunkwise.MAX_WIDTH or (dtype != torch.bfloat16 and not INTERPRETED):
        return resident
    if width > 32:
        return chunkwise if length >= 512 or (length >= 128 and pairs >= 256) else resident
    return chunkwise if length >= 2048 and pairs <= 128 else resident


ROOM = 210_000
"""Bytes of shared memory that a block of `chunkwise` may ask for: its launch settings are an H200's."""


@cache
def _read_shared_memory(device: int) -> int:
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


@torch.compiler.assume_constant_result
def _shared_memory(device: int) -> int:
    """Bytes that a block may ask for, which Triton checks before a launch."""
    return _read_shared_memory(device)


def choose_for(q: Tensor, v: Tensor, write_k: Tensor | None, cu_seqlens: Tensor | None) -> ModuleType:
    """The implementation that runs these inputs here."""
    B, T, _, K = q.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    L = 0 if write_k is None else write_k.shape[3]
    chosen = choose(B * T, N, v.shape[2], K, v.shape[3], L, q.dtype)
    if chosen is chunkwise and q.is_cuda and torch.cuda.is_available():  # fake tensors need no GPU
        device = torch.cuda.current_device() if q.device.index is None else q.device.index
        return chosen if _shared_memory(device) >= ROOM else resident
    return chosen


def _run(
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
    implementation = choose_for(q, v, write_k, cu_seqlens)
    saved = implementation.allocate(q, v, write_k, cu_seqlens) if save else []
    o, state = implementation.forward(*inputs, scale, _dense(initial_state), _dense(cu_seqlens), saved)
    return [o, state, *saved]


_scan = torch.library.custom_op("prism::triton_scan", _run, mutates_args=())


@_scan.register_fake
def _(q, k, v, log_decay, beta, write_k, write_v, scale, initial_state, cu_seqlens, save):
    saved = choose_for(q, v, write_k, cu_seqlens).allocate(q, v, write_k, cu_seqlens) if save else []
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = q.new_empty(N, v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
    return [v.new_empty(v.shape), state, *saved]


def _run_backward(
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
    implementation = choose_for(q, v, write_k, cu_seqlens)
    grads = implementation.backward(*inputs, scale, _dense(initial_state), _dense(cu_seqlens), saved)
    return [g for g in grads if g is not None]


_scan_backward = torch.library.custom_op("prism::triton_scan_backward", _run_backward, mutates_args=())


@_scan_backward.register_fake
def _(
    do, dstate, q, k, v, log_decay, beta, write_k, write_v, scale, initial_state, cu_seqlens, saved
):  # fmt: skip
    inputs = (q, k, v, log_decay, beta, write_k, write_v, initial_state)
    return [x.new_empty(x.shape) for x in inputs if x is not None]


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


# Under vmap members become sequences: folded into B, or laid end to end where sequences are packed.


def _fold(E: int, dims: Sequence[int | None], inputs: Sequence[Any], dos: Sequence[Any] = ()) -> list[Any]:
    """q ... cu_seqlens of E members as the arguments of one call; `dos`, (do, dstate), lead them."""
    axis = 0 if inputs[9] is None else 1  # of the tokens' tensors; sequences come first in states
    q, q_dim = inputs[0], dims[len(dos)]
    T = (q if q_dim is None else q.select(q_dim, 0)).shape[1]
    folded = []
    for n, (x, dim) in enumerate(zip((*dos, *inputs), dims, strict=True)):
        at = n - len(dos)
        if not isinstance(x, Tensor) or at == 9:
            folded.append(x)
            continue
        x = x.unsqueeze(0).expand(E, *x.shape) if dim is None else x.movedim(dim, 0)
        place = 0 if at in (-1, 8) else axis
        folded.append(_dense(x.movedim(0, place).flatten(place, place + 1)))
    if inputs[9] is not None:
        if dims[len(dos) + 9] is not None:
            raise ValueError("prism_scan: cu_seqlens must be the same for every member under vmap")
        offsets = inputs[9]
        starts = T * torch.arange(E, device=offsets.device, dtype=offsets.dtype)
        folded[-1] = torch.cat([(starts[:, None] + offsets[:-1]).flatten(), offsets.new_full((1,), E * T)])
    return folded


def _unfold(E: int, x: Tensor, axis: int) -> Tensor:
    return x.unflatten(axis, (E, -1)).movedim(axis, 0)


def _vmap_scan(
    run: Callable[..., Sequence[Tensor]], info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> Any:
    *inputs, save = args
    o, state, *saved = run(*_fold(info.batch_size, in_dims[:10], inputs), save)
    packed = inputs[9] is not None
    found = [_unfold(info.batch_size, o, int(packed)), _unfold(info.batch_size, state, 0)]
    # What backward needs stays folded: only the folded backward call reads it.
    return [*found, *saved], [0, 0, *(None for _ in saved)]


@_scan.register_vmap
def _(info, in_dims, *args):
    return _vmap_scan(_scan, info, in_dims, *args)


@_scan_backward.register_vmap
def _(info, in_dims, *args):
    do, dstate, *inputs, saved = args
    E = info.batch_size
    if all(dim is None for dim in in_dims[2:12]):  # `saved` is then of one forward pass, not of E
        raise RuntimeError(ALONE)
    grads = _scan_backward(*_fold(E, in_dims[:12], inputs, (do, dstate)), saved)
    axes = [int(inputs[9] is not None)] * 7 + [0]
    present = [axis for x, axis in zip((*inputs[:7], inputs[8]), axes, strict=True) if x is not None]
    return [_unfold(E, g, axis) for g, axis in zip(grads, present, strict=True)], [0] * len(grads)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    *tensors, scale, initial_state, cu_seqlens, _ = inputs
    _, _, *saved = output
    ctx.scale = scale
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, initial_state, cu_seqlens, *saved)


def _backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
    kept = ctx.saved_tensors
    *tensors, initial_state, cu_seqlens = kept[:9]
    if do is None and dstate is None:
        return (None,) * 11
    do, dstate = _dense(do), _dense(dstate)
    floating = do, dstate, *tensors, initial_state

    def gradients() -> list[Tensor | None]:
        run: Callable[..., list[Tensor]] = _run_backward if plain(*floating) else _scan_backward
        found = iter(run(do, dstate, *tensors, ctx.scale, initial_state, cu_seqlens, list(kept[9:])))
        return [None if x is None else next(found) for x in (*tensors, initial_state)]

    *grads, d_initial = differentiable_once(_ONCE, gradients, floating)
    return *grads, None, d_initial, None, None


ALONE = "prism_scan: backend 'triton' has no vmap over the backward pass alone, backend 'recurrent' has"
_ONCE = "prism_scan: backend 'triton' can be differentiated once, backend 'recurrent' without limit"

# For torch.compile, which cannot trace an autograd.Function under vmap.
_scan.register_autograd(lambda ctx, grads: _backward(ctx, *grads[:2]), setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """Where nothing but autograd looks on. Outside this class the operators do the same more slowly."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        output = _run(*args)
        _setup_context(ctx, args, output)
        return output[0], output[1]

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, do, dstate)


class _Transformed(torch.autograd.Function):
    """For torch.func: unlike the operator's own formula it can be vmapped and differentiated there."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return tuple(_scan(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[2:])
        _setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, do, dstate)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        found, dims = _vmap_scan(_Transformed.apply, info, in_dims, *args)
        return tuple(found), tuple(dims)


def apply(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The canonical inputs of `prism.scan._inputs`; returns o and the final state."""
    # Out here a copy is made once, not again for backward; a compiler writes it where it makes the tensor.
    inputs = tuple(x.contiguous() if isinstance(x, Tensor) else x for x in inputs)
    grad = torch.is_grad_enabled()
    if torch.compiler.is_compiling():
        o, state, *_ = _scan(*inputs, grad)
        return o, state
    tensors = (*inputs[:7], inputs[8])
    if not plain(*tensors):
        o, state, *_ = _Transformed.apply(*inputs, grad)
    elif grad and any(x is not None and x.requires_grad for x in tensors):
        o, state = _Eager.apply(*inputs, True)
    else:
        o, state = _run(*inputs, False)  # type: ignore[call-arg]
    return o, state
