# ruff: noqa: RUF005  (Triton knows no unpacking of tuples)
# mypy: disable-error-code="assignment, var-annotated"
"""Causal depthwise convolution, activation and L2 norm of each head: forward, and backward in two kernels.

    y_t = sum_j weight[:, W - 1 - j] x_{t-j}      s = silu(y)      n = s / sqrt(|s|^2 + 1e-6)   per head

Rows are the tokens of all sequences end to end; the first W - 1 of a sequence see zeros before them. A
program takes TURNS tiles of R rows of one head, one after the other, with the taps in registers. y and s are
computed again in the backward pass, never stored.
"""

import triton
import triton.language as tl


@triton.jit
def _taps(weight, column, real, W: tl.constexpr):
    """The W rows of taps [BD], first the one of the current token; weight [channels, W]."""
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (tl.load(weight + column * W + (W - 1 - j), mask=real, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _rows(turn, rows, T, R: tl.constexpr, TURNS: tl.constexpr):
    """First row of a tile, and of each of its rows whether it exists and its place in its sequence."""
    first = (tl.program_id(0) * TURNS + turn) * R
    r = tl.arange(0, R)
    return first.to(tl.int64), first + r < rows, (first % T + r) % T


@triton.jit
def _window(x, first, exists, t, column, real, x_row: tl.constexpr, W: tl.constexpr, R: tl.constexpr):
    """x of the rows and of the W - 1 before each, 0 before its sequence: W tiles [R, BD]."""
    base = x + first * x_row
    r = tl.arange(0, R)
    window = ()
    for j in tl.static_range(W):
        seen = (exists & (t >= j))[:, None] & real[None, :]
        at = base + (r - j)[:, None] * x_row + column[None, :]
        window = window + (tl.load(at, mask=seen, other=0.0).to(tl.float32),)
    return window


@triton.jit
def _dot(window, taps, W: tl.constexpr):
    y = window[0] * taps[0][None, :]
    for j in tl.static_range(1, W):
        y += window[j] * taps[j][None, :]
    return y


@triton.jit(do_not_specialize=["rows", "T"])
def short_conv_kernel(
    x, weight, out, rows, T,
    HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, x_row: tl.constexpr, R: tl.constexpr,
    TURNS: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """out [rows, HEADS, D] from x [rows, HEADS * D] and weight [HEADS * D, W]."""
    head = tl.program_id(1)
    column = tl.arange(0, BD)
    real = column < D
    taps = _taps(weight + head * D * W, column, real, W)
    x += head * D
    for turn in range(TURNS):
        first, exists, t = _rows(turn, rows, T, R, TURNS)
        y = _dot(_window(x, first, exists, t, column, real, x_row, W, R), taps, W)
        if SILU:
            y *= tl.sigmoid(y)
        if UNIT:
            y *= tl.rsqrt(tl.sum(y * y, 1) + 1e-6)[:, None]
        at = out + first * (HEADS * D) + head * D + tl.arange(0, R)[:, None] * (HEADS * D) + column[None, :]
        tl.store(at, y.to(out.dtype.element_ty), mask=exists[:, None] & real[None, :])


@triton.jit(do_not_specialize=["rows", "T"])
def short_conv_grad_kernel(
    x, weight, d_out, d_y, d_weight, rows, T,
    HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, x_row: tl.constexpr, y_row: tl.constexpr,
    R: tl.constexpr, TURNS: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """d_y [rows, HEADS * D], rows y_row apart; d_weight [programs, W, y_row]: sums over a program's rows."""
    head = tl.program_id(1)
    column = tl.arange(0, BD)
    r = tl.arange(0, R)[:, None]
    real = column < D
    taps = _taps(weight + head * D * W, column, real, W)
    x += head * D
    totals = ()
    for _ in tl.static_range(W):
        totals = totals + (tl.zeros([R, BD], tl.float32),)
    for turn in range(TURNS):
        first, exists, t = _rows(turn, rows, T, R, TURNS)
        inside = exists[:, None] & real[None, :]
        window = _window(x, first, exists, t, column, real, x_row, W, R)
        at = d_out + first * (HEADS * D) + head * D + r * (HEADS * D) + column[None, :]
        grad = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        y = _dot(window, taps, W)
        sigmoid = tl.sigmoid(y)
        s = y * sigmoid if SILU else y
        if UNIT:
            root = tl.rsqrt(tl.sum(s * s, 1) + 1e-6)[:, None]
            unit = s * root
            grad = root * (grad - unit * tl.sum(grad * unit, 1)[:, None])
        if SILU:
            grad *= sigmoid * (1 + y * (1 - sigmoid))
        at = d_y + first * y_row + head * D + r * y_row + column[None, :]
        tl.store(at, grad.to(d_y.dtype.element_ty), mask=inside)
        sums = ()
        for j in tl.static_range(W):
            sums = sums + (totals[j] + grad * window[j],)
        totals = sums
    at = d_weight + tl.program_id(0).to(tl.int64) * (W * y_row) + head * D + column
    for j in tl.static_range(W):
        tl.store(at + (W - 1 - j) * y_row, tl.sum(totals[j], 0), mask=real)


@triton.jit(do_not_specialize=["rows", "T"])
def short_conv_input_grad_kernel(
    d_y, weight, d_x, rows, T,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, TURNS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """d_x_t = sum_j weight[:, W - 1 - j] d_y_{t+j}, all [rows, C]."""
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    r = tl.arange(0, R)
    real = column < C
    taps = _taps(weight, column, real, W)
    for turn in range(TURNS):
        first, exists, t = _rows(turn, rows, T, R, TURNS)
        total = tl.zeros([R, BD], tl.float32)
        for j in tl.static_range(W):
            seen = (exists & (t + j < T))[:, None] & real[None, :]
            at = d_y + first * C + (r + j)[:, None] * C + column[None, :]
            total += tl.load(at, mask=seen, other=0.0).to(tl.float32) * taps[j][None, :]
        at = d_x + first * C + r[:, None] * C + column[None, :]
        tl.store(at, total.to(d_x.dtype.element_ty), mask=exists[:, None] & real[None, :])
