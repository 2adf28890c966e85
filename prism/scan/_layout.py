"""How tokens are cut into chunks, and in which order states pass through them.

A layout turns tokens [B, T, heads, ...] into chunks [a, b, heads, C, ...] (a * b chunks in all) with `split`,
and back with `join`. Chunks that can run side by side are neighbours: `forward` and `backward` call
`step(at, state) -> state` once for each such group, with its slice of the flat batch (chunks x heads) and the
states [chunks of the group x heads, K, V] that enter it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

Step = Callable[[slice, Tensor], Tensor]


def layout(B: int, T: int, chunk: int, cu_seqlens: Tensor | None) -> Batch | Packed | Traced:
    """The layout for [B, T] tokens. Reads the values of `cu_seqlens` unless traced or captured."""
    if cu_seqlens is None:
        return Batch(B, T, chunk)
    captured = cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()
    return (Traced if captured or torch.compiler.is_compiling() else Packed)(T, chunk, cu_seqlens)


class Batch:
    """B sequences of one length: chunk [i, b] is the i-th of sequence b. The tail is padded with zeros."""

    def __init__(self, B: int, T: int, chunk: int):
        self.B, self.T, self.C = B, T, chunk
        self.steps = -(-T // chunk)
        self.chunks = self.steps * B

    def split(self, x: Tensor) -> Tensor:
        short = self.steps * self.C - self.T
        if short:
            x = torch.cat([x, x.new_zeros(self.B, short, *x.shape[2:])], 1)
        return x.unflatten(1, (self.steps, self.C)).transpose(0, 1).transpose(2, 3)

    def join(self, x: Tensor, heads: int) -> Tensor:
        x = x.unflatten(0, (self.steps, self.B, heads)).transpose(2, 3).transpose(0, 1)
        return x.flatten(1, 2)[:, : self.T]

    def forward(self, state: Tensor, step: Step) -> Tensor:
        return self._run(state, step, range(self.steps))

    def backward(self, state: Tensor, step: Step) -> Tensor:
        return self._run(state, step, reversed(range(self.steps)))

    def _run(self, state: Tensor, step: Step, order) -> Tensor:
        n = state.shape[0] * state.shape[1]
        S = state.flatten(0, 1)
        for i in order:
            S = step(slice(i * n, i * n + n), S)
        return S.view(state.shape)


class _Indexed:
    """Tokens of B = 1 to chunks [chunks, 1, heads, C, ...] through index maps in both directions."""

    C: int
    slots: Tensor  # [T]: the place of each token among chunks x C
    where: Tensor  # [chunks x C]: the token in each place, T where there is none

    def split(self, x: Tensor) -> Tensor:
        x = torch.cat([x[0], x.new_zeros(1, *x.shape[2:])])[self.where]
        return x.unflatten(0, (-1, 1, self.C)).transpose(2, 3)

    def join(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)[self.slots][None]


class Packed(_Indexed):
    """Sequences packed into B = 1, each cut into chunks of its own from its start.

    The longest sequence comes first and chunks are ordered by their place in the sequence, so that the i-th
    chunks of all sequences that have one are neighbours and belong to a prefix of the sequences.
    """

    def __init__(self, T: int, chunk: int, cu_seqlens: Tensor):
        offsets = cu_seqlens.long().cpu()
        N = offsets.shape[0] - 1
        counts = (offsets.diff() + chunk - 1) // chunk
        rows = counts.argsort(descending=True, stable=True)
        unsort = rows.argsort()
        running = N - counts.bincount().cumsum(0)[:-1]  # sequences that have an i-th chunk
        first = torch.cat([running.new_zeros(1), running.cumsum(0)])
        self.C, self.chunks, self.groups = chunk, int(first[-1]), list(pairwise(first.tolist()))
        token = torch.arange(T)
        n = torch.searchsorted(offsets[1:], token, right=True)
        j = token - offsets[n]
        slots = (first[j // chunk] + unsort[n]) * chunk + j % chunk
        where = torch.full((self.chunks * chunk,), T).scatter(0, slots, token)
        self.slots, self.where, self.rows, self.unsort = (
            t.to(cu_seqlens.device) for t in (slots, where, rows, unsort)
        )

    def forward(self, state: Tensor, step: Step) -> Tensor:
        heads = state.shape[1]
        S, done = state[self.rows].flatten(0, 1), []
        for a, b in self.groups:
            n = (b - a) * heads
            done.append(S[n:])
            S = step(slice(a * heads, b * heads), S[:n])
        return torch.cat([S, *reversed(done)]).view(state.shape)[self.unsort]

    def backward(self, state: Tensor, step: Step) -> Tensor:
        heads = state.shape[1]
        rest = state[self.rows].flatten(0, 1)
        S = rest[:0]
        for a, b in reversed(self.groups):
            S = torch.cat([S, rest[S.shape[0] : (b - a) * heads]])
            S = step(slice(a * heads, b * heads), S)
        return torch.cat([S, rest[S.shape[0] :]]).view(state.shape)[self.unsort]


class Traced(_Indexed):
    """Packed sequences whose lengths are unknown: under torch.compile and CUDA graph capture.

    Every size depends on T and N alone: floor((T + N (C - 1)) / C) chunks are enough for any offsets. They
    run one after the other and take a fresh state where a sequence starts.
    """

    def __init__(self, T: int, chunk: int, cu_seqlens: Tensor):
        N = cu_seqlens.shape[0] - 1
        self.C, self.chunks = chunk, (T + N * (chunk - 1)) // chunk
        offsets = cu_seqlens.long()
        counts = (offsets.diff() + chunk - 1) // chunk
        after = counts.cumsum(0)
        self.first, self.last, self.empty = after - counts, after - 1, (counts == 0)[:, None, None, None]
        token = torch.arange(T, device=offsets.device)
        # The bounds keep offsets that nobody could check within memory.
        n = torch.searchsorted(offsets[1:], token, right=True).clamp(max=N - 1)
        j = token - offsets[n]
        slots = (self.first[n] + j // chunk) * chunk + j % chunk
        self.slots = slots.clamp(0, self.chunks * chunk - 1)
        where = token.new_full((self.chunks * chunk,), T)
        self.where = where.scatter(0, self.slots, token)
        chunks = torch.arange(self.chunks, device=offsets.device)
        self.sequence = torch.searchsorted(after, chunks, right=True).clamp(max=N - 1)
        self.starts = chunks == self.first[self.sequence]
        self.stops = chunks == self.last[self.sequence]

    def forward(self, state: Tensor, step: Step) -> Tensor:
        return self._run(state, step, list(range(self.chunks)), self.starts, self.last)

    def backward(self, state: Tensor, step: Step) -> Tensor:
        return self._run(state, step, list(range(self.chunks))[::-1], self.stops, self.first)

    def _run(self, state: Tensor, step: Step, order: list[int], fresh: Tensor, final: Tensor) -> Tensor:
        heads, given = state.shape[1], state[self.sequence]
        S, out = torch.zeros_like(state[0]), {}
        for i in order:
            S = torch.where(fresh[i], given[i], S)
            S = out[i] = step(slice(i * heads, i * heads + heads), S)
        states = torch.stack([out[i] for i in range(self.chunks)])
        return torch.where(self.empty, state, states[final.clamp(0, self.chunks - 1)])
