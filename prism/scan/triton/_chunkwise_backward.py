"""Chunk-parallel backward kernels (math.md, section 5): a reverse pass over chunks, then all chunks at once.

`reverse_kernel` carries dS backwards and applies one transposed triangular inverse per chunk, whatever L is.
With its results, `writes_grad_kernel` gives the gradients of the writes and `inputs_grad_kernel` those of q,
k, log_decay and beta. Many sums are kept transposed, [width, C], so that a computed tile is only ever a right
operand (see `_chunkwise_forward.py`).
"""

import triton
import triton.language as tl

from prism.scan.triton._chunks import (
    chunk_tokens,
    cumulative,
    last_of,
    load_column,
    load_columns,
    load_rows,
    pair_decay,
    sequence_tokens,
    state_offsets,
    store_columns,
    store_rows,
)


@triton.jit(do_not_specialize=["T", "chunks_per_row"])
def reverse_kernel(
    q, k, beta, solve, scores, grown, rest, do, d_final, dv, d_states, d_initial,
    offsets, chunk_start, scale, T, chunks_per_row, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, DOT: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """dv; d_states, the gradient of the state at each chunk's end; d_initial. One program: sequence, value
    head, slice of V."""
    SLICES: tl.constexpr = (V + BV - 1) // BV
    v0 = (tl.program_id(0) % SLICES) * BV
    head = tl.program_id(0) // SLICES % HV
    n = tl.program_id(0) // SLICES // HV
    first, end, chunk = sequence_tokens(n, offsets, chunk_start, T, chunks_per_row, PACKED)
    at, exists = state_offsets(v0, K, V, BK, BV)
    own = (n.to(tl.int64) * HV + head) * K * V
    state = tl.zeros((BK, BV), tl.float32)
    if FINAL:
        state += tl.load(d_final + own + at, mask=exists, other=0.0).to(tl.float32)
    chunks = tl.cdiv((end - first).to(tl.int32), C)
    for back in range(chunks):
        step = chunks - 1 - back
        token = first + step * C
        left = (end - token).to(tl.int32)
        gate = token * HV + head
        read = (token * H + head // (HV // H)) * K
        cell = ((chunk + step) * HV + head) * K * V
        keys = load_rows(k + read, H * K, left, 0, K, C, BK)
        inverse = load_rows(solve + gate * C, HV * C, left, 0, C, C, C)
        seen = load_rows(scores + gate * C, HV * C, left, 0, C, C, C)
        upstream = load_rows(do + gate * V, HV * V, left, v0, V, C, BV)
        queries = load_rows(q + read, H * K, left, 0, K, C, BK)
        b = load_column(beta + gate, HV, left, C)
        growth = load_column(grown + gate, HV, left, C)
        keep = load_column(rest + gate, HV, left, C)
        last = tl.load(grown + gate + (tl.minimum(left, C) - 1) * HV)

        rounded = state.to(keys.dtype)
        tl.store(d_states + cell + at, rounded, mask=exists)
        d_e = tl.dot(keys, rounded, input_precision=DOT) * keep[:, None]
        d_e = tl.dot(tl.trans(seen), upstream, d_e, input_precision=DOT) * b[:, None]
        d_right = tl.dot(tl.trans(inverse), d_e.to(keys.dtype), input_precision=DOT)
        store_rows(dv + gate * V, d_right, HV * V, left, v0, V, C, BV)

        state *= last
        up = (upstream.to(tl.float32) * (scale * growth)[:, None]).to(keys.dtype)
        state = tl.dot(tl.trans(queries), up, state, input_precision=DOT)
        down = (d_right * -growth[:, None]).to(keys.dtype)
        state = tl.dot(tl.trans(keys), down, state, input_precision=DOT)
    tl.store(d_initial + own + at, state, mask=exists)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "L"])
