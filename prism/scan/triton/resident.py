"""One warp carries the state of one or a few (sequence, value head) pairs on chip from first token to last.

One launch forward and two backward (and sums of what each computed, where value heads share a key head).
Device memory holds, beyond inputs and outputs, e = v - Sbar k and the state at the start of each chunk of
`CHUNK` tokens, and during the backward pass the adjoint of the state there. Right for every T, L, N and
every K and V up to 256; fast where pairs are many, for T tokens take T steps.
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
from prism.scan.triton._narrow_chunk_kernel import narrow_chunk_kernel
from prism.scan.triton._resident_kernels import forward_kernel, reverse_kernel

__all__ = ["allocate", "backward", "forward"]

CHUNK = 16

FEW_PAIRS = 1024
"""(Sequence, value head) pairs that leave an H200 short of warps: measured at 512, and not so at 4096."""


class _Walk(NamedTuple):
    """The tile of a walk, the tokens it reads at a time, the rows it spreads together, the registers a lane
    may use (0: any number), and whether it does without masks where the shape needs none."""

    KR: int
    KL: int
    G: int
    BV: int
    U: int
    J: int
    registers: int
    even: bool

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 1} | ({"maxnreg": self.registers} if self.registers else {})


@cache
def _walk(K: int, V: int, L: int, *, few: bool, reverse: bool) -> _Walk:
    """At most 32 numbers of the state to a lane, and a full warp. Fixed by what was measured on an H200 at
    widths 16 and 32; wider walks follow their like.

    A walk of few narrow pairs waits for its own chain of reads and sums: half the keys to a lane shorten it,
    and make twice as many warps of them.
    """
    width = triton.next_power_of_2(K)
    if few and 2 <= width <= 16 and L in (0, 2):
        BV = min(triton.next_power_of_2(V), 16)
        return _Walk(width // 2, 2, 16 // BV, BV, U=4, J=4, registers=0, even=True)
    KL = max(1, width // 32)
    BV = min(triton.next_power_of_2(V), 32 // KL)
    KR = width // KL
    U = 4 if L == 0 or (reverse and L == 2 and width == 32) else 2 if L <= 2 else 1
    J = {0: 2, 2: 4}.get(L, 1) if reverse else 1
    registers = 128 if KR <= 16 or (width == 32 and L == 0) else 0
    even = reverse or L == 0 or (L == 2 and few)
    return _Walk(KR, KL, 32 // (KL * BV), BV, U, J, registers, even)


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
        # Measured at K = V = 16, which `narrow_chunk_kernel` takes now: twice as many programs at a time were
        # worth 288 bytes of spills a lane, not the 496 that writes make.
        return _Products(tl.float32, precision, 16, 1, 128 if BK == 16 and not writes else 0)
    return _Products(tl.float32, "tf32" if dtype == torch.float16 else "ieee", min(BV, 64), warps, 0)


class _Narrow(NamedTuple):
    """How `narrow_chunk_kernel` works: its flags, which it explains, and the registers a lane may use."""

    TURNED: bool
    M: int
    RELOAD: bool
    num_warps: int
    registers: int

    @property
    def options(self) -> dict[str, int]:
        cap = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.num_warps, "num_stages": 1} | cap


NARROW = {
    (torch.float32, 16, 0): _Narrow(False, 0, False, 1, 168),
    (torch.float32, 32, 0): _Narrow(True, 0, False, 1, 0),
    (torch.float32, 32, 2): _Narrow(True, 2, True, 2, 0),
    (torch.bfloat16, 16, 0): _Narrow(False, 0, False, 1, 96),
    (torch.bfloat16, 16, 2): _Narrow(False, 1, False, 1, 168),
    (torch.bfloat16, 32, 0): _Narrow(True, 0, False, 1, 168),
    (torch.bfloat16, 32, 2): _Narrow(True, 2, False, 2, 168),
}
"""By dtype, the larger of the padded K and V, and L: where it was faster than `chunk_kernel` on an H200."""


def _constants(K: int, V: int, L: int, walk: _Walk) -> dict[str, Any]:
    """The walks' constexpr parameters in order, but for the last flags."""
    KR, KL, G, BV, U, *_ = walk
    return {"K": K, "V": V, "L": L, "KR": KR, "KL": KL, "G": G, "BV": BV, "C": CHUNK, "U": U}


