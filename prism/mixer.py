"""The PRISM mixer: Gated DeltaNet's base path, an anchor, L refinement steps, one scan.

Symbols, and where they are in the code (paper: arXiv 2602.10796; B batch, T tokens, d model width):

    H, HV    key heads, value heads (HV a multiple of H)        n_heads, value_heads
    K, V, L  key width, value width, refinement steps           key_dim, value_dim, n_refine
    q, k     query, key; L2-normalised per head                 [B, T, H, K]
    v        value                                              [B, T, HV, V]
    g        log of the decay alpha, <= 0                       log_decay   [B, T, HV]
    beta     gate of erase and base write                       beta        [B, T, HV]
    u        anchor, stands for the true read Sbar_t k_t        anchor      [B, T, HV, V]
    p, r, delta, b  of refinement.py                            gain, residual, delta, step_gate
    kappa    keys of the refinement writes                      write_k     [B, T, HV, L, K]
    w        values of the refinement writes, b already in      write_v     [B, T, HV, L, V]
    S        state, V x K on paper                              state       [B, HV, K, V]
    o        read S q, before norm and gate                     out         [B, T, HV, V]

    Sbar_t = exp(g_t) S_{t-1}
    S_t    = Sbar_t + beta_t (v_t - Sbar_t k_t) k_t^T + sum_l w_t^l kappa_t^l^T
    o_t    = scale * S_t q_t
    y_t    = W_out (RMSNorm(o_t) * SiLU(W_gate x_t))

Every tensor named above is a hook point: `points` below and prism/hooks.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from prism._fused import HALF, padded_linear, working_dtype
from prism._hookpoints import HookPoints, Pinned, on_gradient, on_gradients
from prism._init import Initializer, exempt_from_weight_decay
from prism.anchor import Anchor, causal_conv, tail_of
from prism.config import PrismConfig
from prism.refinement import Factors, Pins, Refined, Refinement, l2_norm, squash, true_read
from prism.scan import prism_scan, resolve_backend

MIXERS: dict[str, Callable[[PrismConfig], nn.Module]] = {}
"""Name in `PrismConfig.mixer` -> constructor."""


def register(name: str) -> Callable[[Any], Any]:
    """Class decorator that adds a mixer under `name`, for `PrismConfig(mixer=name)`.

    A mixer is an nn.Module made from a PrismConfig. It offers
        forward(x [B, T, d], cache=None, use_cache=False) -> y [B, T, d], or (y, cache) with `use_cache`;
            causal; a cache is never edited in place; no value-dependent control flow (it runs under vmap);
        initialize(init: Initializer): fills the parameters, each by its name;
        state_size() -> (state, tails): floats per sequence of the cache at the end of it (0 where it grows
        with T);
        points: a HookPoints; point_shapes(B, T) -> {name: shape} for each of its names.
    """

    def add(mixer: Any) -> Any:
        if name in MIXERS:
            raise ValueError(f"register: expected a new name, came {name!r}, which {MIXERS[name]!r} has")
        MIXERS[name] = mixer
        return mixer

    return add


def build_mixer(config: PrismConfig) -> nn.Module:
    if config.mixer not in MIXERS:
        raise ValueError(f"mixer: expected one of {', '.join(sorted(MIXERS))}, came {config.mixer!r}")
    # The model initializes it by name afterwards; what a constructor draws must not move the global
    # generator.
    with torch.random.fork_rng(devices=[]):
        return MIXERS[config.mixer](config)


CHAIN = ("anchor", "gain", "step_gate", "residual", "delta", "write_k", "write_v")
"""The hook points of the refinement, in the order in which their edits run."""


class ScanFactors(NamedTuple):
    """What the scan was given, but for q: from it the state after any token can be computed again."""

    k: Float[Tensor, "B T H K"]
    v: Float[Tensor, "B T HV V"]
    log_decay: Float[Tensor, "B T HV"]
    beta: Float[Tensor, "B T HV"]
    write_k: Float[Tensor, "B T HV R K"] | None
    """R = L, or L + 1 where the base write is a row of its own (erase="none"); None where R = 0."""
    write_v: Float[Tensor, "B T HV R V"] | None
    initial_state: Float[Tensor, "B HV K V"] | None

    def part(self, start: int, stop: int, initial_state: Tensor | None) -> ScanFactors:
        """Tokens start to stop - 1, from another state."""
        tensors = [None if f is None else f[:, start:stop] for f in self[:-1]]
        return ScanFactors._make([*tensors, initial_state])

    def scan(self, q: Float[Tensor, "B T H K"], **options: Any) -> tuple[Tensor, Tensor | None]:
        """`prism_scan` of these."""
        return prism_scan(q, *self[:-1], initial_state=self.initial_state, **options)  # type: ignore[arg-type]


class PrismCache(NamedTuple):
    """What a mixer needs of the tokens so far. A value: later passes make a new one and leave this one
    alone.
    """

    state: Float[Tensor, "B HV K V"]
    conv: Float[Tensor, "B W1 C"] | None
    """The last short_conv - 1 inputs of the convolution on q, k, v."""
    anchor: Float[Tensor, "B W1 d"] | None
    """The last anchor_width - 1 inputs of the anchor's convolution."""


