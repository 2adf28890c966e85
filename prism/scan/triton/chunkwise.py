"""The implementation that works on chunks in parallel, for long sequences and wide heads.

Launch sizes depend on shapes only; sequence offsets stay on the device. `_operator.py` says what an
implementation is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from prism.scan.triton._chunkwise_backward import (
    keys_grad_kernel,
    queries_grad_kernel,
    reverse_kernel,
    scores_grad_kernel,
    writes_grad_kernel,
)
from prism.scan.triton._chunkwise_forward import (
    output_kernel,
    prepare_kernel,
    scan_kernel,
    writes_kernel,
)
from prism.scan.triton._launch import launch
from prism.scan.triton._segments import (
    Segments,
    combine_kernel,
    cut_kernel,
    number,
    segment_kernel,
    segment_reverse_kernel,
)

MAX_WIDTH = 128
"""The largest K and V taken: one program holds all K rows of a slice of the state."""


class Launch(NamedTuple):
    """Warps, software stages and slice of V of one kernel, and its registers a thread (0: any number)."""

    warps: int
    stages: int
    v_block: int
    registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        cap = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **cap}


class Tuning(NamedTuple):
    chunk: int
    prepare: Launch
    writes: Launch
    scan: Launch
    output: Launch
    reverse: Launch
    writes_grad: Launch
    scores_grad: Launch
    queries_grad: Launch
    keys_grad: Launch
    segment: Launch
    segment_reverse: Launch
    combine: Launch
    segment_chunks: int = -1  # chunks of a segment; 0: the pass has one level; -1: `segment_chunks` decides


TABLES = Launch(1, 1, 0)
"""Of the one program that makes the tables of two levels, whatever the dtype."""
FEW_PROGRAMS = 64
"""Sequences x value heads x 64-column slices up to which a pass has slices of 32 columns and three stages."""


def tuning(dtype: torch.dtype, K: int, V: int, programs: int, writes: bool, whole: bool) -> Tuning:
    """Launch settings by widths and shape alone: nothing is tuned at run time, so no shape costs a first call
    of minutes. Measured on an H200 (benchmarks/NOTES.md).

    `programs`: sequences x value heads x ceil(V / 64), the programs of a pass over chunks; `whole`: no chunk
    is ragged.
    """
    if dtype == torch.float32:
        block = min(32, _padded(V))
        small, large = Launch(4, 1, block), Launch(8, 1, block)
        return Tuning._make([32, *[small] * 2, *[large] * 9, Launch(4, 1, 16), -1])
    if programs <= FEW_PROGRAMS:
        scan = reverse = Launch(4, 3, 32)
    elif K == 128 and not whole:  # masks take the registers that slices of 64 columns need
        scan, reverse = Launch(4, 3 if writes else 2, 32), Launch(4, 3, 32)
    else:
        scan = Launch(4, 3 if K == 128 or writes else 2, 64)
        reverse = Launch(4, 3 if K == 128 else 2, 64)
    return Tuning(
        chunk=64,
        prepare=Launch(4, 1, 64, 128),
        writes=Launch(4, 3, 64, 0 if K == 128 else 168),
        scan=scan,
        output=Launch(4, 2, V, 128 if K == V == 64 else 0),
        reverse=reverse,
        writes_grad=Launch(4, 1, 64),
        scores_grad=Launch(4, 2, 64, 168),
        queries_grad=Launch(4, 1 if writes else 2, 64),
        keys_grad=Launch(4, 2, 64, 168 if K == 128 else 128),
        segment=Launch(4, 3, 64),
        segment_reverse=Launch(4, 3, 64),
        combine=Launch(2, 1, 16),
    )


FULL = 128
"""Programs of a pass over chunks, a slice of 64 columns each, that fill a GPU: about its multiprocessors."""


def segment_chunks(tokens: int, sequences: int, HV: int, V: int, C: int) -> int:
    """Chunks of a segment, by shapes alone; 0 where the pass over chunks has one level.

    `tokens` in all. Two levels are 2.2 times the work of one, so that fewer than three segments a sequence
    gain nothing; nor do more than fill the GPU, or segments too short for their share of the tables.
    """
    pieces = FULL // max(1, sequences * HV * ((V + 63) // 64))
    chunks = (tokens + sequences * C - 1) // (max(1, sequences) * C)
    length = max(16, (chunks + pieces - 1) // max(1, pieces))
    return length if pieces >= 3 and chunks > 2 * length else 0


def widths(dtype: torch.dtype, K: int, V: int) -> tuple[int, int]:
    """The widths that the kernels run at. Half precision takes 64 and 128 alone and pads others with zeros:
    each pair of widths is another program, and programs with matrix instructions of Hopper are run only where
    their machine code has been checked (see `_chunkwise_forward.py`)."""
    if dtype == torch.float32:
        return K, V
    return (64 if K <= 64 else 128), (64 if V <= 64 else 128)


class Layout(NamedTuple):
    """Which tokens each chunk and each sequence has; the tables are None where B rows of length T say it
    all."""

    chunks: int  # launched: every chunk and, in a packed batch, up to N surplus ones
    chunks_per_row: int
    sequences: int
    offsets: Tensor | None  # [N + 1] int64, first token of each sequence
    chunk_start: Tensor | None  # [N + 1] int64, first chunk of each sequence
    spans: Tensor | None  # [chunks, 2] int64: a chunk's first token, the end of its sequence


def layout(B: int, T: int, C: int, cu_seqlens: Tensor | None) -> Layout:
    per_row = triton.cdiv(T, C)
    if cu_seqlens is None:
        return Layout(B * per_row, per_row, B, None, None, None)
    sequences = cu_seqlens.numel() - 1
    # Unchecked offsets must not lead outside the tensors: bounded and made to rise, whatever they hold.
    offsets = cu_seqlens.to(torch.int64).clamp(0, T).cummax(0).values
    counts = (offsets.diff() + (C - 1)) // C
    start = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    chunk = torch.arange(per_row + sequences, device=offsets.device)
    owner = torch.searchsorted(start[1:], chunk, right=True).clamp_(max=sequences - 1)
    end = offsets[owner + 1]
    spans = torch.stack([torch.minimum(offsets[owner] + (chunk - start[owner]) * C, end), end], 1)
    return Layout(per_row + sequences, per_row, sequences, offsets, start, spans)


def _segments(B: int, T: int, HV: int, V: int, cu_seqlens: Tensor | None, tuned: Tuning) -> tuple[int, int]:
    """Chunks of a segment and segments launched; 0, 0 where the pass has one level."""
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chunks = tuned.segment_chunks
    if chunks < 0:
        chunks = segment_chunks(B * T, sequences, HV, V, tuned.chunk)
    if not chunks:
        return 0, 0
    return chunks, number(T, sequences, chunks * tuned.chunk, cu_seqlens is not None)


def _tuned(q: Tensor, v: Tensor, write_k: Tensor | None, cu_seqlens: Tensor | None) -> Tuning:
    B, T, HV, V = v.shape
    K = q.shape[3]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    any_tuning = tuning(q.dtype, K, V, 0, False, False)
    _, segments = _segments(B, T, HV, V, cu_seqlens, any_tuning)
    programs = max(sequences, segments) * HV * triton.cdiv(V, 64)
    whole = cu_seqlens is None and T % any_tuning.chunk == 0
    return tuning(q.dtype, K, V, programs, write_k is not None, whole)


def _cut(where: Layout, T: int, C: int, chunks: int, launched: int, device: torch.device) -> Segments:
    N = where.sequences
    sizes = (launched + 1, launched + 1, launched, N + 1, N)
    made = Segments._make(torch.empty(size, dtype=torch.int64, device=device) for size in sizes)
    arguments = (where.offsets, where.chunk_start, *made, T, where.chunks_per_row, N, launched, chunks)
    packed = where.offsets is not None
    _run(cut_kernel, 1, TABLES, arguments, C=C, PACKED=packed, BLOCK=_padded(launched + 1))
    return made


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _widen(x: Any, dtype: torch.dtype, dims: tuple[int, ...]) -> Any:
    """Zeros appended in `dims` up to the widths that the kernels run at."""
    if x is None:
        return None
    shape = list(x.shape)
    for dim in dims:
        shape[dim] = widths(dtype, shape[dim], shape[dim])[0]
    wide = x.new_zeros(shape)
    wide[tuple(slice(n) for n in x.shape)] = x
    return wide


def _widened(q: Any, k: Any, v: Any, write_k: Any, write_v: Any, initial_state: Any) -> Any:
    tokens = (_widen(x, q.dtype, (3,)) for x in (q, k, v))
    return (
        *tokens,
        *(_widen(x, q.dtype, (4,)) for x in (write_k, write_v)),
        _widen(initial_state, q.dtype, (2, 3)),
    )


def _narrowed(x: Any, like: Any) -> Any:
    """x without the zeros that `_widen` appended to `like`."""
    return None if like is None else x[tuple(slice(n) for n in like.shape)].contiguous()


def _aligned(*tensors: Any) -> Any:
    """Copies of tensors that do not start on 16 bytes, for which Triton would compile other programs."""
    return [x if x is None or x.data_ptr() % 16 == 0 else x.clone() for x in tensors]


def _run(kernel: Any, programs: int, at: Launch, arguments: tuple[Any, ...], **constants: Any) -> None:
    kinds = (x.dtype if isinstance(x, Tensor) else x is None for x in arguments)
    launch(kernel, (programs, 1), (at, *constants.values(), *kinds), arguments, constants, at.options)


def _on_its_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, which need not be that of the tensors."""

    @wraps(run)
    def call(*args: Any, **options: Any) -> Any:
        x = next(a for a in args if isinstance(a, Tensor))
        if not x.is_cuda:
            return run(*args, **options)
        with torch.cuda.device(x.device):
            return run(*args, **options)

    return call


