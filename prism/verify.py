"""What must be equal, compared: `run()` returns one row per identity, tensor and backend.

The independent recurrences are in `prism._oracles`. In float64 everything must agree to 1e-10. Peers
(transformers, fla) compute in float32 whatever they are given, hence 1e-5 there; one that is not installed
gives a row with status "skipped".

An error is the largest absolute difference, divided by the largest expected magnitude where that is above 1.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prism._oracles import gated_delta_layer, gated_delta_loop, longer_loop, random_factors
from prism.config import PrismConfig
from prism.convert import from_qwen3_next, to_fla, to_qwen3_next
from prism.mixer import PrismMixer
from prism.model import PrismModel
from prism.scan import prism_scan

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
"""By the dtype that a backend computes in. float32 is for kernels without float64: sums of some hundred
terms.
"""
PEER_TOLERANCE = 1e-5
BACKENDS = ("recurrent", "chunked", "triton")
Pair = tuple[str, Tensor, Tensor]
"""Name of a tensor, what came, what is expected."""


@dataclass(frozen=True)
class Comparison:
    """One row: `identity` held for `tensor` on `backend` to `error`, or was skipped for `note`."""

    identity: str
    tensor: str
    error: float
    tolerance: float
    backend: str
    note: str = ""

    @property
    def status(self) -> str:
        """ "passed", "failed" or "skipped"; an error that is not a number is a failure."""
        if self.note:
            return "skipped"
        return "passed" if self.error <= self.tolerance else "failed"

    @property
    def ok(self) -> bool:
        """Passed or skipped."""
        return self.status != "failed"


def compare(
    identity: str, tensor: str, came: Tensor, expected: Tensor, tolerance: float, backend: str
) -> Comparison:
    """The row for two tensors; shapes that differ, or values that are not finite, make an infinite error."""
    if came.shape != expected.shape:
        return Comparison(identity, f"{tensor} (shape)", math.inf, tolerance, backend)
    came, expected = came.detach().double(), expected.detach().double()
    error = float((came - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    return Comparison(identity, tensor, error if math.isfinite(error) else math.inf, tolerance, backend)


def _leaves(factors: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {n: None if t is None else t.detach().to(dtype).requires_grad_() for n, t in factors.items()}


def _with_gradients(
    run: Callable[[dict[str, Any]], tuple[Tensor, ...]], factors: dict[str, Any], dtype: torch.dtype
):
    """Outputs of run(factors), and gradients by every factor of a fixed random function of all outputs."""
    leaves = _leaves(factors, dtype)
    outs = run(leaves)
    loss = torch.zeros((), dtype=torch.float64, device=outs[0].device)
    for i, out in enumerate(outs):
        generator = torch.Generator().manual_seed(100 + i)
        loss = loss + (out.double() * torch.randn(out.shape, generator=generator).to(out)).sum()
    loss.backward()
    return outs, {n: leaf.grad for n, leaf in leaves.items() if leaf is not None}


def _both(came: Any, expected: Any, factors: dict[str, Any], dtype: torch.dtype) -> Iterator[Pair]:
    (o, state), gradients = _with_gradients(came, factors, dtype)
    (o_expected, state_expected), expected_gradients = _with_gradients(expected, factors, torch.float64)
    yield "output", o, o_expected
    yield "state", state, state_expected
    for name, gradient in expected_gradients.items():
        if gradient is not None:
            yield f"gradient of {name}", gradients[name], gradient


# Identities


def _scan(factors: dict[str, Any], backend: str, **changes: Any) -> tuple[Tensor, Tensor]:
    o, state = prism_scan(**{**factors, **changes}, output_final_state=True, backend=backend)
    assert state is not None
    return o, state


def _no_writes(f: dict[str, Any]) -> dict[str, Any]:
    return {n: t for n, t in f.items() if not n.startswith("write_")}


def level_zero(device: Any, dtype: torch.dtype, backend: str) -> Iterator[Pair]:
    """The scan at L = 0 is Gated DeltaNet."""
    factors = random_factors(0, 0, device)
    yield from _both(lambda f: _scan(f, backend), lambda f: gated_delta_loop(**_no_writes(f)), factors, dtype)


def level_zero_layer(device: Any, dtype: torch.dtype, backend: str) -> Iterator[Pair]:
    """The layer at L = 0 is Gated DeltaNet's layer, grouped value heads included, from fla's names of its
    weights.
    """
    config = PrismConfig.preset(
        "gdn", vocab_size=1, d_model=12, n_heads=2, n_value_heads=4, head_dim=8, scan_backend=backend
    )
    yield from _layer_pairs(
        PrismMixer(config, seed=1, device=device),
        dtype,
        lambda weights, x: gated_delta_layer(weights, x, config.n_heads, config.value_heads, config.norm_eps),
    )


def _layer_pairs(
    mixer: PrismMixer, dtype: torch.dtype, expected: Callable[..., tuple[Tensor, Tensor]]
) -> Iterator[Pair]:
    device = mixer.in_proj.device
    x = torch.randn(
        2, 19, mixer.config.d_model, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    weights = {n: t.double().requires_grad_() for n, t in to_fla(mixer).items()}
    inputs = [x.to(device, kind).requires_grad_() for kind in (dtype, torch.float64)]
    mixer = mixer.to(dtype)
    y, cache = mixer(inputs[0], use_cache=True)
    y_expected, state = expected(weights, inputs[1])
    pull = torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(device)
    for out, last in ((y, cache.state), (y_expected, state)):
        ((out * pull).sum() + last.sum()).backward()
    yield "output", y, y_expected
    yield "state", cache.state, state
    yield "gradient of x", _grad(inputs[0]), _grad(inputs[1])
    for name, gradient in _gradients_as(to_fla, mixer).items():
        yield f"gradient of {name}", gradient, _grad(weights[name])


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _gradients_as(layout: Callable[[PrismMixer], dict[str, Tensor]], mixer: PrismMixer) -> dict[str, Tensor]:
    """Gradients under another library's names: conversions only permute, so gradients convert as weights
    do.
    """
    holder = copy.deepcopy(mixer)
    for name, parameter in mixer.named_parameters():
        holder.get_parameter(name).data = _grad(parameter)
    return layout(holder)


def paper_level_one(device: Any, dtype: torch.dtype, backend: str) -> Iterator[Pair]:
    """`paper` with L = 1 is Gated DeltaNet on v := delta^1, k := kappa^1, beta := b^1.

    The gates are bounded here (as `paper` leaves them, values grow until no tolerance means anything).
    """
    config = PrismConfig.preset(
        "paper", vocab_size=11, d_model=8, n_layers=1, n_heads=2, n_refine=1, step_gate="sigmoid",
        refine_key_norm=True, scan_backend=backend,
    )  # fmt: skip
    model = PrismModel(config, seed=2, device=device).to(dtype)
    tokens = torch.randint(11, (2, 17), generator=torch.Generator().manual_seed(5)).to(device)
    names = [
        f"blocks.0.mixer.{n}" for n in ("q", "write_k", "delta", "log_decay", "step_gate", "out", "state")
    ]
    _, cache = model.run_with_cache(tokens, names)
    q, write_k, delta, log_decay, step_gate, out, state = (cache[name].double() for name in names)
    factors = {
        "q": q * q.shape[-1] ** 0.5,  # `paper` reads with scale 1
        "k": write_k[..., 0, :],
        "v": delta[..., 0, :],
        "log_decay": log_decay,
        "beta": step_gate[..., 0],
    }
    o_expected, state_expected = gated_delta_loop(**factors)
    yield "output", out, o_expected
    yield "state", state[:, 0], state_expected

    # The same with gradients, on the scan: no base write, erase and one write by (kappa, b).
    f = random_factors(1, 1, device, H=4)
    loop = {"q": f["q"], "k": f["k"], "v": f["v"], "log_decay": f["log_decay"], "beta": f["beta"]}

    def as_paper(g: dict[str, Any]) -> tuple[Tensor, Tensor]:
        write = (g["beta"].unsqueeze(-1) * g["v"]).unsqueeze(3)
        return prism_scan(
            g["q"], g["k"], torch.zeros_like(g["v"]), g["log_decay"], g["beta"], g["k"].unsqueeze(3), write,
            output_final_state=True, backend=backend,
        )  # type: ignore[return-value]  # fmt: skip

    yield from _both(as_paper, lambda g: gated_delta_loop(**g), loop, dtype)


def longer_sequence(device: Any, dtype: torch.dtype, backend: str) -> Iterator[Pair]:
    """Any L is a diagonal-plus-low-rank rule on a sequence L + 1 times longer."""
    for L in range(5):
        pairs = _both(
            lambda f: _scan(f, backend), lambda f: longer_loop(**f), random_factors(10 + L, L, device), dtype
        )
        for tensor, came, expected in pairs:
            yield f"{tensor}, L = {L}", came, expected


def writes_under_the_base_key(device: Any, dtype: torch.dtype, backend: str) -> Iterator[Pair]:
    """kappa = k for every l is Gated DeltaNet with v + sum_l w^l / beta."""
    factors = random_factors(20, 3, device)
    groups = factors["v"].shape[2] // factors["k"].shape[2]

    def came(f: dict[str, Any]) -> tuple[Tensor, Tensor]:
        key = f["k"].repeat_interleave(groups, 2).unsqueeze(3).expand_as(factors["write_k"])
        return _scan(f, backend, write_k=key)

    def expected(f: dict[str, Any]) -> tuple[Tensor, Tensor]:
        value = f["v"] + f["write_v"].sum(3) / f["beta"].unsqueeze(-1)
        return gated_delta_loop(**{**_no_writes(f), "v": value})

    yield from _both(came, expected, {**factors, "write_k": None}, dtype)


def one_shared_key(device: Any, dtype: torch.dtype, backend: str) -> Iterator[Pair]:
    """One key for all l is L = 1 with sum_l w^l."""
    factors = random_factors(21, 3, device)
    factors["write_k"] = factors["write_k"][..., :1, :]

    def came(f: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return _scan(f, backend, write_k=f["write_k"].expand(-1, -1, -1, 3, -1))

    def expected(f: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return longer_loop(**{**f, "write_v": f["write_v"].sum(3, keepdim=True)})

    yield from _both(came, expected, factors, dtype)


def linear_attention(device: Any, dtype: torch.dtype, backend: str) -> Iterator[Pair]:
    """beta = 0, L = 1 and scale 1 is Mamba-2's recurrence; without decay, linear attention (as a masked
    product).
    """
    factors = random_factors(22, 1, device)
    del factors["initial_state"]
    zero = torch.zeros_like(factors["beta"])
    groups = factors["v"].shape[2] // factors["k"].shape[2]
    T = zero.shape[1]

    for name, decays in (("scalar decay", True), ("no decay", False)):

        def came(f: dict[str, Any], decays: bool = decays) -> tuple[Tensor, Tensor]:
            g = f["log_decay"] if decays else torch.zeros_like(f["log_decay"])
            return _scan(f, backend, beta=zero.to(dtype), log_decay=g, scale=1.0)

        def expected(f: dict[str, Any], decays: bool = decays) -> tuple[Tensor, Tensor]:
            q, kappa, w = (
                f["q"].repeat_interleave(groups, 2),
                f["write_k"][..., 0, :],
                f["write_v"][..., 0, :],
            )
            total = f["log_decay"].cumsum(1) if decays else torch.zeros_like(f["log_decay"])
            mask = torch.ones(T, T, dtype=torch.bool, device=device).tril()[:, :, None]
            weight = (total[:, :, None] - total[:, None]).masked_fill(~mask, -torch.inf).exp()
            o = torch.einsum("bthk,bshk,btsh,bshv->bthv", q, kappa, weight, w)
            return o, torch.einsum("bshk,bsh,bshv->bhkv", kappa, weight[:, -1], w)

        for tensor, a, b in _both(came, expected, factors, dtype):
            yield f"{tensor}, {name}", a, b


def split_anywhere(device: Any, dtype: torch.dtype, backend: str) -> Iterator[Pair]:
    """Cutting a sequence anywhere and passing the state, or a layer's cache, is one pass."""
    factors = random_factors(23, 2, device)
    o, state = _scan(_leaves(factors, dtype), backend)
    T = o.shape[1]
    config = PrismConfig(
        vocab_size=1, d_model=12, n_heads=2, n_value_heads=4, head_dim=8, scan_backend=backend
    )
    mixer = PrismMixer(config, seed=3, device=device).to(dtype)
    x = torch.randn(2, T, 12, generator=torch.Generator().manual_seed(6)).to(device, dtype)
    whole = mixer(x)
    for cut in range(1, T):
        outs: list[Tensor] = []
        ys: list[Tensor] = []
        last, cache = factors["initial_state"].to(dtype), None
        for part in (slice(0, cut), slice(cut, T)):
            here = {n: None if t is None else t[:, part].to(dtype) for n, t in factors.items()}
            out, last = _scan({**here, "initial_state": last}, backend)
            y, cache = mixer(x[:, part], cache, use_cache=True)
            outs, ys = [*outs, out], [*ys, y]
        yield f"output, cut at {cut}", torch.cat(outs, 1), o
        yield f"state, cut at {cut}", last, state
        yield f"layer output, cut at {cut}", torch.cat(ys, 1), whole


