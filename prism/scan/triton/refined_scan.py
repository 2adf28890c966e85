"""The refinement and the scan behind it as one operator, for scans that run on `chunkwise`.

`refine` and `prism_scan`, one after the other, hand L keys a token to each other through memory: normalised
keys forward, their gradients backward. Here the scan reads the keys where the projection has put them, bare,
and puts their gradient where the projection's backward pass wants it. Their norm goes into the values, which
`refine_kernel` forms anyway,

    w^l (key^l / |key^l|)^T = (w^l / |key^l|) key^l^T,      |key|^2 standing for |key|^2 + 1e-6,

and what it owes to the key, -key (key . d_key) / |key|^2, joins the gradient where the scan stores it.
`prism.refinement` and `prism.scan.recurrent` are the definition.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from prism.scan._inputs import canonical
from prism.scan.triton import chunkwise
from prism.scan.triton._operator import ALONE, choose_for
from prism.scan.triton._refine_kernels import refine_grad_kernel, refine_kernel
from prism.scan.triton._transforms import folded_call, plain
from prism.scan.triton.refine import check_rows, run_rows


def takes(q: Float[Tensor, "B T H K"], v: Float[Tensor, "B T HV V"]) -> bool:
    """Whether `refined_scan` has kernels for these: `chunkwise` runs their scan, at widths of its own."""
    K, V = q.shape[3], v.shape[3]
    return choose_for(q, v, None, None) is chunkwise and chunkwise.widths(q.dtype, K, V) == (K, V)


def refined_scan(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    log_decay: Float[Tensor, "B T HV"],
    beta: Float[Tensor, "B T HV"],
    rows: Float[Tensor, "B T R"],
    u: Float[Tensor, "B T HV V"] | None,
    steps: int,
    activation: str = "gelu",
    subtract: bool = True,
    unit: bool = True,
    minus_u: Float[Tensor, "B T HV V"] | None = None,
    v_again: Float[Tensor, "B T HV V"] | None = None,
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "B HV K V"] | None = None,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "B HV K V"]]:
    """`prism_scan(q, k, v, log_decay, beta, *refine(rows, u, v, ...))`: o and the final state.

    Arguments as of these two, one dtype for q, k, v, rows and u. `takes` says for which shapes.
    Differentiable once, in reverse. Works under torch.compile and torch.func.vmap.

    Raises:
        ValueError: what `prism_scan` and `refine` raise, or shapes that `takes` does not take.
    """
    inputs = canonical(q, k, v, log_decay, beta, None, None, scale, initial_state, None, False)
    check_rows(rows, u, v, steps, q.shape[3], activation, minus_u, v_again)
    for name, x in (("rows", rows), ("u", u)):
        if x is not None and x.dtype != q.dtype:
            raise ValueError(f"{name}: expected the dtype of q, {q.dtype}, came {x.dtype}")
    if not takes(q, v):
        expected = "a shape that `chunkwise` takes unpadded (`choose`)"
        raise ValueError(f"q, v: expected {expected}, came {list(q.shape)}, {list(v.shape)} of {q.dtype}")
    if rows.shape[-1] % 8:  # keys of every token start on 16 bytes
        rows = F.pad(rows, (0, -rows.shape[-1] % 8))
    others = None if u is None else minus_u, v_again
    tensors = q, k, v, log_decay, beta, rows, u, *others, initial_state
    save = torch.is_grad_enabled()
    if save and not torch.compiler.is_compiling() and plain(*tensors):
        save = any(x is not None and x.requires_grad for x in tensors)
    options = steps, activation, subtract, unit, inputs.scale
    o, state, *_ = _refined_scan(*tensors, *options, save)
    return o, state


def _keys(rows: Tensor, v: Tensor, steps: int, K: int) -> Tensor:
    """The keys in `rows`, [B, T, HV, L, K]."""
    HV = v.shape[2]
    return rows[..., : HV * steps * K].unflatten(-1, (HV, steps, K))


def _in_order(rows: Tensor) -> Tensor:
    """Rows end to end, which `contiguous()` does not promise of a single token's."""
    return rows if rows.stride(1) == rows.shape[-1] else rows.clone(memory_format=torch.contiguous_format)


def _ready(*tensors: Any) -> list[Any]:
    """Contiguous and from 16 bytes on."""
    dense = (x.contiguous() if isinstance(x, Tensor) else x for x in tensors)
    return [x.clone() if isinstance(x, Tensor) and x.data_ptr() % 16 else x for x in dense]


