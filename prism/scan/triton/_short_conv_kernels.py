# mypy: disable-error-code="assignment, var-annotated"
"""Causal depthwise convolution, activation and L2 norm of each head: forward, and backward in two kernels.

    y_t = sum_j weight[:, W - 1 - j] x_{t-j}      s = silu(y)      n = s / sqrt(|s|^2 + 1e-6)   per head

One program takes R tokens of one head at a time. Rows are the tokens of all sequences end to end; the first
W - 1 of a sequence see zeros before them. y and s are computed again in the backward pass, never stored.
"""

import triton
import triton.language as tl


@triton.jit
def _convolve(
    x, weight, row, t, exists, column, real, x_row,
    W: tl.constexpr, R: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """y [R, BD] of the rows; x points at the first channel of the head, weight at its first tap."""
    y = tl.zeros([R, BD], tl.float32)
    for j in tl.static_range(W):
        seen = (exists & (t >= j))[:, None] & real[None, :]
        tap = tl.load(weight + column * W + (W - 1 - j), mask=real, other=0.0).to(tl.float32)
        at = x + (row - j)[:, None] * x_row + column[None, :]
        y += tl.load(at, mask=seen, other=0.0).to(tl.float32) * tap[None, :]
    return y


@triton.jit(do_not_specialize=["rows", "T"])
def short_conv_kernel(
    x, weight, out, rows, T,
    HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, x_row: tl.constexpr, R: tl.constexpr,
    BD: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """out [rows, HEADS, D] from x [rows, HEADS * D] and weight [HEADS * D, W]."""
    head = tl.program_id(1)
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    column = tl.arange(0, BD)
    real, exists, t = column < D, row < rows, row % T
    y = _convolve(x + head * D, weight + head * D * W, row, t, exists, column, real, x_row, W, R, BD)
    if SILU:
        y *= tl.sigmoid(y)
    if UNIT:
        y *= tl.rsqrt(tl.sum(y * y, 1) + 1e-6)[:, None]
    at = out + (row * (HEADS * D) + head * D)[:, None] + column[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=exists[:, None] & real[None, :])


@triton.jit(do_not_specialize=["rows", "T"])
def short_conv_grad_kernel(
    x, weight, d_out, d_y, d_weight, rows, T,
    HEADS: tl.constexpr, D: tl.constexpr, W: tl.constexpr, x_row: tl.constexpr, y_row: tl.constexpr,
    w_row: tl.constexpr, R: tl.constexpr, TURNS: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """d_y [rows, HEADS * D], and d_weight [programs, W, HEADS * D]: the sum over this program's rows."""
    head = tl.program_id(1)
    column = tl.arange(0, BD)
    real = column < D
    tap_index = tl.arange(0, triton.next_power_of_2(W))
    total = tl.zeros([triton.next_power_of_2(W), BD], tl.float32)
    x += head * D
    for turn in range(TURNS):
        row = ((tl.program_id(0) * TURNS + turn) * R + tl.arange(0, R)).to(tl.int64)
        exists, t = row < rows, row % T
        inside = exists[:, None] & real[None, :]
        y = _convolve(x, weight + head * D * W, row, t, exists, column, real, x_row, W, R, BD)
        sigmoid = tl.sigmoid(y)
        s = y * sigmoid if SILU else y
        at = d_out + (row * (HEADS * D) + head * D)[:, None] + column[None, :]
        grad = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if UNIT:
            root = tl.rsqrt(tl.sum(s * s, 1) + 1e-6)[:, None]
            unit = s * root
            grad = root * (grad - unit * tl.sum(grad * unit, 1)[:, None])
        if SILU:
            grad *= sigmoid * (1 + y * (1 - sigmoid))
        at = d_y + row[:, None] * y_row + head * D + column[None, :]
        tl.store(at, grad.to(d_y.dtype.element_ty), mask=inside)
        for j in tl.static_range(W):
            at = x + (row - j)[:, None] * x_row + column[None, :]
            shifted = tl.load(at, mask=inside & (t >= j)[:, None], other=0.0).to(tl.float32)
            total += tl.where(tap_index[:, None] == W - 1 - j, tl.sum(grad * shifted, 0)[None, :], 0.0)
    at = d_weight + (tl.program_id(0) * W + tap_index)[:, None] * w_row + head * D + column[None, :]
    tl.store(at, total, mask=(tap_index < W)[:, None] & real[None, :])


@triton.jit(do_not_specialize=["rows", "T"])
def short_conv_input_grad_kernel(
    d_y, weight, d_x, rows, T,
    C: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """d_x_t = sum_j weight[:, W - 1 - j] d_y_{t+j}, all [rows, C]."""
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    real, exists, t = column < C, row < rows, row % T
    total = tl.zeros([R, BC], tl.float32)
    for j in tl.static_range(W):
        seen = (exists & (t + j < T))[:, None] & real[None, :]
        tap = tl.load(weight + column * W + (W - 1 - j), mask=real, other=0.0).to(tl.float32)
        at = d_y + (row + j)[:, None] * C + column[None, :]
        total += tl.load(at, mask=seen, other=0.0).to(tl.float32) * tap[None, :]
    at = d_x + row[:, None] * C + column[None, :]
    tl.store(at, total.to(d_x.dtype.element_ty), mask=exists[:, None] & real[None, :])
