"""What the chunk-parallel kernels share: chunk geometry, tile loads, decays, and the triangular solve.

Tensors are flat in tokens, [B * T, heads, width], contiguous. Chunks never straddle two sequences; the rows
of a ragged last chunk read as zeros, which leaves state and output alone (math.md, section 4). Where every
chunk is WHOLE, `left`, the tokens of one, is a constant, and the compiler drops the masks that it makes.
"""

import triton
import triton.language as tl


@triton.jit
def chunk_tokens(chunk, spans, T, chunks_per_row, C: tl.constexpr, PACKED: tl.constexpr):
    """First token of a chunk and the token after the last of its sequence; equal where the chunk is
    surplus."""
    if PACKED:
        first = tl.load(spans + 2 * chunk)
        end = tl.load(spans + 2 * chunk + 1)
    else:
        row = (chunk // chunks_per_row).to(tl.int64)
        first = row * T + (chunk % chunks_per_row) * C
        end = row * T + T
    return first, end


@triton.jit
def sequence_tokens(n, offsets, chunk_start, T, chunks_per_row, PACKED: tl.constexpr):
    """First token of sequence n, the token after its last, and its first chunk."""
    if PACKED:
        first = tl.load(offsets + n)
        end = tl.load(offsets + n + 1)
        chunk = tl.load(chunk_start + n)
    else:
        row = n.to(tl.int64)
        first = row * T
        end = first + T
        chunk = row * chunks_per_row
    return first, end, chunk


@triton.jit
def load_rows(base, stride, left, c0, width: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """[C, BLOCK] tile at column c0 of rows that start at base + r * stride; zeros from row `left`, column
    `width` on."""
    rows = tl.arange(0, C)
    cols = c0 + tl.arange(0, BLOCK)
    mask = (rows < left)[:, None]
    if width % BLOCK != 0:
        mask = mask & (cols < width)[None, :]
    return tl.load(base + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(base, tile, stride, left, c0, width: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.arange(0, C)
    cols = c0 + tl.arange(0, BLOCK)
    mask = (rows < left)[:, None]
    if width % BLOCK != 0:
        mask = mask & (cols < width)[None, :]
    tl.store(base + rows[:, None] * stride + cols[None, :], tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_columns(base, stride, left, c0, width: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """The transpose of `load_rows`, [BLOCK, C]."""
    rows = tl.arange(0, C)
    cols = c0 + tl.arange(0, BLOCK)
    mask = (rows < left)[None, :]
    if width % BLOCK != 0:
        mask = mask & (cols < width)[:, None]
    return tl.load(base + rows[None, :] * stride + cols[:, None], mask=mask, other=0.0)


@triton.jit
def store_columns(base, tile, stride, left, c0, width: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Stores a tile [BLOCK, C] as rows."""
    rows = tl.arange(0, C)
    cols = c0 + tl.arange(0, BLOCK)
    mask = (rows < left)[None, :]
    if width % BLOCK != 0:
        mask = mask & (cols < width)[:, None]
    tl.store(base + rows[None, :] * stride + cols[:, None], tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def write_keys(first, head, l, row, HV, L, K: tl.constexpr):
    """Where key l of a token and head is, and elements from one token to the next. Keys are dense, or stand
    first in rows of 8 `row` elements (in eights: the compiler then knows that they start on 16 bytes)."""
    if row is None:
        place = ((first * HV + head) * L + l) * K
        stride = HV * L * K
    else:
        stride = row * 8
        place = first * stride + (head * L + l) * K
    return place, stride


@triton.jit
def state_offsets(v0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Offsets [BK, BV] into one [K, V] state from column v0 on, and the mask of those that exist."""
    rows = tl.arange(0, BK)[:, None]
    cols = v0 + tl.arange(0, BV)[None, :]
    return rows * V + cols, (rows < K) & (cols < V)


@triton.jit
def load_column(base, stride, left, C: tl.constexpr):
    """[C] float32: one number per token; zeros from token `left` on."""
    rows = tl.arange(0, C)
    return tl.load(base + rows * stride, mask=rows < left, other=0.0).to(tl.float32)


@triton.jit
def cumulative(log_decay, WIDE: tl.constexpr):
    """G / ln 2, where G is the running sum of log_decay: powers of two cost the least. Differences of G lose
    digits under strong decay: float64 where those count."""
    if WIDE:
        total = tl.cumsum(log_decay.to(tl.float64) * 1.4426950408889634, 0)
    else:
        total = tl.cumsum(log_decay * 1.4426950408889634, 0)
    return total


@triton.jit
def decay(total):
    """exp(G) of a G that `cumulative` gave, or of a difference of two."""
    return tl.exp2(total.to(tl.float32))


@triton.jit
def last_of(total, C: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, C) == C - 1, total, 0.0), 0)


@triton.jit
def pair_decay(to, frm, mask):
    """decay(to - frm) where the mask holds, else 0: elsewhere it may overflow, and nothing is made of it."""
    return tl.where(mask, decay(to - frm), 0.0)