@torch.library.custom_op("prism::refined_scan", mutates_args=())
def _refined_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, rows: Tensor, u: Tensor | None,
    minus_u: Tensor | None, v_again: Tensor | None, initial_state: Tensor | None, steps: int, activation: str,
    subtract: bool, unit: bool, scale: float, save: bool,
) -> list[Tensor]:  # fmt: skip
    q, k, v, log_decay, beta, rows, u, initial_state = _ready(
        q, k, v, log_decay, beta, _in_order(rows), u, initial_state
    )
    K = q.shape[3]
    write_v, *norms = _writes(rows, v, steps, unit)
    options = steps, K, activation, subtract, unit, False
    run_rows(refine_kernel, rows, u, v, (None, write_v, norms[0] if unit else None), *options)
    saved = chunkwise.allocate(q, v, None, None) if save else []
    keys = _keys(rows, v, steps, K)
    inputs = q, k, v, log_decay, beta, keys, write_v, scale, initial_state, None
    o, state = chunkwise.forward(*inputs, saved, row=rows.shape[-1] // 8)
    return [o, state, *([write_v, *norms, *saved] if save else [])]


def _writes(rows: Tensor, v: Tensor, steps: int, unit: bool) -> list[Tensor]:
    B, T, HV, V = v.shape
    norms = [rows.new_empty(B, T, HV, steps, dtype=torch.float32)] if unit else []
    return [rows.new_empty(B, T, HV, steps, V), *norms]


@_refined_scan.register_fake
def _(
    q, k, v, log_decay, beta, rows, u, minus_u, v_again, initial_state, steps, activation, subtract, unit,
    scale, save,
):  # fmt: skip
    state = q.new_empty(q.shape[0], *v.shape[2:3], q.shape[3], v.shape[3], dtype=torch.float32)
    saved = [*_writes(rows, v, steps, unit), *chunkwise.allocate(q, v, None, None)] if save else []
    return [v.new_empty(v.shape), state, *saved]


@torch.library.custom_op("prism::refined_scan_backward", mutates_args=())
def _refined_scan_backward(
    do: Tensor | None, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor,
    beta: Tensor, rows: Tensor, u: Tensor | None, initial_state: Tensor | None, steps: int, activation: str,
    subtract: bool, unit: bool, scale: float, saved: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    do, dstate, q, k, v, log_decay, beta, rows, u, initial_state = _ready(
        do, dstate, q, k, v, log_decay, beta, _in_order(rows), u, initial_state
    )
    K = q.shape[3]
    write_v, *saved = saved
    norms = saved.pop(0) if unit else None
    d_rows, d_r = torch.empty_like(rows), torch.empty_like(v)
    inputs = q, k, v, log_decay, beta, _keys(rows, v, steps, K), write_v, scale, initial_state, None
    given = {"row": rows.shape[-1] // 8, "norms": norms, "d_write_k": _keys(d_rows, v, steps, K)}
    *grads, _, d_write_v, d_start = chunkwise.backward(do, dstate, *inputs, saved, **given)
    assert d_write_v is not None
    options = steps, K, activation, subtract, unit, False
    run_rows(refine_grad_kernel, rows, u, v, (None, d_write_v, norms, d_rows, d_r), *options)
    made = [g for g in grads if g is not None]
    return [*made, d_rows, d_r, *([] if d_start is None else [d_start])]


@_refined_scan_backward.register_fake
def _(
    do, dstate, q, k, v, log_decay, beta, rows, u, initial_state, steps, activation, subtract, unit, scale,
    saved,
):  # fmt: skip
    made = (q, k, v, log_decay, beta, rows, v, initial_state)
    return [x.new_empty(x.shape) for x in made if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, minus_u, v_again, initial_state = inputs[:10]
    ctx.options, ctx.others = inputs[10:15], (minus_u is not None, v_again is not None)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, initial_state, *output[2:])


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    do, dstate = grads[:2]
    if do is None and dstate is None:
        return (None,) * 16
    *inputs, initial_state = ctx.saved_tensors[:8]
    saved = list(ctx.saved_tensors[8:])
    u = inputs[6]
    found = _refined_scan_backward(do, dstate, *inputs, initial_state, *ctx.options, saved)
    dq, dk, dv, d_log_decay, d_beta, d_rows, d_r, *d_start = found
    for_u, for_v = ctx.others
    d_u = None if u is None or for_u else -d_r
    d_v = dv if for_v else dv + d_r
    others = d_r if for_u else None, d_r if for_v else None
    first = dq, dk, d_v, d_log_decay, d_beta, d_rows, d_u, *others
    return *first, d_start[0] if d_start else None, *(None for _ in range(6))


_refined_scan.register_autograd(_backward, setup_context=_setup_context)


_refined_scan.register_vmap(
    lambda info, dims, *args: folded_call(_refined_scan, info, dims, *args, results=2)
)


@_refined_scan_backward.register_vmap
def _(info, dims, *args):
    if all(dim is None for dim in dims[2:10]):  # what was saved is then of one forward pass, not of all
        raise RuntimeError(ALONE)
    return folded_call(_refined_scan_backward, info, dims, *args)
