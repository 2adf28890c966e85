"""The chunkwise implementation with the refinement inside: it takes r^1, p and b in the place of the writes.

Neither writes nor their gradients reach memory; all else is `chunkwise`, whose two launches that read writes
are replaced for the length of a call. A measured candidate (benchmarks/NOTES.md, "Fused refinement").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from prism.scan.triton import chunkwise
from prism.scan.triton._refined_kernels import (
    refined_keys_grad_kernel,
    refined_values_grad_kernel,
    refined_writes_kernel,
)

WRITES = chunkwise.Launch(4, 2, 64)
KEYS_GRAD = chunkwise.Launch(4, 1, 64)
VALUES_GRAD = chunkwise.Launch(4, 1, 64)


class _Instead:
    """Stands for a kernel: `run` gets the arguments of its launch."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run


def _blocks(at: chunkwise.Launch, V: int, given: int, wide: bool) -> tuple[int, dict[str, int]]:
    """Slice of V and launch options; in float32 those that the caller was given."""
    if wide:
        return given, {"num_warps": 8, "num_stages": 1}
    return at.v_block, {"num_warps": at.warps, "num_stages": at.stages}


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, write_k: Tensor, r: Tensor,
    gain: Tensor | None, gate: Tensor, activation: str, subtract: bool, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, saved: list[Tensor], **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `chunkwise.forward`; r [B, T, HV, V], gain [B, T, HV, L, V] or None, gate [B, T, HV, L]."""

    def run(
        q, k, v, log_decay, write_k, _, target, write_o, write_state, spans, scale, T, per_row, H, HV, L,
        K, V, C, BK, BV, packed, wide, dot, **_options,
    ):  # fmt: skip
        BV, launch = _blocks(WRITES, V, BV, wide)
        chunks = write_state.shape[0]
        refined_writes_kernel[(chunks * HV * triton.cdiv(V, BV),)](
            q, k, v, log_decay, write_k, r, gain, gate, target, write_o, write_state, spans, scale, T,
            per_row, H, HV, L, K, V, C, BK, BV, packed, wide, dot, activation, subtract, gain is not None,
            **launch,
        )  # fmt: skip

    write_v = r.unsqueeze(3).expand(*gate.shape, -1) if gain is None else gain
    with mock.patch.object(chunkwise, "writes_kernel", _Instead(run)):
        return chunkwise.forward(
            q, k, v, log_decay, beta, write_k, write_v, scale, initial_state, cu_seqlens, saved, **options
        )


def backward(
    do: Tensor | None, dstate: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor,
    beta: Tensor, write_k: Tensor, r: Tensor, gain: Tensor | None, gate: Tensor, activation: str,
    subtract: bool, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    saved: list[Tensor], **options: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dq, dk, dv, d_log_decay, d_beta, d_write_k, d_r, d_gain, d_gate, d_initial_state."""
    d_r, d_gate = torch.empty_like(r), []

    def run(
        q, k, log_decay, write_k, _, do, dv, d_states, d_write_k, d_gain, by_writes, gate_grad, spans, scale,
        T, per_row, H, HV, L, K, V, C, BK, BV, packed, wide, dot, **_options,
    ):  # fmt: skip
        chunks = d_states.shape[0]
        chain = (activation, subtract, gain is not None)
        keys_BV, launch = _blocks(KEYS_GRAD, V, BV, wide)
        tokens = (spans, scale, T, per_row, H, HV, L)
        refined_keys_grad_kernel[(chunks * HV * L,)](
            q, k, log_decay, write_k, r, gain, gate, do, dv, d_states, d_write_k, by_writes, gate_grad,
            *tokens, K, V, C, BK, keys_BV, packed, wide, dot, *chain, **launch,
        )  # fmt: skip
        BV, launch = _blocks(VALUES_GRAD, V, BV, wide)
        slices = triton.cdiv(V, BV)
        shares = gate.new_empty(*gate.shape, slices, dtype=torch.float32)
        refined_values_grad_kernel[(chunks * HV * slices,)](
            q, k, log_decay, write_k, r, gain, gate, do, dv, d_states, d_r, d_gain, shares, *tokens,
            K, V, C, BK, BV, packed, wide, dot, *chain, **launch,
        )  # fmt: skip
        d_gate.append(shares.sum(-1).to(gate.dtype))

    write_v = r.unsqueeze(3).expand(*gate.shape, -1) if gain is None else gain
    with mock.patch.object(chunkwise, "writes_grad_kernel", _Instead(run)):
        *grads, d_gain, d_initial = chunkwise.backward(
            do, dstate, q, k, v, log_decay, beta, write_k, write_v, scale, initial_state, cu_seqlens, saved,
            **options,
        )  # fmt: skip
    return *grads, d_r, None if gain is None else d_gain, d_gate[0], d_initial


class _Refined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        q, _, v, *_ = args
        saved = chunkwise.allocate(q, v, args[5], None) if any(ctx.needs_input_grad) else []
        o, _ = forward(*args, saved)  # type: ignore[call-arg]
        ctx.options = args[9:]
        ctx.save_for_backward(*args[:9], *saved)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        tensors, saved = ctx.saved_tensors[:9], list(ctx.saved_tensors[9:])
        grads = backward(do.contiguous(), None, *tensors, *ctx.options, saved)  # type: ignore[call-arg]
        return *grads[:9], None, None, None, None, None


def refined_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, write_k: Tensor, r: Tensor,
    gain: Tensor | None, gate: Tensor, activation: str = "gelu", subtract: bool = True,
) -> Tensor:  # fmt: skip
    """o [B, T, HV, V] of contiguous tensors, from a zero state, differentiable in every tensor."""
    return _Refined.apply(
        q,
        k,
        v,
        log_decay,
        beta,
        write_k,
        r,
        gain,
        gate,
        activation,
        subtract,
        q.shape[-1] ** -0.5,
        None,
        None,
    )