def jointly_linear(device: Any, dtype: torch.dtype, backend: str) -> Iterator[Pair]:
    """Outputs and state are linear in (v, w, S_0) together."""
    linear = ("v", "write_v", "initial_state")
    first, second = random_factors(24, 2, device), random_factors(25, 2, device)
    second = {**first, **{n: second[n] for n in linear}}
    mixed = {**first, **{n: 2.0 * first[n] - 0.5 * second[n] for n in linear}}
    (o1, s1), (o2, s2), (o, s) = (_scan(_leaves(f, dtype), backend) for f in (first, second, mixed))
    yield "output", o, 2.0 * o1 - 0.5 * o2
    yield "state", s, 2.0 * s1 - 0.5 * s2


def closed_gates(device: Any, dtype: torch.dtype, backend: str) -> Iterator[Pair]:
    """With all step gates 0 a `prism` model is the `gdn` model with its base weights."""
    sizes: dict[str, Any] = {"vocab_size": 11, "d_model": 8, "n_heads": 2, "scan_backend": backend}
    gdn = PrismModel(PrismConfig.preset("gdn", **sizes), seed=4, device=device).to(dtype)
    tokens = torch.randint(11, (2, 17), generator=torch.Generator().manual_seed(7)).to(device)
    expected = gdn(tokens)
    for L in (1, 2, 4):
        model = PrismModel(PrismConfig.preset("prism", n_refine=L, **sizes), seed=4, device=device).to(dtype)
        close = ("blocks.*.mixer.step_gate", lambda tensor, *, hook: torch.zeros_like(tensor))
        yield f"logits, L = {L}", model.run_with_hooks(tokens, [close]), expected


