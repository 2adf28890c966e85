"""The pass over chunks in two levels, for sequences too few to fill a GPU and long enough to be cut.

A sequence is cut into segments of several chunks. Over a segment the state obeys S_end = A S_start + N, and
dS_start = A^T dS_end + D. First every segment finds its N and its A at once, from a zero state and from the
identity (`segment_kernel`); then `combine_kernel` goes from segment to segment, which gives every segment the
state at its start; then the pass over chunks runs on all segments at once, as if they were sequences. The way
back is the same with D (`segment_reverse_kernel`), A kept from the forward pass.

A sequence's first segment starts from the given state, so that it needs no A; its last needs neither.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from prism.scan.triton._chunks import load_column, load_rows, sequence_tokens, state_offsets


class Segments(NamedTuple):
    """Tables on the device, int64; segments beyond those that exist hold no token and end the table."""

    offsets: Tensor  # [launched + 1], first token of each segment
    chunk_start: Tensor  # [launched + 1], first chunk of each segment
    owner: Tensor  # [launched], its sequence
    first: Tensor  # [sequences + 1], first segment of each sequence
    last: Tensor  # [sequences], its last


def number(tokens: int, sequences: int, length: int, packed: bool) -> int:
    """Segments launched for segments of `length` tokens; `tokens` of one row where rows are not packed."""
    full = (tokens + length - 1) // length
    return full + sequences if packed else full * sequences


@triton.jit(do_not_specialize=["T", "chunks_per_row", "sequences", "launched", "chunks"])
def cut_kernel(
    offsets, chunk_start, begins, first_chunks, owner, first, last, T, chunks_per_row, sequences, launched,
    chunks,
    C: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tables of `Segments`, for segments of `chunks` chunks of C tokens; one without tokens for a
    sequence that has none. One program."""
    segment = tl.arange(0, BLOCK)
    begin = tl.zeros((BLOCK,), tl.int64)
    chunk = tl.zeros((BLOCK,), tl.int64)
    number_of = tl.zeros((BLOCK,), tl.int64)
    before = tl.zeros((), tl.int64)
    for n in range(sequences):
        own = tl.full((), n, tl.int64)
        start, stop, start_chunk = sequence_tokens(own, offsets, chunk_start, T, chunks_per_row, PACKED)
        count = tl.maximum(tl.cdiv(stop - start, chunks * C), 1)
        tl.store(first + n, before)
        tl.store(last + n, before + count - 1)
        # What is behind the last segment of all is overwritten by the next sequence, or ends the table.
        inside = segment - before
        here = inside >= 0
        begin = tl.where(here, tl.minimum(start + inside * (chunks * C), stop), begin)
        chunk = tl.where(here, start_chunk + inside * chunks, chunk)
        number_of = tl.where(here, n, number_of)
        before += count
    tl.store(first + sequences, before)
    tl.store(begins + segment, begin, mask=segment <= launched)
    tl.store(first_chunks + segment, chunk, mask=segment <= launched)
    tl.store(owner + segment, number_of, mask=segment < launched)


@triton.jit
def _segment(m, offsets, chunk_start, owner, first):
    """First token, end and first chunk of segment m, its sequence, and whether it is first and last there."""
    n = tl.load(owner + m)
    start = tl.load(first + n)
    stop = tl.load(first + n + 1)
    return (
        tl.load(offsets + m),
        tl.load(offsets + m + 1),
        tl.load(chunk_start + m),
        n,
        m == start,
        m >= stop - 1,
    )


