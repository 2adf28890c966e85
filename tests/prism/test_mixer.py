"""The mixer against its equations, token by token; every ingredient; step-by-step decoding; numerics."""

import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from prism import PrismConfig, PrismMixer
from prism.config import PRESETS
from prism.mixer import MIXERS, register
from prism.refinement import l2_norm

GROUPED = {"n_heads": 2, "n_value_heads": 4, "head_dim": 5, "expand_v": 1.4}


def build(preset="prism", seed=0, dtype=torch.float64, d_model=12, **changes):
    config = PrismConfig.preset(preset, vocab_size=1, d_model=d_model, **changes)
    return PrismMixer(config, seed=seed).to(dtype)


def inputs(T=11, d=12, B=2, seed=0, dtype=torch.float64):
    return torch.randn(B, T, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


PHI = {
    "gelu": lambda z: z * 0.5 * (1 + torch.erf(z / math.sqrt(2))),
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "tanh": lambda z: 1 - 2 / (torch.exp(2 * z) + 1),
    "identity": lambda z: z,
}


def by_the_equations(mixer, x):
    """y for one sequence x [T, d] with states as V x K matrices: one token, one value head, one step at a
    time.
    """
    c, w = mixer.config, dict(mixer.named_parameters())
    H, HV, K, V, L = c.n_heads, c.value_heads, c.key_dim, c.value_dim, c.n_refine
    rows = dict(zip(mixer.rows, w["in_proj"].split(list(mixer.rows.values())), strict=True))

    def norm(z):
        return z / torch.sqrt((z * z).sum() + 1e-6)

    def gate(z, kind):
        return z if kind == "raw" else {"sigmoid": 1, "none": 1, "two_sigmoid": 2}[kind] / (1 + torch.exp(-z))

    def convolved(sequence, taps, t):
        width = taps.shape[1]
        return sum(taps[:, width - 1 - j] * sequence[t - j] for j in range(width) if t - j >= 0)

    def anchor_at(t, reads):
        if c.anchor == "state":
            return torch.cat(reads)
        u = convolved(x, w["anchor.conv"], t) if c.anchor == "shortconv" else x[t]
        u = u if c.anchor == "none" else F.silu(u)
        return w["anchor.proj"] @ u if "anchor.proj" in w else u

    def projections(u):
        """kappa (None: the base key), p (None: 1) and b of u, each indexed by [value head, step]."""
        n_keys, n_gains = {"own": L, "shared": 1, "base": 0}[c.refine_keys], 0 if c.gain == "one" else L
        r = c.refine_rank
        sizes = [n_keys * (r or HV * K), n_gains * (r or HV * V), HV * L]
        keys, gains, gates = (w["refine.proj"] @ u).split(sizes)

        def per_step(rows, up, steps, width):
            if not steps:
                return None
            if r is None:
                return rows.view(HV, steps, width)
            low = rows.view(steps, r)
            return (
                torch.stack([w[up][l] @ low[l] for l in range(steps)]).view(steps, HV, width).transpose(0, 1)
            )

        kappa, p = per_step(keys, "refine.up_key", n_keys, K), per_step(gains, "refine.up_gain", n_gains, V)
        kappa = kappa.expand(HV, L, K) if c.refine_keys == "shared" else kappa
        p = torch.sigmoid(p) if c.gain == "sigmoid" else p
        return kappa, p, gates.view(HV, L) + w.get("refine.gate_bias", 0.0)

    S = [x.new_zeros(V, K) for _ in range(HV)]
    projected = []
    outs = []
    for t in range(x.shape[0]):
        source = anchor_at(t, None) if c.source == "anchor" else x[t]
        projected.append(torch.cat([rows[n] @ source for n in "qkv"]))
        z = convolved(projected, w["conv"], t) if c.short_conv else projected[t]
        z = F.silu(z) if c.qkv_activation == "silu" else z
        q, k, v = z.split([mixer.rows[n] for n in "qkv"])
        q, k = ([norm(head) if c.qk_norm else head for head in z.view(-1, K)] for z in (q, k))
        for j in range(HV):
            if c.decay == "gdn":
                rate = w["A_log"][j].exp() * torch.log1p(
                    torch.exp((rows["decay"] @ source)[j] + w["dt_bias"][j])
                )
                S[j] = torch.exp(-rate) * S[j]
            elif c.decay == "sigmoid":
                S[j] = torch.sigmoid((rows["decay"] @ source)[j]) * S[j]
        if L:
            u = anchor_at(t, [S[j] @ k[j // (HV // H)] for j in range(HV)] if k else None)
            kappas, gains, gates = projections(u)
        heads = []
        for j in range(HV):
            i = j // (HV // H)
            vj = v.view(HV, V)[j]
            writes = []
            if L:
                anchored = c.residual_start == "value-anchor" and c.anchor != "none"
                r = vj - u.view(HV, V)[j] if anchored else vj
                for l in range(L):
                    if kappas is None:
                        kappa = k[i]
                    else:
                        kappa = norm(kappas[j, l]) if c.refine_key_norm else kappas[j, l]
                    delta = PHI[c.activation](r if gains is None else gains[j, l] * r)
                    r = r - delta if c.residual == "subtract" else r
                    writes.append((gate(gates[j, l], c.step_gate), delta, kappa))
            if c.erase == "step":
                b, _, kappa = writes[0]
                S[j] = S[j] - b * torch.outer(S[j] @ kappa, kappa)
            elif mixer.rows["beta"]:
                beta = gate((rows["beta"] @ source)[j], c.erase)
                old = S[j] @ k[i] if c.erase != "none" else torch.zeros_like(vj)
                S[j] = S[j] + beta * torch.outer((vj if c.base_write else 0 * vj) - old, k[i])
            for b, delta, kappa in writes:
                S[j] = S[j] + b * torch.outer(delta, kappa)
            o = S[j] @ q[i] * (c.scale if c.scale is not None else K**-0.5)
            heads.append(o / torch.sqrt((o * o).mean() + c.norm_eps) * w["norm"])
        o = torch.cat(heads)
        outs.append(w["out_proj"] @ (o * F.silu(rows["gate"] @ source) if c.output_gate else o))
    return torch.stack(outs), torch.stack(S)


def assert_equations(mixer):
    with torch.no_grad():
        mixer.norm += torch.arange(len(mixer.norm)) / 10
    x = inputs()
    y, cache = mixer(x, use_cache=True)
    for b in range(2):
        expected, state = by_the_equations(mixer, x[b])
        torch.testing.assert_close(y[b], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(cache.state[b].transpose(-1, -2), state, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("sizes", [{}, GROUPED], ids=["square", "grouped"])
def test_presets_are_the_equations(preset, sizes):
    assert_equations(build(preset, **sizes))


AXES = {
    "n_refine": [1, 3],
    "activation": ["silu", "tanh", "identity"],
    "anchor": ["token", "none", "state"],
    "anchor_width": [2, 7],
    "gain": ["sigmoid", "one"],
    "refine_keys": ["shared", "base"],
    "refine_key_norm": [False],
    "refine_rank": [3],
    "residual": ["keep"],
    "residual_start": ["value"],
    "step_gate": ["two_sigmoid", "raw"],
    "step_gate_bias": [2.0],
    "base_write": [False],
    "erase": ["two_sigmoid", "raw", "none"],
    "decay": ["sigmoid", "none"],
    "short_conv": [0, 2],
    "qkv_activation": ["identity"],
    "qk_norm": [False],
    "scale": [0.1],
    "source": ["anchor"],
    "output_gate": [False],
    "norm_eps": [0.1],
}


INGREDIENTS = pytest.mark.parametrize(
    ("name", "value"), [(n, v) for n, values in AXES.items() for v in values]
)


@INGREDIENTS
def test_every_ingredient_is_its_equation(name, value):
    assert_equations(build(**GROUPED, **{name: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"base_write": False, "erase": "none"},
        {"base_write": False, "erase": "none", "refine_keys": "base"},
        {"base_write": False, "erase": "step", "refine_keys": "base"},
        {"base_write": False, "erase": "step", "refine_keys": "shared", "step_gate": "two_sigmoid"},
        {"erase": "none", "anchor": "state"},
        {"erase": "none", "n_refine": 0},
        {"base_write": False, "anchor": "state", "refine_keys": "base"},
        {"refine_rank": 3, "refine_keys": "shared", "gain": "one"},
        {"source": "anchor", "anchor": "none", "n_refine": 0},
    ],
    ids=str,
)
def test_ingredients_that_meet_are_their_equations(changes):
    assert_equations(build(**GROUPED, **changes))


@INGREDIENTS
def test_every_ingredient_changes_the_output(name, value):
    x = inputs()
    base, other = build(n_heads=2), build(n_heads=2, **{name: value})
    y, z = base(x), other(x)
    assert y.shape == z.shape
    assert (y - z).abs().max() > 1e-3 * y.abs().max()
    z.square().mean().backward()
    idle = [n for n, p in other.named_parameters() if p.grad is None or not p.grad.any()]
    assert not idle, f"parameters without gradient: {idle}"


def test_every_axis_of_the_configuration_is_covered():
    of_the_skeleton = {
        "vocab_size",
        "d_model",
        "n_layers",
        "n_heads",
        "n_value_heads",
        "head_dim",
        "expand_v",
    }
    of_the_skeleton |= {"mlp_ratio", "mixer", "tie_embeddings", "scan_backend"}
    assert set(AXES) == set(PrismConfig(1).to_dict()) - of_the_skeleton


def test_level_zero_has_exactly_the_parameters_of_gated_deltanet():
    mixer = build("gdn", **GROUPED)
    d, H, HV, K, V = 12, 2, 4, 5, 7
    assert sum(p.numel() for p in mixer.parameters()) == (
        2 * H * K * d + 3 * HV * V * d + 2 * HV * d + (2 * H * K + HV * V) * 4 + 2 * HV + V
    )
    assert set(dict(mixer.named_parameters())) == {"in_proj", "conv", "A_log", "dt_bias", "norm", "out_proj"}


def test_initial_values_are_gated_deltanets():
    config = PrismConfig.preset("gdn", vocab_size=1, d_model=64, n_heads=2, head_dim=8, n_value_heads=512)
    mixer = PrismMixer(config, seed=0)
    A, dt = mixer.A_log.detach().exp(), F.softplus(mixer.dt_bias.detach())
    assert 0 < A.min() < 0.5
    assert 15.5 < A.max() <= 16
    assert 1e-3 - 1e-6 < dt.min() < 1.1e-3
    assert 0.09 < dt.max() < 0.1 + 1e-6
    assert abs(float(dt.log().mean()) - 0.5 * (math.log(1e-3) + math.log(0.1))) < 0.15
    bound = 64**-0.5
    assert 0.99 * bound < mixer.in_proj.abs().max() <= bound
    assert 0.49 < mixer.conv.abs().max() <= 0.5
    assert (mixer.norm == 1).all()
    assert mixer.A_log._no_weight_decay
    assert mixer.dt_bias._no_weight_decay


def test_decay_parameters_survive_bfloat16():
    for seed in range(20):
        mixer = PrismMixer(
            PrismConfig.preset("gdn", vocab_size=1, n_heads=16, d_model=64), seed, dtype=torch.bfloat16
        )
        other = PrismMixer(mixer.config, seed=99, dtype=torch.bfloat16)
        other.load_state_dict(mixer.state_dict())
        for name in ("A_log", "dt_bias"):
            mine, theirs = getattr(mixer, name), getattr(other, name)
            assert mine.isfinite().all()
            assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))
            assert theirs._no_weight_decay


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"erase": "none"},
        {"base_write": False},
        {"base_write": False, "erase": "none"},
        {"refine_keys": "base"},
        {"anchor": "shortconv"},
    ],
    ids=str,
)
def test_serial_anchor_is_the_true_read(changes):
    """u_t = Sbar_t k_t with the states that the same run has, for each kind of erase and base write."""
    from prism import PrismModel

    config = PrismConfig(7, d_model=12, n_layers=1, **{"anchor": "state", **GROUPED, **changes})
    model = PrismModel(config, seed=1).double()
    tokens = torch.randint(7, (2, 9), generator=torch.Generator().manual_seed(0))
    _, cache = model.run_with_cache(tokens)
    states = cache.state(0, range(9))
    before = F.pad(states, (0, 0, 0, 0, 0, 0, 1, 0))[:, :9]
    decay = cache["blocks.0.mixer.log_decay"].exp()
    key = cache["blocks.0.mixer.k"].repeat_interleave(2, 2)
    read = torch.einsum("bthkv,bthk,bth->bthv", before, key, decay)
    same = torch.allclose(read, cache["blocks.0.mixer.anchor"], rtol=1e-10, atol=1e-12)
    assert same == (config.anchor == "state")


def test_serial_anchor_passes_gradients_and_continues_from_a_cache():
    mixer, x = build(anchor="state"), inputs(T=6)
    assert torch.autograd.gradcheck(lambda x: mixer(x), x[:1, :3].clone().requires_grad_())
    whole = mixer(x)
    first, cache = mixer(x[:, :2], use_cache=True)
    torch.testing.assert_close(torch.cat([first, mixer(x[:, 2:], cache)], 1), whole)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    preset=st.sampled_from(sorted(PRESETS)),
    cuts=st.lists(st.integers(1, 12), max_size=4),
    widths=st.tuples(st.integers(0, 5), st.integers(1, 5)),
    grouped=st.booleans(),
)
def test_any_split_with_a_cache_is_one_pass(preset, cuts, widths, grouped):
    changes = dict(GROUPED) if grouped else {}
    changes |= {"anchor_width": widths[1]} | ({"short_conv": widths[0]} if preset != "paper" else {})
    mixer, x = build(preset, **changes), inputs(T=13)
    whole, end = mixer(x, use_cache=True)
    parts, cache = [], None
    for start, stop in itertools.pairwise([0, *sorted(set(cuts)), 13]):
        y, cache = mixer(x[:, start:stop], cache, use_cache=True)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-11)
    for mine, theirs in zip(cache, end, strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    assert mixer.state_size() == (
        end.state[0].numel(),
        sum(t[0].numel() for t in (end.conv, end.anchor) if t is not None),
    )


def test_token_by_token_is_the_parallel_pass_in_float32():
    mixer, x = build(dtype=torch.float32), inputs(T=40, dtype=torch.float32)
    parts, cache = [], None
    for t in range(40):
        y, cache = mixer(x[:, t : t + 1], cache, use_cache=True)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), mixer(x), rtol=1e-4, atol=2e-5)