def writes_grad_kernel(
    q, k, log_decay, write_k, write_v, do, dv, d_states, d_write_k, d_write_v, d_kept, spans,
    scale, T, chunks_per_row, H, HV, L,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """d_write_k, d_write_v, and d_kept [tokens, HV, L], the gradient of log exp(G_C - G_i) through each
    write. One program: chunk, value head, write."""
    l = tl.program_id(0) % L
    head = tl.program_id(0) // L % HV
    chunk = tl.program_id(0) // L // HV
    first, end = chunk_tokens(chunk, spans, T, chunks_per_row, C, PACKED)
    left = (end - first).to(tl.int32)
    if left <= 0:
        return
    gate = first * HV + head
    read = (first * H + head // (HV // H)) * K
    own_k = (gate * L + l) * K
    own_v = (gate * L + l) * V
    cell = (chunk.to(tl.int64) * HV + head) * K * V
    total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
    rest = tl.exp((last_of(total, C) - total).to(tl.float32))
    rows = tl.arange(0, C)
    below = rows[:, None] > rows[None, :]
    gamma = pair_decay(total[:, None], total[None, :], rows[:, None] >= rows[None, :])
    queries = load_rows(q + read, H * K, left, 0, K, C, BK)
    keys = load_rows(k + read, H * K, left, 0, K, C, BK)
    x = load_rows(write_k + own_k, HV * L * K, left, 0, K, C, BK)
    by_q = (tl.dot(queries, tl.trans(x), input_precision=DOT) * (scale * gamma)).to(x.dtype)
    by_k = (tl.dot(keys, tl.trans(x), input_precision=DOT) * tl.where(below, -gamma, 0.0)).to(x.dtype)

    d_by_q = tl.zeros((C, C), tl.float32)
    d_by_k = tl.zeros((C, C), tl.float32)
    d_x = tl.zeros((BK, C), tl.float32)
    for v0 in range(0, V, BV):
        at, exists = state_offsets(v0, K, V, BK, BV)
        w = load_rows(write_v + own_v, HV * L * V, left, v0, V, C, BV)
        upstream = load_rows(do + gate * V, HV * V, left, v0, V, C, BV)
        d_right = load_rows(dv + gate * V, HV * V, left, v0, V, C, BV)
        d_state = tl.load(d_states + cell + at, mask=exists, other=0.0)
        d_w = tl.dot(tl.trans(d_state), tl.trans(x), input_precision=DOT) * rest[None, :]
        d_w = tl.dot(tl.trans(upstream), by_q, d_w, input_precision=DOT)
        d_w = tl.dot(tl.trans(d_right), by_k, d_w, input_precision=DOT)
        store_columns(d_write_v + own_v, d_w, HV * L * V, left, v0, V, C, BV)
        d_by_q = tl.dot(upstream, tl.trans(w), d_by_q, input_precision=DOT)
        d_by_k = tl.dot(d_right, tl.trans(w), d_by_k, input_precision=DOT)
        d_x = tl.dot(d_state, tl.trans(w), d_x, input_precision=DOT)
    d_x *= rest[None, :]
    x_columns = load_columns(write_k + own_k, HV * L * K, left, 0, K, C, BK)
    kept = tl.sum(d_x * x_columns.to(tl.float32), axis=0)
    tl.store(d_kept + (gate + rows * HV) * L + l, kept, mask=rows < left)
    # Read again: kept through the loop, gamma would spill registers.
    total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
    gamma = pair_decay(total[:, None], total[None, :], rows[:, None] >= rows[None, :])
    d_x = tl.dot(tl.trans(queries), (d_by_q * (scale * gamma)).to(x.dtype), d_x, input_precision=DOT)
    d_by_k *= tl.where(below, -gamma, 0.0)
    d_x = tl.dot(tl.trans(keys), d_by_k.to(x.dtype), d_x, input_precision=DOT)
    store_columns(d_write_k + own_k, d_x, HV * L * K, left, 0, K, C, BK)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "L"])
