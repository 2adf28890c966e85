"""The last kernel of `resident`'s backward pass: both states known at a chunk's borders, one program a chunk.

A token's rank-1 write and its L further writes are the same thing here, a source: a key x and a value w,
namely (k, beta e) and the pairs (kappa^l, w^l). Later tokens meet a source through q (from its own token
on) and through k (from the next token on). With G the sum of log_decay in the chunk, gamma_si = exp(G_s -
G_i), S_0 the state before the chunk, dS_C the adjoint after it, dR = dv, and sums over sources (x, w)
understood:

    dq_s = exp(G_s) S_0^T do_s + sum_{i<=s} gamma_si (do_s . w_i) x_i
    dk_s = -exp(G_s) S_0^T dR_s - sum_{i<s} gamma_si (dR_s . w_i) x_i + dx_s of the source (k, beta e)
    dx_i = exp(G_C - G_i) dS_C^T w_i
         + sum_{s>=i} gamma_si (do_s . w_i) q_s - sum_{s>i} gamma_si (dR_s . w_i) k_s

dx is linear in w: that of the source (k, beta e) is beta times that of (k, e), whose product with k is dbeta.

Chunks have 16 rows: too few for wgmma, the matrix instruction that Triton 3.4 to 3.7 gets wrong on Hopper
where an operand was computed. Products become mma.sync or, in float32, multiply-adds.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(base, stride, left, width, first, C: tl.constexpr, BLOCK: tl.constexpr):
    """[C, BLOCK] of rows base + r * stride, columns from `first` on; zeros past `left` rows and `width`."""
    r = tl.arange(0, C)
    at = first + tl.arange(0, BLOCK)
    ok = (r < left)[:, None] & (at < width)[None, :]
    return tl.load(base + r[:, None] * stride + at[None, :], mask=ok, other=0.0)


@triton.jit
def _state(base, K: tl.constexpr, V: tl.constexpr, first, BK: tl.constexpr, BV: tl.constexpr):
    """[BV, BK]: columns of a [K, V] state, transposed while loading."""
    vi = first + tl.arange(0, BV)
    ki = tl.arange(0, BK)
    ok = (vi < V)[:, None] & (ki < K)[None, :]
    return tl.load(base + ki[None, :] * V + vi[:, None], mask=ok, other=0.0)


@triton.jit
def _dot(a, b, onto, DOT: tl.constexpr, PRECISION: tl.constexpr):
    if PRECISION == "split":
        # Upper eleven bits and the rest in three tf32 products: 22 bits survive ("tf32x3", faster).
        a, b = a.to(tl.float32), b.to(tl.float32)
        a_upper, b_upper = _upper(a), _upper(b)
        onto = tl.dot(a - a_upper, b_upper, onto, input_precision="tf32")
        onto = tl.dot(a_upper, b - b_upper, onto, input_precision="tf32")
        return tl.dot(a_upper, b_upper, onto, input_precision="tf32")
    else:
        return tl.dot(a.to(DOT), b.to(DOT), onto, input_precision=PRECISION)


@triton.jit
def _upper(x):
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _source(
    x_base, x_stride, w_base, w_stride, weight, q_base, k_base, k_stride, do_base, dv_base, v_stride, adjoint,
    scale, gamma, to_end, left, dq, dk, pairs,
    V: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WEIGHTED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds one source's share to dq, dk and the pairs; returns the gradient of its key, and what the last
    state holds of it. WEIGHTED: the source counts `weight` times, in all but the gradient of its key. Tiles
    are read where they are used: together they would not fit in registers."""
    by_q = tl.zeros([C, C], tl.float32)
    by_k = tl.zeros([C, C], tl.float32)
    dx = tl.zeros([C, BK], tl.float32)
    for first in range(0, V, BV):
        w = _tile(w_base, w_stride, left, V, first, C, BV)
        do = _tile(do_base, v_stride, left, V, first, C, BV)
        by_q = _dot(do, tl.trans(w), by_q, DOT, PRECISION)
        dv = _tile(dv_base, v_stride, left, V, first, C, BV)
        by_k = _dot(dv, tl.trans(w), by_k, DOT, PRECISION)
        dx = _dot(w, _state(adjoint, K, V, first, BK, BV), dx, DOT, PRECISION)

    r = tl.arange(0, C)
    by_q *= gamma
    by_k *= tl.where(r[:, None] > r[None, :], -gamma, 0.0)
    dx *= to_end[:, None]
    tl.debug_barrier()
    x = _tile(x_base, x_stride, left, K, 0, C, BK)
    flow = tl.sum(dx * x.to(tl.float32), 1)
    by_q_once, by_k_once = by_q, by_k
    if WEIGHTED:
        flow *= weight
        by_q *= weight[None, :]
        by_k *= weight[None, :]
    dq = _dot(by_q, x, dq, DOT, PRECISION)
    dk = _dot(by_k, x, dk, DOT, PRECISION)
    q = _tile(q_base, k_stride, left, K, 0, C, BK).to(tl.float32) * scale
    dx = _dot(tl.trans(by_q_once), q, dx, DOT, PRECISION)
    pairs += by_q * _dot(q, tl.trans(x), tl.zeros([C, C], tl.float32), DOT, PRECISION)
    k = _tile(k_base, k_stride, left, K, 0, C, BK)
    dx = _dot(tl.trans(by_k_once), k, dx, DOT, PRECISION)
    pairs += by_k * _dot(k, tl.trans(x), tl.zeros([C, C], tl.float32), DOT, PRECISION)
    tl.debug_barrier()
    return dq, dk, dx, pairs, flow


