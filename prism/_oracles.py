"""Inputs for comparisons, and loops to compare with, written for `prism.verify` and the tests alone.

The loops share no code with `prism.scan`: states are V x K matrices as on paper, tokens one after the other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def random_factors(
    seed: int, L: int, device: Any, T: int = 13, H: int = 2, HV: int = 4, K: int = 8, V: int = 6
) -> dict[str, Any]:
    """Scan inputs in float64: unit keys, beta in (0, 2), decays from 1 to exp(-20), a state to start from."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    log_decay = -0.3 * normal(2, T, HV).abs()
    log_decay[:, 3::5] = -20.0
    log_decay[:, 4::5] = 0.0
    made = {
        "q": normal(2, T, H, K),
        "k": F.normalize(normal(2, T, H, K), dim=-1),
        "v": normal(2, T, HV, V),
        "log_decay": log_decay,
        "beta": 2 * torch.sigmoid(normal(2, T, HV)),
        "write_k": F.normalize(normal(2, T, HV, L, K), dim=-1) if L else None,
        "write_v": normal(2, T, HV, L, V) if L else None,
        "initial_state": normal(2, HV, K, V),
    }
    return {name: None if t is None else t.to(device) for name, t in made.items()}


def gated_delta_loop(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet by sequences, heads and tokens: o [B, T, HV, V] and the state [B, HV, K, V] after the
    last.
    """
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    outs, states = [], []
    for b in range(B):
        for j in range(HV):
            i = j // (HV // H)
            S = v.new_zeros(V, K) if initial_state is None else initial_state[b, j].T
            for t in range(T):
                key = k[b, t, i]
                S = log_decay[b, t, j].exp() * S
                S = S + torch.outer(beta[b, t, j] * (v[b, t, j] - S @ key), key)
                outs.append(S @ q[b, t, i] / math.sqrt(K))
            states.append(S.T)
    return torch.stack(outs).view(B, HV, T, V).transpose(1, 2), torch.stack(states).view(B, HV, K, V)


def longer_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    write_k: Tensor | None,
    write_v: Tensor | None,
    initial_state: Tensor,
) -> tuple[Tensor, Tensor]:
    """A diagonal-plus-low-rank rule S <- D S + (S a) b^T + w c^T over L + 1 sub-tokens for each token.

    The first has D = alpha, a = -alpha beta k, b = k and the base write; the others D = 1, a = 0 and one
    write each;
    the last is read (math: the longer-sequence identity).
    """
    T, H, K = k.shape[1:]
    HV = v.shape[2]
    L = 0 if write_k is None else write_k.shape[3]
    q, k = q.repeat_interleave(HV // H, 2), k.repeat_interleave(HV // H, 2)
    alpha = log_decay.exp().unsqueeze(-1)
    zero, one = torch.zeros_like(k), torch.ones_like(alpha)
    D, a, b = [alpha], [-alpha * beta.unsqueeze(-1) * k], [k]
    w, c = [beta.unsqueeze(-1) * v], [k]
    for l in range(L):
        assert write_k is not None
        assert write_v is not None
        D, a, b = [*D, one], [*a, zero], [*b, zero]
        w, c = [*w, write_v[..., l, :]], [*c, write_k[..., l, :]]
    decay, a_row, b_row, w_row, c_row = (torch.stack(rows, 2).flatten(1, 2) for rows in (D, a, b, w, c))
    S = initial_state.transpose(-1, -2)
    outs = []
    for s in range(T * (L + 1)):
        read = (S * a_row[:, s].unsqueeze(-2)).sum(-1)
        S = decay[:, s].unsqueeze(-1) * S + read.unsqueeze(-1) * b_row[:, s].unsqueeze(-2)
        S = S + w_row[:, s].unsqueeze(-1) * c_row[:, s].unsqueeze(-2)
        if s % (L + 1) == L:
            outs.append((S * q[:, s // (L + 1)].unsqueeze(-2)).sum(-1) / math.sqrt(K))
    return torch.stack(outs, 1), S.transpose(-1, -2)


def gated_delta_layer(
    weights: dict[str, Tensor], x: Tensor, H: int, HV: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet's layer from fla's weights, written from its description: y [B, T, d] and the final
    state.
    """

    def conv(y: Tensor, taps: Tensor) -> Tensor:
        y = F.conv1d(y.transpose(1, 2), taps, padding=taps.shape[-1] - 1, groups=taps.shape[0])
        return F.silu(y[..., : x.shape[1]].transpose(1, 2))

    q, k, v = (conv(x @ weights[f"{n}_proj.weight"].T, weights[f"{n}_conv1d.weight"]) for n in "qkv")
    q, k, v = q.unflatten(-1, (H, -1)), k.unflatten(-1, (H, -1)), v.unflatten(-1, (HV, -1))
    q, k = (y / (y.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    dt = x @ weights["a_proj.weight"].T + weights["dt_bias"]
    log_decay = -weights["A_log"].exp() * (1 + dt.exp()).log()
    beta = 1 / (1 + (-(x @ weights["b_proj.weight"].T)).exp())
    o, state = gated_delta_loop(q, k, v, log_decay, beta)
    o = o / (o.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights["o_norm.weight"]
    o = o * F.silu((x @ weights["g_proj.weight"].T).unflatten(-1, (HV, -1)))
    return o.flatten(-2) @ weights["o_proj.weight"].T, state
