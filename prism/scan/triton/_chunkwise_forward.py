"""Chunk-parallel forward kernels: what a chunk needs of itself, and the pass over chunks.

With e_t = v_t - Sbar_t k_t, the error that the rank-1 write corrects, and U = beta e, math.md's system reads

    (I + tril(Kb Kb^T . gamma, -1) diag(beta)) e
        = Vb - sum_l tril(Kb X^l^T . gamma, -1) W^l - exp(G) Kb S_0^T.

`prepare_kernel` inverts the matrix on the left, which holds neither v nor the writes, and forms P = tril(Q
Kb^T . gamma); `writes_kernel` forms what L writes add to v and to the state. Both work on all chunks at once.
`scan_kernel` walks through the chunks of one sequence and head with a slice of the state's V columns on chip;
the columns of the state are independent of each other. Without writes it forms o on its way; with writes
`output_kernel` does, on all chunks at once again, for the walk is what takes long.

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
    decay,
    last_of,
    load_column,
    load_columns,
    load_rows,
    pair_decay,
    sequence_tokens,
    state_offsets,
    store_columns,
    store_rows,
    write_keys,
)


@triton.jit
def _substitute(a, C: tl.constexpr):
    """Replaces the C / 16 strictly lower triangular blocks [16, 16] on the diagonal of a [C, C] by
    (I + block)^{-1}. One lane per column."""
    lane = tl.arange(0, C)
    block = a + (lane // 16) * (16 * C + 16)
    column = lane % 16
    x = ()
    for i in tl.static_range(16):
        row = tl.where(column == i, 1.0, 0.0)
        for j in tl.static_range(i):
            row -= tl.load(block + (i * C + j)) * x[j]
        x = x + (row,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no unpacking)
    tl.debug_barrier()
    for i in tl.static_range(16):
        tl.store(block + i * C + column, x[i])


@triton.jit
def _high(x):
    """x cut to the eleven bits that a tf32 product takes, so that x minus this is exact."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _product(a, b, DOT: tl.constexpr):
    """a b with the digits of float32: tf32 alone loses a factor of four where keys repeat."""
    if DOT == "ieee":
        out = tl.dot(a, b, input_precision="ieee")
    else:
        a1 = _high(a)
        b1 = _high(b)
        out = tl.dot(a1, b - b1, input_precision="tf32")
        out = tl.dot(a - a1, b1, out, input_precision="tf32")
        out = tl.dot(a1, b1, out, input_precision="tf32")
    return out