@triton.jit(do_not_specialize=["H", "HV"])
def segment_kernel(
    k, target, beta, solve, grown, rest, write_state, initial, parts, transitions,
    offsets, chunk_start, owner, segments, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr, INITIAL: tl.constexpr, WRITES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """parts [segments, HV, K, V], N of each segment but the last of its sequence (of the first, the state at
    its end); transitions [segments, HV, K, K], A of those between. One program: segment, value head, slice of
    the V + K columns."""
    OWN: tl.constexpr = (V + BV - 1) // BV
    SLICES: tl.constexpr = OWN + (K + BV - 1) // BV
    part = tl.program_id(0) % SLICES
    head = tl.program_id(0) // SLICES % HV
    m = (tl.program_id(0) // SLICES // HV).to(tl.int64)
    begin, end, chunk, n, is_first, is_last = _segment(m, offsets, chunk_start, owner, segments)
    moves = part >= OWN
    if is_last or (is_first and moves):
        return
    c0 = tl.where(moves, part - OWN, part) * BV
    at, exists = state_offsets(c0, K, V, BK, BV)
    own = (n * HV + head) * K * V
    state = tl.zeros((BK, BV), tl.float32)
    if INITIAL:
        state += tl.load(initial + own + at, mask=exists & is_first, other=0.0)
    rows = tl.arange(0, BK)[:, None]
    cols = c0 + tl.arange(0, BV)[None, :]
    state = tl.where(moves & (rows == cols), 1.0, state)
    for step in tl.range(tl.cdiv((end - begin).to(tl.int32), C), num_stages=STAGES):
        token = begin + step * C
        left = (end - token).to(tl.int32)
        gate = token * HV + head
        read = (token * H + head // (HV // H)) * K
        keys = load_rows(k + read, H * K, left, 0, K, C, BK)
        values = load_rows(target + gate * V, HV * V, tl.where(moves, 0, left), c0, V, C, BV)
        inverse = load_rows(solve + gate * C, HV * C, left, 0, C, C, C)
        b = load_column(beta + gate, HV, left, C)
        growth = load_column(grown + gate, HV, left, C)
        keep = load_column(rest + gate, HV, left, C)
        last = tl.load(grown + gate + (tl.minimum(left, C) - 1) * HV)
        rounded = state.to(keys.dtype)
        right = values.to(tl.float32) - growth[:, None] * tl.dot(keys, rounded, input_precision=DOT)
        e = tl.dot(inverse, right.to(keys.dtype), input_precision=DOT)
        state *= last
        if WRITES:
            cell = ((chunk + step) * HV + head) * K * V
            shown = exists & (moves == 0)
            state += tl.load(write_state + cell + at, mask=shown, other=0.0).to(tl.float32)
        e *= (b * keep)[:, None]
        state = tl.dot(tl.trans(keys), e.to(keys.dtype), state, input_precision=DOT)
    if moves:
        tl.store(transitions + (m * HV + head) * K * K + rows * K + cols, state, mask=(rows < K) & (cols < K))
    else:
        tl.store(parts + (m * HV + head) * K * V + at, state, mask=exists)


@triton.jit(do_not_specialize=["H", "HV"])
def segment_reverse_kernel(
    q, k, beta, solve, scores, grown, rest, do, d_final, parts,
    offsets, chunk_start, owner, segments, scale, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """parts [segments, HV, K, V], D of each segment but the first of its sequence (of the last, the gradient
    of the state at its start). One program: segment, value head, slice of V."""
    SLICES: tl.constexpr = (V + BV - 1) // BV
    v0 = (tl.program_id(0) % SLICES) * BV
    head = tl.program_id(0) // SLICES % HV
    m = (tl.program_id(0) // SLICES // HV).to(tl.int64)
    begin, end, _, n, is_first, is_last = _segment(m, offsets, chunk_start, owner, segments)
    if is_first:
        return
    at, exists = state_offsets(v0, K, V, BK, BV)
    own = (n * HV + head) * K * V
    state = tl.zeros((BK, BV), tl.float32)
    if FINAL:
        state += tl.load(d_final + own + at, mask=exists & is_last, other=0.0)
    chunks = tl.cdiv((end - begin).to(tl.int32), C)
    for back in range(chunks):
        token = begin + (chunks - 1 - back) * C
        left = (end - token).to(tl.int32)
        gate = token * HV + head
        read = (token * H + head // (HV // H)) * K
        keys = load_rows(k + read, H * K, left, 0, K, C, BK)
        inverse = load_rows(solve + gate * C, HV * C, left, 0, C, C, C)
        seen = load_rows(scores + gate * C, HV * C, left, 0, C, C, C)
        upstream = load_rows(do + gate * V, HV * V, left, v0, V, C, BV)
        queries = load_rows(q + read, H * K, left, 0, K, C, BK)
        b = load_column(beta + gate, HV, left, C)
        growth = load_column(grown + gate, HV, left, C)
        keep = load_column(rest + gate, HV, left, C)
        last = tl.load(grown + gate + (tl.minimum(left, C) - 1) * HV)
        d_e = tl.dot(keys, state.to(keys.dtype), input_precision=DOT) * keep[:, None]
        d_e = tl.dot(tl.trans(seen), upstream, d_e, input_precision=DOT) * b[:, None]
        d_right = tl.dot(tl.trans(inverse), d_e.to(keys.dtype), input_precision=DOT)
        state *= last
        up = (upstream.to(tl.float32) * (scale * growth)[:, None]).to(keys.dtype)
        state = tl.dot(tl.trans(queries), up, state, input_precision=DOT)
        down = (d_right * -growth[:, None]).to(keys.dtype)
        state = tl.dot(tl.trans(keys), down, state, input_precision=DOT)
    tl.store(parts + (m * HV + head) * K * V + at, state, mask=exists)


@triton.jit(do_not_specialize=["HV"])
def combine_kernel(
    transitions, parts, given, out, segments, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STEP: tl.constexpr,
    DOT: tl.constexpr, GIVEN: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """out [segments, HV, K, V]: the state at each segment's start, or (REVERSE) its gradient at each
    segment's end. One program: sequence, value head, slice of V."""
    SLICES: tl.constexpr = (V + BV - 1) // BV
    v0 = (tl.program_id(0) % SLICES) * BV
    head = tl.program_id(0) // SLICES % HV
    n = (tl.program_id(0) // SLICES // HV).to(tl.int64)
    start = tl.load(segments + n)
    stop = tl.load(segments + n + 1)
    at, exists = state_offsets(v0, K, V, BK, BV)
    here = tl.zeros((BK, BV), tl.float32)
    if GIVEN:
        here += tl.load(given + (n * HV + head) * K * V + at, mask=exists, other=0.0)
    rows = tl.arange(0, BK)[:, None]
    some = tl.arange(0, STEP)
    cols = v0 + tl.arange(0, BV)[None, :]
    for i in range((stop - start).to(tl.int32)):
        m = tl.where(REVERSE, stop - 1 - i, start + i)
        cell = (m * HV + head) * K
        tl.store(out + cell * V + at, here, mask=exists)
        # The state passes through memory, to be read a few rows at a time: A does not fit in registers.
        tl.debug_barrier()
        here = tl.load(parts + cell * V + at, mask=exists & (i < stop - start - 1), other=0.0)
        # The part of the segment that holds the given state has it in already.
        if i > 0 and i < stop - start - 1:
            for k0 in range(0, BK, STEP):
                inner = k0 + some
                line = tl.load(
                    out + cell * V + inner[:, None] * V + cols,
                    mask=(inner < K)[:, None] & (cols < V), other=0.0,
                )  # fmt: skip
                if REVERSE:
                    place = inner[None, :] * K + rows
                else:
                    place = rows * K + inner[None, :]
                a = tl.load(
                    transitions + cell * K + place, mask=(rows < K) & (inner < K)[None, :], other=0.0
                )  # fmt: skip
                here = tl.dot(a, line, here, input_precision=DOT)
