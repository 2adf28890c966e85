"""One warp carries the state of one or a few (sequence, value head) pairs on chip from first token to last.

One launch forward and two backward (and sums of what each computed, where value heads share a key head or
V is cut into slices). Device memory holds, beyond inputs and outputs, e = v - Sbar k and the state at the
start of each chunk of `CHUNK` tokens, and during the backward pass the adjoint of the state there. Right
for every T, L, N and every K and V up to 256; fast where pairs are many, for T tokens take T steps.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism.scan.triton._chunk_kernel import chunk_kernel
from prism.scan.triton._launch import launch
from prism.scan.triton._resident_kernels import forward_kernel, reverse_kernel

__all__ = ["allocate", "backward", "forward"]

CHUNK = 16


class _Walk(NamedTuple):
    """The tile of a walk, the tokens it reads at a time, and the registers a lane may use (0: any number)."""

    KR: int
    KL: int
    G: int
    BV: int
    U: int
    registers: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 1} | ({"maxnreg": self.registers} if self.registers else {})


@cache
def _walk(K: int, V: int, L: int, *, reverse: bool) -> _Walk:
    """At most 32 numbers of the state to a lane, and a full warp. Fixed by what was measured on an H200."""
    width = triton.next_power_of_2(K)
    KL = max(1, width // 32)
    BV = min(triton.next_power_of_2(V), 32 // KL)
    KR = width // KL
    registers = 128 if KR <= 16 or (KL == 1 and L == 0 and not reverse) else 0
    return _Walk(KR, KL, 32 // (KL * BV), BV, 4 if L == 0 else 2 if L <= 2 else 1, registers)


class _Products(NamedTuple):
    """How the tiles of `chunk_kernel` are multiplied."""

    DOT: tl.dtype
    PRECISION: str
    BV: int
    num_warps: int
    registers: int

    @property
    def options(self) -> dict[str, int]:
        cap = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.num_warps, "num_stages": 1} | cap


@cache
def _products(dtype: torch.dtype, BK: int, BV: int, writes: bool = False) -> _Products:
    """float32 keeps its digits: three tf32 products where one warp's registers hold the tiles, else float32.

    bfloat16 tiles are multiplied as they are. A state does not fit float16's range, so float16 inputs become
    float32 tiles and lose in tf32 the digits that float16 has not.
    """
    warps = {16: 1, 32: 1, 256: 8}.get(BK, 4)
    if dtype == torch.bfloat16:
        return _Products(tl.bfloat16, "ieee", min(BV, 64 if warps > 1 else 32), warps, 0)
    if warps == 1:
        precision = "tf32" if dtype == torch.float16 else "split"
        # Twice as many programs at a time are worth 288 bytes of spills a lane, not the 496 that writes make.
        return _Products(tl.float32, precision, 16, 1, 128 if BK == 16 and not writes else 0)
    return _Products(tl.float32, "tf32" if dtype == torch.float16 else "ieee", min(BV, 64), warps, 0)


def _constants(K: int, V: int, L: int, walk: _Walk) -> dict[str, Any]:
    """The walks' constexpr parameters in order, but for the last flags."""
    KR, KL, G, BV, U, _ = walk
    return {"K": K, "V": V, "L": L, "KR": KR, "KL": KL, "G": G, "BV": BV, "C": CHUNK, "U": U}