@triton.jit
def _invert(a, scratch, out, out_stride, left, C: tl.constexpr, DOT: tl.constexpr):
    """out [C, C] = (I + a)^{-1} where a [C, C] counts below its diagonal only, C in {16, 32, 64}.

    Substitution inside blocks of 16 rows, then block merges: a product of powers of `a` would be shorter and
    loses every digit where keys repeat. `a` passes through `scratch` [C, C], where blocks of it are replaced
    by those of the inverse, to be read again in the shape that comes next.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    tl.store(scratch + i * C + j, a, mask=i // 16 >= j // 16)
    tl.debug_barrier()
    _substitute(scratch, C)
    tl.debug_barrier()
    if C == 16:
        tl.store(
            out + i * out_stride + j, tl.load(scratch + i * C + j).to(out.dtype.element_ty), mask=i < left
        )
    else:
        # The corners that join two blocks of 16, all pairs at once.
        pair = tl.arange(0, C // 32)[:, None, None] * (32 * C + 32)
        place = scratch + pair + tl.arange(0, 16)[None, :, None] * C + tl.arange(0, 16)[None, None, :]
        before = tl.load(place)
        below = tl.load(place + 16 * C)
        x = tl.load(place + 16 * C + 16)
        corner = -_product(x, _product(below, before, DOT), DOT)
        tl.debug_barrier()
        tl.store(place + 16 * C, corner)
        tl.debug_barrier()
        i = tl.arange(0, 32)[:, None]
        j = tl.arange(0, 32)[None, :]
        lower = i // 16 >= j // 16
        place = scratch + i * C + j
        before = tl.load(place, mask=lower, other=0.0)
        tl.store(out + i * out_stride + j, before.to(out.dtype.element_ty), mask=i < left)
        if C == 64:
            below = tl.load(place + 32 * C)
            x = tl.load(place + 32 * C + 32, mask=lower, other=0.0)
            beside = out + (32 + i) * out_stride + j
            tl.store(beside + 32, x.to(out.dtype.element_ty), mask=32 + i < left)
            zeros = tl.zeros((32, 32), out.dtype.element_ty)
            tl.store(out + i * out_stride + 32 + j, zeros, mask=i < left)
            corner = -_product(x, _product(below, before, DOT), DOT)
            tl.store(beside, corner.to(out.dtype.element_ty), mask=32 + i < left)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "H", "HV"])
def prepare_kernel(
    q, k, log_decay, beta, solve, scores, grown, rest, scratch, spans, scale, T, chunks_per_row, H, HV,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rows of (I + tril(Kb Kb^T . gamma, -1) diag(beta))^{-1} and of scale * P, both [tokens, HV, C]; exp(G)
    and exp(G_C - G), [tokens, HV] float32. One program: chunk, value head."""
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    first, end = chunk_tokens(chunk, spans, T, chunks_per_row, C, PACKED)
    left = C if WHOLE else (end - first).to(tl.int32)
    if left <= 0:
        return
    gate = first * HV + head
    read = (first * H + head // (HV // H)) * K
    keys = load_rows(k + read, H * K, left, 0, K, C, BK)
    queries = load_rows(q + read, H * K, left, 0, K, C, BK)
    total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
    b = load_column(beta + gate, HV, left, C)
    rows = tl.arange(0, C)
    tl.store(grown + gate + rows * HV, decay(total), mask=rows < left)
    tl.store(rest + gate + rows * HV, decay(last_of(total, C) - total), mask=rows < left)

    gamma = pair_decay(total[:, None], total[None, :], rows[:, None] >= rows[None, :])
    alike = tl.dot(keys, tl.trans(keys), input_precision=DOT) * (gamma * b[None, :])
    seen = tl.dot(queries, tl.trans(keys), input_precision=DOT) * (scale * gamma)
    store_rows(scores + gate * C, seen, HV * C, left, 0, C, C, C)
    own = scratch + tl.program_id(0).to(tl.int64) * (C * C)
    _invert(alike, own, solve + gate * C, HV * C, left, C, DOT)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "H", "HV", "L", "row"])