def _even(T: int, pairs: int, K: int, V: int, packed: bool, walk: _Walk) -> bool:
    """Whether nothing that the walk reads or writes needs a mask, and it shall use none."""
    if packed or not walk.even or T % CHUNK:
        return False
    return K == walk.KR * walk.KL and V % walk.BV == 0 and pairs % walk.G == 0


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
    packed = cu_seqlens is not None
    walk = _walk(K, V, L, few=N * HV <= FEW_PAIRS, reverse=False)
    even = _even(T, N * HV, K, V, packed, walk)
    flags: dict[str, Any] = {"INITIAL": initial_state is not None, "PACKED": packed, "SAVE": bool(saved)}
    flags |= {"J": walk.J, "EVEN": even}
    arguments = (
        q, k, v, log_decay, beta, _or(write_k, q), _or(write_v, q), _or(initial_state, last),
        _or(cu_seqlens, q), o, last, e, states, scale, T, N * HV, H, HV,
    )  # fmt: skip
    grid = (-(-N * HV // walk.G), -(-V // walk.BV))
    key = (*_types(q, log_decay, beta, cu_seqlens), H, HV, K, V, L, walk, *flags.values())
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

    walk = _walk(K, V, L, few=N * HV <= FEW_PAIRS, reverse=True)
    even = _even(T, N * HV, K, V, packed, walk)
    dv = torch.empty_like(v)
    dwrite_v = None if write_v is None else torch.empty_like(write_v)
    dinitial = None if initial_state is None else torch.empty_like(initial_state)
    adjoints = torch.empty_like(states)
    flags: dict[str, Any] = {"LAST": dstate is not None, "INITIAL": dinitial is not None, "PACKED": packed}
    flags |= {"J": walk.J, "EVEN": even}
    arguments: tuple[Any, ...] = (
        q, k, do, log_decay, beta, _or(write_k, q), _or(dstate, states), _or(cu_seqlens, q),
        dv, _or(dwrite_v, dv), _or(dinitial, states), adjoints, scale, T, N * HV, H, HV,
    )  # fmt: skip
    types = (*_types(q, log_decay, beta, cu_seqlens), H, HV, K, V)
    grid = (-(-N * HV // walk.G), -(-V // walk.BV))
    constants = _constants(K, V, L, walk) | flags
    launch(reverse_kernel, grid, (*types, L, walk, *flags.values()), arguments, constants, walk.options)

    shared = HV > H  # each value head computes its own part of dq and dk
    dq, dk = (q.new_empty((B, T, HV, K), dtype=torch.float32 if shared else q.dtype) for _ in range(2))
    dlog_decay, dbeta = torch.empty_like(log_decay), torch.empty_like(beta)
    dwrite_k = None if write_k is None else torch.empty_like(write_k)
    BK, BV = (max(16, triton.next_power_of_2(width)) for width in (K, V))
    products = _products(q.dtype, BK, BV, L > 0)
    arguments = (
        q, k, log_decay, beta, _or(write_k, q), _or(write_v, q), do, e, dv, states, adjoints,
        _or(cu_seqlens, q), dq, dk, dlog_decay, _or(dwrite_k, dq), dbeta, scale, T, N, H, HV, L,
    )  # fmt: skip
    grid = (_slots(B, T, cu_seqlens) * HV, 1)
    constants = {"K": K, "V": V, "BK": BK, "BV": BV, "C": CHUNK}
    product = {"DOT": products.DOT, "PRECISION": products.PRECISION}
    narrow = NARROW.get((q.dtype, max(BK, BV), L))
    if narrow is not None:
        even = not packed and T % CHUNK == 0 and K == BK and V == BV
        constants |= {"PACKED": packed} | product | {"EVEN": even}
        constants |= {"TURNED": narrow.TURNED, "M": narrow.M, "RELOAD": narrow.RELOAD}
        launch(narrow_chunk_kernel, grid, (*types, L, packed, even), arguments, constants, narrow.options)
    else:
        constants |= {"BV": products.BV, "WRITES": L > 0, "PACKED": packed} | product
        launch(chunk_kernel, grid, (*types, L > 0, packed), arguments, constants, products.options)
    if shared:
        dq, dk = (x.view(B, T, H, HV // H, K).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dlog_decay, dbeta, dwrite_k, dwrite_v, dinitial


def _types(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if x is None else x.dtype for x in tensors)


def _or(x: Tensor | None, placeholder: Tensor) -> Tensor:
    """A kernel's pointer argument that is never read needs some tensor all the same."""
    return placeholder if x is None else x
