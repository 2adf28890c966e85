"""The chunk-parallel form in plain PyTorch, forward and backward: the default on a CPU.

Inside a chunk of C tokens everything is a matrix product. With G_t the sum of log_decay from the start of the
chunk to t, gamma_ti = exp(G_t - G_i) for i <= t, and S the state at that start, the erase errors
e_t = v_t - Sbar_t k_t solve one C x C triangular system whatever L is:

    (I + N^0 diag(beta)) e = v - exp(G) k S - sum_{l>=1} N^l w^l     N^l = tril(k x^l^T . gamma, -1)
    o   = scale * (exp(G) q S + sum_{l>=0} P^l w^l)                  P^l = tril(q x^l^T . gamma)
    S_C = exp(G_C) S + sum_{l>=0} (exp(G_C - G) x^l)^T w^l

where x^0 = k and w^0 = beta e, and x^l, w^l for l >= 1 are the writes.

Symbols in the code. The batch of every product is X = chunks x value heads; R = L + 1 sources.
    qk    [X, 2, C, K]      queries and keys: the readers
    x, w  [X, R, C, K or V] what is written: keys and values
    gamma [X, 2, C, C]      the decay between reader and source, times scale for queries and -1 for keys
    A     [X, 2, C, R, C]   gamma . (qk x^T) = [scale P, -N], so that A w + reads S gives o and e - v at once
    reads, ends             qk, x times the decay (and sign) to the chunk's start and end

Backward, with D the gradient of S_C and F [X, 2, C, V] that of o and of e, which is dv:

    dw = A^T F + ends D,  of which row 0 is dU = d(beta e)       F_e = (I + N^0 diag(beta))^-T (beta P_e)
    dS = exp(G_C) D + reads^T F                                  P_e = scale P^0^T do + ends_0 D
    dA = F w^T,  dqk = (dA . gamma) x + decayed F S^T,  dx = (dA . gamma)^T qk + decayed w D^T
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, bmm

from prism.scan._inputs import state_dtype
from prism.scan._layout import layout


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
    tensors = (q, k, v, log_decay, beta, write_k, write_v, initial_state, cu_seqlens)
    if torch.compiler.is_compiling() and any(map(_batched, tensors)):
        # Dynamo would inline the forward pass below vmap and differentiate that, past the backward pass
        # written here. A break leaves the vmapped call to eager mode.
        torch._dynamo.graph_break(msg="prism_scan: torch.compile does not trace backend 'chunked' under vmap")
    chunk = _chunk_length(q.shape[1], max(q.shape[3], v.shape[3]))
    o, state, *_ = _Scan.apply(*tensors, scale, chunk)
    return o, state if output_final_state else None


def _chunk_length(T: int, width: int) -> int:
    """About 16, 32 for wide heads, and such that T fills its chunks.

    Measured on a CPU: shorter chunks cost launches and state products, longer ones C x C products and masks.
    """
    steps = -(-T // (16 if width < 64 else 32))
    return -(-T // steps)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(q, k, v, log_decay, beta, write_k, write_v, initial_state, cu_seqlens, scale, chunk):
        B, T, H, K = q.shape
        HV, V = v.shape[2:]
        R = 1 if write_k is None else 1 + write_k.shape[3]
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        lay = layout(B, T, chunk, cu_seqlens)
        out_dtype, dtype = q.dtype, state_dtype(q.dtype)

        qk = torch.stack([lay.split(q), lay.split(k)], 3).to(dtype)
        qk = (qk.repeat_interleave(HV // H, 2) if HV > H else qk).flatten(0, 2)
        v, log_decay, beta = (lay.split(t).to(dtype).flatten(0, 2) for t in (v, log_decay, beta))
        beta = beta[..., None]
        X, _, C, _ = qk.shape
        x = qk[:, 1:]
        if write_k is not None:
            w = v.new_empty(X, R, C, V)
            writes = lay.split(write_k).to(dtype).transpose(3, 4)
            x = torch.cat([x.unflatten(0, writes.shape[:3]), writes], 3).flatten(0, 2)
            w.unflatten(0, writes.shape[:3])[:, :, :, 1:] = lay.split(write_v).transpose(3, 4)

        gamma, start, end = _decays(log_decay, scale)
        total = start[:, 1, -1:].neg()
        reads, ends = start * qk, end * x
        A = bmm(qk.flatten(1, 2), x.flatten(1, 2).mT).view(X, 2, C, R, C)
        A *= gamma[:, :, :, None]
        if R > 1:
            v = torch.baddbmm(v, A[:, 1, :, 1:].flatten(2), w[:, 1:].flatten(1, 2))
            added = bmm(ends[:, 1:].flatten(1, 2).mT, w[:, 1:].flatten(1, 2))
        solve = _inverse(A[:, 1, :, 0] * -beta.mT)
        e, Y = bmm(solve, v), bmm(solve, reads[:, 1])
        erase = (beta * ends[:, 0]).mT

        starts = []

        def step(at: slice, S: Tensor) -> Tensor:
            starts.append(S)
            errors = e[at].baddbmm_(Y[at], S)
            S = torch.addcmul(bmm(erase[at], errors), total[at], S)
            return S if R == 1 else S.add_(added[at])

        initial = q.new_zeros(N, HV, K, V, dtype=dtype) if initial_state is None else initial_state
        final = lay.forward(initial, step)
        S = torch.cat(starts)

        if R == 1:
            w = (beta * e)[:, None]
        else:
            w[:, 0] = beta * e
        o = bmm(reads[:, 0], S).baddbmm_(A[:, 0].flatten(2), w.flatten(1, 2))
        # Autograd refuses in-place edits of results that are views, of memory of their own though it is.
        o, final = lay.join(o, HV).to(out_dtype).detach(), final.detach()
        return o, final, qk, x, w, gamma, start, end, reads, ends, A, solve, e, Y, S, beta

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*output[2:], inputs[8])
        ctx.shapes = (inputs[0].shape, inputs[2].shape, inputs[10])
        ctx.device_type = inputs[0].device.type
        ctx.dtypes = [None if t is None else t.dtype for t in inputs[:8]]

    @staticmethod
    def backward(ctx: Any, do, dfinal, *_):
        with torch.autocast(ctx.device_type, enabled=False):
            grads = _Gradients.apply(do, dfinal, *ctx.saved_tensors, *ctx.shapes)
        grads = (None if d is None else t.to(d) for t, d in zip(grads, ctx.dtypes, strict=True))
        return *grads, None, None, None

    @staticmethod
    def vmap(info, in_dims, *inputs):
        """Members fold into the batch, or into the heads where sequences are packed."""
        E, axes = info.batch_size, _fold_axes(inputs[8])
        tensors = [_fold(x, d, E, a) for x, d, a in zip(inputs[:8], in_dims[:8], axes, strict=True)]
        o, state, *saved = _Scan.apply(*tensors, *inputs[8:])
        o, state = (x.unflatten(a, (E, -1)) for x, a in ((o, axes[0]), (state, axes[-1])))
        return (o, state, *saved), (axes[0], axes[-1], *[None] * len(saved))


class _Gradients(torch.autograd.Function):
    """The backward pass as a function of its own: a second derivative is an error, and vmap folds it."""

    @staticmethod
    def forward(
        do, dfinal, qk, x, w, gamma, start, end, reads, ends, A, solve, e, Y, S, beta,
        cu_seqlens, q_shape, v_shape, chunk,
    ):  # fmt: skip
        B, T, H, K = q_shape
        HV, V = v_shape[2:]
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        lay = layout(B, T, chunk, cu_seqlens)
        X, R, C, _ = x.shape
        total = start[:, 1, -1:].neg()
        A_flat = A.view(X, 2 * C, R * C)

        F = e.new_empty(X, 2, C, V)  # the gradients of o and e
        if do is None:
            F[:, 0] = 0
        else:
            do = lay.split(do)
            F.unflatten(0, do.shape[:3])[:, :, :, 0] = do
        dfinal = e.new_zeros(N, HV, K, V) if dfinal is None else dfinal

        # D is the gradient of the state at the chunks' ends.
        dU, dS = bmm(A[:, 0, :, 0].mT, F[:, 0]), bmm(reads[:, 0].mT, F[:, 0])
        reply = (beta * Y).mT
        D_ends = []

        def step(at: slice, D: Tensor) -> Tensor:
            D_ends.append(D)
            errors = dU[at].baddbmm_(ends[at, 0], D)
            return torch.addcmul(dS[at], total[at], D).baddbmm_(reply[at], errors)

        dinitial = lay.backward(dfinal, step)
        D = torch.cat(D_ends[::-1])

        F[:, 1] = bmm(solve.mT, beta * dU)
        dbeta = dU.baddbmm_(A[:, 1, :, 0].mT, F[:, 1]).mul_(e).sum(-1)
        F_flat, w_flat = F.flatten(1, 2), w.flatten(1, 2)
        dA = bmm(F_flat, w_flat.mT)
        pairs = dA * A_flat
        dA.view(A.shape).mul_(gamma[:, :, :, None])
        dqk, dx = bmm(F_flat, S.mT).view(qk.shape), bmm(w_flat, D.mT).view(x.shape)

        # log_decay of token t acts on all pairs (reader s >= t, source i < t), the states at both ends too.
        # Row sums minus column sums are the same on paper and lose all digits under strong decay.
        ones = e.new_ones(C, C)
        upto, before = ones.triu().repeat(1, 2), ones.tril(-1).repeat(1, R)
        dg = (bmm(upto.expand(X, -1, -1), pairs) * before).sum(-1)
        dg.addmm_((dqk * reads).sum(-1).flatten(1), upto.mT)
        dg.addmm_((dx * ends).sum(-1).flatten(1), before.mT)
        dg += (total * bmm(D.view(X, 1, -1), S.view(X, -1, 1)))[:, 0]

        dqk, dx = dqk.mul_(start).flatten(1, 2), dx.mul_(end).flatten(1, 2)
        dqk = dqk.baddbmm_(dA, x.flatten(1, 2)).view(qk.shape)
        dx = dx.baddbmm_(dA.mT, qk.flatten(1, 2)).view(x.shape)
        dqk[:, 1] += dx[:, 0]
        if HV > H:
            dqk = dqk.unflatten(0, (-1, HV // H)).sum(1)
        dwrite_k = dwrite_v = None
        if R > 1:
            dw = bmm(ends[:, 1:].flatten(1, 2), D).baddbmm_(A_flat[:, :, C:].mT, F_flat)
            dwrite_k = lay.join(dx[:, 1:].transpose(1, 2), HV)
            dwrite_v = lay.join(dw.unflatten(1, (R - 1, C)).transpose(1, 2), HV)
        dq, dk = lay.join(dqk[:, 0], H), lay.join(dqk[:, 1], H)
        dv, dg, dbeta = (lay.join(t, HV) for t in (F[:, 1], dg, dbeta))
        return dq, dk, dv, dg, dbeta, dwrite_k, dwrite_v, dinitial

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        pass

    @staticmethod
    def backward(ctx: Any, *_):
        raise RuntimeError(
            "prism_scan: backend 'chunked' can be differentiated once, backend 'recurrent' without limit"
        )

    @staticmethod
    def vmap(info, in_dims, do, dfinal, *rest):
        """Of the backward pass of a folded forward pass, as in vmap(grad(f)); members fold again."""
        *saved, cu_seqlens, q_shape, v_shape, chunk = rest
        E, axes = info.batch_size, _fold_axes(cu_seqlens)
        per_member = layout(q_shape[0], q_shape[1], chunk, cu_seqlens).chunks * v_shape[2]
        if saved[0].shape[0] != E * per_member or any(d is not None for d in in_dims[2:-3]):
            raise RuntimeError(
                "prism_scan: backend 'chunked' does not support vmap over the backward pass alone, "
                "as in jacrev; use backend 'recurrent'"
            )
        do, dfinal = (
            _fold(x, d, E, a) for x, d, a in zip((do, dfinal), in_dims[:2], (axes[0], axes[-1]), strict=True)
        )
        q_shape, v_shape = (
            torch.Size(n * E if i == axes[0] else n for i, n in enumerate(shape))
            for shape in (q_shape, v_shape)
        )
        grads = _Gradients.apply(do, dfinal, *saved, cu_seqlens, q_shape, v_shape, chunk)
        grads = (None if g is None else g.unflatten(a, (E, -1)) for g, a in zip(grads, axes, strict=True))
        return tuple(grads), tuple(axes)


def _batched(x: Tensor | None) -> bool:
    return x is not None and torch._C._functorch.is_batchedtensor(x)


def _fold_axes(cu_seqlens: Tensor | None) -> list[int]:
    """Where the members of an ensemble go, for each of the eight floating inputs."""
    return [0] * 8 if cu_seqlens is None else [2] * 7 + [1]


def _fold(x: Tensor | None, dim: int | None, members: int, axis: int) -> Tensor | None:
    if x is None:
        return None
    x = x.expand(members, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.movedim(0, axis).flatten(axis, axis + 1)


def _decays(log_decay: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """gamma [X, 2, C, C]; the decays from the chunk's start [X, 2, C, 1] and to its end [X, 1, C, 1].

    Summed in float64 so that G_t - G_i keeps its digits beside strong decays, and masked before exp, where
    the other half overflows.
    """
    C = log_decay.shape[-1]
    G = log_decay.double().cumsum(-1)
    ones = log_decay.new_ones(C, C)
    pairs = (G[:, :, None] - G[:, None, :]).to(log_decay.dtype)
    gamma = pairs.masked_fill_(ones.triu(1).bool(), -torch.inf).exp_()
    sign = torch.stack([scale * ones.tril(), -ones.tril(-1)])
    start = G.to(log_decay.dtype).exp()[:, None, :, None]
    end = gamma[:, None, -1, :, None]
    return gamma[:, None] * sign, torch.cat([scale * start, -start], 1), end


def _inverse(N: Tensor) -> Tensor:
    """(I + N)^-1, N [X, C, C] strictly lower triangular, by forward substitution; powers of N explode."""
    eye = torch.eye(N.shape[-1], dtype=N.dtype, device=N.device).expand_as(N)
    return torch.linalg.solve_triangular(N, eye, upper=False, unitriangular=True)
