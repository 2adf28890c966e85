# mypy: disable-error-code="assignment, var-annotated"
"""The refinement chain, forward and backward, one program for a few rows (token, value head) of all steps.

    z^l = p^l * r^l      delta^l = phi(z^l)      w^l = b^l delta^l      r^{l+1} = r^l - delta^l

Elementwise but for the gradient of b, which sums over V. r stays in registers through all steps; backward
computes it again from r^1 and p, so that neither a residual nor a delta is ever stored.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)), as the square of an inverse root: on a GPU neither the root nor a power of two takes
    the instructions for denormal numbers that a division and an exponential do, nine of fourteen."""
    root = tl.rsqrt(1 + tl.exp2(z * -1.4426950408889634))
    return root * root


@triton.jit
def activate(z, PHI: tl.constexpr):
    """phi(z) and phi'(z)."""
    if PHI == "gelu":
        # Phi(z) by Abramowitz and Stegun 7.1.26, to 7.5e-8, which is float32's rounding of 1 + erf: with the
        # exponential that the slope needs anyway, and without a division, half the instructions.
        t = 1 + 0.23164190 * tl.abs(z)
        t = tl.rsqrt(t * t)
        bell = tl.exp2(z * z * -0.7213475204444817)
        tail = (
            (((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796
        ) * t
        below = tl.where(z < 0, tail * bell, 1 - tail * bell)
        value = z * below
        slope = below + z * (0.3989422804014327 * bell)
    elif PHI == "silu":
        gate = sigmoid(z)
        value = z * gate
        slope = gate + value * (1 - gate)
    elif PHI == "tanh":
        # The difference keeps no digits near zero; the series is right to 4e-7 of itself up to 0.25.
        square = z * z
        series = z - z * square * (0.3333333333 - square * (0.1333333333 - square * 0.0539682540))
        value = tl.where(tl.abs(z) < 0.25, series, 2 * sigmoid(2 * z) - 1)
        slope = 1 - value * value
    else:
        tl.static_assert(PHI == "identity")
        value = z
        slope = tl.full(z.shape, 1.0, tl.float32)
    return value, slope


@triton.jit
def _rows(rows, HV: tl.constexpr, R: tl.constexpr):
    """Row numbers [R, 1] of this program, their tokens and heads, and which of them exist."""
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    return row.to(tl.int64), (row // HV).to(tl.int64), (row % HV).to(tl.int64), row < rows


@triton.jit(do_not_specialize=["rows"])
def chain_kernel(
    r, gain, gate, write_v, rows,
    HV: tl.constexpr, L: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BV: tl.constexpr,
    r_token: tl.constexpr, r_head: tl.constexpr,
    gain_token: tl.constexpr, gain_head: tl.constexpr, gain_step: tl.constexpr,
    PHI: tl.constexpr, SUBTRACT: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """write_v [rows, L, V] from r^1 [token, head, V], gain [token, head, L, V] and gate [rows, L]. R rows."""
    row, token, head, exists = _rows(rows, HV, R)
    column = tl.arange(0, BV)[None, :]
    inside = exists & (column < V) if V != BV else exists & (column >= 0)
    residual = tl.load(r + token * r_token + head * r_head + column, mask=inside, other=0.0).to(tl.float32)
    at_gain = token * gain_token + head * gain_head + column
    at_write = write_v + row * (L * V) + column
    for l in tl.static_range(L):
        z = residual
        if GAIN:
            z *= tl.load(gain + at_gain + l * gain_step, mask=inside, other=0.0).to(tl.float32)
        delta, _ = activate(z, PHI)
        b = tl.load(gate + row * L + l, mask=exists, other=0.0).to(tl.float32)
        tl.store(at_write + l * V, (b * delta).to(write_v.dtype.element_ty), mask=inside)
        if SUBTRACT:
            residual -= delta


@triton.jit(do_not_specialize=["rows"])
def chain_grad_kernel(
    d_write_v, r, gain, gate, d_r, d_gain, d_gate, rows,
    HV: tl.constexpr, L: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BV: tl.constexpr,
    r_token: tl.constexpr, r_head: tl.constexpr,
    gain_token: tl.constexpr, gain_head: tl.constexpr, gain_step: tl.constexpr,
    PHI: tl.constexpr, SUBTRACT: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """d_r [rows, V], d_gain [rows, L, V] and d_gate [rows, L]. R rows."""
    row, token, head, exists = _rows(rows, HV, R)
    column = tl.arange(0, BV)[None, :]
    inside = exists & (column < V) if V != BV else exists & (column >= 0)
    residual = tl.load(r + token * r_token + head * r_head + column, mask=inside, other=0.0).to(tl.float32)
    at_gain = token * gain_token + head * gain_head + column
    at_write = row * (L * V) + column
    # Everything is read before anything is written: a store holds back the loads behind it.
    upstream, gains, residuals, slopes = (), (), (), ()
    for l in tl.static_range(L):
        upstream += (tl.load(d_write_v + at_write + l * V, mask=inside, other=0.0),)
        if GAIN:
            gains += (tl.load(gain + at_gain + l * gain_step, mask=inside, other=0.0),)
    for l in tl.static_range(L):
        z = residual
        if GAIN:
            z *= gains[l].to(tl.float32)
        delta, slope = activate(z, PHI)
        share = tl.sum(upstream[l].to(tl.float32) * delta, axis=1)[:, None]
        tl.store(d_gate + row * L + l, share.to(d_gate.dtype.element_ty), mask=exists)
        residuals += (residual,)
        slopes += (slope,)
        if SUBTRACT:
            residual -= delta
    d_residual = tl.zeros((R, BV), tl.float32)
    for l in tl.static_range(L - 1, -1, -1):
        b = tl.load(gate + row * L + l, mask=exists, other=0.0).to(tl.float32)
        d_delta = b * upstream[l].to(tl.float32)
        if SUBTRACT:
            d_delta -= d_residual
        d_z = d_delta * slopes[l]
        if GAIN:
            d_p = d_z * residuals[l]
            tl.store(d_gain + at_write + l * V, d_p.to(d_gain.dtype.element_ty), mask=inside)
            d_z *= gains[l].to(tl.float32)
        d_residual += d_z
    tl.store(d_r + row * V + column, d_residual.to(d_r.dtype.element_ty), mask=inside)
