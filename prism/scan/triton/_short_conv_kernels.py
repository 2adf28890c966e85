# mypy: disable-error-code="assignment, misc, var-annotated"
"""Causal depthwise convolution, activation and L2 norm of each head, forward and backward.

    y_t = sum_j weight[:, W - 1 - j] x_{t-j}      s = silu(y)      n = s / sqrt(|s|^2 + 1e-6)   per head
    d_x_t = sum_j weight[:, W - 1 - j] d_y_{t+j}

A program walks along LENGTH tokens of one head in one sequence, its channels over the lanes of one warp. The
last W - 1 values of x, and of the sums d_x that are not yet complete, stay in registers, so that each element
of memory is read once; y and s are computed again in the backward pass. STEP rows are loaded at a time,
before those loaded last are worked on: little is in flight otherwise. Loops go by two STEPs, which spares the
moves from the rows ahead to those at hand.
"""

import triton
import triton.language as tl

from prism.scan.triton._chain_kernels import sigmoid


@triton.jit
def _taps(weight, column, real, W: tl.constexpr):
    """The W rows of taps [BD], first the one of the current token; weight [channels, W]."""
    taps = ()
    for j in tl.static_range(W):
        taps += (tl.load(weight + column * W + (W - 1 - j), mask=real, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _load(base, row: tl.constexpr, t, T, column, real, stride: tl.constexpr):
    """Row t + row of a sequence, where base is its row t; zeros outside of the sequence."""
    inside = real & (t + row >= 0) & (t + row < T)
    return tl.load(base + row * stride + column, mask=inside, other=0.0)


@triton.jit
def _rows(base, step, limit, start, T, column, real, stride: tl.constexpr, STEP: tl.constexpr):
    """STEP rows from row `step` of a program on; zeros from row `limit` on."""
    rows = ()
    for i in tl.static_range(STEP):
        rows += (_load(base + step * stride, i, start + step, T, column, real & (step < limit), stride),)
    return rows


@triton.jit
def _place(T, LENGTH: tl.constexpr):
    """Sequence of this program, its first token there, and that token's row among those of all sequences."""
    blocks = tl.cdiv(T, LENGTH)
    n = tl.program_id(0) // blocks
    start = (tl.program_id(0) % blocks) * LENGTH
    return start, n.to(tl.int64) * T + start


@triton.jit
def _dot(current, before, taps, W: tl.constexpr):
    y = current * taps[0]
    for j in tl.static_range(1, W):
        y += before[j - 1] * taps[j]
    return y


@triton.jit
def _shift(current, before, W: tl.constexpr):
    """`before` of the next token."""
    after = (current,)
    for j in tl.static_range(W - 2):
        after += (before[j],)
    return after


@triton.jit(do_not_specialize=["T"])
def short_conv_kernel(
    x, weight, out, T,
    HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, x_row: tl.constexpr, LENGTH: tl.constexpr,
    STEP: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """out [B, T, HEADS, D] from x [B, T, HEADS * D] and weight [HEADS * D, W]."""
    head = tl.program_id(1)
    column = tl.arange(0, BD)
    real = column < D
    taps = _taps(weight + head * D * W, column, real, W)
    start, row = _place(T, LENGTH)
    x += row * x_row + head * D
    out += row * (HEADS * D) + head * D
    before = ()
    for j in tl.static_range(1, W):
        before += (_load(x, -j, start, T, column, real, x_row).to(tl.float32),)
    rows = _rows(x, 0, LENGTH, start, T, column, real, x_row, STEP)
    for step in tl.range(0, LENGTH, STEP, loop_unroll_factor=2):
        ahead = _rows(x, step + STEP, LENGTH, start, T, column, real, x_row, STEP)
        for i in tl.static_range(STEP):
            current = rows[i].to(tl.float32)  # here and not where it is loaded, which would wait for it
            y = _dot(current, before, taps, W)
            before = _shift(current, before, W)
            if SILU:
                y *= sigmoid(y)
            if UNIT:
                y *= tl.rsqrt(tl.sum(y * y, 0) + 1e-6)
            at = out + (step + i) * (HEADS * D) + column
            tl.store(at, y.to(out.dtype.element_ty), mask=real & (start + step + i < T))
        rows = ahead


@triton.jit(do_not_specialize=["T"])
def short_conv_grad_kernel(
    x, weight, d_out, d_more, d_x, d_weight, T,
    HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, x_row: tl.constexpr, d_row: tl.constexpr,
    w_row: tl.constexpr, LENGTH: tl.constexpr, STEP: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr,
    UNIT: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """d_x [B, T, HEADS * D], rows d_row apart; d_weight [programs, W, w_row]: sums over a program's tokens.

    The gradient is d_out + SIGN * d_more; with SIGN 0 d_more is not read. d_x_t needs d_y up to t + W - 1:
    the walk goes on for W - 1 tokens, rounded up to a STEP, which add nothing to d_weight and to the d_x of
    other programs.
    """
    head = tl.program_id(1)
    column = tl.arange(0, BD)
    real = column < D
    taps = _taps(weight + head * D * W, column, real, W)
    start, row = _place(T, LENGTH)
    x += row * x_row + head * D
    d_out += row * (HEADS * D) + head * D
    d_more += row * (HEADS * D) + head * D
    d_x += row * d_row + head * D
    before = ()
    pending = ()  # d_x of the last W - 1 tokens, the nearest first
    totals = ()
    for j in tl.static_range(1, W):
        before += (_load(x, -j, start, T, column, real, x_row).to(tl.float32),)
        pending += (tl.zeros([BD], tl.float32),)
    for _ in tl.static_range(W):
        totals += (tl.zeros([BD], tl.float32),)
    LAST: tl.constexpr = LENGTH + STEP * ((W - 1 + STEP - 1) // STEP)
    rows = _rows(x, 0, LAST, start, T, column, real, x_row, STEP)
    grads = _rows(d_out, 0, LAST, start, T, column, real, HEADS * D, STEP)
    more = grads
    if SIGN != 0:
        more = _rows(d_more, 0, LAST, start, T, column, real, HEADS * D, STEP)
    for step in tl.range(0, LAST, STEP, loop_unroll_factor=2):
        rows_ahead = _rows(x, step + STEP, LAST, start, T, column, real, x_row, STEP)
        grads_ahead = _rows(d_out, step + STEP, LAST, start, T, column, real, HEADS * D, STEP)
        more_ahead = grads_ahead
        if SIGN != 0:
            more_ahead = _rows(d_more, step + STEP, LAST, start, T, column, real, HEADS * D, STEP)
        for i in tl.static_range(STEP):
            current = rows[i].to(tl.float32)
            grad = grads[i].to(tl.float32)
            if SIGN != 0:
                grad += SIGN * more[i].to(tl.float32)
            y = _dot(current, before, taps, W)
            gate = sigmoid(y)
            if UNIT:
                s = y * gate if SILU else y
                root = tl.rsqrt(tl.sum(s * s, 0) + 1e-6)
                grad = root * (grad - s * (root * root * tl.sum(grad * s, 0)))
            if SILU:
                grad *= gate * (1 + y * (1 - gate))
            own = step + i < LENGTH
            counted = tl.where(own, grad, 0.0)
            sums = (totals[0] + counted * current,)
            for j in tl.static_range(1, W):
                sums += (totals[j] + counted * before[j - 1],)
            totals = sums
            waiting = (grad * taps[0],)
            for j in tl.static_range(1, W):
                waiting += (pending[j - 1] + grad * taps[j],)
            pending = ()
            for j in tl.static_range(W - 1):
                pending += (waiting[j],)
            # Complete now: the token W - 1 back, if it is this program's.
            done = step + i - (W - 1)
            written = real & (done >= 0) & (done < LENGTH) & (start + done < T)
            tl.store(d_x + done * d_row + column, waiting[W - 1].to(d_x.dtype.element_ty), mask=written)
            before = _shift(current, before, W)
        rows = rows_ahead
        grads = grads_ahead
        more = more_ahead
    at = d_weight + tl.program_id(0).to(tl.int64) * (W * w_row) + head * D + column
    for j in tl.static_range(W):
        tl.store(at + (W - 1 - j) * w_row, totals[j], mask=real)


@triton.jit(do_not_specialize=["programs"])
def weight_grad_kernel(
    parts, d_weight, programs,
    C: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d_weight [C, W], the sum of `parts` [programs, W, C]. One program: BLOCK channels, a tap."""
    tap = tl.program_id(1)
    row = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, programs, ROWS):
        inside = (first + row < programs) & (column < C)
        at = parts + ((first + row).to(tl.int64) * W + tap) * C + column
        total += tl.load(at, mask=inside, other=0.0)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    summed = tl.sum(total, 0).to(d_weight.dtype.element_ty)
    tl.store(d_weight + channel * W + tap, summed, mask=channel < C)
