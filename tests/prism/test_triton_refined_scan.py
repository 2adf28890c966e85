"""Refinement and scan as one operator, against the definition of both in float64, and in a mixer.

The interpreter runs small shapes in float32, where `choose` is made to take the kernels for chunks; a GPU
takes bfloat16. Inputs are rounded to the dtype under test before the reference sees them, and new memory is
filled with NaN.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from prism import PrismConfig, PrismModel, prism_scan
from prism.mixer import PrismMixer
from prism.scan.chunked import chunked

pytest.importorskip("triton")
from prism.scan.triton import _operator, chunkwise, resident
from prism.scan.triton.refine import refine
from prism.scan.triton.refined_scan import refined_scan, takes

pytestmark = [
    pytest.mark.usefixtures("kernels", "on_chunks"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
PLACES = [
    pytest.param("cpu", torch.float32, marks=pytest.mark.interpreter),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
BOUNDS = {torch.float32: (1e-6, 4e-6), torch.bfloat16: (8e-3, 1.2e-2)}
NAMES = ("q", "k", "v", "log_decay", "beta", "rows", "u", "initial_state")
# B, T, H, HV, K, V in the interpreter and on a GPU; L, values behind a row, activation, subtract, unit,
# anchored, a first state
CASES = {
    "default": ((2, 35, 1, 2, 16, 8), (2, 700, 2, 4, 128, 128), 2, 4, "gelu", True, True, True, True),
    "whole_chunks": ((1, 64, 1, 1, 8, 16), (2, 640, 2, 2, 64, 128), 1, 0, "gelu", True, True, True, False),
    "three_steps": ((1, 40, 1, 1, 8, 8), (1, 4000, 1, 1, 128, 64), 3, 5, "silu", True, True, True, True),
    "short": ((2, 5, 1, 1, 8, 8), (2, 130, 2, 2, 64, 64), 2, 4, "gelu", True, True, True, True),
    "three_chunks": ((1, 70, 1, 1, 8, 8), (2, 700, 2, 4, 128, 128), 2, 4, "gelu", True, True, True, True),
    "bare_keys": ((2, 20, 2, 2, 8, 8), (2, 550, 2, 2, 64, 64), 2, 60, "tanh", False, False, False, True),
}


@pytest.fixture
def on_chunks(monkeypatch):
    monkeypatch.setattr(_operator, "choose", lambda *_: chunkwise)


def relative(found, exact):
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm().clamp_min(1e-300))


def make(case, dtype, device, seed=0):
    """Inputs by name, u and the first state None where the case has none, and the options of a call."""
    small, large, L, behind, activation, subtract, unit, anchored, state = CASES[case]
    B, T, H, HV, K, V = large if device == "cuda" else small
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    def norm(x):
        return torch.nn.functional.normalize(x, dim=-1)

    inputs = {
        "q": normal(B, T, H, K).to(dtype),
        "k": norm(normal(B, T, H, K)).to(dtype),
        "v": normal(B, T, HV, V).to(dtype),
        "log_decay": -0.1 * torch.rand(B, T, HV, generator=g),  # much is left of a state after a chunk
        "beta": torch.rand(B, T, HV, generator=g),
        # Keys of many lengths: their norm goes into the values.
        "rows": (normal(B, T, HV * L * (K + V + 1) + behind) * normal(B, T, 1).exp()).to(dtype),
        "u": normal(B, T, HV, V).to(dtype) if anchored else None,
        "initial_state": normal(B, HV, K, V) if state else None,
    }
    leaves = {n: None if x is None else x.to(device).requires_grad_() for n, x in inputs.items()}
    return leaves, (L, activation, subtract, unit)


def run(inputs, options, **others):
    *tensors, state = inputs.values()
    return refined_scan(*tensors, *options, initial_state=state, **others)


def parted(inputs, options):
    q, k, v, log_decay, beta, rows, u, state = inputs.values()
    L, activation, subtract, unit = options
    writes = refine(rows, u, v, L, q.shape[3], activation, subtract, unit)
    gates = {"initial_state": state, "output_final_state": True, "backend": "triton"}
    return prism_scan(q, k, v, log_decay, beta, *writes, **gates)


def given(inputs):
    return [x for x in inputs.values() if x is not None]


def upstream(results, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=g).to(x) for x in results]


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case, device, dtype, refine_reference):
    inputs, options = make(case, dtype, device)
    exact = {n: None if x is None else x.detach().double().requires_grad_() for n, x in inputs.items()}
    q, k, v, log_decay, beta, rows, u, state = exact.values()
    L, K = options[0], q.shape[3]
    writes = refine_reference(rows, u, v, L, K, *options[1:])
    want = chunked(q, k, v, log_decay, beta, *writes, K**-0.5, state, None)
    found = run(inputs, options)
    grads = upstream(found)
    wanted = torch.autograd.grad(want, given(exact), [g.double() for g in grads])
    got = torch.autograd.grad(found, given(inputs), grads)
    assert [x.dtype for x in found] == [dtype, torch.float32]
    bound, grad_bound = BOUNDS[dtype]
    errors = [relative(f, w) for f, w in zip(found, want, strict=True)]
    assert max(errors) < bound, errors
    names = [n for n, x in inputs.items() if x is not None]
    errors = {n: relative(f, w) for n, f, w in zip(names, got, wanted, strict=True)}
    assert max(errors.values()) < grad_bound, errors
    for x, g in zip(given(inputs), got, strict=True):
        assert (g.dtype, g.shape) == (x.dtype, x.shape)
    behind = CASES[case][3]
    assert not behind or not got[5][..., -behind:].any()  # of what nobody reads


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_without_gradients_the_same_bits(device, dtype):
    inputs, options = make("default", dtype, device)
    with torch.no_grad():
        bare = run(inputs, options)
    assert all(torch.equal(b, x) for b, x in zip(bare, run(inputs, options), strict=True))
    assert not bare[0].requires_grad


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_in_two_levels(device, dtype, monkeypatch):
    """Segments of two chunks, as `segment_chunks` makes them where sequences are few and long."""
    inputs, options = make("three_chunks", dtype, device)
    want = run(inputs, options)
    grads = upstream(want)
    wanted = torch.autograd.grad(want, given(inputs), grads)
    monkeypatch.setattr(chunkwise, "segment_chunks", lambda *_: 2 if device == "cuda" else 1)
    found = run(inputs, options)
    got = torch.autograd.grad(found, given(inputs), grads)
    for f, w in zip((*found, *got), (*want, *wanted), strict=True):
        assert relative(f, w.double()) < BOUNDS[dtype][1]
    assert not torch.equal(found[1], want[1])  # other sums


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_rows_that_are_not_dense(device, dtype):
    inputs, options = make("short", dtype, device)
    R = inputs["rows"].shape[-1]
    want = run(inputs, options)[0]
    longer = torch.cat([inputs["rows"], inputs["rows"][..., :3]], -1).detach().requires_grad_()
    found = run(inputs | {"rows": longer[..., :R]}, options)[0]
    assert torch.equal(found, want)
    (grad,) = upstream([want])
    (got,) = torch.autograd.grad(found, [longer], grad)
    (wanted,) = torch.autograd.grad(want, [inputs["rows"]], grad)
    assert torch.equal(got[..., :R], wanted)
    assert not got[..., R:].any()


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_result_that_nobody_reads_has_no_gradient(device, dtype):
    inputs, options = make("short", dtype, device)
    for which in (0, 1):
        found, want = run(inputs, options)[which], parted(inputs, options)[which]
        (grad,) = upstream([want])
        got = torch.autograd.grad(found, given(inputs), grad)
        wanted = torch.autograd.grad(want, given(inputs), grad)
        for f, w in zip(got, wanted, strict=True):
            assert relative(f, w.double()) < BOUNDS[dtype][1]
    assert not got[0].any()  # q, of which the state holds nothing


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_what_stands_for_the_anchor_and_the_value_takes_their_gradient(device, dtype):
    inputs, options = make("short", dtype, device)
    v, u = inputs["v"], inputs["u"]
    minus_u, v_again = (v.detach().new_empty(1).expand(v.shape).requires_grad_() for _ in range(2))
    want = run(inputs, options)
    grads = upstream(want)
    d_v, d_u = torch.autograd.grad(want, [v, u], grads)
    found = run(inputs, options, minus_u=minus_u, v_again=v_again)
    *got, nothing = torch.autograd.grad(found, [v, v_again, minus_u, u], grads, allow_unused=True)
    assert nothing is None
    assert torch.equal(got[0] + got[1], d_v)
    assert torch.equal(-got[2], d_u)
    assert torch.equal(got[1], got[2])


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_members_under_vmap_and_one_backward(device, dtype):
    members = [make("short", dtype, device, seed) for seed in range(2)]
    options = members[0][1]
    pairs = zip(*(given(inputs) for inputs, _ in members), strict=True)
    stacked = [torch.stack([x.detach() for x in pair]).requires_grad_() for pair in pairs]

    def both(*tensors):
        o, state = run(dict(zip(NAMES, tensors, strict=True)), options)
        return torch.cat([o.float().flatten(), state.flatten()])

    together = torch.func.vmap(both)(*stacked)
    together.square().sum().backward()
    for e, (inputs, _) in enumerate(members):
        alone = both(*inputs.values())
        alone.square().sum().backward()
        torch.testing.assert_close(together[e], alone)
        for x, own in zip(stacked, given(inputs), strict=True):
            torch.testing.assert_close(x.grad[e], own.grad)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_compiles_without_a_graph_break(device, dtype):
    inputs, options = make("whole_chunks", dtype, device)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=False)
    results = [f(inputs, options) for f in (run, compiled)]
    grads = upstream(results[0])
    got = [torch.autograd.grad(found, given(inputs), grads) for found in results]
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(got[1], got[0])


@pytest.mark.interpreter
def test_differentiating_twice_is_an_error():
    inputs, options = make("whole_chunks", torch.float32, "cpu")
    (grad,) = torch.autograd.grad(run(inputs, options)[0].sum(), [inputs["v"]], create_graph=True)
    with pytest.raises(RuntimeError, match="refined_scan_backward"):
        grad.sum().backward()


@pytest.mark.interpreter
def test_vmap_over_the_backward_pass_alone_is_an_error():
    """What was saved is of one forward pass: read as if of two, it would end too early."""
    inputs, options = make("short", torch.float32, "cpu")
    o = run(inputs, options)[0]
    with pytest.raises(RuntimeError, match=r"refined_scan_backward|vmap over the backward pass alone"):
        torch.autograd.grad(o, [inputs["k"]], torch.stack([o, -o]).detach(), is_grads_batched=True)
    q, k, v, *gates = [x.detach() for x in list(inputs.values())[:5]]
    with pytest.raises(RuntimeError, match="no vmap over the backward pass alone"):
        torch.func.jacrev(lambda k: prism_scan(q, k, v, *gates, backend="triton")[0].sum((0, 2, 3)))(k)


@pytest.mark.interpreter
def test_a_single_token_whose_stride_is_odd():
    inputs, options = make("short", torch.float32, "cpu")
    tokens = {n: x[:, :1].contiguous() for n, x in inputs.items() if n != "initial_state"}
    tokens = {**tokens, "initial_state": inputs["initial_state"]}
    want = run(tokens, options)[0]
    B, _, R = tokens["rows"].shape
    odd = tokens["rows"].detach().as_strided((B, 1, R), (R, 3 * R, 1))
    assert odd.is_contiguous()
    assert odd.stride(1) != odd.shape[-1]
    assert torch.equal(run(tokens | {"rows": odd}, options)[0], want)


def test_an_anchor_in_float32_is_cast(monkeypatch):
    """A convolution that goes on from a cache gives one under autocast."""
    from prism.scan.triton import refined_scan as module

    mixer = models()[1].blocks[0].mixer
    seen = {}
    monkeypatch.setattr(
        module, "refined_scan", lambda *a, **k: seen.update(zip(("rows", "u"), a[5:7], strict=True))
    )
    q = torch.zeros(1, 3, 2, 16, dtype=torch.bfloat16)
    u = torch.zeros(1, 3, 2, 16)
    gates = torch.zeros(1, 3, 2)
    mixer.refine.scan_in_one(u, q, q, q, gates, gates, None, None, None)
    assert seen["rows"].dtype == seen["u"].dtype == torch.bfloat16


@pytest.mark.interpreter
def test_wrong_inputs_are_named(monkeypatch):
    inputs, options = make("default", torch.float32, "cpu")
    with pytest.raises(
        ValueError, match=r"prism_scan: beta must have shape .* = \[2, 35, 2\], got \[2, 34, 2\]"
    ):
        run(inputs | {"beta": inputs["beta"][:, 1:]}, options)
    with pytest.raises(ValueError, match="rows: expected steps >= 1 and at least 150 values a token, came 3"):
        run(inputs, (3, *options[1:]))
    with pytest.raises(
        ValueError, match=r"rows: expected the dtype of q, torch\.float32, came torch\.float16"
    ):
        run(inputs | {"rows": inputs["rows"].half()}, options)
    monkeypatch.setattr(_operator, "choose", lambda *_: resident)
    assert not takes(inputs["q"], inputs["v"])
    with pytest.raises(ValueError, match=r"q, v: expected a shape that `chunkwise` takes unpadded"):
        run(inputs, options)


@pytest.mark.parametrize(
    ("K", "V", "taken"), [(64, 128, True), (128, 128, True), (128, 96, False), (256, 64, False)]
)
def test_half_precision_takes_the_widths_of_the_kernels(K, V, taken, monkeypatch):
    monkeypatch.undo()
    q, v = (torch.empty(1, 4096, 16, width, dtype=torch.bfloat16, device="meta") for width in (K, V))
    assert takes(q, v) == taken
    assert _operator.INTERPRETED or not takes(q.half(), v.half())


def models(**changes):
    """The same weights on formulas and on kernels."""
    small = {"vocab_size": 16, "d_model": 32, "n_layers": 1, "n_heads": 2}
    config = PrismConfig(**small | changes)
    return [PrismModel(config.replace(scan_backend=backend), seed=3) for backend in ("chunked", "triton")]


@pytest.fixture
def calls(monkeypatch):
    """Lets a mixer take its kernels in the interpreter too, and counts calls of `refined_scan`."""
    from prism.scan.triton import refined_scan as module

    made = []
    whole = module.refined_scan
    monkeypatch.setattr(module, "refined_scan", lambda *a, **k: made.append(1) or whole(*a, **k))
    monkeypatch.setattr(PrismMixer, "_fuses", lambda self, x: self.backend(x) == "triton")
    return made


VARIANTS = {
    "prism": ({}, True),
    "grouped_values_unanchored": (
        {"n_value_heads": 4, "anchor": "none", "erase": "two_sigmoid", "refine_key_norm": False},
        True,
    ),
    "from_the_value": ({"residual_start": "value", "activation": "tanh", "scale": 0.3}, True),
    "low_rank": ({"refine_rank": 8}, False),
    "additive": ({"erase": "none"}, False),
    "no_base_write": ({"base_write": False, "erase": "step"}, False),
}
QUICK = ("prism",)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "variant", [v if v in QUICK else pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS]
)
def test_a_mixer_takes_it_where_it_can(variant, calls):
    changes, taken = VARIANTS[variant]
    x = torch.randint(16, (2, 7), generator=torch.Generator().manual_seed(0))
    formulas, kernels = models(**changes)
    grads = []
    for model in (formulas, kernels):
        logits = model(x)
        grads.append(torch.autograd.grad(logits.square().sum(), list(model.parameters())))
    assert bool(calls) == taken
    torch.testing.assert_close(kernels(x), formulas(x), atol=2e-5, rtol=1e-4)
    for (name, _), want, got in zip(formulas.named_parameters(), *grads, strict=True):
        assert (got - want).norm() <= 2e-4 * want.norm() + 1e-6, name


@pytest.mark.interpreter
def test_a_mixer_hands_on_its_state(calls):
    _, model = models()
    x = torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(0))
    whole = model(x)
    first, cache = model(x[:, :5], use_cache=True)
    second, _ = model(x[:, 5:], cache, use_cache=True)
    assert len(calls) == 3
    torch.testing.assert_close(torch.cat([first, second], 1), whole, atol=2e-5, rtol=1e-4)


@pytest.mark.interpreter
def test_hooks_see_what_one_operator_would_keep_to_itself(calls):
    formulas, kernels = models()
    x = torch.randint(16, (2, 7), generator=torch.Generator().manual_seed(0))
    name = "blocks.0.mixer.write_k"
    _, want = formulas.run_with_cache(x, [name])
    _, found = kernels.run_with_cache(x, [name])
    torch.testing.assert_close(found[name], want[name], atol=2e-5, rtol=1e-4)
    seen = []
    kernels.blocks[0].mixer.refine.register_forward_hook(lambda m, a, out: seen.append(out.write_k))
    kernels(x)
    torch.testing.assert_close(seen[0], want[name], atol=2e-5, rtol=1e-4)
    kernels = models()[1]
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, a, out: seen.append(type(m)))
    with contextlib.closing(SimpleNamespace(close=handle.remove)):
        kernels(x)
    assert type(kernels.blocks[0].mixer.refine) in seen
    assert not calls


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [True, False])
def test_a_mixer_in_bfloat16_agrees_with_float32(autocast, monkeypatch):
    monkeypatch.undo()  # `choose` chooses
    torch.use_deterministic_algorithms(False)  # the embedding's gradient
    from prism.scan.triton import refined_scan as module

    made, whole = [], module.refined_scan
    monkeypatch.setattr(module, "refined_scan", lambda *a, **k: made.append(1) or whole(*a, **k))
    config = PrismConfig(vocab_size=64, d_model=128, n_layers=2, n_heads=2, head_dim=64)
    x = torch.randint(64, (2, 600), generator=torch.Generator().manual_seed(0)).cuda()
    exact = PrismModel(config.replace(scan_backend="chunked"), seed=3, device="cuda")
    model = PrismModel(config, seed=3, device="cuda", dtype=None if autocast else torch.bfloat16)
    want = torch.autograd.grad(exact(x).square().mean(), list(exact.parameters()))
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    got = torch.autograd.grad(loss, list(model.parameters()))
    assert len(made) == 2
    missed = sum((g.float() - w).square().sum() for g, w in zip(got, want, strict=True)).sqrt()
    assert missed < 0.05 * sum(w.square().sum() for w in want).sqrt()
