"""The two walks of `resident` through the tokens, which keep the state, or its adjoint, in registers.

`forward_kernel` computes the recurrence as the definition writes it, with e_t = v_t - Sbar_t k_t;
`reverse_kernel` runs the adjoint of the state backwards:

    dS_t   += scale q_t do_t^T                               (what comes from later tokens, and from o_t)
    dw_t^l  = dS_t^T kappa_t^l,   dU_t = dS_t^T k_t,   dv_t = dR_t = beta_t dU_t,   dbeta_t = dU_t . e_t
    dS_t-1  = alpha_t (dS_t - k_t dR_t^T)

The columns of the state, and of its adjoint, do not touch each other, so a lane owns columns and sums over
the keys without leaving its registers: no triangular system, no exponential of a sum of decays. Once both
states are known at the borders of every chunk, all other gradients are products of tiles, one program a
chunk: `_chunk_kernel.py`.

The tile of a walk is [KR, KL, G * BV], one warp: columns are (sequence, value) pairs, keys lie KR to a
lane and KL lanes side by side. Tokens are read U at a time and U ahead, each row once and coalesced, and
spread over the tile when their turn comes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sequence(i, live, spans, T, HV, C: tl.constexpr, PACKED: tl.constexpr):
    """First token, number of tokens and slot of the first chunk of the (sequence, value head) pairs i."""
    n = (i // HV).to(tl.int64)
    if PACKED:
        # The offsets may say anything: what lies outside [0, T] is never touched.
        start = tl.minimum(tl.maximum(tl.load(spans + n, mask=live, other=0).to(tl.int64), 0), T)
        end = tl.minimum(tl.maximum(tl.load(spans + n + 1, mask=live, other=0).to(tl.int64), start), T)
        # Chunks of two sequences never share a slot: floor(b / C) - floor(a / C) + 1 >= ceil((b - a) / C).
        return start, tl.where(live, end - start, 0).to(tl.int32), start // C + n
    else:
        return n * T, tl.where(live, T, 0).to(tl.int32), n * tl.cdiv(T, C)


@triton.jit
def _rows(base, ok, width: tl.constexpr, BLOCK: tl.constexpr):
    """[G, BLOCK], one row per sequence."""
    at = tl.arange(0, BLOCK)
    x = tl.load(base[:, None] + at[None, :], mask=ok[:, None] & (at < width)[None, :], other=0.0)
    return x.to(tl.float32)


@triton.jit
def _columns(base, ok):
    """[G * BV] float32, one number per column."""
    return tl.load(base, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _keys(x, KR: tl.constexpr, KL: tl.constexpr, BV: tl.constexpr):
    """Rows [G, KL * KR] spread over the tile."""
    G: tl.constexpr = x.shape[0]
    x = tl.permute(tl.reshape(x, (G, KL, KR)), (2, 1, 0))
    return tl.reshape(tl.broadcast_to(x[:, :, :, None], (KR, KL, G, BV)), (KR, KL, G * BV))


@triton.jit
def _wide(x):
    """Numbers [G * BV] spread over the tile."""
    return x[None, None, :]


@triton.jit
def _read(S, x):
    """S^T x: [G * BV], in four chains of additions that do not wait for each other."""
    KR: tl.constexpr = S.shape[0]
    if KR >= 8:
        terms = tl.reshape(S * x, (4, KR // 4, S.shape[1], S.shape[2]))
        return tl.sum(tl.sum(tl.sum(terms, 1), 0), 0)
    else:
        return tl.sum(tl.sum(S * x, 0), 0)


@triton.jit
def _tokens(
    q, k, v, e, log_decay, beta, write_k, write_v, t, left_g, left, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, U: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """U tokens from t on as a walk reads them; zeros where a token is before the first or after the last."""
    tokens = ()
    for u in tl.static_range(U):
        ok_g = (t + u >= 0) & (t + u < left_g)
        ok = (t + u >= 0) & (t + u < left)
        at = tl.cast(t, tl.int64) + u
        writes = ()
        for l in tl.static_range(L):
            x = _rows(write_k + (at * HV * L + l) * K, ok_g, K, BK)
            if REVERSE:
                writes = writes + (x,)  # type: ignore  # noqa: RUF005
            else:
                w = _columns(write_v + (at * HV * L + l) * V, ok)
                writes = writes + ((x, w),)  # type: ignore  # noqa: RUF005
        token = (
            _rows(q + at * H * K, ok_g, K, BK),
            _rows(k + at * H * K, ok_g, K, BK),
            _columns(v + at * HV * V, ok),
            _columns(log_decay + at * HV, ok),
            _columns(beta + at * HV, ok),
            writes,
        )
        if REVERSE:
            token = token + (_columns(e + at * HV * V, ok),)  # type: ignore  # noqa: RUF005
        tokens = tokens + (token,)  # type: ignore  # noqa: RUF005
    return tokens


@triton.jit(do_not_specialize=["T", "pairs"], do_not_specialize_on_alignment=["last", "states"])
def forward_kernel(
    q, k, v, log_decay, beta, write_k, write_v, initial, spans, o, last, e, states, scale, T, pairs, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, KR: tl.constexpr, KL: tl.constexpr, G: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, U: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr,
    SAVE: tl.constexpr,
):  # fmt: skip
    """o and the last state; with SAVE e, and the state before each chunk. A program: G pairs, BV columns."""
    BK: tl.constexpr = KR * KL
    first = tl.program_id(0) * G
    col = tl.arange(0, G * BV)
    i_g = first + tl.arange(0, G)
    i = first + col // BV
    vi = tl.program_id(1) * BV + col % BV
    start_g, left_g, _ = _sequence(i_g, i_g < pairs, spans, T, HV, C, PACKED)
    start, length, slot = _sequence(i, i < pairs, spans, T, HV, C, PACKED)
    left = tl.where(vi < V, length, 0)
    steps = tl.max(left_g, 0)

    ki = (tl.arange(0, KR)[:, None] + KR * tl.arange(0, KL)[None, :])[:, :, None]
    entry = ki * V + _wide(vi)
    inside = (ki < K) & _wide((vi < V) & (i < pairs))
    if INITIAL:
        S = tl.load(initial + _wide(i.to(tl.int64) * K * V) + entry, mask=inside, other=0.0)
    else:
        S = tl.zeros([KR, KL, G * BV], tl.float32)

    h_g, h = i_g % HV, i % HV
    row_g, row = start_g * HV + h_g, start * HV + h
    key_g = start_g * H + h_g // (HV // H)
    q += key_g * K
    k += key_g * K
    v += row * V + vi
    o += row * V + vi
    e += row * V + vi
    log_decay += row
    beta += row
    write_k += row_g * L * K
    write_v += row * L * V + vi
    states += _wide((slot * HV + h) * K * V) + entry

    t = 0
    coming = _tokens(
        q, k, v, e, log_decay, beta, write_k, write_v, t, left_g, left, H, HV, K, V, L, BK, U, False
    )
    while t < steps:
        tokens = coming
        coming = _tokens(
            q, k, v, e, log_decay, beta, write_k, write_v, t + U, left_g, left, H, HV, K, V, L, BK, U, False
        )  # fmt: skip
        if SAVE and t % C == 0:
            tl.store(states + tl.cast(t // C, tl.int64) * HV * K * V, S, mask=inside & _wide(t < length))
        for u in tl.static_range(U):
            q_t, k_t, v_t, g_t, beta_t, writes = tokens[u]
            ok = t + u < left
            k_t = _keys(k_t, KR, KL, BV)
            alpha = tl.exp(g_t)
            e_t = v_t - alpha * _read(S, k_t)
            S = _wide(alpha) * S + k_t * _wide(beta_t * e_t)
            for l in tl.static_range(L):
                write = writes[l]
                S += _keys(write[0], KR, KL, BV) * _wide(write[1])
            o_t = scale * _read(S, _keys(q_t, KR, KL, BV))
            at = (tl.cast(t, tl.int64) + u) * HV * V
            tl.store(o + at, o_t.to(o.dtype.element_ty), mask=ok)
            if SAVE:
                tl.store(e + at, e_t.to(e.dtype.element_ty), mask=ok)
        t += U
    tl.store(last + _wide(i.to(tl.int64) * K * V) + entry, S, mask=inside)


@triton.jit(
    do_not_specialize=["T", "pairs", "slices"], do_not_specialize_on_alignment=["dinitial", "adjoints"]
)
def reverse_kernel(
    q, k, do, e, log_decay, beta, write_k, dlast, spans, dv, dwrite_v, dbeta, dinitial, adjoints, scale,
    T, pairs, H, HV, slices,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, KR: tl.constexpr, KL: tl.constexpr, G: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, U: tl.constexpr, LAST: tl.constexpr, INITIAL: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """dv, dwrite_v, this slice's share of dbeta, the gradient of the initial state, and the adjoint of the
    state after each chunk. A program: G pairs, BV columns."""
    BK: tl.constexpr = KR * KL
    first = tl.program_id(0) * G
    col = tl.arange(0, G * BV)
    i_g = first + tl.arange(0, G)
    i = first + col // BV
    vi = tl.program_id(1) * BV + col % BV
    start_g, left_g, _ = _sequence(i_g, i_g < pairs, spans, T, HV, C, PACKED)
    start, length, slot = _sequence(i, i < pairs, spans, T, HV, C, PACKED)
    left = tl.where(vi < V, length, 0)

    ki = (tl.arange(0, KR)[:, None] + KR * tl.arange(0, KL)[None, :])[:, :, None]
    entry = ki * V + _wide(vi)
    inside = (ki < K) & _wide((vi < V) & (i < pairs))
    if LAST:
        dS = tl.load(dlast + _wide(i.to(tl.int64) * K * V) + entry, mask=inside, other=0.0)
    else:
        dS = tl.zeros([KR, KL, G * BV], tl.float32)

    h_g, h = i_g % HV, i % HV
    row_g, row = start_g * HV + h_g, start * HV + h
    key_g = start_g * H + h_g // (HV // H)
    q += key_g * K
    k += key_g * K
    do += row * V + vi
    e += row * V + vi
    dv += row * V + vi
    log_decay += row
    beta += row
    dbeta += row_g * slices + tl.program_id(1)
    write_k += row_g * L * K
    dwrite_v += row * L * V + vi
    adjoints += _wide((slot * HV + h) * K * V) + entry

    # Whole chunks: steps past the end of a sequence read zeros and change nothing.
    t = tl.cdiv(tl.max(left_g, 0), C) * C - U
    coming = _tokens(q, k, do, e, log_decay, beta, write_k, e, t, left_g, left, H, HV, K, V, L, BK, U, True)
    while t >= 0:
        tokens = coming
        coming = _tokens(
            q, k, do, e, log_decay, beta, write_k, e, t - U, left_g, left, H, HV, K, V, L, BK, U, True
        )  # fmt: skip
        if (t + U) % C == 0:
            chunk = t // C
            tl.store(
                adjoints + tl.cast(chunk, tl.int64) * HV * K * V, dS, mask=inside & _wide(chunk * C < length)
            )
        for u in tl.static_range(U - 1, -1, -1):
            q_t, k_t, do_t, g_t, beta_t, writes, e_t = tokens[u]
            k_t = _keys(k_t, KR, KL, BV)
            at = tl.cast(t, tl.int64) + u
            ok = t + u < left
            dS += _keys(q_t, KR, KL, BV) * _wide(scale * do_t)
            for l in tl.static_range(L):
                dw_t = _read(dS, _keys(writes[l], KR, KL, BV))
                tl.store(dwrite_v + (at * HV * L + l) * V, dw_t.to(dwrite_v.dtype.element_ty), mask=ok)
            dU = _read(dS, k_t)
            dR = beta_t * dU
            tl.store(dv + at * HV * V, dR.to(dv.dtype.element_ty), mask=ok)
            dbeta_t = tl.sum(tl.reshape(dU * e_t, (G, BV)), 1)
            tl.store(dbeta + at * HV * slices, dbeta_t.to(dbeta.dtype.element_ty), mask=t + u < left_g)
            dS = _wide(tl.exp(g_t)) * (dS - k_t * _wide(dR))
        t -= U
    if INITIAL:
        tl.store(dinitial + _wide(i.to(tl.int64) * K * V) + entry, dS, mask=inside)
