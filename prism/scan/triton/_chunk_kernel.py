"""The last kernel of `resident`'s backward pass: with both states known at a chunk's borders, one program a chunk.

A token's rank-1 write and its L further writes are the same thing here, a source: a key x and a value w, namely
(k, beta e) and the pairs (kappa^l, w^l). Later tokens meet a source through q (from its own token on) and through
k (from the next token on), so each source costs the same few products of C x C tiles (math.md, section 5). No
tile that a product gave is transposed for another product, which Triton 3.4 to 3.7 compiles wrongly on Hopper:
transposed tiles are products of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(base, stride, left, width, first, C: tl.constexpr, BLOCK: tl.constexpr):
    """[C, BLOCK] of the rows base + r * stride, columns from `first` on; zeros past row `left`, column `width`."""
    r = tl.arange(0, C)
    at = first + tl.arange(0, BLOCK)
    ok = (r < left)[:, None] & (at < width)[None, :]
    return tl.load(base + r.to(tl.int64)[:, None] * stride + at[None, :], mask=ok, other=0.0)


@triton.jit
def _state(base, K: tl.constexpr, V: tl.constexpr, first, BK: tl.constexpr, BV: tl.constexpr):
    """[BV, BK]: columns of a [K, V] state, transposed while loading."""
    vi = first + tl.arange(0, BV)
    ki = tl.arange(0, BK)
    ok = (vi < V)[:, None] & (ki < K)[None, :]
    return tl.load(base + ki[None, :] * V + vi[:, None], mask=ok, other=0.0)


@triton.jit
def _dot(a, b, DOT: tl.constexpr, PRECISION: tl.constexpr):
    if PRECISION == "split":
        # Upper eleven bits and the rest, three tf32 products: 22 bits survive, as in "tf32x3", in fewer instructions.
        a, b = a.to(tl.float32), b.to(tl.float32)
        a_upper, b_upper = _upper(a), _upper(b)
        product = tl.dot(a - a_upper, b_upper, input_precision="tf32")
        product = tl.dot(a_upper, b - b_upper, product, input_precision="tf32")
        return tl.dot(a_upper, b_upper, product, input_precision="tf32")
    else:
        return tl.dot(a.to(DOT), b.to(DOT), input_precision=PRECISION)


@triton.jit
def _upper(x):
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _source(
    x, w_base, w_stride, factor, q, k, do_base, dv_base, v_stride, adjoint, gamma, gamma_t, to_end, left,
    V: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One source's share of dq, of dk, and of the pairs' and the last state's weight in dg; the gradient of x."""
    by_q = tl.zeros([C, C], tl.float32)
    by_k = tl.zeros([C, C], tl.float32)
    by_q_t = tl.zeros([C, C], tl.float32)
    by_k_t = tl.zeros([C, C], tl.float32)
    dx = tl.zeros([C, BK], tl.float32)
    for first in range(0, V, BV):
        w = _tile(w_base, w_stride, left, V, first, C, BV).to(tl.float32) * factor[:, None]
        do = _tile(do_base, v_stride, left, V, first, C, BV)
        dv = _tile(dv_base, v_stride, left, V, first, C, BV)
        by_q += _dot(do, tl.trans(w), DOT, PRECISION)
        by_k += _dot(dv, tl.trans(w), DOT, PRECISION)
        by_q_t += _dot(w, tl.trans(do), DOT, PRECISION)
        by_k_t += _dot(w, tl.trans(dv), DOT, PRECISION)
        dx += _dot(w, _state(adjoint, K, V, first, BK, BV), DOT, PRECISION)
    dx *= to_end[:, None]
    flow = tl.sum(dx * x.to(tl.float32), 1)

    r = tl.arange(0, C)
    by_q *= gamma
    by_k = tl.where(r[:, None] > r[None, :], -by_k * gamma, 0.0)
    dx += _dot(by_q_t * gamma_t, q, DOT, PRECISION)
    dx += _dot(tl.where(r[:, None] < r[None, :], -by_k_t * gamma_t, 0.0), k, DOT, PRECISION)
    dq = _dot(by_q, x, DOT, PRECISION)
    dk = _dot(by_k, x, DOT, PRECISION)
    x_t = tl.trans(x)
    pairs = by_q * _dot(q, x_t, DOT, PRECISION) + by_k * _dot(k, x_t, DOT, PRECISION)
    return dq, dk, dx, pairs, flow


