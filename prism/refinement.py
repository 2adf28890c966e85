"""Input-anchored refinement (Eqs. 11 to 16): from the anchor u and the value v to L writes w^l (kappa^l)^T.

    kappa^l = W_kappa^l u      key of the write, L2-normalised            write_k    [B, T, HV, L, K]
    p^l     = W_p^l u          predicted gain                             gain       [B, T, HV, L, V]
    b^l     = sigmoid(W_b^l u) gate of the step                           step_gate  [B, T, HV, L]
    r^1     = v - u            residual (Eq. 14)                          residual   [B, T, HV, L + 1, V]
    delta^l = phi(p^l * r^l)   what the step finds (Eq. 15)               delta      [B, T, HV, L, V]
    r^{l+1} = r^l - delta^l    what it leaves (Eq. 16)
    w^l     = b^l delta^l      what it writes                             write_v    [B, T, HV, L, V]

u is [B, T, HV, V]; every projection reads all of it, HV V wide, and gives one result per value head.
Nothing here reads the state, except the serial anchor at the end of the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from prism._fused import padded_linear, split_linear
from prism._init import Initializer, exempt_from_weight_decay
from prism.config import PrismConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}
Pins = dict[str, tuple[Tensor, Tensor]]
"""Name of a tensor -> (mask, values): where an intervention has fixed it, and to what. Everything else
follows.
"""


class Refined(NamedTuple):
    """All tensors of a refinement, in the order in which they are made (shapes at the top of the file)."""

    anchor: Tensor
    gain: Tensor | None
    step_gate: Tensor | None
    residuals: tuple[Tensor, ...]
    """r^1 .. r^{L+1} one by one, as the chain used them; likewise the deltas. Empty, and other tensors
    None, where a kernel kept them to itself.
    """
    deltas: tuple[Tensor, ...]
    write_k: Tensor
    write_v: Tensor

    @property
    def residual(self) -> Float[Tensor, "B T HV L1 V"]:
        return torch.stack(self.residuals, 3)

    @property
    def delta(self) -> Float[Tensor, "B T HV L V"]:
        return torch.stack(self.deltas, 3)


def squash(x: Tensor, kind: str) -> Tensor:
    """A gate in its range: "sigmoid" (0, 1), "two_sigmoid" (0, 2), "raw"."""
    return x if kind == "raw" else torch.sigmoid(x) if kind == "sigmoid" else 2 * torch.sigmoid(x)


def l2_norm(x: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch K"]:
    """x / sqrt(|x|^2 + 1e-6), in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _pin(pins: Pins, name: str, tensor: Tensor) -> Tensor:
    if name not in pins:
        return tensor
    mask, values = pins[name]
    return torch.where(mask, values.to(tensor.dtype), tensor)


def _pin_step(pins: Pins, name: str, step: int, tensor: Tensor) -> Tensor:
    if name not in pins:
        return tensor
    mask, values = pins[name]
    return torch.where(mask[..., step, :], values[..., step, :].to(tensor.dtype), tensor)


