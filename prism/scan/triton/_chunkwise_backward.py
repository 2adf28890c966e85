"""Chunk-parallel backward kernels (math.md, section 5): a reverse pass over chunks, then two kernels over all chunks.

`reverse_kernel` carries dS backwards and solves one transposed triangular system per chunk, whatever L is. With its
results, `writes_grad_kernel` gives the gradients of the writes and `inputs_grad_kernel` those of q, k, log_decay and
beta. A transposed product is always formed by a product of its own: Triton 3.4 to 3.7.0 miscompiles, on Hopper, a dot
whose operand is the transposed result of another dot.
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
    store_rows,
)


@triton.jit(do_not_specialize=["T", "chunks_per_row"])
def reverse_kernel(
    q, k, log_decay, beta, solve, error, do, d_final, dv, d_beta, d_states, d_initial,
    offsets, chunk_start, scale, T, chunks_per_row, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """dv; d_beta [tokens, HV, slices], e . dU of each slice; d_states, the gradient of the state at each chunk's end; and
    d_initial. One program: sequence, value head, slice of V."""
    SLICES: tl.constexpr = (V + BV - 1) // BV
    part = tl.program_id(0) % SLICES
    v0 = part * BV
    head = tl.program_id(0) // SLICES % HV
    n = tl.program_id(0) // SLICES // HV
    first, end, chunk = sequence_tokens(n, offsets, chunk_start, T, chunks_per_row, PACKED)
    at, exists = state_offsets(v0, K, V, BK, BV)
    own = (n.to(tl.int64) * HV + head) * K * V
    state = tl.zeros((BK, BV), tl.float32)
    if FINAL:
        state += tl.load(d_final + own + at, mask=exists, other=0.0).to(tl.float32)
    rows = tl.arange(0, C)
    chunks = tl.cdiv((end - first).to(tl.int32), C)
    for back in range(chunks):
        step = chunks - 1 - back
        token = first + step * C
        left = (end - token).to(tl.int32)
        gate = token * HV + head
        read = (token * H + head // (HV // H)) * K
        cell = ((chunk + step) * HV + head) * K * V
        keys = load_rows(k + read, H * K, left, 0, K, C, BK)
        queries = load_rows(q + read, H * K, left, 0, K, C, BK)
        # Column t of the inverse, read as row t: the transpose.
        transposed = tl.load(
            solve + gate * C + rows[None, :] * (HV * C) + rows[:, None],
            mask=(rows < left)[None, :],
            other=0.0,
        )
        upstream = load_rows(do + gate * V, HV * V, left, v0, V, C, BV)
        e = load_rows(error + gate * V, HV * V, left, v0, V, C, BV)
        b = load_column(beta + gate, HV, left, C)
        total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
        grown = tl.exp(total.to(tl.float32))
        last = last_of(total, C)
        rest = tl.exp((last - total).to(tl.float32))

        rounded = state.to(keys.dtype)
        tl.store(d_states + cell + at, rounded, mask=exists)
        seen = tl.dot(keys, tl.trans(queries), input_precision=DOT)
        seen *= scale * pair_decay(total[None, :], total[:, None], rows[:, None] <= rows[None, :])
        d_e = tl.dot(keys, rounded, input_precision=DOT) * rest[:, None]
        d_e = tl.dot(seen.to(keys.dtype), upstream, d_e, input_precision=DOT)
        tl.store(
            d_beta + (gate + rows * HV) * SLICES + part,
            tl.sum(d_e * e.to(tl.float32), axis=1),
            mask=rows < left,
        )
        d_right = tl.dot(transposed, (d_e * b[:, None]).to(keys.dtype), input_precision=DOT)
        store_rows(dv + gate * V, d_right, HV * V, left, v0, V, C, BV)

        state *= tl.exp(last.to(tl.float32))
        up = (upstream.to(tl.float32) * (scale * grown)[:, None]).to(keys.dtype)
        state = tl.dot(tl.trans(queries), up, state, input_precision=DOT)
        down = (d_right * -grown[:, None]).to(keys.dtype)
        state = tl.dot(tl.trans(keys), down, state, input_precision=DOT)
    tl.store(d_initial + own + at, state, mask=exists)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "L"])
def writes_grad_kernel(
    q, k, log_decay, write_k, write_v, do, dv, d_states, d_write_k, d_write_v, d_kept, spans,
    scale, T, chunks_per_row, H, HV, L,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """d_write_k, d_write_v, and d_kept [tokens, HV, L], the writes' part of the gradient of log(exp(G_C - G_i)).
    One program: chunk, value head, write."""
    l = tl.program_id(0) % L
    head = tl.program_id(0) // L % HV
    chunk = tl.program_id(0) // L // HV
    first, end = chunk_tokens(chunk, spans, T, chunks_per_row, C, PACKED)
    left = (end - first).to(tl.int32)
    if left <= 0:
        return
    gate = first * HV + head
    read = (first * H + head // (HV // H)) * K
    cell = (chunk.to(tl.int64) * HV + head) * K * V
    total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
    rest = tl.exp((last_of(total, C) - total).to(tl.float32))
    rows = tl.arange(0, C)
    gamma = pair_decay(total[None, :], total[:, None], rows[:, None] <= rows[None, :])
    queries = load_rows(q + read, H * K, left, 0, K, C, BK)
    keys = load_rows(k + read, H * K, left, 0, K, C, BK)
    x = load_rows(write_k + (gate * L + l) * K, HV * L * K, left, 0, K, C, BK)
    by_q = (tl.dot(x, tl.trans(queries), input_precision=DOT) * (scale * gamma)).to(x.dtype)
    above = rows[:, None] < rows[None, :]
    by_k = (tl.dot(x, tl.trans(keys), input_precision=DOT) * tl.where(above, -gamma, 0.0)).to(x.dtype)

    d_by_q = tl.zeros((C, C), tl.float32)
    d_by_k = tl.zeros((C, C), tl.float32)
    d_x = tl.zeros((C, BK), tl.float32)
    for v0 in range(0, V, BV):
        at, exists = state_offsets(v0, K, V, BK, BV)
        w = load_rows(write_v + (gate * L + l) * V, HV * L * V, left, v0, V, C, BV)
        upstream = load_rows(do + gate * V, HV * V, left, v0, V, C, BV)
        d_right = load_rows(dv + gate * V, HV * V, left, v0, V, C, BV)
        d_state = tl.load(d_states + cell + at, mask=exists, other=0.0)
        d_w = tl.dot(x, d_state, input_precision=DOT) * rest[:, None]
        d_w = tl.dot(by_q, upstream, d_w, input_precision=DOT)
        d_w = tl.dot(by_k, d_right, d_w, input_precision=DOT)
        store_rows(d_write_v + (gate * L + l) * V, d_w, HV * L * V, left, v0, V, C, BV)
        d_by_q = tl.dot(w, tl.trans(upstream), d_by_q, input_precision=DOT)
        d_by_k = tl.dot(w, tl.trans(d_right), d_by_k, input_precision=DOT)
        d_x = tl.dot(w, tl.trans(d_state), d_x, input_precision=DOT)
    d_x *= rest[:, None]
    kept = tl.sum(d_x * x.to(tl.float32), axis=1)
    tl.store(d_kept + (gate + rows * HV) * L + l, kept, mask=rows < left)
    # Read again: kept through the loop, gamma would spill registers.
    total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
    gamma = pair_decay(total[None, :], total[:, None], rows[:, None] <= rows[None, :])
    d_x = tl.dot((d_by_q * scale * gamma).to(x.dtype), queries, d_x, input_precision=DOT)
    above = rows[:, None] < rows[None, :]
    d_x = tl.dot((d_by_k * tl.where(above, -gamma, 0.0)).to(x.dtype), keys, d_x, input_precision=DOT)
    store_rows(d_write_k + (gate * L + l) * K, d_x, HV * L * K, left, 0, K, C, BK)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "L"])
def inputs_grad_kernel(
    q, k, log_decay, beta, error, states, write_k, write_v, do, dv, d_states, d_kept, d_beta_parts,
    dq, dk, d_log_decay, d_beta, spans, scale, T, chunks_per_row, H, HV, L, slices,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """dq, dk [tokens, HV, K], d_log_decay, d_beta. One program: chunk, value head.

    log_decay_t scales every path that crosses t: pairs (s, i) with s >= t > i, reads of the chunk's first state at
    s >= t, rows i < t kept to its end, and the first state carried through. Summing those, and not differences of row
    and column sums, keeps the digits under strong decay.
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
    total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
    b = load_column(beta + gate, HV, left, C)

    lower = rows[:, None] >= rows[None, :]
    below = rows[:, None] > rows[None, :]
    inside = rows < left
    queries = load_rows(q + read, H * K, left, 0, K, C, BK)
    keys = load_rows(k + read, H * K, left, 0, K, C, BK)

    # One accumulator after the other, each finished before the next begins: together they would spill registers.
    d_seen = tl.zeros((C, C), tl.float32)
    d_q = tl.zeros((C, BK), tl.float32)
    for v0 in range(0, V, BV):
        at, exists = state_offsets(v0, K, V, BK, BV)
        upstream = load_rows(do + gate * V, HV * V, left, v0, V, C, BV)
        e = load_rows(error + gate * V, HV * V, left, v0, V, C, BV)
        d_seen = tl.dot(upstream, tl.trans(e), d_seen, input_precision=DOT)
        state = tl.load(states + cell + at, mask=exists, other=0.0)
        d_q = tl.dot(upstream, tl.trans(state), d_q, input_precision=DOT)
    grown = tl.exp(total.to(tl.float32))
    d_q *= (scale * grown)[:, None]
    reads = tl.sum(d_q * queries.to(tl.float32), axis=1)
    gamma = pair_decay(total[:, None], total[None, :], lower)
    d_seen *= scale * gamma * b[None, :]
    d_q = tl.dot(d_seen.to(keys.dtype), keys, d_q, input_precision=DOT)
    pairs = d_seen * tl.dot(queries, tl.trans(keys), input_precision=DOT)
    if WRITES:
        for l in range(L):
            x = load_rows(write_k + (gate * L + l) * K, HV * L * K, left, 0, K, C, BK)
            by_q = tl.zeros((C, C), tl.float32)
            for v0 in range(0, V, BV):
                w = load_rows(write_v + (gate * L + l) * V, HV * L * V, left, v0, V, C, BV)
                upstream = load_rows(do + gate * V, HV * V, left, v0, V, C, BV)
                by_q = tl.dot(upstream, tl.trans(w), by_q, input_precision=DOT)
            by_q *= scale * gamma
            d_q = tl.dot(by_q.to(x.dtype), x, d_q, input_precision=DOT)
            pairs += by_q * tl.dot(queries, tl.trans(x), input_precision=DOT)
    store_rows(dq + gate * K, d_q, HV * K, left, 0, K, C, BK)

    d_k = tl.zeros((C, BK), tl.float32)
    carried = 0.0
    for v0 in range(0, V, BV):
        at, exists = state_offsets(v0, K, V, BK, BV)
        e = load_rows(error + gate * V, HV * V, left, v0, V, C, BV)
        state = tl.load(states + cell + at, mask=exists, other=0.0)
        d_state = tl.load(d_states + cell + at, mask=exists, other=0.0)
        carried += tl.sum(tl.sum(state.to(tl.float32) * d_state.to(tl.float32), axis=1), axis=0)
        d_k = tl.dot(e, tl.trans(d_state), d_k, input_precision=DOT)
    last = last_of(total, C)
    d_k *= (tl.exp((last - total).to(tl.float32)) * b)[:, None]
    kept = tl.sum(d_k * keys.to(tl.float32), axis=1)
    d_solve = tl.zeros((C, C), tl.float32)
    d_solve_t = tl.zeros((C, C), tl.float32)
    d_seen_t = tl.zeros((C, C), tl.float32)
    for v0 in range(0, V, BV):
        at, exists = state_offsets(v0, K, V, BK, BV)
        upstream = load_rows(do + gate * V, HV * V, left, v0, V, C, BV)
        e = load_rows(error + gate * V, HV * V, left, v0, V, C, BV)
        d_right = load_rows(dv + gate * V, HV * V, left, v0, V, C, BV)
        d_solve = tl.dot(d_right, tl.trans(e), d_solve, input_precision=DOT)
        d_solve_t = tl.dot(e, tl.trans(d_right), d_solve_t, input_precision=DOT)
        d_seen_t = tl.dot(e, tl.trans(upstream), d_seen_t, input_precision=DOT)
    total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
    gamma_t = pair_decay(total[None, :], total[:, None], rows[:, None] <= rows[None, :]) * b[:, None]
    d_seen_t *= scale * gamma_t
    d_k = tl.dot(d_seen_t.to(keys.dtype), queries, d_k, input_precision=DOT)
    gamma = pair_decay(total[:, None], total[None, :], below)
    d_solve *= gamma
    d_both = d_solve * b[None, :] + tl.where(lower, 0.0, d_solve_t * gamma_t)
    d_k = tl.dot((-d_both).to(keys.dtype), keys, d_k, input_precision=DOT)
    d_solve *= tl.dot(keys, tl.trans(keys), input_precision=DOT)
    pairs -= d_solve * b[None, :]
    to_beta = -tl.sum(d_solve, axis=0)
    for part in range(slices):
        to_beta += tl.load(d_beta_parts + (gate + rows * HV) * slices + part, mask=inside, other=0.0)
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
            d_k = tl.dot(by_k.to(x.dtype), x, d_k, input_precision=DOT)
            pairs += by_k * tl.dot(keys, tl.trans(x), input_precision=DOT)
            kept += tl.load(d_kept + (gate + rows * HV) * L + l, mask=inside, other=0.0)
    # d_k of the first state's reads: d_right S_0^T, folded in last.
    d_read = tl.zeros((C, BK), tl.float32)
    for v0 in range(0, V, BV):
        at, exists = state_offsets(v0, K, V, BK, BV)
        d_right = load_rows(dv + gate * V, HV * V, left, v0, V, C, BV)
        state = tl.load(states + cell + at, mask=exists, other=0.0)
        d_read = tl.dot(d_right, tl.trans(state), d_read, input_precision=DOT)
    d_read *= -tl.exp(total.to(tl.float32))[:, None]
    reads += tl.sum(d_read * keys.to(tl.float32), axis=1)
    store_rows(dk + gate * K, d_k + d_read, HV * K, left, 0, K, C, BK)

    # Column t of `crossing`, summed, is the gradient at t + 1.
    carried *= tl.exp(last.to(tl.float32))
    crossing = tl.where(below, reads[:, None] + tl.cumsum(pairs, axis=1), kept[:, None])
    tl.store(d_log_decay + gate + (rows + 1) * HV, tl.sum(crossing, axis=0) + carried, mask=rows + 1 < left)
    tl.store(d_log_decay + gate, tl.sum(reads, axis=0) + carried)