def _hooked(*modules: nn.Module | None) -> bool:
    """Whether PyTorch's own hooks look on at a module, or change what it takes or gives."""
    return bool(nn.modules.module._has_any_global_hook()) or any(
        bool(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks)
        for m in modules
        if m is not None
    )


class _Projections(NamedTuple):
    """What a mixer forms of its input; None where nothing uses it."""

    q: Tensor
    k: Tensor | None
    v: Tensor
    v_again: Tensor | None
    """Stands for v in a backward pass: takes the refinement's gradient of it (`short_conv`)."""
    gate: Tensor | None
    beta: Tensor | None
    log_decay: Tensor
    tail: Tensor | None
    """Of the convolution, for the tokens that follow."""


@register("prism")
class PrismMixer(nn.Module):
    """Sequence mixer, x [B, T, d] -> y [B, T, d], of any `PrismConfig`.

    At n_refine=0 it has exactly the parameters of Gated DeltaNet: `in_proj` stacks the rows of fla's
    q_proj, k_proj, v_proj, g_proj, b_proj and a_proj (those in use, in this order; `rows` gives the sizes),
    `conv` the three convolutions' channels; A_log, dt_bias, `norm` and `out_proj` are fla's own. A_log and
    dt_bias are flagged `_no_weight_decay`.
    """

    def __init__(
        self, config: PrismConfig, seed: int | None = None, *, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.config = config
        d, H, HV, K, V = config.d_model, config.n_heads, config.value_heads, config.key_dim, config.value_dim
        ranged_erase = config.erase not in ("none", "step")
        refines = config.n_refine > 0
        reads_key = refines and (config.refine_keys == "base" or config.anchor == "state")
        self.rows = {
            "q": H * K,
            "k": H * K if config.base_write or ranged_erase or reads_key else 0,
            "v": HV * V,
            "gate": HV * V if config.output_gate else 0,
            "beta": HV if config.base_write or ranged_erase else 0,
            "decay": HV if config.decay != "none" else 0,
        }
        channels = self.rows["q"] + self.rows["k"] + self.rows["v"]
        with torch.device(device or torch.get_default_device()):
            needs_anchor = (refines and config.anchor != "state") or config.source == "anchor"
            self.anchor = Anchor(config) if needs_anchor else None
            fan_in = HV * V if config.source == "anchor" else d
            self.in_proj = nn.Parameter(torch.empty(sum(self.rows.values()), fan_in))
            self.conv = nn.Parameter(torch.empty(channels, config.short_conv)) if config.short_conv else None
            self.A_log = nn.Parameter(torch.empty(HV)) if config.decay == "gdn" else None
            self.dt_bias = nn.Parameter(torch.empty(HV)) if config.decay == "gdn" else None
            self.refine = Refinement(config) if refines else None
            self.norm = nn.Parameter(torch.empty(V))
            self.out_proj = nn.Parameter(torch.empty(d, HV * V))
        self.points = HookPoints(*self.point_shapes(1, 1))
        self.initialize(Initializer(seed))
        self.to(dtype=dtype)
        exempt_from_weight_decay(self.A_log, self.dt_bias)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        exempt_from_weight_decay(self.A_log, self.dt_bias)

    @torch.no_grad()
    def initialize(self, init: Initializer) -> None:
        """As fla: linear and convolution weights uniform within 1 / sqrt(fan in), A uniform in (0, 16], dt
        log-uniform in [1e-3, 0.1], stored as inverse softplus.
        """
        for rows, name in zip(self.in_proj.split(list(self.rows.values())), self.rows, strict=True):
            rows.copy_(init.linear(f"in_proj.{name}", tuple(rows.shape)))
        if self.conv is not None:
            sizes = [self.rows[name] for name in "qkv"]
            for rows, name in zip(self.conv.split(sizes), "qkv", strict=True):
                rows.copy_(init.linear(f"conv.{name}", tuple(rows.shape)))
        if self.A_log is not None and self.dt_bias is not None:
            # 1 - uniform[0, 1) is never 0, so the logarithm is finite.
            self.A_log.copy_((16 * (1 - init.uniform("A_log", tuple(self.A_log.shape)))).log())
            dt = init.uniform("dt_bias", tuple(self.dt_bias.shape), math.log(1e-3), math.log(0.1)).exp()
            dt = dt.clamp(min=1e-4)
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
        if self.anchor is not None:
            self.anchor.initialize(init.child("anchor"))
        if self.refine is not None:
            self.refine.initialize(init.child("refine"))
        self.norm.fill_(1.0)
        self.out_proj.copy_(init.linear("out_proj", tuple(self.out_proj.shape)))

    def forward(
        self, x: Float[Tensor, "B T d"], cache: PrismCache | None = None, use_cache: bool = False
    ) -> Any:
        """y [B, T, d]; with `use_cache` also the cache after the last token, to be passed with the tokens
        that follow.

        Raises:
            ValueError: x of another shape, or a cache of another batch or mixer.
        """
        config, points = self.config, self.points
        if x.ndim != 3 or x.shape[-1] != config.d_model:
            raise ValueError(f"x: expected shape [B, T, d_model={config.d_model}], came {list(x.shape)}")
        before = PrismCache(*cache) if cache is not None else None
        if before is not None:
            shape = [x.shape[0], config.value_heads, config.key_dim, config.value_dim]
            if list(before.state.shape) != shape:
                came = list(before.state.shape)
                raise ValueError(f"cache: expected a state of shape [B, HV, K, V] = {shape}, came {came}")
        fused = self._fuses(x)
        if fused:
            x = x.to(working_dtype(x))
        u, anchor_tail, minus_u, v_again = None, None, None, None
        if self.anchor is not None:
            u, minus_u, anchor_tail = self.anchor(x, before.anchor if before else None, fused)
        source = u.flatten(-2) if config.source == "anchor" and u is not None else x
        tail = before.conv if before else None
        q, k, v, v_again, gate, beta, log_decay, conv_tail = self._project(source, tail, fused)
        if points.active:
            q, v, log_decay = points.fire("q", q), points.fire("v", v), points.fire("log_decay", log_decay)
            k = points.fire("k", k) if k is not None else None
            beta = points.fire("beta", beta) if beta is not None else None
        state = before.state if before else None
        whole = points.active or _hooked(self.anchor, self.refine)  # hooks see whole gradients
        others = (None, None) if whole else (minus_u, v_again)
        if fused and not whole and self._scans_in_one(q, v):
            assert self.refine is not None
            assert u is not None
            assert k is not None
            assert beta is not None
            o, state = self.refine.scan_in_one(u, q, k, v, log_decay, beta, state, *others)
        else:
            refined = None
            if self.refine is not None:
                refined = self._refine(u, k, v, log_decay, beta, state, fused, others)
            scan_k, scan_v, scan_beta, write_k, write_v = self._assemble(k, v, beta, refined)
            if points.active and config.erase == "step":
                scan_k = points.fire("k", scan_k) if k is None else scan_k
                scan_beta = points.fire("beta", scan_beta)
            if scan_k.shape[2] != q.shape[2]:
                q = q.repeat_interleave(scan_k.shape[2] // q.shape[2], 2)
            o, state = self._scan(q, scan_k, scan_v, log_decay, scan_beta, write_k, write_v, state, use_cache)
        if points.active:
            o = points.fire("out", o)
        o = F.rms_norm(o.to(self.norm.dtype), o.shape[-1:], self.norm, config.norm_eps)
        if gate is not None:
            o = o * F.silu(gate.unflatten(-1, o.shape[-2:]))
        y = F.linear(o.flatten(-2), self.out_proj)
        if not use_cache:
            return y
        assert state is not None
        return y, PrismCache(state, *(None if t is None else t.clone() for t in (conv_tail, anchor_tail)))

    def _fuses(self, x: Tensor) -> bool:
        """Whether kernels stand in for formulas: in half precision, where the scan is a kernel too."""
        return x.is_cuda and working_dtype(x) in HALF and self.backend(x) == "triton"

    def _scans_in_one(self, q: Tensor, v: Tensor) -> bool:
        """Whether refinement and scan run as one operator: where the scan takes k, v, beta and the writes as
        they are, and its kernels work on chunks."""
        config, refine = self.config, self.refine
        if type(refine) is not Refinement or config.erase in ("none", "step") or not config.base_write:
            return False
        if config.anchor == "state" or not refine.in_one_kernel():
            return False
        from prism.scan.triton.refined_scan import takes

        return takes(q, v)

    def _project(self, source: Tensor, conv_tail: Tensor | None, fused: bool = False) -> _Projections:
        config = self.config
        qkv_rows = self.rows["q"] + self.rows["k"] + self.rows["v"]
        sizes = [self.rows["gate"], self.rows["beta"], self.rows["decay"]]
        if fused:
            # Two products, so that the gradient of each comes from one kernel, which no copy puts together.
            before, gate_rows, behind = self.in_proj.split([qkv_rows, sizes[0], sum(sizes[1:])])
            gate = F.linear(source, gate_rows)
            rows = padded_linear(source, torch.cat([before, behind]))
            qkv, beta, decay, _ = rows.split(
                [qkv_rows, *sizes[1:], rows.shape[-1] - qkv_rows - len(behind)], -1
            )
        else:
            qkv, gate, beta, decay = F.linear(source, self.in_proj).split([qkv_rows, *sizes], -1)
        k: Tensor | None
        v_again: Tensor | None = None
        if fused and self.conv is not None and conv_tail is None:
            q, k, v, rest, v_again = self._convolve(rows)
            beta, decay = rest.split([*sizes[1:], rest.shape[-1] - len(behind)], -1)[:2]
            tail = tail_of(qkv, self.conv.shape[1])
        else:
            tail = None
            if self.conv is not None:
                qkv, tail = causal_conv(qkv, self.conv, conv_tail)
            if config.qkv_activation == "silu":
                qkv = F.silu(qkv)
            qk, v = qkv.split([qkv_rows - self.rows["v"], self.rows["v"]], -1)
            qk, v = qk.unflatten(-1, (-1, config.key_dim)), v.unflatten(-1, (config.value_heads, -1))
            if config.qk_norm:
                qk = l2_norm(qk)
            q, *keys = qk.split(config.n_heads, 2)
            k = keys[0] if keys else None
        erase = squash(beta, "sigmoid" if config.erase == "none" else config.erase)
        optional = gate if self.rows["gate"] else None, erase if self.rows["beta"] else None
        return _Projections(q, k, v, v_again, *optional, self._log_decay(decay, source), tail)

    def _convolve(self, rows: Float[Tensor, "B T R"]) -> tuple[Any, ...]:
        """q, k (None), v, the channels that are not convolved, and v_again."""
        from prism.scan.triton.short_conv import short_conv

        assert self.conv is not None
        config, H, HV = self.config, self.config.n_heads, self.config.value_heads
        keys = [config.key_dim] * (2 if self.rows["k"] else 1)
        widths, unit = [*keys, config.value_dim], [config.qk_norm for _ in keys] + [False]
        heads, silu = [H for _ in keys] + [HV], config.qkv_activation == "silu"
        again = [*(0 for _ in keys), int(self.refine is not None)]
        made = short_conv(rows, self.conv, heads, widths, unit, silu, again)
        v_again = made[-1] if self.refine is not None else None
        rest = made[len(heads)] if rows.shape[-1] > self.conv.shape[0] else rows[..., :0]
        return made[0], made[1] if self.rows["k"] else None, made[len(keys)], rest, v_again

    def _log_decay(self, decay: Tensor, source: Tensor) -> Float[Tensor, "B T HV"]:
        wide = torch.promote_types(source.dtype, torch.float32)
        if self.config.decay == "none":
            return source.new_zeros(*source.shape[:2], self.config.value_heads, dtype=wide)
        if self.A_log is None or self.dt_bias is None:
            return F.logsigmoid(decay.to(wide))
        return -self.A_log.to(wide).exp() * F.softplus(decay.to(wide) + self.dt_bias.to(wide))

    def _assemble(self, k: Tensor | None, v: Tensor, beta: Tensor | None, refined: Refined | None) -> Factors:
        """k, v, beta, write_k, write_v as the scan takes them, for each kind of erase (math in
        `PrismConfig`).
        """
        config = self.config
        write_k, write_v = (refined.write_k, refined.write_v) if refined is not None else (None, None)
        value = v if config.base_write else torch.zeros_like(v)
        if config.erase == "step":
            assert refined is not None
            assert refined.step_gate is not None
            return refined.write_k[:, :, :, 0], value, refined.step_gate[..., 0], write_k, write_v
        if config.erase == "none":
            if config.base_write:
                assert k is not None
                assert beta is not None
                row_k = k.repeat_interleave(v.shape[2] // k.shape[2], 2).unsqueeze(3)
                row_v = (beta.unsqueeze(-1) * v).unsqueeze(3)
                write_k = row_k if write_k is None else torch.cat([row_k, write_k], 3)
                write_v = row_v if write_v is None else torch.cat([row_v, write_v], 3)
            if k is None:
                k = v.new_zeros(*v.shape[:2], config.n_heads, config.key_dim)
            return k, value, v.new_zeros(v.shape[:3]), write_k, write_v
        assert k is not None
        assert beta is not None
        return k, value, beta, write_k, write_v

    def _refine(
        self,
        u: Tensor | None,
        k: Tensor | None,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        state: Tensor | None,
        fused: bool,
        others: tuple[Tensor | None, Tensor | None],
    ) -> Refined:
        """The refinement, with the anchor from the state where it is serial, and with what hooks change in
        it.

        An edit fixes the elements that it changes; whatever follows from them is computed again from them,
        and then the next edit runs. Readers see the tensors after all edits.
        """
        assert self.refine is not None
        refine, points = self.refine, self.points
        watched = points.active and points.wants(*CHAIN)
        serial = u is None or (points.active and any(points.of("anchor", "true_read")))

        def settle(pins: Pins) -> Refined:
            anchor = u
            if serial:
                if k is None:
                    raise ValueError("swap_anchor: expected a mixer with a key of its own, came one without")
                start = state if state is not None else self._zero_state(v)
                anchor = true_read(refine, self._assemble, k, v, log_decay, beta, start, pins)
            return refine(anchor, v, k, pins, fused and not watched, *others)

        refined = settle({})
        if not watched:
            return refined
        pins: Pins = {}
        for name in CHAIN:
            for item in points.of(name, "edit"):
                was = getattr(refined, name)
                made = points.apply(item, was)
                if made is was:
                    continue
                mask, values = (made.mask, made.values) if isinstance(made, Pinned) else (made != was, made)
                # `was` holds what earlier edits fixed, which stays fixed.
                values = torch.where(mask, values, was)
                pins[name] = (mask | pins[name][0] if name in pins else mask, values)
                refined = settle(pins)
        for name in CHAIN:
            for item in points.of(name, "read"):
                item.function(getattr(refined, name), hook=points.hook(name))
            for item in points.of(name, "backward"):
                if name in ("residual", "delta"):
                    on_gradients(getattr(refined, f"{name}s"), item.function, points.hook(name))
                else:
                    on_gradient(getattr(refined, name), item.function, points.hook(name))
        return refined

    def _zero_state(self, v: Tensor) -> Float[Tensor, "B HV K V"]:
        dtype = torch.promote_types(v.dtype, torch.float32)
        return v.new_zeros(
            v.shape[0], self.config.value_heads, self.config.key_dim, self.config.value_dim, dtype=dtype
        )

    def _scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        write_k: Tensor | None,
        write_v: Tensor | None,
        state: Tensor | None,
        output_final_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The scan, in one pass, or in pieces where a hook replaces the state between two tokens."""
        points, dtype = self.points, working_dtype(q)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if beta.dtype != torch.float32:
            beta = beta.to(dtype)
        if write_k is not None and write_v is not None:
            write_k, write_v = write_k.to(dtype), write_v.to(dtype)
        factors = ScanFactors(k, v, log_decay, beta, write_k, write_v, state)
        options: dict[str, Any] = {"scale": self.config.scale, "backend": self.config.scan_backend}
        if not (points.active and points.wants("state")):
            return factors.scan(q, output_final_state=output_final_state, **options)

        T = q.shape[1]
        edits = [
            (T - 1 if item.position is None else item.position, item) for item in points.of("state", "edit")
        ]
        for position, _ in edits:
            if not -T <= position < T:
                raise ValueError(f"{points.prefix}state: expected positions in [{-T}, {T}), came {position}")
        outs, patches, start = [], {}, 0
        for stop in [*sorted({position % T + 1 for position, _ in edits} - {T}), T]:
            part = factors.part(start, stop, state)
            o, state = part.scan(q[:, start:stop], output_final_state=True, **options)
            assert state is not None
            for position, item in edits:
                if position % T == stop - 1:
                    state = points.replace(item, state.unsqueeze(1)).squeeze(1)
                    patches[stop - 1] = state
            outs.append(o)
            start = stop
        assert state is not None
        points.read("state", state.unsqueeze(1))
        for item in points.of("state", "factors"):
            item.function(factors, patches, hook=points.hook("state"))
        return torch.cat(outs, 1), state

    def factor_shapes(self, B: int, T: int) -> dict[str, tuple[int, ...]]:
        """Shapes of `ScanFactors` (no rows of writes: 0)."""
        config = self.config
        HV, K, V = config.value_heads, config.key_dim, config.value_dim
        rows = config.n_refine + (config.erase == "none" and config.base_write)
        return {
            "k": (B, T, HV if config.erase == "step" else config.n_heads, K),
            "v": (B, T, HV, V),
            "log_decay": (B, T, HV),
            "beta": (B, T, HV),
            "write_k": (B, T, HV, rows, K),
            "write_v": (B, T, HV, rows, V),
            "initial_state": (B, HV, K, V),
        }

    def backend(self, x: Float[Tensor, "B T d"]) -> str:
        """The scan backend that a forward pass on x runs."""
        config, dtype = self.config, working_dtype(x)
        q = x.new_empty(1, 1, config.n_heads, config.key_dim, dtype=dtype)
        v = x.new_empty(1, 1, config.value_heads, config.value_dim, dtype=dtype)
        return resolve_backend(q, v, backend=config.scan_backend)

    def state_size(self) -> tuple[int, int]:
        """Floats per sequence that a cache holds: (recurrent state, convolution tails)."""
        config = self.config
        state = config.value_heads * config.key_dim * config.value_dim
        tails = self.conv.shape[0] * (config.short_conv - 1) if self.conv is not None else 0
        if self.anchor is not None and self.anchor.conv is not None:
            tails += config.d_model * (config.anchor_width - 1)
        return state, tails

    def point_shapes(self, B: int, T: int) -> dict[str, tuple[int, ...]]:
        """Shape of every hook point, of the state for one position."""
        config = self.config
        H, HV, K, V, L = config.n_heads, config.value_heads, config.key_dim, config.value_dim, config.n_refine
        shapes: dict[str, tuple[int, ...]] = {"q": (B, T, H, K)}
        if self.rows["k"]:
            shapes["k"] = (B, T, H, K)
        elif config.erase == "step":
            shapes["k"] = (B, T, HV, K)
        shapes["v"] = (B, T, HV, V)
        if self.rows["beta"] or config.erase == "step":
            shapes["beta"] = (B, T, HV)
        shapes["log_decay"] = (B, T, HV)
        if L:
            shapes["anchor"] = (B, T, HV, V)
            shapes |= {"gain": (B, T, HV, L, V)} if config.gain != "one" else {}
            shapes |= {
                "step_gate": (B, T, HV, L),
                "residual": (B, T, HV, L + 1, V),
                "delta": (B, T, HV, L, V),
            }
            shapes |= {"write_k": (B, T, HV, L, K), "write_v": (B, T, HV, L, V)}
        return {**shapes, "state": (B, 1, HV, K, V), "out": (B, T, HV, V)}