@triton.jit(do_not_specialize=["T", "N", "L"])
def chunk_kernel(
    q, k, log_decay, beta, write_k, write_v, do, e, dv, states, adjoints, spans,
    dq, dk, dlog_decay, dwrite_k, scale, T, N, H, HV, L,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    WRITES: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dk (per value head), dlog_decay, dwrite_k. A program: a chunk and value head."""
    slot = tl.program_id(0).to(tl.int64) // HV
    h = tl.program_id(0) % HV
    if PACKED:
        # The last sequence whose first slot, floor(start / C) + n, is not past this one.
        n, above = tl.cast(0, tl.int64), tl.cast(N, tl.int64)
        while above - n > 1:
            middle = (n + above) // 2
            start = tl.minimum(tl.maximum(tl.load(spans + middle).to(tl.int64), 0), T)
            n, above = (
                tl.where(start // C + middle <= slot, middle, n),
                tl.where(start // C + middle <= slot, above, middle),
            )
        start = tl.minimum(tl.maximum(tl.load(spans + n).to(tl.int64), 0), T)
        end = tl.minimum(tl.maximum(tl.load(spans + n + 1).to(tl.int64), start), T)
        chunk = slot - start // C - n
        token = start + chunk * C
        left = tl.where(chunk < 0, 0, end - token)
    else:
        chunks = tl.cdiv(T, C)
        chunk = slot % chunks
        token = slot // chunks * T + chunk * C
        left = T - chunk * C
    if left <= 0:
        return

    r = tl.arange(0, C)
    ok = r < left
    row = token * HV + h
    key = (token * H + h // (HV // H)) * K
    q_c = _tile(q + key, H * K, left, K, 0, C, BK).to(tl.float32) * scale
    k_c = _tile(k + key, H * K, left, K, 0, C, BK)
    g = tl.load(log_decay + row + r * HV, mask=ok, other=0.0).to(tl.float64)
    beta_c = tl.load(beta + row + r * HV, mask=ok, other=0.0).to(tl.float32)
    # Differences of sums: float64, or strong decays leave few digits to weak ones.
    G = tl.cumsum(g, 0)
    total = tl.sum(g, 0)
    lag = (G[:, None] - G[None, :]).to(tl.float32)
    causal = r[:, None] >= r[None, :]
    gamma = tl.where(causal, tl.exp(tl.where(causal, lag, 0.0)), 0.0)
    lag_t = (G[None, :] - G[:, None]).to(tl.float32)
    causal_t = r[:, None] <= r[None, :]
    gamma_t = tl.where(causal_t, tl.exp(tl.where(causal_t, lag_t, 0.0)), 0.0)
    from_start = tl.exp(G.to(tl.float32))
    to_end = tl.exp((total - G).to(tl.float32))

    state = states + (slot * HV + h) * K * V
    adjoint = adjoints + (slot * HV + h) * K * V
    do += row * V
    dv += row * V
    dq_c = tl.zeros([C, BK], tl.float32)
    dk_c = tl.zeros([C, BK], tl.float32)
    overlap = tl.zeros([BK], tl.float32)
    for first in range(0, V, BV):
        S = _state(state, K, V, first, BK, BV)
        dq_c += _dot(_tile(do, HV * V, left, V, first, C, BV), S, DOT, PRECISION)
        dk_c -= _dot(_tile(dv, HV * V, left, V, first, C, BV), S, DOT, PRECISION)
        overlap += tl.sum(S * _state(adjoint, K, V, first, BK, BV), 0)
    dq_c *= from_start[:, None]
    dk_c *= from_start[:, None]
    # dg_t: everything that crosses from before t to t or later, and nothing else (no differences of sums).
    from_before = tl.sum(dq_c * q_c + dk_c * k_c.to(tl.float32), 1)
    dg = tl.cumsum(from_before, 0, reverse=True) + tl.exp(total.to(tl.float32)) * tl.sum(overlap, 0)

    dq_s, dk_s, dx, pairs, flow = _source(
        k_c, e + row * V, HV * V, beta_c, q_c, k_c, do, dv, HV * V, adjoint, gamma, gamma_t, to_end, left,
        V, K, C, BK, BV, DOT, PRECISION,
    )  # fmt: skip
    dq_c += dq_s
    dk_c += dk_s + dx
    if WRITES:
        for l in range(L):
            write = (row * L + l) * K
            x = _tile(write_k + write, HV * L * K, left, K, 0, C, BK)
            dq_s, dk_s, dx, pairs_l, flow_l = _source(
                x, write_v + (row * L + l) * V, HV * L * V, tl.full([C], 1.0, tl.float32), q_c, k_c, do, dv, HV * V,
                adjoint, gamma, gamma_t, to_end, left, V, K, C, BK, BV, DOT, PRECISION,
            )  # fmt: skip
            dq_c += dq_s
            dk_c += dk_s
            pairs += pairs_l
            flow += flow_l
            _put(dwrite_k + write, HV * L * K, left, K, dx, C, BK)

    # Pairs (s, i) with s >= t > i, and what the sources before t leave in the last state.
    crossing = tl.cumsum(pairs, 0, reverse=True)
    dg += tl.sum(tl.where(r[:, None] > r[None, :], crossing, 0.0), 1) + tl.cumsum(flow, 0) - flow
    tl.store(dlog_decay + row + r * HV, dg.to(dlog_decay.dtype.element_ty), mask=ok)
    _put(dq + row * K, HV * K, left, K, dq_c * scale, C, BK)
    _put(dk + row * K, HV * K, left, K, dk_c, C, BK)


@triton.jit
def _put(base, stride, left, width, x, C: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.arange(0, C)
    at = tl.arange(0, BLOCK)
    ok = (r < left)[:, None] & (at < width)[None, :]
    tl.store(base + r.to(tl.int64)[:, None] * stride + at[None, :], x.to(base.dtype.element_ty), mask=ok)