IDENTITIES: dict[str, Callable[[Any, torch.dtype, str], Iterator[Pair]]] = {
    "L = 0 scan is Gated DeltaNet": level_zero,
    "L = 0 layer is Gated DeltaNet": level_zero_layer,
    "paper, L = 1, is GDN on delta^1": paper_level_one,
    "L is a sequence L + 1 times longer": longer_sequence,
    "kappa = k is GDN on v + sum w / beta": writes_under_the_base_key,
    "one key is L = 1 on sum w": one_shared_key,
    "beta = 0, L = 1 is linear attention": linear_attention,
    "split anywhere is one pass": split_anywhere,
    "linear in (v, w, S_0)": jointly_linear,
    "closed gates are L = 0": closed_gates,
}


# Peers


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Where fla can be imported, transformers takes its GPU kernels when its module is first imported, on a
    CPU too.
    """
    had = {n: m for n, m in sys.modules.items() if n == package or n.startswith(f"{package}.")}
    for name in had:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(had)


def transformers_layer(device: Any, dtype: torch.dtype, backend: str) -> Iterator[Pair]:
    """`Qwen3NextGatedDeltaNet` with its weights carried over, with equal and with grouped heads."""
    import transformers

    with _hidden("fla") if torch.device(device).type == "cpu" else nullcontext():
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    for H, HV in ((2, 2), (2, 4)):
        sizes: dict[str, Any] = {"linear_num_key_heads": H, "linear_num_value_heads": HV}
        sizes |= {
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "hidden_size": 24,
            "num_hidden_layers": 2,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(8)
            theirs = Qwen3NextGatedDeltaNet(transformers.Qwen3NextConfig(**sizes), 0).to(device)
        ours = from_qwen3_next(theirs)
        ours.config = ours.config.replace(scan_backend=backend)
        x = torch.randn(2, 70, 24, generator=torch.Generator().manual_seed(9)).to(device)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        y, (state, *_) = ours(inputs[0], use_cache=True)
        y_expected = theirs(inputs[1])
        pull = torch.randn(y.shape, generator=torch.Generator().manual_seed(10)).to(device)
        for out in (y, y_expected):
            (out * pull).mean().backward()
        cache = transformers.DynamicCache(config=transformers.Qwen3NextConfig(**sizes))
        with torch.no_grad():
            theirs(x, cache)
        at = f"H = {H}, HV = {HV}"
        yield f"output, {at}", y, y_expected
        layer: Any = cache.layers[0]
        state_expected = layer.recurrent_states[0]  # get_recurrent_state is younger than 5.17
        assert state_expected is not None
        yield f"state, {at}", state, state_expected
        yield f"gradient of x, {at}", _grad(inputs[0]), _grad(inputs[1])
        for name, gradient in _gradients_as(to_qwen3_next, ours).items():
            yield f"gradient of {name}, {at}", gradient, _grad(theirs.get_parameter(name))


def fla_naive(device: Any, dtype: torch.dtype, backend: str) -> Iterator[Pair]:
    """fla's naive gated delta rule, recurrent and chunked."""
    from fla.ops.gated_delta_rule import naive

    factors = random_factors(26, 0, device, T=64, H=2, HV=2)

    def recurrent(f: dict[str, Any]) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta, state = (f[n] for n in ("q", "k", "v", "log_decay", "beta", "initial_state"))
        return naive.naive_recurrent_gated_delta_rule(
            q, k, v, beta, g, initial_state=state, output_final_state=True
        )

    def chunk(f: dict[str, Any]) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta, state = (f[n] for n in ("q", "k", "v", "log_decay", "beta", "initial_state"))
        return naive.naive_chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, output_final_state=True
        )

    for name, expected in (("recurrent", recurrent), ("chunk", chunk)):
        for tensor, came, other in _both(lambda f: _scan(f, backend), expected, factors, torch.float32):
            yield f"{tensor}, {name}", came, other


