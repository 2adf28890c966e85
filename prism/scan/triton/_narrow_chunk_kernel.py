"""`chunk_kernel` for K and V up to 32, where every tile fits in registers whole and is read once.

The same gradients by the same equations (`_chunk_kernel.py`), with half the products: what goes by q and do,
and what goes by k and dR = dv, are rows of one tile of twice the height. With [a; b] for a above b,

    P = [do; -dR],   R = [q scale; k],   N = [gamma; gamma below the diagonal]      2 C rows each

a source (x, w), one row a token in x and w, and weights beta for the source (k, e), else 1, give

    by = (P w^T) N                                                  scores, decayed
    [dq; dk] = [gamma_0 P S_0] + sum (by beta) x                     dq still without its scale
    dx       = gamma_C w dS_C + by^T R                               of a source of weight 1
    dbeta    = k . dx,   dk += beta dx                               of the source (k, e)
    crossing = sum (by beta) (R x^T) U                               U_it = 1 where source i is before token t

S_0 and dS_C being [V, K], gamma_0 and gamma_C the decays from the chunk's start and to its end, and products
of tiles of one shape elementwise. dlog_decay sums the rows s >= t of column t of `crossing`, what crosses
from before t to t or later, where the last state counts as one more reader at s = C - 1; what comes from the
first state is added.

TURNED forms dx transposed: its BK = 32 rows are enough for two warps, where C = 16 are not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from prism.scan.triton._chunk_kernel import _chunk, _dot, _upper


@triton.jit
def _load(at, ok, EVEN: tl.constexpr):
    if EVEN:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=ok, other=0.0)
    return x


@triton.jit
def _store(at, x, ok, EVEN: tl.constexpr):
    if EVEN:
        tl.store(at, x.to(at.dtype.element_ty))
    else:
        tl.store(at, x.to(at.dtype.element_ty), mask=ok)


@triton.jit
def _rows(
    base, stride, left, width, C: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, M: tl.constexpr = 1
):
    """[C * M, BLOCK]: M rows a token, `width` apart; tokens are `stride` apart."""
    n = tl.arange(0, C * M)
    at = tl.arange(0, BLOCK)
    row = base + (n // M) * stride + (n % M) * width
    return _load(row[:, None] + at[None, :], (n // M < left)[:, None] & (at < width)[None, :], EVEN)


@triton.jit
def _stacked(a, b, stride, left, width, C: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """[2 C, BLOCK]: C rows of a above C rows of b."""
    r = tl.arange(0, 2 * C)
    at = tl.arange(0, BLOCK)
    row = tl.where(r < C, a, b) + (r % C) * stride
    return _load(row[:, None] + at[None, :], (r % C < left)[:, None] & (at < width)[None, :], EVEN)


@triton.jit
def _repeated(x, M: tl.constexpr):
    """Numbers [C] of tokens, M times each."""
    C: tl.constexpr = x.shape[0]
    if M == 1:
        return x
    else:
        return tl.reshape(tl.broadcast_to(x[:, None], (C, M)), (C * M,))


@triton.jit
def _source(
    x, w, weight, qk, dodv, adjoint, G, G2, total, acc, crossing,
    C: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, WEIGHTED: tl.constexpr, TURNED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the share of M sources a token to acc, which is dq above dk, and to crossing; returns the gradient
    of their keys. WEIGHTED: they count `weight` times, in all but the gradient of their keys."""
    i = tl.arange(0, C * M) // M
    r = tl.arange(0, 2 * C)
    lower = r >= C
    G1 = _repeated(G, M)
    to_end = tl.exp((total - G1).to(tl.float32))
    last = tl.where(lower, r - C - 1, r)  # the last source that a row meets
    lag = tl.where(last[:, None] >= i[None, :], (G2[:, None] - G1[None, :]).to(tl.float32), float("-inf"))
    gamma = tl.exp(lag)
    gamma = tl.where(lower[:, None], -gamma, gamma)
    by = _dot(dodv, tl.trans(w), tl.zeros([2 * C, C * M], tl.float32), DOT, PRECISION) * gamma
    if TURNED:
        dx = _dot(adjoint, tl.trans(w), tl.zeros([BK, C * M], tl.float32), DOT, PRECISION) * to_end[None, :]
        flow = tl.sum(dx * tl.trans(x).to(tl.float32), 0)
    else:
        dx = _dot(w, tl.trans(adjoint), tl.zeros([C * M, BK], tl.float32), DOT, PRECISION) * to_end[:, None]
        flow = tl.sum(dx * x.to(tl.float32), 1)
    if WEIGHTED:
        flow *= weight
        weighed = by * weight[None, :]
    else:
        weighed = by
    acc = _dot(weighed, x, acc, DOT, PRECISION)
    pairs = weighed * _dot(qk, tl.trans(x), tl.zeros([2 * C, C * M], tl.float32), DOT, PRECISION)
    pairs += tl.where((r == C - 1)[:, None], flow[None, :], 0.0)
    if TURNED:
        dx = _dot(tl.trans(qk), by, dx, DOT, PRECISION)
    else:
        dx = _dot(tl.trans(by), qk, dx, DOT, PRECISION)
    before = tl.where(i[:, None] < tl.arange(0, C)[None, :], 1.0, 0.0)
    if PRECISION == "split":
        upper = _upper(pairs)
        crossing = tl.dot(pairs - upper, before, crossing, input_precision="tf32")
        crossing = tl.dot(upper, before, crossing, input_precision="tf32")
    else:
        crossing = tl.dot(pairs, before, crossing, input_precision="ieee" if DOT == tl.float32 else "tf32")  # noqa: SIM300
    return acc, dx, crossing


