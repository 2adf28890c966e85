"""The two walks of `resident` through the tokens, which keep the state, or its adjoint, in registers.

`forward_kernel` computes the recurrence as the definition writes it, with e_t = v_t - Sbar_t k_t;
`reverse_kernel` runs the adjoint of the state backwards:

    dS_t   += scale q_t do_t^T                               (what comes from later tokens, and from o_t)
    dw_t^l  = dS_t^T kappa_t^l,   dv_t = dR_t = beta_t dS_t^T k_t
    dS_t-1  = alpha_t (dS_t - k_t dR_t^T)

The columns of the state, and of its adjoint, do not touch each other, so a lane owns columns and sums over
the keys without leaving its registers: no triangular system, no exponential of a sum of decays. Once both
states are known at the borders of every chunk, all other gradients are products of tiles, one program a
chunk: `_chunk_kernel.py` and `_narrow_chunk_kernel.py`.

The tile of a walk is [KR, KL, G * BV], one warp: columns are (sequence, value) pairs, keys lie KR to a
lane and KL lanes side by side. Tokens are read U at a time and U ahead, each row once and coalesced, and
spread over the tile when their turn comes, J rows together: each time, the warp writes them to shared
memory, waits, and reads them.

EVEN: sequences of equal length, all whole chunks, widths that are whole tiles, pairs that fill every warp:
nothing needs a mask. With no tokens left to read ahead, a walk reads its last ones again.
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
def _rows(base, ok, width: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """[G, BLOCK], one row per sequence."""
    at = tl.arange(0, BLOCK)
    if EVEN:
        x = tl.load(base[:, None] + at[None, :])
    else:
        x = tl.load(base[:, None] + at[None, :], mask=ok[:, None] & (at < width)[None, :], other=0.0)
    return x.to(tl.float32)


@triton.jit
def _columns(base, ok, EVEN: tl.constexpr):
    """[G * BV] float32, one number per column."""
    if EVEN:
        x = tl.load(base)
    else:
        x = tl.load(base, mask=ok, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _store(at, x, ok, EVEN: tl.constexpr):
    if EVEN:
        tl.store(at, x.to(at.dtype.element_ty))
    else:
        tl.store(at, x.to(at.dtype.element_ty), mask=ok)


@triton.jit
def _lanewise(base, col, T, EVEN: tl.constexpr):
    """`base`, and an offset of zero that the compiler cannot know to be zero: T < 0 never holds.

    All lanes of a sequence load the same decay and beta. Where no mask differs between them and the address
    visibly does not either, ptxas loads into a uniform register, and the warp waits for such a load at once,
    not U tokens later where the number is used.
    """
    if EVEN:
        base += tl.where(T < 0, col, 0)
    return base


@triton.jit
def _keys(x, KR: tl.constexpr, KL: tl.constexpr, BV: tl.constexpr):
    """Rows [G, KL * KR] spread over the tile."""
    G: tl.constexpr = x.shape[0]
    x = tl.permute(tl.reshape(x, (G, KL, KR)), (2, 1, 0))
    return tl.reshape(tl.broadcast_to(x[:, :, :, None], (KR, KL, G, BV)), (KR, KL, G * BV))


@triton.jit
def _keys_together(x, J: tl.constexpr, KR: tl.constexpr, KL: tl.constexpr, BV: tl.constexpr):
    """J rows, [G, KL * KR, ...J], spread over the tile: [KR, KL, G * BV, J]."""
    G: tl.constexpr = x.shape[0]
    x = tl.permute(tl.reshape(x, (G, KL, KR, J)), (2, 1, 0, 3))
    return tl.reshape(tl.broadcast_to(x[:, :, :, None, :], (KR, KL, G, BV, J)), (KR, KL, G * BV, J))


@triton.jit
def _two_keys(a, b, KR: tl.constexpr, KL: tl.constexpr, BV: tl.constexpr):
    return tl.split(_keys_together(tl.join(a, b), 2, KR, KL, BV))


@triton.jit
def _four_keys(a, b, c, d, KR: tl.constexpr, KL: tl.constexpr, BV: tl.constexpr):
    columns: tl.constexpr = a.shape[0] * BV
    x = _keys_together(tl.join(tl.join(a, b), tl.join(c, d)), 4, KR, KL, BV)
    ab, cd = tl.split(tl.reshape(x, (KR, KL, columns, 2, 2)))
    a, b = tl.split(ab)
    c, d = tl.split(cd)
    return a, b, c, d


@triton.jit
def _together(
    tokens, u: tl.constexpr, L: tl.constexpr, J: tl.constexpr, KR: tl.constexpr, KL: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """(q, k, keys of the writes) of token u, and of the next where J rows are those of two tokens: spread,
    or as they were read where J is 1 and `_alone` spreads them, each where it is used."""
    q, k, keys = tokens[u][:3]
    if J == 1:
        return ((q, k, keys),)
    elif J == 2:
        tl.static_assert(L == 0)
        q, k = _two_keys(q, k, KR, KL, BV)
        return ((q, k, ()),)
    elif L == 0:
        q, k, q_next, k_next = _four_keys(q, k, tokens[u + 1][0], tokens[u + 1][1], KR, KL, BV)
        return ((q, k, ()), (q_next, k_next, ()))
    else:
        tl.static_assert(L == 2)
        q, k, first, second = _four_keys(q, k, keys[0], keys[1], KR, KL, BV)
        return ((q, k, (first, second)),)


@triton.jit
def _alone(x, J: tl.constexpr, KR: tl.constexpr, KL: tl.constexpr, BV: tl.constexpr):
    if J == 1:
        x = _keys(x, KR, KL, BV)
    return x


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
    q, k, v, log_decay, beta, write_k, write_v, t, left_g, left, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, U: tl.constexpr,
    REVERSE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """U tokens from t on as a walk reads them; zeros where a token is before the first or after the last.
    Backwards v is do, and no values of writes are read."""
    tokens = ()
    for u in tl.static_range(U):
        ok_g = (t + u >= 0) & (t + u < left_g)
        ok = (t + u >= 0) & (t + u < left)
        at = tl.cast(t, tl.int64) + u
        keys, values = (), ()
        for l in tl.static_range(L):
            x = _rows(write_k + (at * HV * L + l) * K, ok_g, K, BK, EVEN)
            keys = keys + (x,)  # type: ignore  # noqa: RUF005
            if not REVERSE:
                w = _columns(write_v + (at * HV * L + l) * V, ok, EVEN)
                values = values + (w,)  # type: ignore  # noqa: RUF005
        token = (
            _rows(q + at * H * K, ok_g, K, BK, EVEN),
            _rows(k + at * H * K, ok_g, K, BK, EVEN),
            keys,
            _columns(v + at * HV * V, ok, EVEN),
            _columns(log_decay + at * HV, ok, EVEN),
            _columns(beta + at * HV, ok, EVEN),
            values,
        )
        tokens = tokens + (token,)  # type: ignore  # noqa: RUF005
    return tokens


@triton.jit(do_not_specialize=["T", "pairs"], do_not_specialize_on_alignment=["initial", "last", "states"])
def forward_kernel(
    q, k, v, log_decay, beta, write_k, write_v, initial, spans, o, last, e, states, scale, T, pairs, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, KR: tl.constexpr, KL: tl.constexpr, G: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, U: tl.constexpr, INITIAL: tl.constexpr, PACKED: tl.constexpr,
    SAVE: tl.constexpr, J: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """o and the last state; with SAVE e, and the state before each chunk. A program: G pairs, BV columns."""
    BK: tl.constexpr = KR * KL
    TURN: tl.constexpr = 2 if J == 4 and L == 0 else 1  # tokens whose rows are spread together
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
    log_decay = _lanewise(log_decay + row, col, T, EVEN)
    beta = _lanewise(beta + row, col, T, EVEN)
    write_k += row_g * L * K
    write_v += row * L * V + vi
    states += _wide((slot * HV + h) * K * V) + entry

    t = 0
    coming = _tokens(
        q, k, v, log_decay, beta, write_k, write_v, t, left_g, left, H, HV, K, V, L, BK, U, False, EVEN
    )
    while t < steps:
        tokens = coming
        ahead = t + U
        if EVEN:
            ahead = tl.minimum(ahead, steps - U)
        coming = _tokens(
            q, k, v, log_decay, beta, write_k, write_v, ahead, left_g, left, H, HV,
            K, V, L, BK, U, False, EVEN,
        )  # fmt: skip
        if SAVE and t % C == 0:
            state = states + tl.cast(t // C, tl.int64) * HV * K * V
            _store(state, S, inside & _wide(t < length), EVEN)
        for u in tl.static_range(U):
            v_t, g_t, beta_t, values = tokens[u][3:]
            if u % TURN == 0:
                rows = _together(tokens, u, L, J, KR, KL, BV)
            q_t, k_t, keys = rows[u % TURN]
            ok = t + u < left
            k_t = _alone(k_t, J, KR, KL, BV)
            alpha = tl.exp(g_t)
            e_t = v_t - alpha * _read(S, k_t)
            S = _wide(alpha) * S + k_t * _wide(beta_t * e_t)
            for l in tl.static_range(L):
                S += _alone(keys[l], J, KR, KL, BV) * _wide(values[l])
            o_t = scale * _read(S, _alone(q_t, J, KR, KL, BV))
            at = (tl.cast(t, tl.int64) + u) * HV * V
            _store(o + at, o_t, ok, EVEN)
            if SAVE:
                _store(e + at, e_t, ok, EVEN)
        t += U
    tl.store(last + _wide(i.to(tl.int64) * K * V) + entry, S, mask=inside)


@triton.jit(
    do_not_specialize=["T", "pairs"], do_not_specialize_on_alignment=["dlast", "dinitial", "adjoints"]
)
def reverse_kernel(
    q, k, do, log_decay, beta, write_k, dlast, spans, dv, dwrite_v, dinitial, adjoints, scale,
    T, pairs, H, HV,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, KR: tl.constexpr, KL: tl.constexpr, G: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, U: tl.constexpr, LAST: tl.constexpr, INITIAL: tl.constexpr,
    PACKED: tl.constexpr, J: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """dv, dwrite_v, the gradient of the initial state, and the adjoint of the state after each chunk. A
    program: G pairs, BV columns."""
    BK: tl.constexpr = KR * KL
    TURN: tl.constexpr = 2 if J == 4 and L == 0 else 1  # tokens whose rows are spread together
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
    dv += row * V + vi
    log_decay = _lanewise(log_decay + row, col, T, EVEN)
    beta = _lanewise(beta + row, col, T, EVEN)
    write_k += row_g * L * K
    dwrite_v += row * L * V + vi
    adjoints += _wide((slot * HV + h) * K * V) + entry

    # Whole chunks: steps past the end of a sequence read zeros and change nothing.
    t = tl.cdiv(tl.max(left_g, 0), C) * C - U
    coming = _tokens(
        q, k, do, log_decay, beta, write_k, do, t, left_g, left, H, HV, K, V, L, BK, U, True, EVEN
    )
    while t >= 0:
        tokens = coming
        ahead = t - U
        if EVEN:
            ahead = tl.maximum(ahead, 0)
        coming = _tokens(
            q, k, do, log_decay, beta, write_k, do, ahead, left_g, left, H, HV, K, V, L, BK, U, True, EVEN
        )  # fmt: skip
        if (t + U) % C == 0:
            chunk = t // C
            adjoint = adjoints + tl.cast(chunk, tl.int64) * HV * K * V
            _store(adjoint, dS, inside & _wide(chunk * C < length), EVEN)
        for u in tl.static_range(U - 1, -1, -1):
            do_t, g_t, beta_t, _values = tokens[u][3:]
            if u % TURN == TURN - 1:
                rows = _together(tokens, u - (TURN - 1), L, J, KR, KL, BV)
            q_t, k_t, keys = rows[u % TURN]
            k_t = _alone(k_t, J, KR, KL, BV)
            at = tl.cast(t, tl.int64) + u
            ok = t + u < left
            dS += _alone(q_t, J, KR, KL, BV) * _wide(scale * do_t)
            for l in tl.static_range(L):
                dw_t = _read(dS, _alone(keys[l], J, KR, KL, BV))
                _store(dwrite_v + (at * HV * L + l) * V, dw_t, ok, EVEN)
            dR = beta_t * _read(dS, k_t)
            _store(dv + at * HV * V, dR, ok, EVEN)
            dS = _wide(tl.exp(g_t)) * (dS - k_t * _wide(dR))
        t -= U
    if INITIAL:
        tl.store(dinitial + _wide(i.to(tl.int64) * K * V) + entry, dS, mask=inside)