PEERS: dict[str, tuple[str, Callable[[Any, torch.dtype, str], Iterator[Pair]]]] = {
    "L = 0 layer is transformers' Qwen3NextGatedDeltaNet": ("transformers", transformers_layer),
    "L = 0 scan is fla's naive gated delta rule": ("fla", fla_naive),
}


def why_not(backend: str, device: Any, dtype: torch.dtype) -> str:
    """Why a backend cannot run there; empty if it can."""
    tensor = torch.zeros(1, 1, 1, 8, device=device, dtype=dtype)
    try:
        prism_scan(tensor, tensor, tensor, tensor[..., 0], tensor[..., 0], backend=backend)
    except ValueError as error:
        return str(error)
    return ""


def run(
    device: Any = "cpu", dtype: torch.dtype | None = None, backends: tuple[str, ...] = BACKENDS
) -> list[Comparison]:
    """All comparisons on a device. dtype None: float64 where a backend takes it, else float32.

    A comparison that raises is a failed row that names the error; a backend that cannot run here, or a peer
    that is not installed, is a skipped one.
    """
    rows: list[Comparison] = []
    for backend in backends:
        kinds = (dtype,) if dtype is not None else (torch.float64, torch.float32)
        reasons = {kind: why_not(backend, device, kind) for kind in kinds}
        usable = [kind for kind in kinds if not reasons[kind]]
        if not usable:
            rows.append(Comparison("all", "all", math.nan, math.nan, backend, reasons[kinds[-1]]))
            continue
        kind = usable[0]
        for identity, pairs in IDENTITIES.items():
            rows += _rows(identity, pairs, device, kind, backend, TOLERANCE.get(kind, 2e-2))
        for identity, (package, pairs) in PEERS.items():
            try:
                importlib.import_module(package)
            except ImportError as error:
                rows.append(
                    Comparison(identity, "all", math.nan, PEER_TOLERANCE, backend, f"not installed: {error}")
                )
                continue
            rows += _rows(identity, pairs, device, torch.float32, backend, PEER_TOLERANCE)
    return rows


def _rows(
    identity: str,
    pairs: Callable[..., Iterator[Pair]],
    device: Any,
    dtype: torch.dtype,
    backend: str,
    tolerance: float,
) -> list[Comparison]:
    rows = []
    try:
        for tensor, came, expected in pairs(device, dtype, backend):
            rows.append(compare(identity, tensor, came, expected, tolerance, backend))
    except Exception as error:  # a crash in one identity must not hide the others
        rows.append(Comparison(identity, f"{type(error).__name__}: {error}", math.inf, tolerance, backend))
    return rows
