# mypy: disable-error-code="assignment, var-annotated"
"""From the rows of one projection to the writes, forward and backward, R rows (token, value head) a program.

    kappa^l = key^l / sqrt(|key^l|^2 + 1e-6)      b^l = sigmoid(gate^l)      r^1 = v - u
    delta^l = phi(p^l * r^l)      w^l = b^l delta^l      r^{l+1} = r^l - delta^l

A token's row holds keys [HV, L, K], gains p [HV, L, V], gates [HV, L] and PAD values that nobody reads.
Backward computes r^l again from u, v and p.

Without KEYS nothing is made of the keys, which the scan reads where they are: their norm goes into the values
instead, w (key / |key|)^T = (w / |key|) key^T, and the scan's backward pass gives what it owes to the keys.
"""

import triton
import triton.language as tl

from prism.scan.triton._chain_kernels import activate, sigmoid


@triton.jit
def _place(count, HV: tl.constexpr, R: tl.constexpr):
    """Numbers [R, 1] of this program's rows, their tokens and heads, and which of them exist."""
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    return row.to(tl.int64), (row // HV).to(tl.int64), row % HV, row < count


@triton.jit
def _residual(u, v, row, column, inside, V: tl.constexpr, ANCHORED: tl.constexpr):
    at = row * V + column
    r = tl.load(v + at, mask=inside, other=0.0).to(tl.float32)
    if ANCHORED:
        r -= tl.load(u + at, mask=inside, other=0.0).to(tl.float32)
    return r


@triton.jit(do_not_specialize=["count"])
def refine_kernel(
    rows, u, v, write_k, write_v, norms, count,
    HV: tl.constexpr, L: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PAD: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, stride: tl.constexpr, PHI: tl.constexpr,
    SUBTRACT: tl.constexpr, ANCHORED: tl.constexpr, UNIT: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """write_k [count, L, K] and write_v [count, L, V] from rows [token, stride], u and v [count, V]; without
    KEYS write_v / |key|, and |key|^-2 as norms [count, L] where UNIT."""
    row, token, head, exists = _place(count, HV, R)
    key_column, column = tl.arange(0, BK)[None, :], tl.arange(0, BV)[None, :]
    key_inside, inside = exists & (key_column < K), exists & (column < V)
    residual = _residual(u, v, row, column, inside, V, ANCHORED)
    rows += token * stride
    keys, gains, gates = (), (), ()
    for l in tl.static_range(L):
        if KEYS or UNIT:
            keys += (tl.load(rows + (head * L + l) * K + key_column, mask=key_inside, other=0.0),)
        at = rows + HV * L * K + (head * L + l) * V + column
        gains += (tl.load(at, mask=inside, other=0.0),)
        gates += (tl.load(rows + HV * L * (K + V) + head * L + l, mask=exists, other=0.0),)
    for l in tl.static_range(L):
        gate = sigmoid(gates[l].to(tl.float32))
        if KEYS or UNIT:
            key = keys[l].to(tl.float32)
        if UNIT:
            root = tl.rsqrt(tl.sum(key * key, 1) + 1e-6)[:, None]
        if KEYS:
            if UNIT:
                key *= root
            at = write_k + (row * L + l) * K + key_column
            tl.store(at, key.to(write_k.dtype.element_ty), mask=key_inside)
        elif UNIT:
            gate *= root
            tl.store(norms + row * L + l, root * root, mask=exists)
        delta, _ = activate(gains[l].to(tl.float32) * residual, PHI)
        written = gate * delta
        tl.store(write_v + (row * L + l) * V + column, written.to(write_v.dtype.element_ty), mask=inside)
        if SUBTRACT:
            residual -= delta


@triton.jit(do_not_specialize=["count"])
def refine_grad_kernel(
    rows, u, v, d_write_k, d_write_v, norms, d_rows, d_r, count,
    HV: tl.constexpr, L: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PAD: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, stride: tl.constexpr, PHI: tl.constexpr,
    SUBTRACT: tl.constexpr, ANCHORED: tl.constexpr, UNIT: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """d_rows [token, HV * L * (K + V + 1) + PAD], all of it but for the keys without KEYS, and d_r
    [count, V], the gradient of r^1."""
    row, token, head, exists = _place(count, HV, R)
    key_column, column = tl.arange(0, BK)[None, :], tl.arange(0, BV)[None, :]
    key_inside, inside = exists & (key_column < K), exists & (column < V)
    rows += token * stride
    d_rows += token * (HV * L * (K + V + 1) + PAD)
    for l in tl.static_range(L if KEYS else 0):
        at = (head * L + l) * K + key_column
        grad = tl.load(d_write_k + (row * L + l) * K + key_column, mask=key_inside, other=0.0)
        grad = grad.to(tl.float32)
        if UNIT:
            key = tl.load(rows + at, mask=key_inside, other=0.0).to(tl.float32)
            root = tl.rsqrt(tl.sum(key * key, 1) + 1e-6)[:, None]
            grad = root * (grad - key * (root * root * tl.sum(grad * key, 1)[:, None]))
        tl.store(d_rows + at, grad.to(d_rows.dtype.element_ty), mask=key_inside)
    residual = _residual(u, v, row, column, inside, V, ANCHORED)
    upstream, gains, residuals, slopes, gates, roots = (), (), (), (), (), ()
    for l in tl.static_range(L):
        upstream += (tl.load(d_write_v + (row * L + l) * V + column, mask=inside, other=0.0),)
        at = rows + HV * L * K + (head * L + l) * V + column
        gains += (tl.load(at, mask=inside, other=0.0),)
        gate = tl.load(rows + HV * L * (K + V) + head * L + l, mask=exists, other=0.0)
        gates += (sigmoid(gate.to(tl.float32)),)
        if KEYS or not UNIT:
            roots += (1.0,)
        else:
            roots += (tl.sqrt(tl.load(norms + row * L + l, mask=exists, other=0.0)),)
    for l in tl.static_range(L):
        delta, slope = activate(gains[l].to(tl.float32) * residual, PHI)
        share = tl.sum(upstream[l].to(tl.float32) * delta, 1)[:, None] * roots[l] * gates[l] * (1 - gates[l])
        at = d_rows + HV * L * (K + V) + head * L + l
        tl.store(at, share.to(d_rows.dtype.element_ty), mask=exists)
        residuals += (residual,)
        slopes += (slope,)
        if SUBTRACT:
            residual -= delta
    d_residual = tl.zeros((R, BV), tl.float32)
    for l in tl.static_range(L - 1, -1, -1):
        d_delta = roots[l] * gates[l] * upstream[l].to(tl.float32)
        if SUBTRACT:
            d_delta -= d_residual
        d_z = d_delta * slopes[l]
        at = d_rows + HV * L * K + (head * L + l) * V + column
        tl.store(at, (d_z * residuals[l]).to(d_rows.dtype.element_ty), mask=inside)
        d_residual += d_z * gains[l].to(tl.float32)
    tl.store(d_r + row * V + column, d_residual.to(d_r.dtype.element_ty), mask=inside)
    if PAD > 0:
        pad = tl.arange(0, triton.next_power_of_2(PAD))[None, :]
        at = d_rows + HV * L * (K + V + 1) + pad
        zero = tl.zeros((R, triton.next_power_of_2(PAD)), d_rows.dtype.element_ty)
        tl.store(at, zero, mask=exists & (head == 0) & (pad < PAD))