@triton.jit(do_not_specialize=["T", "N", "L"])
def narrow_chunk_kernel(
    q, k, log_decay, beta, write_k, write_v, do, e, dv, states, adjoints, spans,
    dq, dk, dlog_decay, dwrite_k, dbeta, scale, T, N, H, HV, L,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    TURNED: tl.constexpr, M: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """dq and dk (per value head), dlog_decay, dbeta, dwrite_k. A program: a chunk and value head.

    M: 0 where there are no writes, 1 for one after the other, 2 for two (L = 2) at a time. RELOAD: what the
    source (k, e) needs is read after the writes (again), not kept meanwhile. EVEN: no masks, for sequences
    of whole chunks, not packed, K = BK and V = BV.
    """
    slot = tl.program_id(0) // HV
    h = tl.program_id(0) % HV
    token, left = _chunk(slot, spans, T, N, C, PACKED)
    if EVEN:
        token = slot.to(tl.int64) * C
    elif left <= 0:
        return

    r = tl.arange(0, C)
    ok = r < left
    row = token * HV + h
    key = (token * H + h // (HV // H)) * K
    q += key
    k += key
    do += row * V
    dv += row * V
    e += row * V
    g = _load(log_decay + row + r * HV, ok, EVEN).to(tl.float64)
    beta_c = _load(beta + row + r * HV, ok, EVEN).to(tl.float32)
    ki = tl.arange(0, BK)
    vi = tl.arange(0, BV)
    entry = tl.program_id(0).to(tl.int64) * K * V + ki[:, None] * V + vi[None, :]
    inside = (ki < K)[:, None] & (vi < V)[None, :]
    dodv = _stacked(do, dv, HV * V, left, V, C, BV, EVEN)
    qk = _stacked(q, k, H * K, left, K, C, BK, EVEN).to(tl.float32)
    state = _load(states + entry, inside, EVEN)
    adjoint = _load(adjoints + entry, inside, EVEN)
    if not RELOAD:
        x = _rows(k, H * K, left, K, C, BK, EVEN)
        w = _rows(e, HV * V, left, V, C, BV, EVEN).to(tl.float32)
    # Differences of sums: float64, or strong decays leave few digits to weak ones.
    G = tl.cumsum(g, 0)
    total = tl.sum(g, 0)
    r2 = tl.arange(0, 2 * C)
    lower = r2 >= C
    s = r2 % C
    G2 = tl.reshape(tl.broadcast_to(G[None, :], (2, C)), (2 * C,))
    from_start = tl.exp(G2.to(tl.float32)) * tl.where(lower, -1.0, 1.0)
    scales = tl.where(lower, 1.0, scale)
    qk *= scales[:, None]

    # What q and k read of the chunk's first state.
    acc = _dot(dodv, tl.trans(state), tl.zeros([2 * C, BK], tl.float32), DOT, PRECISION) * from_start[:, None]
    from_before = tl.sum(acc * qk, 1)
    through = tl.exp(total.to(tl.float32)) * tl.sum(tl.sum(state * adjoint, 1), 0)
    crossing = tl.zeros([2 * C, C], tl.float32)
    if M > 0:
        n = tl.arange(0, C * M)
        at = (n // M) * (HV * L * K) + (n % M) * K
        if TURNED:
            at_x = ki[:, None] + at[None, :]
            ok_x = (ki < K)[:, None] & (n // M < left)[None, :]
        else:
            at_x = at[:, None] + ki[None, :]
            ok_x = (n // M < left)[:, None] & (ki < K)[None, :]
        write_k += row * L * K
        write_v += row * L * V
        dwrite_k += row * L * K
        if M == 1:
            for l in range(L):
                x_l = _rows(write_k + l * K, HV * L * K, left, K, C, BK, EVEN)
                w_l = _rows(write_v + l * V, HV * L * V, left, V, C, BV, EVEN)
                acc, dx, crossing = _source(
                    x_l, w_l, beta_c, qk, dodv, adjoint, G, G2, total, acc, crossing,
                    C, M, BK, False, TURNED, DOT, PRECISION,
                )  # fmt: skip
                _store(dwrite_k + l * K + at_x, dx, ok_x, EVEN)
        else:
            x_l = _rows(write_k, HV * L * K, left, K, C, BK, EVEN, M)
            w_l = _rows(write_v, HV * L * V, left, V, C, BV, EVEN, M)
            acc, dx, crossing = _source(
                x_l, w_l, beta_c, qk, dodv, adjoint, G, G2, total, acc, crossing,
                C, M, BK, False, TURNED, DOT, PRECISION,
            )  # fmt: skip
            _store(dwrite_k + at_x, dx, ok_x, EVEN)
    if RELOAD:
        tl.debug_barrier()  # or the compiler would find the first loads and keep what they gave
        dodv = _stacked(do, dv, HV * V, left, V, C, BV, EVEN)
        qk = _stacked(q, k, H * K, left, K, C, BK, EVEN).to(tl.float32) * scales[:, None]
        adjoint = _load(adjoints + entry, inside, EVEN)
        x = _rows(k, H * K, left, K, C, BK, EVEN)
        w = _rows(e, HV * V, left, V, C, BV, EVEN).to(tl.float32)
    acc, dx, crossing = _source(
        x, w, beta_c, qk, dodv, adjoint, G, G2, total, acc, crossing,
        C, 1, BK, True, TURNED, DOT, PRECISION,
    )  # fmt: skip
    if TURNED:
        dbeta_c = tl.sum(dx * tl.trans(x).to(tl.float32), 0)
        dx = tl.trans(dx * beta_c[None, :])
    else:
        dbeta_c = tl.sum(dx * x.to(tl.float32), 1)
        dx *= beta_c[:, None]
    _store(dbeta + row + r * HV, dbeta_c, ok, EVEN)
    dx = tl.reshape(tl.broadcast_to(dx[None, :, :], (2, C, BK)), (2 * C, BK))
    acc = tl.where(lower[:, None], acc + dx, acc * scale)
    out = tl.where(lower, dk, dq) + row * K + s * (HV * K)
    _store(out[:, None] + ki[None, :], acc, (s < left)[:, None] & (ki < K)[None, :], EVEN)

    # dg_t is what crosses from before t to t or later, and nothing else (no difference of sums).
    crossing = tl.where(s[:, None] >= r[None, :], crossing + from_before[:, None], 0.0)
    dg = tl.sum(crossing, 0) + through
    _store(dlog_decay + row + r * HV, dg, ok, EVEN)
