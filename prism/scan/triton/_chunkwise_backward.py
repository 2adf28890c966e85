"""Chunk-parallel backward kernels (math.md, section 5): a reverse pass over chunks, then all chunks at once.

`reverse_kernel` carries dS backwards and applies one transposed triangular inverse per chunk, whatever L is.
With its results, four kernels work on all chunks at once, each small enough that several programs share a
multiprocessor: `writes_grad_kernel` and `scores_grad_kernel` form the gradients of the C x C products once,
`queries_grad_kernel` and `keys_grad_kernel` use them. Many sums are kept transposed, [width, C], so that a
computed tile is only ever a right operand (see `_chunkwise_forward.py`).
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


@triton.jit(do_not_specialize=["T", "chunks_per_row", "H", "HV"])
def reverse_kernel(
    q, k, beta, solve, scores, grown, rest, error, do, d_final, dv, d_states, d_initial, kept,
    offsets, chunk_start, scale, T, chunks_per_row, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, DOT: tl.constexpr, FINAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dv; d_states, the gradient of the state at each chunk's end; d_initial; kept [tokens, HV, slices], each
    slice's share of e . (exp(G_C - G) k dS). One program: sequence, value head, slice of V. STAGES as in
    `scan_kernel`."""
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
    for back in tl.range(chunks, num_stages=STAGES):
        step = chunks - 1 - back
        token = first + step * C
        left = C if WHOLE else (end - token).to(tl.int32)
        gate = token * HV + head
        read = (token * H + head // (HV // H)) * K
        cell = ((chunk + step) * HV + head) * K * V
        keys = load_rows(k + read, H * K, left, 0, K, C, BK)
        inverse = load_rows(solve + gate * C, HV * C, left, 0, C, C, C)
        seen = load_rows(scores + gate * C, HV * C, left, 0, C, C, C)
        upstream = load_rows(do + gate * V, HV * V, left, v0, V, C, BV)
        e = load_rows(error + gate * V, HV * V, left, v0, V, C, BV)
        queries = load_rows(q + read, H * K, left, 0, K, C, BK)
        b = load_column(beta + gate, HV, left, C)
        growth = load_column(grown + gate, HV, left, C)
        keep = load_column(rest + gate, HV, left, C)
        last = tl.load(grown + gate + (tl.minimum(left, C) - 1) * HV)

        rounded = state.to(keys.dtype)
        tl.store(d_states + cell + at, rounded, mask=exists)
        d_e = tl.dot(keys, rounded, input_precision=DOT) * keep[:, None]
        share = tl.sum(d_e * e.to(tl.float32), axis=1)
        tl.store(kept + (gate + rows * HV) * SLICES + part, share, mask=rows < left)
        d_e = tl.dot(tl.trans(seen), upstream, d_e, input_precision=DOT) * b[:, None]
        d_right = tl.dot(tl.trans(inverse), d_e.to(keys.dtype), input_precision=DOT)
        store_rows(dv + gate * V, d_right, HV * V, left, v0, V, C, BV)

        state *= last
        up = (upstream.to(tl.float32) * (scale * growth)[:, None]).to(keys.dtype)
        state = tl.dot(tl.trans(queries), up, state, input_precision=DOT)
        down = (d_right * -growth[:, None]).to(keys.dtype)
        state = tl.dot(tl.trans(keys), down, state, input_precision=DOT)
    tl.store(d_initial + own + at, state, mask=exists)


@triton.jit
def _store_gate_grad(base, stride, pairs, kept, left, C: tl.constexpr):
    """Stores, for every t of the chunk but its first, the sum of `pairs` (s, i) with s >= t > i and of `kept`
    i with i < t.

    log_decay_t scales every path that crosses t. Sums of what crosses, and not differences of row and column
    sums, keep their digits under strong decay.
    """
    rows = tl.arange(0, C)
    below = rows[:, None] > rows[None, :]
    crossing = tl.sum(tl.where(below, tl.cumsum(pairs, axis=1), kept[:, None]), axis=0)  # at t + 1
    tl.store(base + (rows + 1) * stride, crossing, mask=rows + 1 < tl.minimum(left, C))


@triton.jit(do_not_specialize=["T", "chunks_per_row", "H", "HV", "L", "row"])
def writes_grad_kernel(
    q, k, log_decay, write_k, write_v, norms, do, dv, d_states, d_write_k, d_write_v, by_writes, gate_grad,
    spans, scale, T, chunks_per_row, H, HV, L, row,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """d_write_k, d_write_v; by_writes [tokens, HV, L, 2, C], the gradients of q . x and of k . x; gate_grad
    [tokens, HV, L], the share of d_log_decay. One program: chunk, value head, write.

    norms [tokens, HV, L], where given, are |x|^-2, and write_v is w / |x|, of a write w (x / |x|)^T:
    d_write_k is then the gradient of x for a given w, d_write_v still that of write_v.
    """
    l = tl.program_id(0) % L
    head = tl.program_id(0) // L % HV
    chunk = tl.program_id(0) // L // HV
    first, end = chunk_tokens(chunk, spans, T, chunks_per_row, C, PACKED)
    left = C if WHOLE else (end - first).to(tl.int32)
    if left <= 0:
        return
    gate = first * HV + head
    read = (first * H + head // (HV // H)) * K
    own = gate * L + l
    cell = (chunk.to(tl.int64) * HV + head) * K * V
    rows = tl.arange(0, C)
    place, stride = write_keys(first, head, l, row, HV, L, K)
    x = load_rows(write_k + place, stride, left, 0, K, C, BK)

    d_by_q = tl.zeros((C, C), tl.float32)
    d_by_k = tl.zeros((C, C), tl.float32)
    for v0 in range(0, V, BV):
        w = load_rows(write_v + own * V, HV * L * V, left, v0, V, C, BV)
        upstream = load_rows(do + gate * V, HV * V, left, v0, V, C, BV)
        d_right = load_rows(dv + gate * V, HV * V, left, v0, V, C, BV)
        d_by_q = tl.dot(upstream, tl.trans(w), d_by_q, input_precision=DOT)
        d_by_k = tl.dot(d_right, tl.trans(w), d_by_k, input_precision=DOT)
    total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
    gamma = pair_decay(total[:, None], total[None, :], rows[:, None] >= rows[None, :])
    d_by_q *= scale * gamma
    d_by_k *= tl.where(rows[:, None] > rows[None, :], -gamma, 0.0)
    store_rows(by_writes + own * 2 * C, d_by_q, HV * L * 2 * C, left, 0, C, C, C)
    store_rows(by_writes + own * 2 * C + C, d_by_k, HV * L * 2 * C, left, 0, C, C, C)
    queries = load_rows(q + read, H * K, left, 0, K, C, BK)
    keys = load_rows(k + read, H * K, left, 0, K, C, BK)
    by_q = tl.dot(queries, tl.trans(x), input_precision=DOT)
    by_k = tl.dot(keys, tl.trans(x), input_precision=DOT)
    pairs = d_by_q * by_q + d_by_k * by_k
    by_q = (by_q * (scale * gamma)).to(x.dtype)
    by_k = (by_k * tl.where(rows[:, None] > rows[None, :], -gamma, 0.0)).to(x.dtype)

    d_x = tl.zeros((BK, C), tl.float32)
    for v0 in range(0, V, BV):
        at, exists = state_offsets(v0, K, V, BK, BV)
        d_state = tl.load(d_states + cell + at, mask=exists, other=0.0)
        w = load_rows(write_v + own * V, HV * L * V, left, v0, V, C, BV)
        d_x = tl.dot(d_state, tl.trans(w), d_x, input_precision=DOT)
    rest = decay(last_of(total, C) - total)
    d_x *= rest[None, :]
    x_columns = load_columns(write_k + place, stride, left, 0, K, C, BK).to(tl.float32)
    kept = tl.sum(d_x * x_columns, axis=0)
    _store_gate_grad(gate_grad + own, HV * L, pairs, kept, left, C)
    d_x = tl.dot(tl.trans(queries), d_by_q.to(x.dtype), d_x, input_precision=DOT)
    d_x = tl.dot(tl.trans(keys), d_by_k.to(x.dtype), d_x, input_precision=DOT)
    if norms is not None:
        x_columns = load_columns(write_k + place, stride, left, 0, K, C, BK).to(tl.float32)
        along = tl.sum(d_x * x_columns, axis=0) * load_column(norms + own, HV * L, left, C)
        d_x -= x_columns * along[None, :]
    store_columns(d_write_k + place, d_x, stride, left, 0, K, C, BK)

    for v0 in range(0, V, BV):
        at, exists = state_offsets(v0, K, V, BK, BV)
        d_state = tl.load(d_states + cell + at, mask=exists, other=0.0)
        d_w = tl.dot(tl.trans(d_state), tl.trans(x), input_precision=DOT) * rest[None, :]
        upstream = load_rows(do + gate * V, HV * V, left, v0, V, C, BV)
        d_w = tl.dot(tl.trans(upstream), by_q, d_w, input_precision=DOT)
        d_right = load_rows(dv + gate * V, HV * V, left, v0, V, C, BV)
        d_w = tl.dot(tl.trans(d_right), by_k, d_w, input_precision=DOT)
        store_columns(d_write_v + own * V, d_w, HV * L * V, left, v0, V, C, BV)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "H", "HV"])
def scores_grad_kernel(
    k, log_decay, beta, scores, error, do, dv, by_scores, gate_grad, beta_grad, spans,
    scale, T, chunks_per_row, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """by_scores [tokens, HV, 2, C], the gradients of q . k and of k . k below the diagonal; gate_grad and
    beta_grad [tokens, HV], their shares of d_log_decay and d_beta. One program: chunk, value head."""
    head = tl.program_id(0) % HV
    chunk = tl.program_id(0) // HV
    first, end = chunk_tokens(chunk, spans, T, chunks_per_row, C, PACKED)
    left = C if WHOLE else (end - first).to(tl.int32)
    if left <= 0:
        return
    gate = first * HV + head
    rows = tl.arange(0, C)
    keys = load_rows(k + (first * H + head // (HV // H)) * K, H * K, left, 0, K, C, BK)
    d_seen = tl.zeros((C, C), tl.float32)
    d_solve = tl.zeros((C, C), tl.float32)
    for v0 in range(0, V, BV):
        e = load_rows(error + gate * V, HV * V, left, v0, V, C, BV)
        upstream = load_rows(do + gate * V, HV * V, left, v0, V, C, BV)
        d_right = load_rows(dv + gate * V, HV * V, left, v0, V, C, BV)
        d_seen = tl.dot(upstream, tl.trans(e), d_seen, input_precision=DOT)
        d_solve = tl.dot(d_right, tl.trans(e), d_solve, input_precision=DOT)
    b = load_column(beta + gate, HV, left, C)
    total = cumulative(load_column(log_decay + gate, HV, left, C), WIDE)
    gamma = pair_decay(total[:, None], total[None, :], rows[:, None] >= rows[None, :])
    pairs = d_seen * load_rows(scores + gate * C, HV * C, left, 0, C, C, C).to(tl.float32)
    d_seen *= (scale * gamma) * b[None, :]
    store_rows(by_scores + gate * 2 * C, d_seen, HV * 2 * C, left, 0, C, C, C)
    d_solve *= tl.where(rows[:, None] > rows[None, :], -gamma, 0.0)
    store_rows(by_scores + gate * 2 * C + C, d_solve * b[None, :], HV * 2 * C, left, 0, C, C, C)
    pairs += d_solve * tl.dot(keys, tl.trans(keys), input_precision=DOT)
    tl.store(beta_grad + gate + rows * HV, tl.sum(pairs, axis=0), mask=rows < left)
    _store_gate_grad(gate_grad + gate, HV, pairs * b[None, :], tl.zeros((C,), tl.float32), left, C)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "H", "HV", "L", "row"])
def queries_grad_kernel(
    q, k, grown, states, write_k, do, by_scores, by_writes, dq, reads, spans,
    scale, T, chunks_per_row, H, HV, L, row,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, DOT: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """dq [tokens, HV, K]; reads [tokens, HV], q . dq through the chunk's first state. One program: chunk,
    value head."""
    head = tl.program_id(0) % HV
    chunk = tl.program_id(0) // HV
    first, end = chunk_tokens(chunk, spans, T, chunks_per_row, C, PACKED)
    left = C if WHOLE else (end - first).to(tl.int32)
    if left <= 0:
        return
    gate = first * HV + head
    read = (first * H + head // (HV // H)) * K
    cell = (chunk.to(tl.int64) * HV + head) * K * V
    rows = tl.arange(0, C)
    keys = load_rows(k + read, H * K, left, 0, K, C, BK)
    by_seen = load_rows(by_scores + gate * 2 * C, HV * 2 * C, left, 0, C, C, C)
    d_q = tl.zeros((BK, C), tl.float32)
    for v0 in range(0, V, BV):
        at, exists = state_offsets(v0, K, V, BK, BV)
        state = tl.load(states + cell + at, mask=exists, other=0.0)
        upstream = load_rows(do + gate * V, HV * V, left, v0, V, C, BV)
        d_q = tl.dot(state, tl.trans(upstream), d_q, input_precision=DOT)
    d_q *= scale * load_column(grown + gate, HV, left, C)[None, :]
    q_columns = load_columns(q + read, H * K, left, 0, K, C, BK)
    tl.store(reads + gate + rows * HV, tl.sum(d_q * q_columns.to(tl.float32), axis=0), mask=rows < left)
    d_q = tl.dot(tl.trans(keys), tl.trans(by_seen), d_q, input_precision=DOT)
    if WRITES:
        for l in range(L):
            place, stride = write_keys(first, head, l, row, HV, L, K)
            x = load_rows(write_k + place, stride, left, 0, K, C, BK)
            by_q = load_rows(by_writes + (gate * L + l) * 2 * C, HV * L * 2 * C, left, 0, C, C, C)
            d_q = tl.dot(tl.trans(x), tl.trans(by_q), d_q, input_precision=DOT)
    store_columns(dq + gate * K, d_q, HV * K, left, 0, K, C, BK)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "H", "HV", "L", "slices", "row"])
def keys_grad_kernel(
    q, k, beta, grown, rest, error, states, write_k, dv, d_states, by_scores, by_writes, gate_grad,
    write_gate_grad, beta_grad, reads, kept, dk, d_log_decay, d_beta, spans,
    T, chunks_per_row, H, HV, L, slices, row,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, DOT: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """dk [tokens, HV, K], and d_log_decay and d_beta from the shares found before and this kernel's own.
    One program: chunk, value head."""
    head = tl.program_id(0) % HV
    chunk = tl.program_id(0) // HV
    first, end = chunk_tokens(chunk, spans, T, chunks_per_row, C, PACKED)
    left = C if WHOLE else (end - first).to(tl.int32)
    if left <= 0:
        return
    gate = first * HV + head
    read = (first * H + head // (HV // H)) * K
    cell = (chunk.to(tl.int64) * HV + head) * K * V
    rows = tl.arange(0, C)
    inside = rows < left
    next_inside = rows + 1 < tl.minimum(left, C)

    # What k reads of the chunk's first state, and that state carried through.
    d_k = tl.zeros((BK, C), tl.float32)
    carried = 0.0
    for v0 in range(0, V, BV):
        at, exists = state_offsets(v0, K, V, BK, BV)
        state = tl.load(states + cell + at, mask=exists, other=0.0)
        d_state = tl.load(d_states + cell + at, mask=exists, other=0.0)
        carried += tl.sum(tl.sum(state.to(tl.float32) * d_state.to(tl.float32), axis=1), axis=0)
        d_right = load_rows(dv + gate * V, HV * V, left, v0, V, C, BV)
        d_k = tl.dot(state, tl.trans(d_right), d_k, input_precision=DOT)
    carried *= tl.load(grown + gate + (tl.minimum(left, C) - 1) * HV)
    d_k *= -load_column(grown + gate, HV, left, C)[None, :]
    k_columns = load_columns(k + read, H * K, left, 0, K, C, BK).to(tl.float32)
    read_grad = load_column(reads + gate, HV, left, C) + tl.sum(d_k * k_columns, axis=0)

    # What k adds to the chunk's last state.
    b = load_column(beta + gate, HV, left, C)
    weight = load_column(rest + gate, HV, left, C) * b
    for v0 in range(0, V, BV):
        at, exists = state_offsets(v0, K, V, BK, BV)
        d_state = tl.load(d_states + cell + at, mask=exists, other=0.0)
        e = load_rows(error + gate * V, HV * V, left, v0, V, C, BV)
        u = (e.to(tl.float32) * weight[:, None]).to(e.dtype)
        d_k = tl.dot(d_state, tl.trans(u), d_k, input_precision=DOT)

    queries = load_rows(q + read, H * K, left, 0, K, C, BK)
    by_seen = load_rows(by_scores + gate * 2 * C, HV * 2 * C, left, 0, C, C, C)
    d_k = tl.dot(tl.trans(queries), by_seen, d_k, input_precision=DOT)
    keys = load_rows(k + read, H * K, left, 0, K, C, BK)
    by_keys = load_rows(by_scores + gate * 2 * C + C, HV * 2 * C, left, 0, C, C, C)
    d_k = tl.dot(tl.trans(keys), by_keys, d_k, input_precision=DOT)
    d_k = tl.dot(tl.trans(keys), tl.trans(by_keys), d_k, input_precision=DOT)
    gate_share = tl.load(gate_grad + gate + (rows + 1) * HV, mask=next_inside, other=0.0)
    if WRITES:
        for l in range(L):
            place, stride = write_keys(first, head, l, row, HV, L, K)
            x = load_rows(write_k + place, stride, left, 0, K, C, BK)
            by_k = load_rows(by_writes + (gate * L + l) * 2 * C + C, HV * L * 2 * C, left, 0, C, C, C)
            d_k = tl.dot(tl.trans(x), tl.trans(by_k), d_k, input_precision=DOT)
            share = write_gate_grad + gate * L + l + (rows + 1) * HV * L
            gate_share += tl.load(share, mask=next_inside, other=0.0)
    store_columns(dk + gate * K, d_k, HV * K, left, 0, K, C, BK)

    own_kept = tl.zeros((C,), tl.float32)
    for part in range(slices):
        own_kept += tl.load(kept + (gate + rows * HV) * slices + part, mask=inside, other=0.0)
    beta_share = tl.load(beta_grad + gate + rows * HV, mask=inside, other=0.0)
    tl.store(d_beta + gate + rows * HV, beta_share + own_kept, mask=inside)
    # Reads at s >= t and rows i < t kept cross t: column t of `crossing`, summed, is the gradient at t + 1.
    crossing = tl.where(rows[:, None] > rows[None, :], read_grad[:, None], (own_kept * b)[:, None])
    crossing = tl.sum(crossing, axis=0) + carried + gate_share
    tl.store(d_log_decay + gate + (rows + 1) * HV, crossing, mask=next_inside)
    tl.store(d_log_decay + gate, tl.sum(read_grad, axis=0) + carried)
