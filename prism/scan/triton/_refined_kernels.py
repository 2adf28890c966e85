"""The writes of a refinement formed where they are used: chunk-parallel kernels that read r^1, p and b.

They take the places of `writes_kernel` and `writes_grad_kernel` (`_chunkwise_forward.py`,
`_chunkwise_backward.py`), and neither the writes nor their gradients reach memory. Every program computes the
chain (`_chain_kernels.py`) again for its rows and columns, from r^1 up.

Backward is cut otherwise than `writes_grad_kernel`, where one program has one write: the gradient of write
l goes into the residual that write l - 1 left. The gradients of the keys still have one program a write,
those of the values one a slice of V, which walks through the writes from last to first with the residual's
gradient on chip.
"""

import triton
import triton.language as tl

from prism.scan.triton._chain_kernels import activate
from prism.scan.triton._chunks import (
    chunk_tokens,
    cumulative,
    last_of,
    load_column,
    load_columns,
    load_rows,
    pair_decay,
    state_offsets,
    store_columns,
    store_rows,
)
from prism.scan.triton._chunkwise_backward import _store_gate_grad


@triton.jit
def _step(
    residual, gain, gate, own, stride, left, v0,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    PHI: tl.constexpr, SUBTRACT: tl.constexpr, GAIN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """w^l [C, BV] and r^{l+1} from r^l; `own` is the first token's row of [tokens, HV, L]."""
    z = residual
    if GAIN:
        z *= load_rows(gain + own * V, stride * V, left, v0, V, C, BV).to(tl.float32)
    delta, _ = activate(z, PHI)
    b = load_column(gate + own, stride, left, C)
    if SUBTRACT:
        residual -= delta
    return (delta * b[:, None]).to(DTYPE), residual


@triton.jit(do_not_specialize=["T", "chunks_per_row", "H", "HV", "L"])
def refined_writes_kernel(
    q, k, v, log_decay, write_k, r, gain, gate, target, write_o, write_state, spans, scale, T,
    chunks_per_row, H, HV, L,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
    PHI: tl.constexpr, SUBTRACT: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """As `writes_kernel`. One program: chunk, value head, slice of V."""
    SLICES: tl.constexpr = (V + BV - 1) // BV
    v0 = (tl.program_id(0) % SLICES) * BV
    head = tl.program_id(0) // SLICES % HV
    chunk = tl.program_id(0) // SLICES // HV
    first, end = chunk_tokens(chunk, spans, T, chunks_per_row, C, PACKED)
    left = (end - first).to(tl.int32)
    if left <= 0:
        return
    at = first * HV + head
    read = (first * H + head // (HV // H)) * K
    total = cumulative(load_column(log_decay + at, HV, left, C), WIDE)
    queries = load_rows(q + read, H * K, left, 0, K, C, BK)
    keys = load_rows(k + read, H * K, left, 0, K, C, BK)
    rows = tl.arange(0, C)
    gamma = pair_decay(total[None, :], total[:, None], rows[:, None] <= rows[None, :])
    above = rows[:, None] < rows[None, :]
    rest = tl.exp((last_of(total, C) - total).to(tl.float32))

    from_k = tl.zeros((BV, C), tl.float32)
    from_q = tl.zeros((BV, C), tl.float32)
    added = tl.zeros((BK, BV), tl.float32)
    residual = load_rows(r + at * V, HV * V, left, v0, V, C, BV).to(tl.float32)
    # A write is formed one turn before it is used: a left operand that the same turn computed would stay in
    # registers (see `_chunkwise_forward.py`).
    w, residual = _step(
        residual, gain, gate, at * L, HV * L, left, v0, V, C, BV, PHI, SUBTRACT, GAIN, v.dtype.element_ty
    )
    for l in range(L):
        x = load_rows(write_k + (at * L + l) * K, HV * L * K, left, 0, K, C, BK)
        seen = tl.dot(x, tl.trans(keys), input_precision=DOT) * tl.where(above, gamma, 0.0)
        from_k = tl.dot(tl.trans(w), seen.to(w.dtype), from_k, input_precision=DOT)
        seen = tl.dot(x, tl.trans(queries), input_precision=DOT) * (scale * gamma)
        from_q = tl.dot(tl.trans(w), seen.to(w.dtype), from_q, input_precision=DOT)
        kept = (w.to(tl.float32) * rest[:, None]).to(w.dtype)
        added = tl.dot(tl.trans(x), kept, added, input_precision=DOT)
        remain = tl.where(l + 1 < L, left, 0)
        w, residual = _step(
            residual, gain, gate, at * L + l + 1, HV * L, remain, v0,
            V, C, BV, PHI, SUBTRACT, GAIN, v.dtype.element_ty,
        )  # fmt: skip
    values = load_rows(v + at * V, HV * V, left, v0, V, C, BV)
    store_columns(target + at * V, tl.trans(values).to(tl.float32) - from_k, HV * V, left, v0, V, C, BV)
    store_columns(write_o + at * V, from_q, HV * V, left, v0, V, C, BV)
    cells, exists = state_offsets(v0, K, V, BK, BV)
    cell = (chunk.to(tl.int64) * HV + head) * K * V
    tl.store(write_state + cell + cells, added.to(write_state.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "H", "HV", "L"])
def refined_keys_grad_kernel(
    q, k, log_decay, write_k, r, gain, gate, do, dv, d_states, d_write_k, by_writes, gate_grad, spans,
    scale, T, chunks_per_row, H, HV, L,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
    PHI: tl.constexpr, SUBTRACT: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """As `writes_grad_kernel`, but for d_write_v. One program: chunk, value head, write."""
    l = tl.program_id(0) % L
    head = tl.program_id(0) // L % HV
    chunk = tl.program_id(0) // L // HV
    first, end = chunk_tokens(chunk, spans, T, chunks_per_row, C, PACKED)
    left = (end - first).to(tl.int32)
    if left <= 0:
        return
    at = first * HV + head
    read = (first * H + head // (HV // H)) * K
    own = at * L + l
    cell = (chunk.to(tl.int64) * HV + head) * K * V
    rows = tl.arange(0, C)
    total = cumulative(load_column(log_decay + at, HV, left, C), WIDE)
    rest = tl.exp((last_of(total, C) - total).to(tl.float32))

    d_by_q = tl.zeros((C, C), tl.float32)
    d_by_k = tl.zeros((C, C), tl.float32)
    d_x = tl.zeros((BK, C), tl.float32)
    for v0 in range(0, V, BV):
        residual = load_rows(r + at * V, HV * V, left, v0, V, C, BV).to(tl.float32)
        if SUBTRACT:
            for j in range(l):
                z = residual
                if GAIN:
                    z *= load_rows(gain + (at * L + j) * V, HV * L * V, left, v0, V, C, BV).to(tl.float32)
                delta, _ = activate(z, PHI)
                residual -= delta
        w, _ = _step(
            residual, gain, gate, own, HV * L, left, v0, V, C, BV, PHI, False, GAIN, do.dtype.element_ty
        )
        upstream = load_rows(do + at * V, HV * V, left, v0, V, C, BV)
        d_right = load_rows(dv + at * V, HV * V, left, v0, V, C, BV)
        cells, exists = state_offsets(v0, K, V, BK, BV)
        d_state = tl.load(d_states + cell + cells, mask=exists, other=0.0)
        d_by_q = tl.dot(upstream, tl.trans(w), d_by_q, input_precision=DOT)
        d_by_k = tl.dot(d_right, tl.trans(w), d_by_k, input_precision=DOT)
        d_x = tl.dot(d_state, tl.trans(w), d_x, input_precision=DOT)
    gamma = pair_decay(total[:, None], total[None, :], rows[:, None] >= rows[None, :])
    d_by_q *= scale * gamma
    d_by_k *= tl.where(rows[:, None] > rows[None, :], -gamma, 0.0)
    store_rows(by_writes + own * 2 * C, d_by_q, HV * L * 2 * C, left, 0, C, C, C)
    store_rows(by_writes + own * 2 * C + C, d_by_k, HV * L * 2 * C, left, 0, C, C, C)
    x = load_rows(write_k + own * K, HV * L * K, left, 0, K, C, BK)
    queries = load_rows(q + read, H * K, left, 0, K, C, BK)
    keys = load_rows(k + read, H * K, left, 0, K, C, BK)
    pairs = d_by_q * tl.dot(queries, tl.trans(x), input_precision=DOT)
    pairs += d_by_k * tl.dot(keys, tl.trans(x), input_precision=DOT)

    d_x *= rest[None, :]
    x_columns = load_columns(write_k + own * K, HV * L * K, left, 0, K, C, BK)
    kept = tl.sum(d_x * x_columns.to(tl.float32), axis=0)
    _store_gate_grad(gate_grad + own, HV * L, pairs, kept, left, C)
    d_x = tl.dot(tl.trans(queries), d_by_q.to(x.dtype), d_x, input_precision=DOT)
    d_x = tl.dot(tl.trans(keys), d_by_k.to(x.dtype), d_x, input_precision=DOT)
    store_columns(d_write_k + own * K, d_x, HV * L * K, left, 0, K, C, BK)


@triton.jit(do_not_specialize=["T", "chunks_per_row", "H", "HV", "L"])
def refined_values_grad_kernel(
    q, k, log_decay, write_k, r, gain, gate, do, dv, d_states, d_r, d_gain, d_gate, spans,
    scale, T, chunks_per_row, H, HV, L,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
    PHI: tl.constexpr, SUBTRACT: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """d_r, d_gain, and d_gate [tokens, HV, L, slices] float32, each slice's share. One program: chunk, value
    head, slice of V."""
    SLICES: tl.constexpr = (V + BV - 1) // BV
    part = tl.program_id(0) % SLICES
    v0 = part * BV
    head = tl.program_id(0) // SLICES % HV
    chunk = tl.program_id(0) // SLICES // HV
    first, end = chunk_tokens(chunk, spans, T, chunks_per_row, C, PACKED)
    left = (end - first).to(tl.int32)
    if left <= 0:
        return
    at = first * HV + head
    read = (first * H + head // (HV // H)) * K
    cell = (chunk.to(tl.int64) * HV + head) * K * V
    rows = tl.arange(0, C)
    total = cumulative(load_column(log_decay + at, HV, left, C), WIDE)
    rest = tl.exp((last_of(total, C) - total).to(tl.float32))
    gamma = pair_decay(total[:, None], total[None, :], rows[:, None] >= rows[None, :])
    queries = load_rows(q + read, H * K, left, 0, K, C, BK)
    keys = load_rows(k + read, H * K, left, 0, K, C, BK)
    upstream = load_rows(do + at * V, HV * V, left, v0, V, C, BV)
    d_right = load_rows(dv + at * V, HV * V, left, v0, V, C, BV)
    cells, exists = state_offsets(v0, K, V, BK, BV)
    d_state = tl.load(d_states + cell + cells, mask=exists, other=0.0)

    d_residual = tl.zeros((BV, C), tl.float32)
    for back in range(L):
        l = L - 1 - back
        own = at * L + l
        x = load_rows(write_k + own * K, HV * L * K, left, 0, K, C, BK)
        by_q = (tl.dot(queries, tl.trans(x), input_precision=DOT) * (scale * gamma)).to(x.dtype)
        by_k = tl.dot(keys, tl.trans(x), input_precision=DOT)
        by_k = (by_k * tl.where(rows[:, None] > rows[None, :], -gamma, 0.0)).to(x.dtype)
        d_w = tl.dot(tl.trans(d_state), tl.trans(x), input_precision=DOT) * rest[None, :]
        d_w = tl.dot(tl.trans(upstream), by_q, d_w, input_precision=DOT)
        d_w = tl.dot(tl.trans(d_right), by_k, d_w, input_precision=DOT)

        residual = load_columns(r + at * V, HV * V, left, v0, V, C, BV).to(tl.float32)
        if SUBTRACT:
            for j in range(l):
                z = residual
                if GAIN:
                    p = load_columns(gain + (at * L + j) * V, HV * L * V, left, v0, V, C, BV)
                    z *= p.to(tl.float32)
                delta, _ = activate(z, PHI)
                residual -= delta
        z = residual
        if GAIN:
            p = load_columns(gain + own * V, HV * L * V, left, v0, V, C, BV).to(tl.float32)
            z *= p
        delta, slope = activate(z, PHI)
        share = tl.sum(d_w * delta, axis=0)
        tl.store(d_gate + (own + rows * (HV * L)) * SLICES + part, share, mask=rows < left)
        d_z = d_w * load_column(gate + own, HV * L, left, C)[None, :]
        if SUBTRACT:
            d_z -= d_residual
        d_z *= slope
        if GAIN:
            store_columns(d_gain + own * V, d_z * residual, HV * L * V, left, v0, V, C, BV)
            d_z *= p
        d_residual += d_z
    store_columns(d_r + at * V, d_residual, HV * V, left, v0, V, C, BV)