def test_a_cache_is_a_value():
    mixer, x = build(), inputs(T=9)
    _, cache = mixer(x[:, :4], use_cache=True)
    kept = [t.clone() for t in cache]
    once = mixer(x[:, 4:], cache, use_cache=True)[0]
    again = mixer(x[:, 4:], cache, use_cache=True)[0]
    assert torch.equal(once, again)
    assert all(torch.equal(a, b) for a, b in zip(cache, kept, strict=True))
    # And holds no more memory than it shows: a view would keep all of the sequence.
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in cache)


@pytest.mark.parametrize("T", range(1, 18))
def test_short_sequences_and_both_backends(T):
    x = inputs(T=T)
    a, b = (build(scan_backend=name, **GROUPED)(x) for name in ("recurrent", "chunked"))
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_named_backend_that_cannot_run_refuses():
    mixer = build(scan_backend="triton", dtype=torch.float64)
    with pytest.raises(ValueError, match="triton"):
        mixer(inputs())
    assert mixer.backend(inputs()) == "triton"
    assert build().backend(inputs()) == "chunked"
    assert build(scan_backend="recurrent").backend(inputs()) == "recurrent"


@pytest.mark.parametrize("preset", PRESETS)
def test_bfloat16_autocast_keeps_the_state_in_float32(preset):
    mixer, x = build(preset, dtype=torch.float32, **GROUPED), inputs(T=65, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, cache = mixer(x, use_cache=True)
    y.float().square().mean().backward()
    assert cache.state.dtype == torch.float32
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in mixer.parameters())
    assert (y - mixer(x)).abs().max() < 0.1 * mixer(x).abs().max()


