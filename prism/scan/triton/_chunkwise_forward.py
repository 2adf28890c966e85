"""Chunk-parallel forward kernels: what a chunk needs of itself, and the pass over chunks.

With e_t = v_t - Sbar_t k_t, the error that the rank-1 write corrects, and U = beta e, math.md's system reads

    (I + tril(Kb Kb^T . gamma, -1) diag(beta)) e
        = Vb - sum_l tril(Kb X^l^T . gamma, -1) W^l - exp(G) Kb S_0^T.

`prepare_kernel` inverts the matrix on the left, which holds neither v nor the writes, and forms P = tril(Q
Kb^T . gamma); `writes_kernel` forms what L writes add to v, to o and to the state. Both work on all chunks at
once. `scan_kernel` walks through the chunks of one sequence and head with a slice of the state's V columns on
chip; the columns of the state are independent of each other.

Two faults of the ptxas 12.8 that Triton 3.4 to 3.7.0 ships have made such kernels wrong on Hopper, at some
widths and numbers of warps only. A matrix instruction may read its left operand from registers that have
been overwritten: so a left operand is always a loaded tile, here and in the backward pass. And the high word
of a matrix descriptor, a 64-bit sum with a zero-extended address, may start from the address instead of zero:
so half precision runs at few widths, and tests/prism/test_triton_machine_code.py looks for such sums in the
machine code.
"""

import triton
import triton.language as tl

from prism.scan.triton._chunks import (
    chunk_tokens,
    cumulative,
    last_of,
    load_column,
    load_rows,
    pair_decay,
    sequence_tokens,
    state_offsets,
    store_columns,
    store_rows,
)


