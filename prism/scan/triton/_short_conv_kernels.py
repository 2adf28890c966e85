# mypy: disable-error-code="assignment, misc, var-annotated"
"""Causal depthwise convolution, activation and L2 norm of each head, forward and backward.

    y_t = sum_j weight[:, W - 1 - j] x_{t-j}      s = silu(y)      n = s / sqrt(|s|^2 + 1e-6)   per head
    d_x_t = sum_j weight[:, W - 1 - j] d_y_{t+j}

A program walks along LENGTH tokens of one head in one sequence, its channels over the lanes of one warp. The
last W - 1 values of x, and of the sums d_x that are not yet complete, stay in registers, so that each element
of memory is read once; y and s are computed again in the backward pass. STEP rows are loaded at a time.
"""

import triton
import triton.language as tl


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
    return tl.load(base + row * stride + column, mask=inside, other=0.0).to(tl.float32)


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
        before += (_load(x, -j, start, T, column, real, x_row),)
    for step in range(0, LENGTH, STEP):
        rows = ()
        for i in tl.static_range(STEP):
            rows += (_load(x + step * x_row, i, start + step, T, column, real, x_row),)
        for i in tl.static_range(STEP):
            y = _dot(rows[i], before, taps, W)
            before = _shift(rows[i], before, W)
            if SILU:
                y *= tl.sigmoid(y)
            if UNIT:
                y *= tl.rsqrt(tl.sum(y * y, 0) + 1e-6)
            at = out + (step + i) * (HEADS * D) + column
            tl.store(at, y.to(out.dtype.element_ty), mask=real & (start + step + i < T))


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
        before += (_load(x, -j, start, T, column, real, x_row),)
        pending += (tl.zeros([BD], tl.float32),)
    for _ in tl.static_range(W):
        totals += (tl.zeros([BD], tl.float32),)
    for step in range(0, LENGTH + STEP * ((W - 1 + STEP - 1) // STEP), STEP):
        rows = ()
        grads = ()
        for i in tl.static_range(STEP):
            rows += (_load(x + step * x_row, i, start + step, T, column, real, x_row),)
        for i in tl.static_range(STEP):
            at = d_out + step * (HEADS * D)
            grad = _load(at, i, start + step, T, column, real, HEADS * D)
            if SIGN != 0:
                at = d_more + step * (HEADS * D)
                grad += SIGN * _load(at, i, start + step, T, column, real, HEADS * D)
            grads += (grad,)
        for i in tl.static_range(STEP):
            grad = grads[i]
            y = _dot(rows[i], before, taps, W)
            sigmoid = tl.sigmoid(y)
            if UNIT:
                s = y * sigmoid if SILU else y
                root = tl.rsqrt(tl.sum(s * s, 0) + 1e-6)
                grad = root * (grad - s * (root * root * tl.sum(grad * s, 0)))
            if SILU:
                grad *= sigmoid * (1 + y * (1 - sigmoid))
            own = step + i < LENGTH
            counted = tl.where(own, grad, 0.0)
            sums = (totals[0] + counted * rows[i],)
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
            before = _shift(rows[i], before, W)
    at = d_weight + tl.program_id(0).to(tl.int64) * (W * w_row) + head * D + column
    for j in tl.static_range(W):
        tl.store(at + (W - 1 - j) * w_row, totals[j], mask=real)