def test_decays_and_norms_are_computed_in_float32():
    """bfloat16 has 8 bits: no room for a decay close to 1 over many tokens, or the norm of a wide key."""
    mixer, x = build("gdn", dtype=torch.bfloat16, **GROUPED), inputs(T=20, dtype=torch.bfloat16)
    with torch.no_grad():
        log_decay = mixer._project(x, None).log_decay
        rows = mixer.in_proj[-4:]
    assert log_decay.dtype == torch.float32
    rate = F.softplus(F.linear(x, rows).float() + mixer.dt_bias.float())
    torch.testing.assert_close(log_decay, -mixer.A_log.float().exp() * rate, rtol=1e-6, atol=0)
    wide = inputs(d=256, dtype=torch.bfloat16)
    assert torch.equal(l2_norm(wide), l2_norm(wide.float()).bfloat16())


def test_inputs_of_another_shape_are_refused():
    for bad in (torch.zeros(2, 3, 11), torch.zeros(3, 12)):
        with pytest.raises(ValueError, match=r"x: expected shape \[B, T, d_model=12\], came \["):
            build(dtype=torch.float32)(bad)


@pytest.mark.parametrize("preset", PRESETS)
def test_bfloat16_parameters(preset):
    mixer, x = build(preset, dtype=torch.bfloat16), inputs(T=20, dtype=torch.bfloat16)
    y, cache = mixer(x, use_cache=True)
    assert y.dtype == torch.bfloat16
    assert cache.state.dtype == torch.float32
    assert y.isfinite().all()