@triton.jit
def _substitute(scratch, C: tl.constexpr):
    """Replaces C / 16 strictly lower triangular blocks a [16, 16] by (I + a)^{-1}. One lane per column."""
    lane = tl.arange(0, C)
    block = scratch + (lane // 16) * 256
    column = lane % 16
    x = ()
    for i in tl.static_range(16):
        row = tl.where(column == i, 1.0, 0.0)
        for j in tl.static_range(i):
            row -= tl.load(block + (i * 16 + j)) * x[j]
        x = x + (row,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no unpacking)
    tl.debug_barrier()
    for i in tl.static_range(16):
        tl.store(block + i * 16 + column, x[i])


@triton.jit
def _load_blocks(
    base, stride, left, start, step, K: tl.constexpr, N: tl.constexpr, B: tl.constexpr, BK: tl.constexpr
):
    """[N, B, BK]: blocks of B rows, the n-th from row start + n * step."""
    rows = start + tl.arange(0, N)[:, None, None] * step + tl.arange(0, B)[None, :, None]
    cols = tl.arange(0, BK)[None, None, :]
    return tl.load(base + rows * stride + cols, mask=(rows < left) & (cols < K), other=0.0)


@triton.jit
def _store_blocks(base, tile, stride, left, row, column, step, N: tl.constexpr, B: tl.constexpr):
    """Stores [N, B, B], the n-th block from (row + n * step, column + n * step)."""
    shift = tl.arange(0, N)[:, None, None] * step
    rows = row + shift + tl.arange(0, B)[None, :, None]
    cols = column + shift + tl.arange(0, B)[None, None, :]
    tl.store(base + rows * stride + cols, tile.to(base.dtype.element_ty), mask=rows < left)


@triton.jit
def _half(x, second, P: tl.constexpr, B: tl.constexpr):
    """[P, B]: the first or the second half of each of P pairs of B numbers."""
    pairs = tl.reshape(x, (P, 2, B))
    return tl.sum(tl.where((tl.arange(0, 2) == second)[None, :, None], pairs, 0.0), axis=1)


@triton.jit
def _below_diagonal(
    k, stride, left, total, b,
    K: tl.constexpr, P: tl.constexpr, B: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """[P, B, B]: k_i . k_j exp(G_i - G_j) beta_j, i in the second half of a pair of blocks."""
    upper = _load_blocks(k, stride, left, 0, 2 * B, K, P, B, BK)
    lower = _load_blocks(k, stride, left, B, 2 * B, K, P, B, BK)
    decay = tl.exp((_half(total, 1, P, B)[:, :, None] - _half(total, 0, P, B)[:, None, :]).to(tl.float32))
    if P == 1:
        upper = tl.trans(tl.reshape(upper, (B, BK)))
        a = tl.dot(tl.reshape(lower, (B, BK)), upper, input_precision=DOT)[None, :, :]
    else:
        a = tl.dot(lower, tl.permute(upper, (0, 2, 1)), input_precision=DOT)
    return a * decay * _half(b, 0, P, B)[:, None, :]


@triton.jit
def _invert(
    k, k_stride, left, total, b, scratch, out, out_stride,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """out [C, C] = (I + a)^{-1}, a_ij = k_i . k_j exp(G_i - G_j) beta_j for j < i, C in {16, 32, 64}.

    Substitution inside blocks of 16 rows, then block merges: a product of powers of `a` would be shorter and
    loses every digit where keys repeat. Blocks pass through `scratch` [C + C / 2, 16], to be read again in
    the shape that comes next.
    """
    N: tl.constexpr = C // 16
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    block = scratch + tl.arange(0, N)[:, None, None] * 256 + i * 16 + j
    keys = _load_blocks(k, k_stride, left, 0, 16, K, N, 16, BK)
    G = tl.reshape(total, (N, 16))
    a = tl.dot(keys, tl.permute(keys, (0, 2, 1)), input_precision=DOT)
    a *= pair_decay(G[:, :, None], G[:, None, :], (i > j) & (tl.arange(0, N)[:, None, None] >= 0))
    tl.store(block, a * tl.reshape(b, (N, 16))[:, None, :])
    tl.debug_barrier()
    _substitute(scratch, C)
    tl.debug_barrier()
    _store_blocks(out, tl.load(block), out_stride, left, 0, 0, 16, N, 16)
    if C >= 32:
        P: tl.constexpr = C // 32
        pair = scratch + tl.arange(0, P)[:, None, None] * 512 + i * 16 + j
        a = _below_diagonal(k, k_stride, left, total, b, K, P, 16, BK, DOT)
        corner = tl.dot(a, tl.load(pair), input_precision=DOT)
        corner = -tl.dot(tl.load(pair + 256), corner, input_precision=DOT)
        _store_blocks(out, corner, out_stride, left, 16, 0, 32, P, 16)
        _store_blocks(out, tl.zeros_like(corner), out_stride, left, 0, 16, 32, P, 16)
        if C >= 64:
            corners = scratch + C * 16
            tl.store(corners + tl.arange(0, P)[:, None, None] * 256 + i * 16 + j, corner)
            tl.debug_barrier()
            r = tl.arange(0, 32)[:, None]
            c = tl.arange(0, 32)[None, :]
            place = tl.where(r // 16 == c // 16, r * 16 + c % 16, C * 16 + (r - 16) * 16 + c)
            inside = r // 16 >= c // 16
            first = tl.load(scratch + place, mask=inside, other=0.0)
            place += tl.where(r // 16 == c // 16, 512, 256)
            second = tl.load(scratch + place, mask=inside, other=0.0)
            a = tl.reshape(_below_diagonal(k, k_stride, left, total, b, K, 1, 32, BK, DOT), (32, 32))
            corner = tl.dot(a, first, input_precision=DOT)
            corner = -tl.dot(second, corner, input_precision=DOT)[None, :, :]
            _store_blocks(out, corner, out_stride, left, 32, 0, 0, 1, 32)
            _store_blocks(out, tl.zeros_like(corner), out_stride, left, 0, 32, 0, 1, 32)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "H", "HV"])
def prepare_kernel(
    q, k, log_decay, beta, solve, scores, grown, rest, scratch, spans, scale, T, chunks_per_row, H, HV,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    PACKED: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rows of (I + tril(Kb Kb^T . gamma, -1) diag(beta))^{-1} and of scale * P, both [tokens, HV, C]; exp(G)
    and exp(G_C - G), [tokens, HV] float32. One program: chunk, value head."""
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    first, end = chunk_tokens(chunk, spans, T, chunks_per_row, C, PACKED)
    left = (end - first).to(tl.int32)
    if left <= 0:
        return
    gate = first * HV + head
    read = (first * H + head // (HV // H)) * K
    total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
    b = load_column(beta + gate, HV, left, C)
    rows = tl.arange(0, C)
    tl.store(grown + gate + rows * HV, tl.exp(total.to(tl.float32)), mask=rows < left)
    tl.store(rest + gate + rows * HV, tl.exp((last_of(total, C) - total).to(tl.float32)), mask=rows < left)

    keys = load_rows(k + read, H * K, left, 0, K, C, BK)
    queries = load_rows(q + read, H * K, left, 0, K, C, BK)
    gamma = pair_decay(total[:, None], total[None, :], rows[:, None] >= rows[None, :])
    seen = tl.dot(queries, tl.trans(keys), input_precision=DOT) * (scale * gamma)
    store_rows(scores + gate * C, seen, HV * C, left, 0, C, C, C)
    own = scratch + tl.program_id(0).to(tl.int64) * (C * 24)
    _invert(k + read, H * K, left, total, b, own, solve + gate * C, HV * C, K, C, BK, DOT)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "H", "HV", "L"])
def writes_kernel(
    q, k, v, log_decay, write_k, write_v, target, write_o, write_state, spans, scale, T,
    chunks_per_row, H, HV, L,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """target = v minus what k reads of the chunk's writes; write_o = scale times what q reads of them;
    write_state, their share of the state at the chunk's end. One program: chunk, value head, slice of V."""
    SLICES: tl.constexpr = (V + BV - 1) // BV
    v0 = (tl.program_id(0) % SLICES) * BV
    head = tl.program_id(0) // SLICES % HV
    chunk = tl.program_id(0) // SLICES // HV
    first, end = chunk_tokens(chunk, spans, T, chunks_per_row, C, PACKED)
    left = (end - first).to(tl.int32)
    if left <= 0:
        return
    gate = first * HV + head
    read = (first * H + head // (HV // H)) * K
    total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
    queries = load_rows(q + read, H * K, left, 0, K, C, BK)
    keys = load_rows(k + read, H * K, left, 0, K, C, BK)
    rows = tl.arange(0, C)
    gamma = pair_decay(total[None, :], total[:, None], rows[:, None] <= rows[None, :])
    above = rows[:, None] < rows[None, :]
    rest = tl.exp((last_of(total, C) - total).to(tl.float32))

    # Transposed sums [BV, C]: the computed tile is the right operand.
    from_k = tl.zeros((BV, C), tl.float32)
    from_q = tl.zeros((BV, C), tl.float32)
    added = tl.zeros((BK, BV), tl.float32)
    for l in range(L):
        x = load_rows(write_k + (gate * L + l) * K, HV * L * K, left, 0, K, C, BK)
        w = load_rows(write_v + (gate * L + l) * V, HV * L * V, left, v0, V, C, BV)
        seen = tl.dot(x, tl.trans(keys), input_precision=DOT) * tl.where(above, gamma, 0.0)
        from_k = tl.dot(tl.trans(w), seen.to(w.dtype), from_k, input_precision=DOT)
        seen = tl.dot(x, tl.trans(queries), input_precision=DOT) * (scale * gamma)
        from_q = tl.dot(tl.trans(w), seen.to(w.dtype), from_q, input_precision=DOT)
        kept = (w.to(tl.float32) * rest[:, None]).to(w.dtype)
        added = tl.dot(tl.trans(x), kept, added, input_precision=DOT)
    values = load_rows(v + gate * V, HV * V, left, v0, V, C, BV)
    store_columns(target + gate * V, tl.trans(values).to(tl.float32) - from_k, HV * V, left, v0, V, C, BV)
    store_columns(write_o + gate * V, from_q, HV * V, left, v0, V, C, BV)
    at, exists = state_offsets(v0, K, V, BK, BV)
    cell = (chunk.to(tl.int64) * HV + head) * K * V
    tl.store(write_state + cell + at, added.to(write_state.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "H", "HV"])
def scan_kernel(
    q, k, target, beta, solve, scores, grown, rest, write_o, write_state, initial, o, final, error, states,
    offsets, chunk_start, scale, T, chunks_per_row, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, INITIAL: tl.constexpr, WRITES: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """o, the final state and, for the backward pass (SAVE), e [tokens, HV, V] and the state at the start of
    each chunk. One program: sequence, value head, slice of V."""
    SLICES: tl.constexpr = (V + BV - 1) // BV
    v0 = (tl.program_id(0) % SLICES) * BV
    head = tl.program_id(0) // SLICES % HV
    n = tl.program_id(0) // SLICES // HV
    first, end, chunk = sequence_tokens(n, offsets, chunk_start, T, chunks_per_row, PACKED)
    at, exists = state_offsets(v0, K, V, BK, BV)
    own = (n.to(tl.int64) * HV + head) * K * V
    state = tl.zeros((BK, BV), tl.float32)
    if INITIAL:
        state += tl.load(initial + own + at, mask=exists, other=0.0).to(tl.float32)
    for step in range(tl.cdiv((end - first).to(tl.int32), C)):
        token = first + step * C
        left = (end - token).to(tl.int32)
        gate = token * HV + head
        read = (token * H + head // (HV // H)) * K
        cell = ((chunk + step) * HV + head) * K * V
        keys = load_rows(k + read, H * K, left, 0, K, C, BK)
        values = load_rows(target + gate * V, HV * V, left, v0, V, C, BV)
        inverse = load_rows(solve + gate * C, HV * C, left, 0, C, C, C)
        queries = load_rows(q + read, H * K, left, 0, K, C, BK)
        seen = load_rows(scores + gate * C, HV * C, left, 0, C, C, C)
        b = load_column(beta + gate, HV, left, C)
        growth = load_column(grown + gate, HV, left, C)
        keep = load_column(rest + gate, HV, left, C)
        last = tl.load(grown + gate + (tl.minimum(left, C) - 1) * HV)

        rounded = state.to(keys.dtype)
        if SAVE:
            tl.store(states + cell + at, rounded, mask=exists)
        right = values.to(tl.float32) - growth[:, None] * tl.dot(keys, rounded, input_precision=DOT)
        e = tl.dot(inverse, right.to(keys.dtype), input_precision=DOT)
        if SAVE:
            store_rows(error + gate * V, e, HV * V, left, v0, V, C, BV)
        e *= b[:, None]
        out = tl.dot(queries, rounded, input_precision=DOT) * (scale * growth)[:, None]
        out = tl.dot(seen, e.to(keys.dtype), out, input_precision=DOT)
        state *= last
        if WRITES:
            out += load_rows(write_o + gate * V, HV * V, left, v0, V, C, BV).to(tl.float32)
            state += tl.load(write_state + cell + at, mask=exists, other=0.0).to(tl.float32)
        store_rows(o + gate * V, out, HV * V, left, v0, V, C, BV)
        state = tl.dot(tl.trans(keys), (e * keep[:, None]).to(keys.dtype), state, input_precision=DOT)
    tl.store(final + own + at, state, mask=exists)