def _slots(B: int, T: int, cu_seqlens: Tensor | None) -> int:
    if cu_seqlens is None:
        return B * ((T + CHUNK - 1) // CHUNK)
    return T // CHUNK + cu_seqlens.shape[0] - 1


def allocate(q: Tensor, v: Tensor, write_k: Tensor | None, cu_seqlens: Tensor | None) -> list[Tensor]:
    B, T, HV, V = v.shape
    states = (_slots(B, T, cu_seqlens), HV, q.shape[3], V)
    return [v.new_empty(v.shape), v.new_empty(states, dtype=torch.float32)]


def forward(
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
) -> tuple[Tensor, Tensor]:
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    L = 0 if write_k is None else write_k.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o = v.new_empty(v.shape)
    last = q.new_empty((N, HV, K, V), dtype=torch.float32)
    e, states = saved or (o, last)
    walk = _walk(K, V, L, reverse=False)
    flags = {"INITIAL": initial_state is not None, "PACKED": cu_seqlens is not None, "SAVE": bool(saved)}
    arguments = (
        q, k, v, log_decay, beta, _or(write_k, q), _or(write_v, q), _or(initial_state, last),
        _or(cu_seqlens, q), o, last, e, states, scale, T, N * HV, H, HV,
    )  # fmt: skip
    grid = (-(-N * HV // walk.G), -(-V // walk.BV))
    key = (*_types(q, log_decay, beta, cu_seqlens), H, HV, K, V, L, *flags.values())
    launch(forward_kernel, grid, key, arguments, _constants(K, V, L, walk) | flags, walk.options)
    return o, last


def backward(
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
) -> tuple[Tensor | None, ...]:
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    L = 0 if write_k is None else write_k.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    packed = cu_seqlens is not None
    e, states = saved
    if do is None:
        do = torch.zeros_like(v)

    walk = _walk(K, V, L, reverse=True)
    slices = -(-V // walk.BV)
    dv = torch.empty_like(v)
    dwrite_v = None if write_v is None else torch.empty_like(write_v)
    dinitial = None if initial_state is None else torch.empty_like(initial_state)
    dbeta = (
        torch.empty_like(beta) if slices == 1 else beta.new_empty((*beta.shape, slices), dtype=torch.float32)
    )
    adjoints = torch.empty_like(states)
    flags = {"LAST": dstate is not None, "INITIAL": dinitial is not None, "PACKED": packed}
    arguments: tuple[Any, ...] = (
        q, k, do, e, log_decay, beta, _or(write_k, q), _or(dstate, states), _or(cu_seqlens, q),
        dv, _or(dwrite_v, dv), dbeta, _or(dinitial, states), adjoints, scale, T, N * HV, H, HV, slices,
    )  # fmt: skip
    types = (*_types(q, log_decay, beta, cu_seqlens), H, HV, K, V)
    grid = (-(-N * HV // walk.G), slices)
    constants = _constants(K, V, L, walk) | flags
    launch(reverse_kernel, grid, (*types, L, *flags.values()), arguments, constants, walk.options)
    if slices > 1:
        dbeta = dbeta.sum(-1).to(beta.dtype)

    shared = HV > H  # each value head computes its own part of dq and dk
    dq, dk = (q.new_empty((B, T, HV, K), dtype=torch.float32 if shared else q.dtype) for _ in range(2))
    dlog_decay = torch.empty_like(log_decay)
    dwrite_k = None if write_k is None else torch.empty_like(write_k)
    BK, BV = (max(16, triton.next_power_of_2(width)) for width in (K, V))
    products = _products(q.dtype, BK, BV, L > 0)
    arguments = (
        q, k, log_decay, beta, _or(write_k, q), _or(write_v, q), do, e, dv, states, adjoints,
        _or(cu_seqlens, q), dq, dk, dlog_decay, _or(dwrite_k, dq), scale, T, N, H, HV, L,
    )  # fmt: skip
    constants = {"K": K, "V": V, "BK": BK, "BV": products.BV, "C": CHUNK, "WRITES": L > 0, "PACKED": packed}
    constants |= {"DOT": products.DOT, "PRECISION": products.PRECISION}
    grid = (_slots(B, T, cu_seqlens) * HV, 1)
    launch(chunk_kernel, grid, (*types, L > 0, packed), arguments, constants, products.options)
    if shared:
        dq, dk = (x.view(B, T, H, HV // H, K).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dlog_decay, dbeta, dwrite_k, dwrite_v, dinitial


def _types(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if x is None else x.dtype for x in tensors)


def _or(x: Tensor | None, placeholder: Tensor) -> Tensor:
    """A kernel's pointer argument that is never read needs some tensor all the same."""
    return placeholder if x is None else x