def _gates(like: Tensor, count: int, tokens: int) -> Tensor:
    """[count, tokens] float32, uninitialised, each row of which starts on 16 bytes (up to three are behind
    the tokens)."""
    return like.new_empty(count, (tokens + 3) // 4 * 4, dtype=torch.float32)


def allocate(
    q: Tensor, v: Tensor, write_k: Tensor | None, cu_seqlens: Tensor | None, *, tuned: Tuning | None = None
) -> list[Tensor]:
    """Each chunk's inverse and scores [2, B, T, HV, C], its decays [2, B T HV and a few] in float32,
    e = v - Sbar k [B, T, HV, V], and the state at its start [chunks, HV, K, V]; but for the decays in the
    dtype of q. Where the pass has two levels, the transitions of its segments [segments, HV, K, K] in
    float32."""
    B, T, HV, _ = v.shape
    K, V = widths(q.dtype, q.shape[3], v.shape[3])
    tuned = tuned or tuning(q.dtype, K, V, 0, False, False)
    C = tuned.chunk
    per_row = (T + C - 1) // C  # T may be symbolic
    chunks = B * per_row if cu_seqlens is None else per_row + cu_seqlens.shape[0] - 1
    decays = _gates(q, 2, B * T * HV)
    _, segments = _segments(B, T, HV, V, cu_seqlens, tuned)
    transitions = [q.new_empty(segments, HV, K, K, dtype=torch.float32)] if segments else []
    states = q.new_empty(chunks, HV, K, V)
    return [q.new_empty(2, B, T, HV, C), decays, v.new_empty(B, T, HV, V), states, *transitions]


@_on_its_device
def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, write_k: Tensor | None,
    write_v: Tensor | None, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    saved: list[Tensor], *, tuned: Tuning | None = None, row: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """row: write_k stands first in rows of 8 `row` elements a token; `widths` are K and V then."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if widths(q.dtype, K, V) != (K, V):
        q, k, v, write_k, write_v, initial_state = _widened(q, k, v, write_k, write_v, initial_state)
        o, final = forward(
            q, k, v, log_decay, beta, write_k, write_v, scale, initial_state, cu_seqlens, saved, tuned=tuned
        )
        return o[..., :V].contiguous(), final[..., :K, :V].contiguous()
    q, k, v, log_decay, beta, write_k, write_v, initial_state = _aligned(
        q, k, v, log_decay.float(), beta.float(), write_k, write_v, initial_state
    )
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    tuned = tuned or _tuned(q, v, write_k, cu_seqlens)
    C, BK, wide = tuned.chunk, _padded(K), q.dtype == torch.float32
    dot = "ieee" if wide else "tf32x3"
    where = layout(B, T, C, cu_seqlens)
    packed = where.spans is not None
    tokens = (where.spans, scale, T, where.chunks_per_row, H, HV)
    whole = not packed and T % C == 0
    modes = {"PACKED": packed, "WHOLE": whole, "WIDE": wide, "DOT": dot}
    length, launched = _segments(B, T, HV, V, cu_seqlens, tuned)
    writes = write_k is not None
    error = states = None
    if saved:
        (solve, scores), (grown, rest), error, states, *transitions = saved
    else:
        solve, scores = q.new_empty(2, B, T, HV, C)
        grown, rest = _gates(q, 2, B * T * HV)
        transitions = [q.new_empty(launched, HV, K, K, dtype=torch.float32)]
        if writes:
            error, states = torch.empty_like(v), q.new_empty(where.chunks, HV, K, V)
    o = torch.empty_like(v)

    at = tuned.prepare
    scratch = q.new_empty(where.chunks, HV, C, C, dtype=torch.float32)
    _run(
        prepare_kernel, where.chunks * HV, at,
        (q, k, log_decay, beta, solve, scores, grown, rest, scratch, *tokens),
        K=K, C=C, BK=BK, **modes,
    )  # fmt: skip

    target, write_state, L = v, None, 0
    if write_k is not None and write_v is not None:
        at, L = tuned.writes, write_k.shape[3]
        target, write_state = torch.empty_like(v), q.new_empty(where.chunks, HV, K, V)
        _run(
            writes_kernel, where.chunks * HV * triton.cdiv(V, at.v_block), at,
            (k, v, log_decay, write_k, write_v, target, write_state, where.spans, T, where.chunks_per_row, H,
             HV, L, row),
            K=K, V=V, C=C, BK=BK, BV=at.v_block, **modes,
        )  # fmt: skip

    sequences, offsets, chunk_start, start, last = N, where.offsets, where.chunk_start, initial_state, None
    if launched:
        pieces = _cut(where, T, C, length, launched, q.device)
        parts, start = q.new_empty(2, launched, HV, K, V, dtype=torch.float32)
        tables = (pieces.offsets, pieces.chunk_start, pieces.owner, pieces.first)
        at = tuned.segment
        slices = triton.cdiv(V, at.v_block) + triton.cdiv(K, at.v_block)
        _run(
            segment_kernel, launched * HV * slices, at,
            (k, target, beta, solve, grown, rest, write_state, initial_state, parts, transitions[0], *tables,
             H, HV),
            K=K, V=V, C=C, BK=BK, BV=at.v_block, DOT=dot, INITIAL=initial_state is not None, WRITES=writes,
            STAGES=at.stages if writes else None,
        )  # fmt: skip
        _combine(transitions[0], parts, initial_state, start, pieces, tuned, dot, reverse=False)
        sequences, offsets, chunk_start = launched, pieces.offsets, pieces.chunk_start
        last = pieces.last
    at = tuned.scan
    final = q.new_empty(sequences, HV, K, V, dtype=torch.float32)
    _run(
        scan_kernel, sequences * HV * triton.cdiv(V, at.v_block), at,
        (None if writes else q, k, target, beta, solve, None if writes else scores, grown, rest, write_state,
         start, None if writes else o, final, error, states, offsets, chunk_start, scale, T,
         where.chunks_per_row, H, HV),
        K=K, V=V, C=C, BK=BK, BV=at.v_block, PACKED=offsets is not None, WHOLE=whole, DOT=dot,
        INITIAL=start is not None, WRITES=writes, SAVE=error is not None,
        STAGES=at.stages if writes else None,
    )  # fmt: skip
    if writes:
        at = tuned.output
        _run(
            output_kernel, where.chunks * HV * triton.cdiv(V, at.v_block), at,
            (q, log_decay, beta, scores, grown, error, states, write_k, write_v, o, *tokens, L,
             row),
            K=K, V=V, C=C, BK=BK, BV=at.v_block, **modes,
        )  # fmt: skip
    return o, final if last is None else final[last]


def _combine(
    transitions: Tensor, parts: Tensor, given: Tensor | None, out: Tensor, pieces: Segments, tuned: Tuning,
    dot: str, *, reverse: bool,
) -> None:  # fmt: skip
    _, HV, K, V = parts.shape
    at = tuned.combine
    _run(
        combine_kernel, (pieces.first.shape[0] - 1) * HV * triton.cdiv(V, at.v_block), at,
        (transitions, parts, given, out, pieces.first, HV),
        K=K, V=V, BK=_padded(K), BV=at.v_block, STEP=min(32, _padded(K)), DOT=dot, GIVEN=given is not None,
        REVERSE=reverse,
    )  # fmt: skip


@_on_its_device
def backward(
    do: Tensor | None, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor,
    beta: Tensor, write_k: Tensor | None, write_v: Tensor | None, scale: float, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, saved: list[Tensor], *, tuned: Tuning | None = None,
    row: int | None = None, norms: Tensor | None = None, d_write_k: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """row: as in `forward`, and d_write_k, to be filled, has such rows too. norms: as in
    `writes_grad_kernel`."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    do = torch.zeros_like(v) if do is None else do
    gate_dtypes = log_decay.dtype, beta.dtype
    if widths(q.dtype, K, V) != (K, V):
        given = (q, k, v, log_decay, beta, write_k, write_v, initial_state)
        q, k, v, write_k, write_v, initial_state = _widened(q, k, v, write_k, write_v, initial_state)
        do, dstate = _widen(do, q.dtype, (3,)), _widen(dstate, q.dtype, (2, 3))
        grads = backward(
            do, dstate, q, k, v, log_decay, beta, write_k, write_v, scale, initial_state, cu_seqlens, saved,
            tuned=tuned,
        )  # fmt: skip
        return tuple(_narrowed(x, like) for x, like in zip(grads, given, strict=True))
    q, k, v, log_decay, beta, write_k, write_v, do, dstate = _aligned(
        q, k, v, log_decay.float(), beta.float(), write_k, write_v, do, dstate
    )
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    tuned = tuned or _tuned(q, v, write_k, cu_seqlens)
    C, BK, wide = tuned.chunk, _padded(K), q.dtype == torch.float32
    dot = "ieee" if wide else "tf32x3"
    where = layout(B, T, C, cu_seqlens)
    packed, writes = where.spans is not None, write_k is not None
    L = write_k.shape[3] if write_k is not None else 0
    tokens = (where.spans, scale, T, where.chunks_per_row, H, HV)
    whole = not packed and T % C == 0
    modes = {"PACKED": packed, "WHOLE": whole, "WIDE": wide, "DOT": dot}
    (solve, scores), (grown, rest), error, states, *transitions = saved

    sequences, offsets, chunk_start, end, first = N, where.offsets, where.chunk_start, dstate, None
    if transitions:
        length, launched = _segments(B, T, HV, V, cu_seqlens, tuned)
        pieces = _cut(where, T, C, length, launched, q.device)
        parts, end = q.new_empty(2, launched, HV, K, V, dtype=torch.float32)
        tables = (pieces.offsets, pieces.chunk_start, pieces.owner, pieces.first)
        at = tuned.segment_reverse
        _run(
            segment_reverse_kernel, launched * HV * triton.cdiv(V, at.v_block), at,
            (q, k, beta, solve, scores, grown, rest, do, dstate, parts, *tables, scale, H, HV),
            K=K, V=V, C=C, BK=BK, BV=at.v_block, DOT=dot, FINAL=dstate is not None,
        )  # fmt: skip
        _combine(transitions[0], parts, dstate, end, pieces, tuned, dot, reverse=True)
        sequences, offsets, chunk_start = launched, pieces.offsets, pieces.chunk_start
        first = pieces.first[:-1]
    at = tuned.reverse
    dv = torch.empty_like(v)
    d_states = torch.empty_like(states)
    d_initial = q.new_empty(sequences, HV, K, V, dtype=torch.float32)
    slices = triton.cdiv(V, at.v_block)
    kept = q.new_empty(B, T, HV, slices, dtype=torch.float32)
    _run(
        reverse_kernel, sequences * HV * slices, at,
        (q, k, beta, solve, scores, grown, rest, error, do, end, dv, d_states, d_initial, kept, offsets,
         chunk_start, scale, T, where.chunks_per_row, H, HV),
        K=K, V=V, C=C, BK=BK, BV=at.v_block, PACKED=offsets is not None, WHOLE=whole, DOT=dot,
        FINAL=end is not None, STAGES=at.stages,
    )  # fmt: skip
    if first is not None:
        d_initial = d_initial[first]

    d_write_v = by_writes = write_gate_grad = None
    if write_k is not None and write_v is not None:
        at = tuned.writes_grad
        d_write_k = torch.empty_like(write_k) if d_write_k is None else d_write_k
        d_write_v = torch.empty_like(write_v)
        by_writes = q.new_empty(B, T, HV, L, 2, C)
        write_gate_grad = q.new_empty(B, T, HV, L, dtype=torch.float32)
        _run(
            writes_grad_kernel, where.chunks * HV * L, at,
            (q, k, log_decay, write_k, write_v, norms, do, dv, d_states, d_write_k, d_write_v, by_writes,
             write_gate_grad, *tokens, L, row),
            K=K, V=V, C=C, BK=BK, BV=at.v_block, **modes,
        )  # fmt: skip

    at = tuned.scores_grad
    by_scores = q.new_empty(B, T, HV, 2, C)
    gate_grad, beta_grad, reads = _gates(q, 3, B * T * HV)
    _run(
        scores_grad_kernel, where.chunks * HV, at,
        (k, log_decay, beta, scores, error, do, dv, by_scores, gate_grad, beta_grad, *tokens),
        K=K, V=V, C=C, BK=BK, BV=at.v_block, **modes,
    )  # fmt: skip

    # Value heads that share a key head are summed afterwards, in float32 and in one order.
    at = tuned.queries_grad
    dq = q.new_empty(B, T, HV, K, dtype=q.dtype if HV == H else torch.float32)
    _run(
        queries_grad_kernel, where.chunks * HV, at,
        (q, k, grown, states, write_k, do, by_scores, by_writes, dq, reads, *tokens, L,
         row),
        K=K, V=V, C=C, BK=BK, BV=at.v_block, PACKED=packed, WHOLE=whole, DOT=dot, WRITES=writes,
    )  # fmt: skip

    at = tuned.keys_grad
    dk = torch.empty_like(dq)
    d_log_decay, d_beta = torch.empty_like(log_decay), torch.empty_like(beta)
    _run(
        keys_grad_kernel, where.chunks * HV, at,
        (q, k, beta, grown, rest, error, states, write_k, dv, d_states, by_scores, by_writes, gate_grad,
         write_gate_grad, beta_grad, reads, kept, dk, d_log_decay, d_beta, where.spans, T,
         where.chunks_per_row, H, HV, L, slices, row),
        K=K, V=V, C=C, BK=BK, BV=at.v_block, PACKED=packed, WHOLE=whole, DOT=dot, WRITES=writes,
    )  # fmt: skip
    if HV != H:
        dq = dq.unflatten(2, (H, HV // H)).sum(3).to(q.dtype)
        dk = dk.unflatten(2, (H, HV // H)).sum(3).to(k.dtype)
    d_start = None if initial_state is None else d_initial
    d_log_decay, d_beta = (x.to(dtype) for x, dtype in zip((d_log_decay, d_beta), gate_dtypes, strict=True))
    return dq, dk, dv, d_log_decay, d_beta, d_write_k, d_write_v, d_start
