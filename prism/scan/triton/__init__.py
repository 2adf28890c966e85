"""The GPU kernels of the scan, as one PyTorch operator with two implementations behind it.

`resident` keeps the state of one sequence and head on chip from the first token to the last: right for
every shape, and fast where sequences are many and narrow. `chunkwise` works on the chunks of a long
sequence in parallel. `choose` picks by shape, and says which it trusts; a caller sees one operator.
`_operator.py` says what an implementation is.

With TRITON_INTERPRET=1 set before triton is imported, the same kernels run on CPU tensors in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prism.scan.triton._operator import INTERPRETED, apply, choose

__all__ = ["MAX_WIDTH", "choose", "triton", "why_not"]

MAX_WIDTH = 256
"""The largest K and V that the kernels take."""


def why_not(
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
) -> str | None:
    """Why the kernels cannot run on these canonical inputs, or None where they can."""
    if max(q.shape[-1], v.shape[-1]) > MAX_WIDTH:
        return f"K and V must be at most {MAX_WIDTH}, got K = {q.shape[-1]} and V = {v.shape[-1]}"
    if q.dtype == torch.float64:
        return "it computes in float32; float64 inputs run on 'recurrent' and 'chunked'"
    if INTERPRETED:
        # Triton's interpreter rounds half-precision products wrongly and says nothing.
        return None if q.dtype == torch.float32 else f"Triton's interpreter takes float32 only, got {q.dtype}"
    if not q.is_cuda:
        return f"it needs CUDA tensors, got {q.device} (or TRITON_INTERPRET=1 set before triton is imported)"
    return None


def triton(
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
    *,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The canonical inputs of `prism.scan._inputs`; returns o [B, T, HV, V] and the state [N, HV, K, V]."""
    o, state = apply(q, k, v, log_decay, beta, write_k, write_v, scale, initial_state, cu_seqlens)
    return o, state if output_final_state else None