def test_paper_overflows_in_plain_sight_and_bounded_gates_do_not():
    x = 3 * inputs(T=600, d=32, dtype=torch.float32)
    paper = build("paper", d_model=32, dtype=torch.float32, anchor="none")
    bounded = build(
        "paper", d_model=32, dtype=torch.float32, anchor="none", step_gate="sigmoid", refine_key_norm=True
    )
    with torch.no_grad():
        for mixer in (paper, bounded):
            mixer.refine.proj *= 6
        assert not paper(x).isfinite().all()
        assert bounded(x).isfinite().all()


def test_closed_form_is_a_product():
    """delta^l = P_l * prod_{j<l} (1 - P_j) * v, without a chain."""
    mixer = build("closed_form", n_refine=4)
    u, v = inputs(d=12).unsqueeze(2), inputs(d=12, seed=1).unsqueeze(2)
    refined = mixer.refine(u, v, None)
    P = refined.gain
    assert ((P > 0) & (P < 1)).all()
    for l in range(4):
        expected = P[..., l, :] * (1 - P[..., :l, :]).prod(-2) * v
        torch.testing.assert_close(refined.delta[..., l, :], expected, rtol=1e-10, atol=1e-12)


def test_the_degenerate_chain_writes_once():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mixer = build(gain="one", activation="identity", n_refine=3)
    u = torch.randn(1, 2, 1, 12, dtype=torch.float64)
    refined = mixer.refine(u, torch.randn_like(u), None)
    assert not refined.delta[..., 1:, :].any()
    assert refined.delta[..., 0, :].any()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised inside Dynamo
def test_compiled_twice_keeps_the_first_output():
    mixer = build(dtype=torch.float32)
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    x, z = inputs(dtype=torch.float32), inputs(seed=1, dtype=torch.float32)
    with torch.no_grad():
        first = compiled(x)
        kept = first.clone()
        second = compiled(z)
    assert torch.equal(first, kept)
    torch.testing.assert_close(first, mixer(x))
    torch.testing.assert_close(second, mixer(z))


def test_registry():
    with pytest.raises(ValueError, match="register: expected a new name, came 'prism'"):
        register("prism")(torch.nn.Identity)
    from prism import PrismModel

    with pytest.raises(ValueError, match="mixer: expected one of attention, prism, came 'mamba'"):
        PrismModel(PrismConfig(4, mixer="mamba"))
    assert {"prism", "attention"} <= set(MIXERS)
