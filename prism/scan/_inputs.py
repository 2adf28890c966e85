"""What `prism_scan` accepts, and the one form in which every backend receives it.

Canonical form: tensors as the user gave them (any strides, any of the four floating dtypes), with consistent
shapes, dtypes and devices; `scale` a float; `write_k` and `write_v` both None or both with L >= 1;
`initial_state` None or [N, HV, K, V] in the state dtype; `cu_seqlens` None or [N + 1] on the device of q.
"""

from __future__ import annotations

import math
from itertools import pairwise
from numbers import Real
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class ScanInputs(NamedTuple):
    """The positional arguments of a backend, in order."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    write_k: Tensor | None
    write_v: Tensor | None
    scale: float
    initial_state: Tensor | None
    cu_seqlens: Tensor | None


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the state and of every sum: float64 for float64 inputs, float32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def canonical(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    write_k: Tensor | None,
    write_v: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    validate: bool,
) -> ScanInputs:
    """Checks everything; raises ValueError on the first thing wrong."""
    _tensor("q", q, 4, "[B, T, H, K]")
    _tensor("v", v, 4, "[B, T, HV, V]")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if q.dtype not in DTYPES:
        _fail("q", "have dtype float32, float64, bfloat16 or float16", q.dtype)
    if min(B, T, H, K) < 1:
        _fail("q", "have every size of [B, T, H, K] at least 1", list(q.shape))
    if min(HV, V) < 1 or HV % H:
        _fail("v", f"have V >= 1 and a number of value heads that is a multiple of H = {H}", list(v.shape))
    _like("k", k, q, [B, T, H, K], "[B, T, H, K]")
    _like("v", v, q, [B, T, HV, V], "[B, T, HV, V]")
    _like("log_decay", log_decay, q, [B, T, HV], "[B, T, HV]", torch.float32)
    _like("beta", beta, q, [B, T, HV], "[B, T, HV]", torch.float32)

    if write_k is None or write_v is None:
        if write_k is not None or write_v is not None:
            name, other = ("write_k", "write_v") if write_k is None else ("write_v", "write_k")
            _fail(name, f"be given together with {other}", None)
    else:
        _tensor("write_k", write_k, 5, "[B, T, HV, L, K]")
        L = write_k.shape[3]
        _like("write_k", write_k, q, [B, T, HV, L, K], "[B, T, HV, L, K]")
        _like("write_v", write_v, q, [B, T, HV, L, V], "[B, T, HV, L, V]")
        if L == 0:
            write_k = write_v = None

    if scale is None:
        scale = K**-0.5
    elif isinstance(scale, bool) or not isinstance(scale, Real) or not math.isfinite(scale):
        _fail("scale", "be a finite number or None", repr(scale))

    N = B
    if cu_seqlens is not None:
        N = _offsets(cu_seqlens, q, validate)
    if initial_state is not None:
        _tensor("initial_state", initial_state, 4, "[N, HV, K, V]")
        _shape("initial_state", initial_state, [N, HV, K, V], "[N, HV, K, V]")
        if initial_state.dtype != state_dtype(q.dtype):
            _fail(
                "initial_state",
                f"have dtype {_plain(state_dtype(q.dtype))} beside {_plain(q.dtype)} inputs",
                initial_state.dtype,
            )
        _device("initial_state", initial_state, q)
    return ScanInputs(q, k, v, log_decay, beta, write_k, write_v, float(scale), initial_state, cu_seqlens)


def _offsets(cu_seqlens: Tensor, q: Tensor, validate: bool) -> int:
    """Number of packed sequences. Reads the values where that is free, or wanted and possible."""
    B, T = q.shape[:2]
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        _fail("cu_seqlens", "be an int32 or int64 tensor of offsets", _what(cu_seqlens))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        _fail("cu_seqlens", "have shape [N + 1] with N >= 1", list(cu_seqlens.shape))
    if B != 1:
        _fail("q", "have B = 1 where cu_seqlens packs the sequences", list(q.shape))
    _device("cu_seqlens", cu_seqlens, q)
    if torch.compiler.is_compiling():
        return cu_seqlens.shape[0] - 1
    if torch._C._functorch.is_batchedtensor(cu_seqlens):
        _fail("cu_seqlens", "be the same for every member under vmap", "a batched tensor")
    on_cpu = cu_seqlens.device.type == "cpu"
    capturing = cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()
    if on_cpu or (validate and not capturing):
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0:
            _fail("cu_seqlens", "start at 0", offsets[0])
        for n, (start, end) in enumerate(pairwise(offsets)):
            if end < start:
                _fail("cu_seqlens", "never decrease", f"{start} before {end} at position {n + 1}")
        if offsets[-1] != T:
            _fail("cu_seqlens", f"end at T = {T}", offsets[-1])
    return cu_seqlens.shape[0] - 1


def _like(
    name: str, x: Tensor, q: Tensor, shape: list[int], symbols: str, *other_dtypes: torch.dtype
) -> None:
    _tensor(name, x, len(shape), symbols)
    _shape(name, x, shape, symbols)
    if x.dtype != q.dtype and x.dtype not in other_dtypes:
        allowed = " or ".join(dict.fromkeys(_plain(d) for d in (q.dtype, *other_dtypes)))
        _fail(name, f"have dtype {allowed} beside q of {_plain(q.dtype)}", x.dtype)
    _device(name, x, q)


def _tensor(name: str, x: Tensor, dim: int, symbols: str) -> None:
    if not isinstance(x, Tensor):
        _fail(name, f"be a tensor {symbols}", _what(x))
    if x.dim() != dim:
        _fail(name, f"have {dim} dimensions {symbols}", list(x.shape))


def _shape(name: str, x: Tensor, shape: list[int], symbols: str) -> None:
    if list(x.shape) != shape:
        _fail(name, f"have shape {symbols} = {shape}", list(x.shape))


def _device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        _fail(name, f"be on the device of q, {q.device}", x.device)


def _what(x: object) -> object:
    return f"a tensor of {_plain(x.dtype)}" if isinstance(x, Tensor) else type(x).__name__


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fail(name: str, expected: str, got: object) -> NoReturn:
    if isinstance(got, torch.dtype):
        got = _plain(got)
    raise ValueError(f"prism_scan: {name} must {expected}, got {got}")