def inputs_grad_kernel(
    q, k, log_decay, beta, scores, error, states, write_k, write_v, do, dv, d_states, d_kept,
    dq, dk, d_log_decay, d_beta, spans, scale, T, chunks_per_row, H, HV, L,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """dq, dk [tokens, HV, K], d_log_decay, d_beta. One program: chunk, value head.

    log_decay_t scales every path that crosses t: pairs (s, i) with s >= t > i, reads of the chunk's first
    state at s >= t, rows i < t kept to its end, and the first state carried through. Summing those, and not
    differences of row and column sums, keeps the digits under strong decay.

    One accumulator after the other, each finished before the next begins: together they would spill
    registers.
    """
    head = tl.program_id(0) % HV
    chunk = tl.program_id(0) // HV
    first, end = chunk_tokens(chunk, spans, T, chunks_per_row, C, PACKED)
    left = (end - first).to(tl.int32)
    if left <= 0:
        return
    gate = first * HV + head
    read = (first * H + head // (HV // H)) * K
    cell = (chunk.to(tl.int64) * HV + head) * K * V
    rows = tl.arange(0, C)
    inside = rows < left
    below = rows[:, None] > rows[None, :]
    total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
    b = load_column(beta + gate, HV, left, C)
    queries = load_rows(q + read, H * K, left, 0, K, C, BK)
    keys = load_rows(k + read, H * K, left, 0, K, C, BK)

    # Through what q reads.
    d_seen = tl.zeros((C, C), tl.float32)
    d_q = tl.zeros((BK, C), tl.float32)
    for v0 in range(0, V, BV):
        at, exists = state_offsets(v0, K, V, BK, BV)
        upstream = load_rows(do + gate * V, HV * V, left, v0, V, C, BV)
        e = load_rows(error + gate * V, HV * V, left, v0, V, C, BV)
        state = tl.load(states + cell + at, mask=exists, other=0.0)
        d_seen = tl.dot(upstream, tl.trans(e), d_seen, input_precision=DOT)
        d_q = tl.dot(state, tl.trans(upstream), d_q, input_precision=DOT)
    grown = tl.exp(total.to(tl.float32))
    d_q *= (scale * grown)[None, :]
    q_columns = load_columns(q + read, H * K, left, 0, K, C, BK)
    reads = tl.sum(d_q * q_columns.to(tl.float32), axis=0)
    gamma = pair_decay(total[:, None], total[None, :], rows[:, None] >= rows[None, :])
    pairs = d_seen * load_rows(scores + gate * C, HV * C, left, 0, C, C, C).to(tl.float32)
    to_beta = tl.sum(pairs, axis=0)
    pairs *= b[None, :]
    by_seen = (d_seen * (scale * gamma) * b[None, :]).to(keys.dtype)
    d_q = tl.dot(tl.trans(keys), tl.trans(by_seen), d_q, input_precision=DOT)
    if WRITES:
        for l in range(L):
            x = load_rows(write_k + (gate * L + l) * K, HV * L * K, left, 0, K, C, BK)
            by_q = tl.zeros((C, C), tl.float32)
            for v0 in range(0, V, BV):
                w = load_rows(write_v + (gate * L + l) * V, HV * L * V, left, v0, V, C, BV)
                upstream = load_rows(do + gate * V, HV * V, left, v0, V, C, BV)
                by_q = tl.dot(upstream, tl.trans(w), by_q, input_precision=DOT)
            by_q *= scale * gamma
            pairs += by_q * tl.dot(queries, tl.trans(x), input_precision=DOT)
            d_q = tl.dot(tl.trans(x), tl.trans(by_q.to(x.dtype)), d_q, input_precision=DOT)
    store_columns(dq + gate * K, d_q, HV * K, left, 0, K, C, BK)

    # Through the rows that k adds to the state.
    d_k = tl.zeros((BK, C), tl.float32)
    carried = 0.0
    for v0 in range(0, V, BV):
        at, exists = state_offsets(v0, K, V, BK, BV)
        e = load_rows(error + gate * V, HV * V, left, v0, V, C, BV)
        state = tl.load(states + cell + at, mask=exists, other=0.0)
        d_state = tl.load(d_states + cell + at, mask=exists, other=0.0)
        carried += tl.sum(tl.sum(state.to(tl.float32) * d_state.to(tl.float32), axis=1), axis=0)
        d_k = tl.dot(d_state, tl.trans(e), d_k, input_precision=DOT)
    last = last_of(total, C)
    d_k *= tl.exp((last - total).to(tl.float32))[None, :]
    k_columns = load_columns(k + read, H * K, left, 0, K, C, BK).to(tl.float32)
    kept = tl.sum(d_k * k_columns, axis=0)
    to_beta += kept
    kept *= b
    d_k *= b[None, :]
    d_k = tl.dot(tl.trans(queries), by_seen, d_k, input_precision=DOT)

    # Through the triangular system.
    d_solve = tl.zeros((C, C), tl.float32)
    for v0 in range(0, V, BV):
        e = load_rows(error + gate * V, HV * V, left, v0, V, C, BV)
        d_right = load_rows(dv + gate * V, HV * V, left, v0, V, C, BV)
        d_solve = tl.dot(d_right, tl.trans(e), d_solve, input_precision=DOT)
    total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
    gamma = pair_decay(total[:, None], total[None, :], below)
    d_solve *= -gamma
    by_keys = (d_solve * b[None, :]).to(keys.dtype)
    d_k = tl.dot(tl.trans(keys), by_keys, d_k, input_precision=DOT)
    d_k = tl.dot(tl.trans(keys), tl.trans(by_keys), d_k, input_precision=DOT)
    d_solve *= tl.dot(keys, tl.trans(keys), input_precision=DOT)
    to_beta += tl.sum(d_solve, axis=0)
    pairs += d_solve * b[None, :]
    tl.store(d_beta + gate + rows * HV, to_beta, mask=inside)
    if WRITES:
        for l in range(L):
            x = load_rows(write_k + (gate * L + l) * K, HV * L * K, left, 0, K, C, BK)
            by_k = tl.zeros((C, C), tl.float32)
            for v0 in range(0, V, BV):
                w = load_rows(write_v + (gate * L + l) * V, HV * L * V, left, v0, V, C, BV)
                d_right = load_rows(dv + gate * V, HV * V, left, v0, V, C, BV)
                by_k = tl.dot(d_right, tl.trans(w), by_k, input_precision=DOT)
            by_k *= -gamma
            pairs += by_k * tl.dot(keys, tl.trans(x), input_precision=DOT)
            d_k = tl.dot(tl.trans(x), tl.trans(by_k.to(x.dtype)), d_k, input_precision=DOT)
            kept += tl.load(d_kept + (gate + rows * HV) * L + l, mask=inside, other=0.0)

    # Through what k reads of the chunk's first state.
    d_read = tl.zeros((BK, C), tl.float32)
    for v0 in range(0, V, BV):
        at, exists = state_offsets(v0, K, V, BK, BV)
        d_right = load_rows(dv + gate * V, HV * V, left, v0, V, C, BV)
        state = tl.load(states + cell + at, mask=exists, other=0.0)
        d_read = tl.dot(state, tl.trans(d_right), d_read, input_precision=DOT)
    d_read *= -tl.exp(total.to(tl.float32))[None, :]
    k_columns = load_columns(k + read, H * K, left, 0, K, C, BK).to(tl.float32)
    reads += tl.sum(d_read * k_columns, axis=0)
    store_columns(dk + gate * K, d_k + d_read, HV * K, left, 0, K, C, BK)

    # Column t of `crossing`, summed, is the gradient at t + 1.
    carried *= tl.exp(last.to(tl.float32))
    crossing = tl.where(below, reads[:, None] + tl.cumsum(pairs, axis=1), kept[:, None])
    tl.store(d_log_decay + gate + (rows + 1) * HV, tl.sum(crossing, axis=0) + carried, mask=rows + 1 < left)
    tl.store(d_log_decay + gate, tl.sum(reads, axis=0) + carried)
