"""Causal softmax attention with rotary positions: the mixer to compare recurrences with, in the same
skeleton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from prism._hookpoints import HookPoints
from prism._init import Initializer
from prism.config import PrismConfig
from prism.mixer import register

ROTARY_BASE = 10_000.0
EXPLICIT_LENGTH = 512
"""Up to this many tokens the scores are formed, because torch's fused attention has no rule for vmap."""


class AttentionCache(NamedTuple):
    """Keys (rotated) and values of all tokens so far."""

    k: Float[Tensor, "B T H K"]
    v: Float[Tensor, "B T HV V"]


def rotate(x: Float[Tensor, "B T H K"], start: int = 0) -> Float[Tensor, "B T H K"]:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split layout; a last odd channel
    stays.
    """
    T, half = x.shape[1], x.shape[-1] // 2
    position = torch.arange(start, start + T, device=x.device, dtype=torch.float32)
    rate = ROTARY_BASE ** (-torch.arange(half, device=x.device, dtype=torch.float32) / max(half, 1))
    angle = (position[:, None] * rate)[None, :, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attend(
    q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], v: Float[Tensor, "B H S V"], start: int
) -> Float[Tensor, "B H T V"]:
    """Causal softmax(q k^T K^-1/2) v, q being tokens start to start + T - 1 of S = start + T."""
    T, S = q.shape[2], k.shape[2]
    if S > EXPLICIT_LENGTH and start == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(start)
    if S > EXPLICIT_LENGTH:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


@register("attention")
class Attention(nn.Module):
    """x [B, T, d] -> y [B, T, d]: q, k, v linear in x, rotary q and k, softmax(q k^T K^-1/2) v, linear out.

    Reads n_heads, n_value_heads (grouped: value head j attends with q and k of head j // (HV/H)), head_dim
    and expand_v, and neither convolution nor gate nor refinement. `in_proj` stacks the rows of q, k and v.
    """

    def __init__(self, config: PrismConfig) -> None:
        super().__init__()
        self.config = config
        d, H, HV, K, V = config.d_model, config.n_heads, config.value_heads, config.key_dim, config.value_dim
        self.rows = {"q": H * K, "k": H * K, "v": HV * V}
        self.in_proj = nn.Parameter(torch.empty(sum(self.rows.values()), d))
        self.out_proj = nn.Parameter(torch.empty(d, HV * V))
        self.points = HookPoints(*self.point_shapes(1, 1))
        self.initialize(Initializer(None))

    @torch.no_grad()
    def initialize(self, init: Initializer) -> None:
        parts = self.in_proj.split(list(self.rows.values()))
        for rows, name in zip(parts, self.rows, strict=True):
            rows.copy_(init.linear(f"in_proj.{name}", tuple(rows.shape)))
        self.out_proj.copy_(init.linear("out_proj", tuple(self.out_proj.shape)))

    def forward(
        self, x: Float[Tensor, "B T d"], cache: AttentionCache | None = None, use_cache: bool = False
    ) -> Any:
        """y; with `use_cache` also the cache after the last token."""
        config, points = self.config, self.points
        if cache is not None:
            (B, _, *size), expected = cache[0].shape, [x.shape[0], config.n_heads, config.key_dim]
            if [B, *size] != expected:
                raise ValueError(f"cache: expected keys of [B, H, K] = {expected}, came {[B, *size]}")
        q, k, v = F.linear(x, self.in_proj).split(list(self.rows.values()), -1)
        start = 0 if cache is None else cache[0].shape[1]
        q = rotate(q.unflatten(-1, (config.n_heads, -1)), start)
        k = rotate(k.unflatten(-1, (config.n_heads, -1)), start)
        v = v.unflatten(-1, (config.value_heads, -1))
        if points.active:
            q, k, v = points.fire("q", q), points.fire("k", k), points.fire("v", v)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        groups = config.value_heads // config.n_heads
        queries, keys = (t.repeat_interleave(groups, 2).transpose(1, 2) for t in (q, k))
        o = attend(queries, keys, v.transpose(1, 2), start).transpose(1, 2)
        if points.active:
            o = points.fire("out", o)
        y = F.linear(o.flatten(-2), self.out_proj)
        return (y, AttentionCache(k, v)) if use_cache else y

    def state_size(self) -> tuple[int, int]:
        """(0, 0): the cache grows with T, by H K + HV V floats a token."""
        return 0, 0

    def point_shapes(self, B: int, T: int) -> dict[str, tuple[int, ...]]:
        config = self.config
        key = (B, T, config.n_heads, config.key_dim)
        value = (B, T, config.value_heads, config.value_dim)
        return {"q": key, "k": key, "v": value, "out": value}