class Refinement(nn.Module):
    """The projections of u and the chain of L steps.

    `proj` stacks the rows of all projections, so that one product serves them: keys [HV, steps of keys, K],
    gains [HV, L, V], gates [HV, L]. With `refine_rank` r the rows of keys and gains are bottlenecks [step,
    r], which `up_key` [steps of keys, HV K, r] and `up_gain` [L, HV V, r] follow.
    """

    def __init__(self, config: PrismConfig) -> None:
        super().__init__()
        self.config = config
        HV, K, V, L = config.value_heads, config.key_dim, config.value_dim, config.n_refine
        self.n_keys = {"own": L, "shared": 1, "base": 0}[config.refine_keys]
        self.n_gains = 0 if config.gain == "one" else L
        self.rank = config.refine_rank
        key_rows = self.n_keys * (HV * K if self.rank is None else self.rank)
        gain_rows = self.n_gains * (HV * V if self.rank is None else self.rank)
        self.sizes = [key_rows, gain_rows, HV * L]
        self.proj = nn.Parameter(torch.empty(sum(self.sizes), HV * V))
        self.up_key = self.up_gain = None
        if self.rank is not None and self.n_keys:
            self.up_key = nn.Parameter(torch.empty(self.n_keys, HV * K, self.rank))
        if self.rank is not None and self.n_gains:
            self.up_gain = nn.Parameter(torch.empty(self.n_gains, HV * V, self.rank))
        self.gate_bias = None
        if config.step_gate_bias is not None:
            self.gate_bias = nn.Parameter(torch.empty(HV, L))
        exempt_from_weight_decay(self.gate_bias)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        exempt_from_weight_decay(self.gate_bias)

    @torch.no_grad()
    def initialize(self, init: Initializer) -> None:
        """As nn.Linear, step by step: step l starts alike whatever the number of steps."""
        HV, width, rank = self.config.value_heads, self.proj.shape[1], self.rank
        keys, gains, gates = self.proj.split(self.sizes)
        for name, rows, steps in (("key", keys, self.n_keys), ("gain", gains, self.n_gains)):
            for l in range(steps):
                if rank is None:
                    step = rows.view(HV, steps, -1, width)[:, l]
                else:
                    step = rows.view(steps, rank, width)[l]
                    up = getattr(self, f"up_{name}")[l]
                    up.copy_(init.linear(f"up_{name}.{l}", tuple(up.shape)))
                step.copy_(init.linear(f"{name}.{l}", tuple(step.shape)))
        for l in range(self.config.n_refine):
            step = gates.view(HV, -1, width)[:, l]
            step.copy_(init.linear(f"gate.{l}", tuple(step.shape)))
        if self.gate_bias is not None and self.config.step_gate_bias is not None:
            self.gate_bias.fill_(self.config.step_gate_bias)

    def project(
        self, u: Float[Tensor, "B T HV V"], k: Float[Tensor, "B T H K"] | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """kappa, p (None: constant 1) and b. `k` is read where the refinement keys are the base key."""
        config, HV, L = self.config, self.config.value_heads, self.config.n_refine
        keys, gains, gates = split_linear(u.flatten(-2), self.proj, self.sizes)
        if self.n_keys == 0:
            assert k is not None
            kappa = k.repeat_interleave(HV // k.shape[2], 2).unsqueeze(3)
        else:
            kappa = self._rise(keys, self.up_key, self.n_keys)
            kappa = l2_norm(kappa) if config.refine_key_norm else kappa
        kappa = kappa.expand(-1, -1, -1, L, -1)
        gain = self._rise(gains, self.up_gain, L) if self.n_gains else None
        if gain is not None and config.gain == "sigmoid":
            gain = torch.sigmoid(gain)
        gates = gates.unflatten(-1, (HV, L))
        if self.gate_bias is not None:
            gates = gates + self.gate_bias
        return kappa, gain, squash(gates, config.step_gate)

    def in_one_kernel(self) -> bool:
        """Whether `prism.scan.triton.refine` has this configuration; others take the chain alone."""
        config = self.config
        plain = (config.refine_keys, config.gain, config.step_gate) == ("own", "learned", "sigmoid")
        return plain and self.rank is None and self.gate_bias is None and config.erase != "step"

    def _rise(self, rows: Tensor, up: Tensor | None, steps: int) -> Tensor:
        HV = self.config.value_heads
        if up is None:
            return rows.unflatten(-1, (HV, steps, -1))
        low = rows.unflatten(-1, (steps, -1))
        return torch.einsum("btlr,lor->btlo", low, up).unflatten(-1, (HV, -1)).transpose(2, 3)

    def forward(
        self,
        u: Float[Tensor, "B T HV V"],
        v: Float[Tensor, "B T HV V"],
        k: Float[Tensor, "B T H K"] | None,
        pins: Pins | None = None,
        fused: bool = False,
        minus_u: Float[Tensor, "B T HV V"] | None = None,
        v_again: Float[Tensor, "B T HV V"] | None = None,
    ) -> Refined:
        """The chain. `pins` fixes elements of the named tensors; whatever follows from them is computed
        from them. `fused`: in one kernel, which keeps neither residuals nor deltas and takes no pins, and
        hands gradients to `minus_u` and `v_again` (None: to u and v), as `prism.scan.triton.refine` says.
        """
        config, L = self.config, self.config.n_refine
        pins = pins or {}
        u = _pin(pins, "anchor", u)
        anchored, subtract = self._anchored(), config.residual == "subtract"
        if fused and not pins and self.in_one_kernel():
            from prism.scan.triton.refine import refine

            rows, given = padded_linear(u.flatten(-2), self.proj), (L, config.key_dim, config.activation)
            options = (*given, subtract, config.refine_key_norm, minus_u, v_again)
            writes = refine(rows, u if anchored else None, v, *options)
            return Refined(u, None, None, (), (), *writes)
        kappa, gain, gate = self.project(u, k)
        if gain is not None:
            gain = _pin(pins, "gain", gain)
        gate = _pin(pins, "step_gate", gate)
        phi = ACTIVATIONS[config.activation]
        r = v - u if anchored else v
        if fused and not pins:
            from prism.scan.triton.chain import chain

            write_v = chain(r, gain, gate, config.activation, subtract)
            return Refined(u, gain, gate, (), (), kappa, write_v)
        r = _pin_step(pins, "residual", 0, r)
        residuals, deltas = [r], []
        for l in range(L):
            delta = phi(r if gain is None else gain[..., l, :] * r)
            delta = _pin_step(pins, "delta", l, delta)
            r = _pin_step(pins, "residual", l + 1, r - delta if subtract else r)
            deltas.append(delta)
            residuals.append(r)
        write_v = _pin(pins, "write_v", gate.unsqueeze(-1) * torch.stack(deltas, 3))
        kappa = _pin(pins, "write_k", kappa)
        return Refined(u, gain, gate, tuple(residuals), tuple(deltas), kappa, write_v)

    def scan_in_one(
        self,
        u: Float[Tensor, "B T HV V"],
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B T H K"],
        v: Float[Tensor, "B T HV V"],
        log_decay: Float[Tensor, "B T HV"],
        beta: Float[Tensor, "B T HV"],
        state: Float[Tensor, "B HV K V"] | None,
        minus_u: Float[Tensor, "B T HV V"] | None,
        v_again: Float[Tensor, "B T HV V"] | None,
    ) -> tuple[Tensor, Tensor]:
        """o and the final state, where `in_one_kernel`: chain and scan as one operator, which keeps the
        writes too to itself."""
        from prism.scan.triton.refined_scan import refined_scan

        config, rows = self.config, padded_linear(u.flatten(-2), self.proj).to(q.dtype)
        options = config.n_refine, config.activation, config.residual == "subtract", config.refine_key_norm
        # A convolution that goes on from a cache gives float32 under autocast.
        given = rows, u.to(q.dtype) if self._anchored() else None, *options, minus_u, v_again
        return refined_scan(q, k, v, log_decay, beta, *given, scale=config.scale, initial_state=state)

    def _anchored(self) -> bool:
        return self.config.residual_start == "value-anchor" and self.config.anchor != "none"


Factors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""k, v, beta, write_k, write_v as the scan takes them."""


def true_read(
    refinement: Refinement,
    assemble: Callable[[Tensor, Tensor, Tensor | None, Refined], Factors],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    log_decay: Float[Tensor, "B T HV"],
    beta: Float[Tensor, "B T HV"] | None,
    state: Float[Tensor, "B HV K V"],
    pins: Pins,
) -> Float[Tensor, "B T HV V"]:
    """The "state" anchor u_t = Sbar_t k_t: the serial solver that the other anchors amortise.

    A loop over tokens, each of which needs the state that the refinement of the one before has written:
    slow by nature, meant as a yardstick. `assemble` turns a token's
    tensors into the scan's; the recurrence is the one of `prism.scan.recurrent`.
    """
    groups = v.shape[2] // k.shape[2]
    reads = []
    for t in range(k.shape[1]):
        now = slice(t, t + 1)
        here = {name: (mask[:, now], values[:, now]) for name, (mask, values) in pins.items()}
        decayed = state * log_decay[:, t].to(state.dtype).exp()[..., None, None]
        key = k[:, t].repeat_interleave(groups, 1).to(state.dtype)
        read = torch.einsum("bhkv,bhk->bhv", decayed, key)
        refined = refinement(read.to(v.dtype).unsqueeze(1), v[:, now], k[:, now], here)
        reads.append(refined.anchor)
        gate = None if beta is None else beta[:, now]
        *_, scan_v, scan_beta, write_k, write_v = assemble(k[:, now], v[:, now], gate, refined)
        error = scan_beta[:, 0, :, None].to(state.dtype) * (scan_v[:, 0].to(state.dtype) - read)
        state = decayed + torch.einsum("bhk,bhv->bhkv", key, error)
        if write_k is not None and write_v is not None:
            writes = write_k[:, 0].to(state.dtype), write_v[:, 0].to(state.dtype)
            state = state + torch.einsum("bhlk,bhlv->bhkv", *writes)
    return torch.cat(reads, 1)