def writes_kernel(
    k, v, log_decay, write_k, write_v, target, write_state, spans, T, chunks_per_row, H, HV, L,
    row,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """target = v minus what k reads of the chunk's writes; write_state, their share of the state at the
    chunk's end. One program: chunk, value head, slice of V."""
    SLICES: tl.constexpr = (V + BV - 1) // BV
    v0 = (tl.program_id(0) % SLICES) * BV
    head = tl.program_id(0) // SLICES % HV
    chunk = tl.program_id(0) // SLICES // HV
    first, end = chunk_tokens(chunk, spans, T, chunks_per_row, C, PACKED)
    left = C if WHOLE else (end - first).to(tl.int32)
    if left <= 0:
        return
    gate = first * HV + head
    total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
    keys = load_rows(k + (first * H + head // (HV // H)) * K, H * K, left, 0, K, C, BK)
    rows = tl.arange(0, C)
    gamma = pair_decay(total[None, :], total[:, None], rows[:, None] < rows[None, :])
    rest = decay(last_of(total, C) - total)

    # A transposed sum [BV, C]: the computed tile is the right operand.
    from_k = tl.zeros((BV, C), tl.float32)
    added = tl.zeros((BK, BV), tl.float32)
    for l in range(L):
        place, stride = write_keys(first, head, l, row, HV, L, K)
        x = load_rows(write_k + place, stride, left, 0, K, C, BK)
        w = load_rows(write_v + (gate * L + l) * V, HV * L * V, left, v0, V, C, BV)
        seen = tl.dot(x, tl.trans(keys), input_precision=DOT) * gamma
        from_k = tl.dot(tl.trans(w), seen.to(w.dtype), from_k, input_precision=DOT)
        kept = (w.to(tl.float32) * rest[:, None]).to(w.dtype)
        added = tl.dot(tl.trans(x), kept, added, input_precision=DOT)
    values = load_rows(v + gate * V, HV * V, left, v0, V, C, BV)
    store_columns(target + gate * V, tl.trans(values).to(tl.float32) - from_k, HV * V, left, v0, V, C, BV)
    at, exists = state_offsets(v0, K, V, BK, BV)
    cell = (chunk.to(tl.int64) * HV + head) * K * V
    tl.store(write_state + cell + at, added.to(write_state.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "H", "HV"])
def scan_kernel(
    q, k, target, beta, solve, scores, grown, rest, write_state, initial, o, final, error, states,
    offsets, chunk_start, scale, T, chunks_per_row, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, DOT: tl.constexpr, INITIAL: tl.constexpr, WRITES: tl.constexpr,
    SAVE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The final state; o, unless WRITES; where SAVE, e [tokens, HV, V] and the state at the start of each
    chunk. One program: sequence, value head, slice of V.

    STAGES says how far every load runs ahead; None leaves those to wait that no product takes.
    """
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
    for step in tl.range(tl.cdiv((end - first).to(tl.int32), C), num_stages=STAGES):
        token = first + step * C
        left = C if WHOLE else (end - token).to(tl.int32)
        gate = token * HV + head
        read = (token * H + head // (HV // H)) * K
        cell = ((chunk + step) * HV + head) * K * V
        keys = load_rows(k + read, H * K, left, 0, K, C, BK)
        values = load_rows(target + gate * V, HV * V, left, v0, V, C, BV)
        inverse = load_rows(solve + gate * C, HV * C, left, 0, C, C, C)
        if not WRITES:
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
        state *= last
        if WRITES:
            state += tl.load(write_state + cell + at, mask=exists, other=0.0).to(tl.float32)
        else:
            out = tl.dot(queries, rounded, input_precision=DOT) * (scale * growth)[:, None]
            out = tl.dot(seen, e.to(keys.dtype), out, input_precision=DOT)
            store_rows(o + gate * V, out, HV * V, left, v0, V, C, BV)
        state = tl.dot(tl.trans(keys), (e * keep[:, None]).to(keys.dtype), state, input_precision=DOT)
    tl.store(final + own + at, state, mask=exists)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "H", "HV", "L", "row"])
def output_kernel(
    q, log_decay, beta, scores, grown, error, states, write_k, write_v, o, spans, scale, T,
    chunks_per_row, H, HV, L, row,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """o: what q reads of the state at the chunk's start, of U and of the L writes. One program: chunk, value
    head, slice of V."""
    SLICES: tl.constexpr = (V + BV - 1) // BV
    v0 = (tl.program_id(0) % SLICES) * BV
    head = tl.program_id(0) // SLICES % HV
    chunk = tl.program_id(0) // SLICES // HV
    first, end = chunk_tokens(chunk, spans, T, chunks_per_row, C, PACKED)
    left = C if WHOLE else (end - first).to(tl.int32)
    if left <= 0:
        return
    gate = first * HV + head
    at, exists = state_offsets(v0, K, V, BK, BV)
    state = tl.load(states + (chunk.to(tl.int64) * HV + head) * K * V + at, mask=exists, other=0.0)
    queries = load_rows(q + (first * H + head // (HV // H)) * K, H * K, left, 0, K, C, BK)
    e = load_rows(error + gate * V, HV * V, left, v0, V, C, BV)
    b = load_column(beta + gate, HV, left, C)
    seen = load_columns(scores + gate * C, HV * C, left, 0, C, C, C)
    # Transposed, [BV, C], as in `writes_kernel`.
    out = tl.dot(tl.trans(state), tl.trans(queries), input_precision=DOT)
    out *= scale * load_column(grown + gate, HV, left, C)[None, :]
    out = tl.dot(tl.trans(e), (seen.to(tl.float32) * b[:, None]).to(e.dtype), out, input_precision=DOT)
    rows = tl.arange(0, C)
    total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
    gamma = pair_decay(total[None, :], total[:, None], rows[:, None] <= rows[None, :]) * scale
    for l in range(L):
        place, stride = write_keys(first, head, l, row, HV, L, K)
        x = load_rows(write_k + place, stride, left, 0, K, C, BK)
        w = load_rows(write_v + (gate * L + l) * V, HV * L * V, left, v0, V, C, BV)
        by_q = tl.dot(x, tl.trans(queries), input_precision=DOT) * gamma
        out = tl.dot(tl.trans(w), by_q.to(w.dtype), out, input_precision=DOT)
    store_columns(o + gate * V, out, HV * V, left, v0, V, C, BV)
