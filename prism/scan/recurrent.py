"""The definition: the recurrence token by token, to be checked against the paper."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, einsum

from prism.scan._inputs import state_dtype


def recurrent(
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
    if cu_seqlens is not None:
        parts = []
        for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            at = slice(start, end)
            wk, wv = (None if x is None else x[:, at] for x in (write_k, write_v))
            S_0 = None if initial_state is None else initial_state[n : n + 1]
            tokens = q[:, at], k[:, at], v[:, at], log_decay[:, at], beta[:, at], wk, wv
            parts.append(recurrent(*tokens, scale, S_0, None))
        o = torch.cat([o for o, _ in parts], dim=1)
        return o, torch.cat([S for _, S in parts if S is not None]) if output_final_state else None

    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    out_dtype, dtype = q.dtype, state_dtype(q.dtype)
    # Value head j reads key head j // (HV / H).
    q, k = (x.to(dtype).repeat_interleave(HV // H, dim=2) for x in (q, k))
    v, log_decay, beta = v.to(dtype), log_decay.to(dtype), beta.to(dtype)

    S = q.new_zeros(B, HV, K, V) if initial_state is None else initial_state
    outs = []
    for t in range(T):
        S = log_decay[:, t, :, None, None].exp() * S
        read = einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - read))
        if write_k is not None and write_v is not None:
            S = S + einsum("bhlk,bhlv->bhkv", write_k[:, t].to(dtype), write_v[:, t].to(dtype))
        outs.append(scale * einsum("bhkv,bhk->bhv", S, q[:, t]))
    o = torch.stack(outs, dim=1) if outs else v  # v: an empty sequence
    return o.to(out_dtype), S if output_final_state else None
