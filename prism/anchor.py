"""The anchor u_t: what stands for the true read Sbar_t k_t in the refinement (Eq. 9), and the causal
convolution.

Shapes: B batch, T tokens, C channels, W taps, d model width, HV value heads, V value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from prism._init import Initializer
from prism.config import PrismConfig


def causal_conv(
    x: Float[Tensor, "B T C"], weight: Float[Tensor, "C W"], tail: Float[Tensor, "B W1 C"] | None = None
) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "B W1 C"]]:
    """Causal depthwise convolution, y_t = sum_j weight[:, W-1-j] x_{t-j} (the order of taps of nn.Conv1d).

    `tail` holds the W - 1 inputs before x (None: zeros). Returns y and the tail for the tokens that follow.
    A sum of W shifted products is faster on a CPU than conv1d with groups, and batches under vmap.
    """
    T, taps = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, taps - 1, 0)) if tail is None else torch.cat([tail.to(x), x], 1)
    y = padded[:, :T] * weight[:, 0]
    for j in range(1, taps):
        y = torch.addcmul(y, padded[:, j : j + T], weight[:, j])
    return y, padded[:, T:]


def tail_of(x: Float[Tensor, "B T C"], taps: int) -> Float[Tensor, "B W1 C"]:
    """What `causal_conv` returns as the tail where x starts a sequence."""
    missing = taps - 1 - x.shape[1]
    return F.pad(x, (0, 0, missing, 0)) if missing > 0 else x[:, -missing:]


class Anchor(nn.Module):
    """u_t in value space R^{HV V}, from the tokens up to t.

    kind "shortconv": SiLU(ShortConv x) (Algorithm 1, line 4); "token": SiLU(x_t); "none": x_t, to be read
    by the refinement's projections but not subtracted. Where d differs from HV V, a learned projection
    follows. The fourth kind, "state", is the true read and depends on the recurrence:
    `prism.refinement.true_read`.
    """

    def __init__(self, config: PrismConfig) -> None:
        super().__init__()
        d, width = config.d_model, config.value_heads * config.value_dim
        self.kind = config.anchor
        self.heads = config.value_heads
        self.conv = nn.Parameter(torch.empty(d, config.anchor_width)) if self.kind == "shortconv" else None
        self.proj = nn.Parameter(torch.empty(width, d)) if width != d else None

    @torch.no_grad()
    def initialize(self, init: Initializer) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            parameter.copy_(init.linear(name, tuple(parameter.shape)))

    def forward(
        self, x: Float[Tensor, "B T d"], tail: Float[Tensor, "B W1 d"] | None = None, fused: bool = False
    ) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "B T HV V"] | None, Float[Tensor, "B W1 d"] | None]:
        """Returns u, what stands for -u in a backward pass and holds no values (None: u itself), and the
        convolution's tail (None without a convolution).

        `fused`: convolution and SiLU in one kernel, where x starts a sequence.
        """
        minus_u: Tensor | None = None
        if fused and self.conv is not None and tail is None:
            from prism.scan.triton.short_conv import short_conv

            u, minus_u = short_conv(x, self.conv, (1,), (x.shape[-1],), (False,), again=(-1,))
            u, tail = u.squeeze(2), tail_of(x, self.conv.shape[1])
            minus_u = minus_u.squeeze(2).unflatten(-1, (self.heads, -1)) if self.proj is None else None
        else:
            u, tail = causal_conv(x, self.conv, tail) if self.conv is not None else (x, None)
            u = u if self.kind == "none" else F.silu(u)
        if self.proj is not None:
            u = F.linear(u, self.proj)
        return u.unflatten(-1, (self.heads, -1)), minus_u, tail