@triton.jit
def _chunk(slot, spans, T, N, C: tl.constexpr, PACKED: tl.constexpr):
    """First token of the chunk in a slot, and how many tokens its sequence has from there on."""
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
        token = (slot // chunks).to(tl.int64) * T + chunk * C
        left = T - chunk * C
    return token, left


@triton.jit(do_not_specialize=["T", "N", "L"])
def chunk_kernel(
    q, k, log_decay, beta, write_k, write_v, do, e, dv, states, adjoints, spans,
    dq, dk, dlog_decay, dwrite_k, dbeta, scale, T, N, H, HV, L,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    WRITES: tl.constexpr, PACKED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dk (per value head), dlog_decay, dbeta, dwrite_k. A program: a chunk and value head."""
    slot = tl.program_id(0) // HV
    h = tl.program_id(0) % HV
    token, left = _chunk(slot, spans, T, N, C, PACKED)
    if left <= 0:
        return

    r = tl.arange(0, C)
    ok = r < left
    row = token * HV + h
    key = (token * H + h // (HV // H)) * K
    q += key
    k += key
    g = tl.load(log_decay + row + r * HV, mask=ok, other=0.0).to(tl.float64)
    beta_c = tl.load(beta + row + r * HV, mask=ok, other=0.0).to(tl.float32)
    # Differences of sums: float64, or strong decays leave few digits to weak ones.
    G = tl.cumsum(g, 0)
    total = tl.sum(g, 0)
    lag = tl.where(r[:, None] >= r[None, :], (G[:, None] - G[None, :]).to(tl.float32), float("-inf"))
    gamma = tl.exp(lag)
    from_start = tl.exp(G.to(tl.float32))
    to_end = tl.exp((total - G).to(tl.float32))

    state = states + tl.program_id(0).to(tl.int64) * K * V
    adjoint = adjoints + tl.program_id(0).to(tl.int64) * K * V
    do += row * V
    dv += row * V
    dq_c = tl.zeros([C, BK], tl.float32)
    dk_c = tl.zeros([C, BK], tl.float32)
    pairs = tl.zeros([C, C], tl.float32)
    flow = tl.zeros([C], tl.float32)
    if WRITES:
        for l in range(L):
            write = (row * L + l) * K
            dq_c, dk_c, dx, pairs, flow_l = _source(
                write_k + write, HV * L * K, write_v + (row * L + l) * V, HV * L * V, beta_c,
                q, k, H * K, do, dv, HV * V, adjoint, scale, gamma, to_end, left, dq_c, dk_c, pairs,
                V, K, C, BK, BV, False, DOT, PRECISION,
            )  # fmt: skip
            flow += flow_l
            _put(dwrite_k + write, HV * L * K, left, K, dx, C, BK)
    dq_c, dk_c, dx, pairs, flow_k = _source(
        k, H * K, e + row * V, HV * V, beta_c,
        q, k, H * K, do, dv, HV * V, adjoint, scale, gamma, to_end, left, dq_c, dk_c, pairs,
        V, K, C, BK, BV, True, DOT, PRECISION,
    )  # fmt: skip
    flow += flow_k
    dbeta_c = tl.sum(dx * _tile(k, H * K, left, K, 0, C, BK).to(tl.float32), 1)
    tl.store(dbeta + row + r * HV, dbeta_c.to(dbeta.dtype.element_ty), mask=ok)
    dk_c += dx * beta_c[:, None]

    # What q and k read of the chunk's first state.
    dq_s = tl.zeros([C, BK], tl.float32)
    dk_s = tl.zeros([C, BK], tl.float32)
    overlap = tl.zeros([BV, BK], tl.float32)
    for first in range(0, V, BV):
        S = _state(state, K, V, first, BK, BV)
        overlap += S * _state(adjoint, K, V, first, BK, BV)
        dq_s = _dot(_tile(do, HV * V, left, V, first, C, BV), S, dq_s, DOT, PRECISION)
        dk_s = _dot(_tile(dv, HV * V, left, V, first, C, BV), S, dk_s, DOT, PRECISION)
    dq_s *= from_start[:, None]
    dk_s *= -from_start[:, None]
    dq_c += dq_s
    dk_c += dk_s
    q_c = _tile(q, H * K, left, K, 0, C, BK).to(tl.float32) * scale
    k_c = _tile(k, H * K, left, K, 0, C, BK).to(tl.float32)
    from_before = tl.sum(dq_s * q_c + dk_s * k_c, 1)
    through = tl.exp(total.to(tl.float32)) * tl.sum(tl.sum(overlap, 1), 0)

    # dg_t is what crosses from before t to t or later, and nothing else (no difference of sums): pairs (s, i)
    # with s >= t > i, sources i < t in the last state, and the first state in reads s >= t and in the last.
    since = tl.where(r[None, :] >= r[:, None], 1.0, 0.0)
    if PRECISION == "split":
        upper = _upper(pairs)
        crossing = tl.dot(since, pairs - upper, input_precision="tf32")
        crossing = tl.dot(since, upper, crossing, input_precision="tf32")
    else:
        crossing = tl.dot(since, pairs, input_precision="ieee" if DOT == tl.float32 else "tf32")  # noqa: SIM300
    crossing = tl.where(r[:, None] > r[None, :], crossing + flow[None, :], from_before[None, :])
    dg = tl.sum(crossing, 1) + through
    tl.store(dlog_decay + row + r * HV, dg.to(dlog_decay.dtype.element_ty), mask=ok)
    _put(dq + row * K, HV * K, left, K, dq_c * scale, C, BK)
    _put(dk + row * K, HV * K, left, K, dk_c, C, BK)


@triton.jit
def _put(base, stride, left, width, x, C: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.arange(0, C)
    at = tl.arange(0, BLOCK)
    ok = (r < left)[:, None] & (at < width)[None, :]
    tl.store(base + r[:, None] * stride + at[None, :], x.to(base.dtype.element_ty), mask=ok)
