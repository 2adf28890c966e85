"""The chunk-parallel form in plain PyTorch, forward and backward: the default on a CPU.

Inside a chunk of C tokens everything is a matrix product. With G_t the sum of log_decay from the chunk's start to
t, D_ti = exp(G_t - G_i) for i <= t, and S the state at the chunk's start, the erase errors e_t = v_t - Sbar_t k_t
solve one C x C triangular system whatever L is,

    (I + N^0 diag(beta)) e = v - exp(G) k S - sum_l N^l w^l          N^l = tril(k x_l^T . D, -1)
    o    = scale * (exp(G) q S + sum_l P^l w^l)                      P^l = tril(q x_l^T . D)
    S_C  = exp(G_C) S + sum_l (exp(G_C - G) x_l)^T w^l

where x_0 = k, w^0 = beta e and x_l, w^l for l >= 1 are the writes. The backward pass is derived by hand: one
transposed solve, and a gradient of log_decay that sums the pairs straddling a token instead of subtracting totals.

Symbols in the code: X (sequence chunks x value heads) is the batch of all products; R = L + 1 sources; `qk` stacks
queries and keys, `P` and `N` are the halves of `A`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.linalg import solve_triangular

from prism.scan._inputs import state_dtype


def chunked(
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
    chunk = _chunk_length(q.shape[1], q.shape[3])
    o, state, *_ = _Scan.apply(
        q, k, v, log_decay, beta, write_k, write_v, initial_state, cu_seqlens, scale, chunk
    )
    return o, state if output_final_state else None


def _chunk_length(T: int, K: int) -> int:
    return min(T, 16 if K <= 32 else 32 if K <= 64 else 64)


class _Batch:
    """Tokens [B, T, heads, ...] to chunks [n * B, heads, C, ...] and back; the tail is padded with zeros."""

    def __init__(self, B: int, T: int, chunk: int):
        self.B, self.T, self.C = B, T, chunk
        self.n = -(-T // chunk)
        self.running = (B,) * self.n

    def split(self, x: Tensor) -> Tensor:
        if self.n * self.C != self.T:
            x = torch.cat([x, x.new_zeros(self.B, self.n * self.C - self.T, *x.shape[2:])], 1)
        x = x.unflatten(1, (self.n, self.C))
        return x.permute(1, 0, 3, 2, *range(4, x.dim())).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (self.n, self.B))
        x = x.permute(1, 0, 3, 2, *range(4, x.dim())).flatten(1, 2)
        return x[:, : self.T]

    def start_states(self, state: Tensor) -> Tensor:
        return state

    def final_states(self, state: Tensor) -> Tensor:
        return state


class _Packed:
    """The same for sequences packed into B = 1: each is cut into chunks of its own, the longest sequences first."""

    def __init__(self, cu_seqlens: Tensor, T: int, chunk: int):
        ends = cu_seqlens.tolist()
        counts = [-(-(b - a) // chunk) for a, b in zip(ends, ends[1:], strict=False)]
        order = sorted(range(len(counts)), key=lambda n: -counts[n])
        self.T, self.C = T, chunk
        self.running = tuple(sum(c > i for c in counts) for i in range(max(counts)))
        first, token = [], torch.arange(T)
        slots = torch.empty(T, dtype=torch.long)
        offsets = [0]
        for r in self.running:
            offsets.append(offsets[-1] + r)
        for rank, n in enumerate(order):
            a, b = ends[n], ends[n + 1]
            j = token[: b - a]
            slots[a:b] = (torch.tensor(offsets)[j // chunk] + rank) * chunk + j % chunk
        where = torch.full((offsets[-1] * chunk,), T)
        where[slots] = token
        dev = cu_seqlens.device
        self.slots, self.where = slots.to(dev), where.to(dev)
        self.order = torch.tensor(order, device=dev)
        self.back = self.order.argsort()

    def split(self, x: Tensor) -> Tensor:
        x = torch.cat([x[0], x.new_zeros(1, *x.shape[2:])])[self.where]
        return x.unflatten(0, (-1, self.C)).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)[self.slots][None]

    def start_states(self, state: Tensor) -> Tensor:
        return state[self.order]

    def final_states(self, state: Tensor) -> Tensor:
        return state[self.back]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, log_decay, beta, write_k, write_v, initial_state, cu_seqlens, scale, chunk):
        B, T, H, K = q.shape
        HV, V = v.shape[2:]
        dtype = state_dtype(q.dtype)
        layout = _Batch(B, T, chunk) if cu_seqlens is None else _Packed(cu_seqlens, T, chunk)
        C = layout.C
        L = 0 if write_k is None else write_k.shape[3]

        qk = torch.stack([layout.split(q), layout.split(k)], 2).to(dtype)
        qk = qk.repeat_interleave(HV // H, 1).flatten(0, 1)  # [X, 2, C, K]
        k = qk[:, 1]
        v, g, beta = (layout.split(x).to(dtype).flatten(0, 1) for x in (v, log_decay, beta))
        x = k[:, None]
        if L:
            x = torch.cat([x, layout.split(write_k).to(dtype).flatten(0, 1).transpose(1, 2)], 1)
            w = layout.split(write_v).to(dtype).flatten(0, 1).transpose(1, 2)
            w = torch.cat([torch.empty_like(w[:, :1]), w], 1)
        else:
            w = torch.empty_like(v)[:, None]
        X = k.shape[0]

        D, start = _decays(g)
        end = D[:, 0, -1, :, None]
        A = torch.bmm(qk.flatten(1, 2), x.flatten(1, 2).mT).view(X, 2, C, L + 1, C)
        A *= D[:, :, :, None]
        P, N = A[:, 0], A[:, 1]
        if L:
            v = torch.baddbmm(v, N[:, :, 1:].flatten(2), w[:, 1:].flatten(1, 2), alpha=-1)
        eY = torch.cat([v, start * k], -1)
        eY = solve_triangular(N[:, :, 0] * beta[:, None], eY, upper=False, unitriangular=True)
        e, Y = eY[..., :V], eY[..., V:]
        into = ((end * beta[..., None]) * k).mT
        added = torch.bmm((end[:, None] * x[:, 1:]).flatten(1, 2).mT, w[:, 1:].flatten(1, 2)) if L else None

        n0 = layout.running[0] if layout.running else 0
        if initial_state is None:
            S = k.new_zeros((B if cu_seqlens is None else cu_seqlens.shape[0] - 1) * HV, K, V)
        else:
            S = layout.start_states(initial_state).flatten(0, 1)
        final = S.clone()
        S0 = k.new_empty(X, K, V)
        errors = k.new_empty(X, C, V)
        a = 0
        for n in layout.running:
            at = slice(a, a + n * HV)
            a += n * HV
            S = S[: n * HV]
            S0[at] = S
            torch.baddbmm(e[at], Y[at], S, alpha=-1, out=errors[at])
            S = start[at, -1:] * S
            if L:
                S = S + added[at]
            S = torch.baddbmm(S, into[at], errors[at])
            final[: n * HV] = S
        w[:, 0] = beta[..., None] * errors
        o = torch.bmm(start * qk[:, 0], S0)
        o = torch.baddbmm(o, P.flatten(2), w.flatten(1, 2))
        o = layout.join((scale * o).to(q.dtype).unflatten(0, (-1, HV)))
        final = layout.final_states(final.unflatten(0, (-1, HV)))
        return o, final, qk, x, w, A, D, start, beta, errors, Y, S0

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        ctx.set_materialize_grads(True)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*output[2:], inputs[8])
        q, k, v, log_decay, beta, write_k, write_v, initial_state, cu_seqlens, scale, chunk = inputs
        ctx.meta = (tuple(q.shape), tuple(v.shape), scale, chunk)
        ctx.dtypes = [None if i is None else i.dtype for i in inputs[:8]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do, dfinal, *_):
        *saved, cu_seqlens = ctx.saved_tensors
        qk, x, w, A, D, start, beta, errors, Y, S0 = saved
        (B, T, H, K), (_, _, HV, V), scale, chunk = ctx.meta
        layout = _Batch(B, T, chunk) if cu_seqlens is None else _Packed(cu_seqlens, T, chunk)
        C = layout.C
        X, R = x.shape[:2]
        dtype = qk.dtype
        end = D[:, 0, -1, :, None]
        k = qk[:, 1]
        do = layout.split(do).to(dtype).flatten(0, 1) * scale
        P, N = A[:, 0], A[:, 1]
        dU = torch.bmm(P[:, :, 0].mT, do)
        dS0 = torch.bmm((start * qk[:, 0]).mT, do)
        Yb = (beta[..., None] * Y).mT
        ek = end * k
        dSC = torch.empty_like(S0)
        dS = layout.start_states(dfinal).flatten(0, 1).clone()
        a = X
        for n in reversed(layout.running):
            at = slice(a - n * HV, a)
            a -= n * HV
            cur = dS[: n * HV]
            dSC[at] = cur
            dU[at] = torch.baddbmm(dU[at], ek[at], cur)
            dS[: n * HV] = torch.baddbmm(start[at, -1:] * cur + dS0[at], Yb[at], dU[at], alpha=-1)
        dinit = layout.final_states(dS.unflatten(0, (-1, HV)))
        dY = solve_triangular(N[:, :, 0].mT * beta[:, None], dU, upper=True, unitriangular=True)
        dbeta = (dY * errors).sum(-1)
        dR = beta[..., None] * dY
        F = torch.stack([do, -dR], 1).flatten(1, 2)  # [X, 2C, V]
        w_ = w.flatten(1, 2)
        dA = torch.bmm(F, w_.mT).view(X, 2, C, R, C)
        Z = (dA * A).sum((1, 3))
        dA *= D[:, :, :, None]
        dA_ = dA.view(X, 2 * C, R * C)
        T1 = start[:, None] * torch.bmm(F, S0.mT).view(X, 2, C, K)
        z = (T1 * qk).sum((1, 3))
        dqk = torch.baddbmm(T1.flatten(1, 2), dA_, x.flatten(1, 2)).view(X, 2, C, K)
        T2 = end[:, None] * torch.bmm(w_, dSC.mT).view(X, R, C, K)
        y = (T2 * x).sum((1, 3))
        dx = torch.baddbmm(T2.flatten(1, 2), dA_.mT, qk.flatten(1, 2)).view(X, R, C, K)
        carry = start[:, -1] * (dSC * S0).sum((1, 2))[:, None]
        tri = torch.ones(C, C, dtype=dtype, device=do.device).triu()
        below = torch.ones(C, C + 1, dtype=dtype, device=do.device).tril()
        Z = torch.cat([z[..., None], Z], -1)
        src = torch.cat([carry, y], -1)
        dg = ((torch.matmul(tri, Z) + src[:, None]) * below).sum(-1)
        dwk = dwv = None
        if R > 1:
            dw = torch.bmm((end[:, None] * x[:, 1:]).flatten(1, 2), dSC)
            dw = torch.baddbmm(dw, A.view(X, 2 * C, R * C)[:, :, C:].mT, F).view(X, R - 1, C, V)
            dwv = layout.join(dw.transpose(1, 2).unflatten(0, (-1, HV)))
            dwk = layout.join(dx[:, 1:].transpose(1, 2).unflatten(0, (-1, HV)))
        dq, dk = dqk[:, 0], dqk[:, 1] + dx[:, 0]
        dq, dk = (t.reshape(-1, H, HV // H, C, K).sum(2) for t in (dq, dk))
        grads = [
            layout.join(dq),
            layout.join(dk),
            layout.join(dR.unflatten(0, (-1, HV))),
            layout.join(dg.unflatten(0, (-1, HV))),
            layout.join(dbeta.unflatten(0, (-1, HV))),
            dwk,
            dwv,
            dinit,
        ]
        grads = [None if d is None else t.to(d) if t is not None else None for t, d in zip(grads, ctx.dtypes)]
        return *grads, None, None, None

    @staticmethod
    def vmap(info, in_dims, *inputs):
        """Members fold into the batch, or into the heads where sequences are packed."""
        E = info.batch_size
        *tensors, cu_seqlens, scale, chunk = inputs
        axes = [0] * 8 if cu_seqlens is None else [2] * 7 + [1]

        def fold(x: Tensor | None, dim: int | None, axis: int) -> Tensor | None:
            if x is None:
                return None
            x = x.expand(E, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.movedim(0, axis).flatten(axis, axis + 1)

        folded = [fold(x, d, a) for x, d, a in zip(tensors, in_dims[:8], axes, strict=True)]
        o, state, *saved = _Scan.apply(*folded, cu_seqlens, scale, chunk)
        o, state = o.unflatten(axes[0], (E, -1)), state.unflatten(axes[-1], (E, -1))
        return (o, state, *saved), (axes[0], axes[-1], *[None] * len(saved))


def _decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """D [X, 2, C, C] for queries (i <= t) and keys (i < t), and exp(G) [X, C, 1].

    The sums are float64 so that G_t - G_i keeps its digits beside strong decays. Masked before exp, or the other
    half overflows.
    """
    C = g.shape[-1]
    G = g.double().cumsum(-1)
    causal = torch.ones(C, C, dtype=torch.bool, device=g.device).tril()
    mask = torch.stack([causal, causal.tril(-1)])
    D = (G[:, :, None] - G[:, None, :]).to(g.dtype)[:, None].masked_fill(~mask, -torch.inf).exp()
    return D, G.to(g.dtype).exp()[..., None]
