"""The fused short convolution against `causal_conv`, SiLU and `l2_norm` in float64.

The interpreter runs small shapes in float32; a GPU takes half precision too. Inputs are rounded to the dtype
under test before the reference sees them, and new memory is filled with NaN.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prism.anchor import causal_conv
from prism.refinement import l2_norm

pytest.importorskip("triton")
from prism.scan.triton import short_conv as module
from prism.scan.triton.short_conv import short_conv

pytestmark = [
    pytest.mark.usefixtures("kernels"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]
PLACES = [
    pytest.param("cpu", torch.float32, marks=pytest.mark.interpreter),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
]
# Largest |x - reference| / |reference| of an output and of a gradient.
BOUNDS = {torch.float32: (1e-6, 4e-6), torch.float16: (1e-3, 2e-3), torch.bfloat16: (6e-3, 1.2e-2)}
# heads, widths, which are normalised
GDN = ((2, 2, 4), (16, 16, 8), (True, True, False))
CASES = {
    "gdn": (1, 70, *GDN, 4, True),
    "one_token": (3, 1, *GDN, 4, True),
    "shorter_than_the_window": (2, 2, *GDN, 4, True),
    "odd_width": (2, 13, (3,), (5,), (True,), 3, True),
    "anchor": (1, 130, (1,), (32,), (False,), 4, True),
    "identity": (2, 20, *GDN, 2, False),
    "many_programs": (2, 80, (1, 1), (64, 64), (True, False), 4, True),
    "one_tap": (2, 20, *GDN, 1, True),
    "more_taps_than_a_step": (1, 70, (1,), (16,), (True,), 7, True),
    "wide": (1, 10, (1, 1), (160, 256), (True, False), 4, True),
}


@pytest.fixture(autouse=True)
def _short_programs(request, monkeypatch):
    """The interpreter takes seconds for a hundred tokens: a quarter of them, in programs of a quarter."""
    if request.node.get_closest_marker("interpreter"):
        for name in ("LENGTH", "GRAD_LENGTH"):
            monkeypatch.setattr(module, name, getattr(module, name) // 4)


def tokens(T, device):
    return T if T < 64 or device == "cuda" else -(-T // 4)


def reference(x, weight, heads, widths, unit, silu):
    y, _ = causal_conv(x, weight)
    y = F.silu(y) if silu else y
    parts = y.split([h * d for h, d in zip(heads, widths, strict=True)], -1)
    parts = [part.unflatten(-1, (h, -1)) for part, h in zip(parts, heads, strict=True)]
    return [l2_norm(part) if norm else part for part, norm in zip(parts, unit, strict=True)]


def make(B, T, heads, widths, W, dtype, device="cpu", extra=0, seed=0):
    """x (a view of rows that are `extra` longer) and weight, rounded to dtype."""
    g = torch.Generator().manual_seed(seed)
    C, T = sum(h * d for h, d in zip(heads, widths, strict=True)), tokens(T, device)
    x = torch.randn(B, T, C + extra, generator=g).to(device, dtype)
    weight = (0.5 * torch.randn(C, W, generator=g)).to(device)
    return x.requires_grad_(), weight.requires_grad_()


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case, device, dtype):
    B, T, heads, widths, unit, W, silu = CASES[case]
    x, weight = make(B, T, heads, widths, W, dtype, device, extra=3)
    C = weight.shape[0]
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    want = reference(exact_x[..., :C], exact_weight, heads, widths, unit, silu)
    found = short_conv(x[..., :C], weight, heads, widths, unit, silu)
    g = torch.Generator().manual_seed(1)
    grads = [torch.randn(t.shape, generator=g).to(device, dtype) for t in found]
    wanted = torch.autograd.grad(want, [exact_x, exact_weight], [t.double() for t in grads])
    got = torch.autograd.grad(found, [x, weight], grads)
    bound, grad_bound = BOUNDS[dtype]
    for f, w in zip(found, want, strict=True):
        assert f.is_contiguous()
        assert f.dtype == dtype
        assert relative(f, w) < bound
    for f, w in zip(got, wanted, strict=True):
        assert relative(f, w) < grad_bound


@pytest.mark.parametrize(("device", "dtype"), PLACES[:1] + PLACES[2:3])
def test_a_result_that_nobody_reads_has_no_gradient(device, dtype):
    x, weight = make(2, 5, GDN[0], GDN[1], 4, dtype, device)
    *_, v = short_conv(x, weight, *GDN)
    d_x, d_weight = torch.autograd.grad(v.float().sum(), [x, weight])
    assert not d_x[..., :64].any()
    assert not d_weight[:64].any()
    assert d_x[..., 64:].any()


@pytest.mark.parametrize(("device", "dtype"), PLACES[:1] + PLACES[2:3])
def test_further_channels_pass_through_with_their_gradient(device, dtype):
    x, weight = make(2, 5, GDN[0], GDN[1], 4, dtype, device, extra=3)
    *alone, rest = short_conv(x, weight, *GDN)
    for f, w in zip(alone, short_conv(x[..., :96], weight, *GDN), strict=True):
        assert torch.equal(f, w)
    assert torch.equal(rest, x[..., 96:])
    (d_x,) = torch.autograd.grad((2 * rest).sum(), [x])
    assert torch.equal(d_x[..., 96:], torch.full_like(rest, 2))
    assert not d_x[..., :96].any()


@pytest.mark.parametrize(("device", "dtype"), PLACES[:1] + PLACES[2:3])
@pytest.mark.parametrize("T", [5, 70])
def test_what_stands_for_a_result_adds_its_gradient(T, device, dtype):
    x, weight = make(2 if T == 5 else 1, T, GDN[0], GDN[1], 4, dtype, device, extra=3)
    q, k, v, rest, q_again, minus_v = short_conv(x, weight, *GDN, again=(1, 0, -1))
    assert (q_again.shape, minus_v.shape) == (q.shape, v.shape)
    g = torch.Generator().manual_seed(1)
    grads = [torch.randn(t.shape, generator=g).to(device, dtype) for t in (q, k, v, rest, q, v)]
    got = torch.autograd.grad([q, k, v, rest, q_again, minus_v], [x, weight], grads, retain_graph=True)
    wide = [t.double() for t in grads]
    total = [wide[0] + wide[4], wide[1], wide[2] - wide[5], wide[3]]
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    want = [*reference(exact_x[..., :96], exact_weight, *GDN, True), exact_x[..., 96:]]
    for f, w in zip(got, torch.autograd.grad(want, [exact_x, exact_weight], total), strict=True):
        assert relative(f, w) < BOUNDS[dtype][1]
    alone = torch.autograd.grad([q, minus_v], [x, weight], [grads[0], grads[5]])
    zeros = torch.zeros_like(v)
    plain = torch.autograd.grad(short_conv(x, weight, *GDN)[::2], [x, weight], [grads[0], zeros - grads[5]])
    for f, w in zip(alone, plain, strict=True):
        torch.testing.assert_close(f, w)


@pytest.mark.parametrize(("device", "dtype"), PLACES[:1] + PLACES[2:3])
def test_members_under_vmap_and_one_backward(device, dtype):
    pairs = [make(2, 5, GDN[0], GDN[1], 4, dtype, device, seed=seed) for seed in range(2)]
    x, weight = (torch.stack([p[i].detach() for p in pairs]).requires_grad_() for i in (0, 1))
    together = torch.func.vmap(lambda x, w: torch.cat([t.flatten() for t in short_conv(x, w, *GDN)]))(
        x, weight
    )
    together.float().square().sum().backward()
    for e, (x_e, weight_e) in enumerate(pairs):
        alone = torch.cat([t.flatten() for t in short_conv(x_e, weight_e, *GDN)])
        alone.float().square().sum().backward()
        torch.testing.assert_close(together[e], alone)
        torch.testing.assert_close(x.grad[e], x_e.grad)
        torch.testing.assert_close(weight.grad[e], weight_e.grad)


@pytest.mark.parametrize(("device", "dtype"), PLACES[:1] + PLACES[2:3])
def test_compiles_without_a_graph_break(device, dtype):
    x, weight = make(2, 5, GDN[0], GDN[1], 4, dtype, device)

    def loss(x, weight):
        return sum(t.float().square().sum() for t in short_conv(x, weight, *GDN))

    want = torch.autograd.grad(loss(x, weight), [x, weight])
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, weight), [x, weight]), want)


def test_wrong_sizes_are_named():
    x, weight = make(1, 3, GDN[0], GDN[1], 4, torch.float32)
    with pytest.raises(
        ValueError,
        match=r"heads, widths: expected 64 channels and a flag each, came x \[1, 3, 96\], weight \[96",
    ):
        short_conv(x, weight, (2, 2), (16, 16), (True, True))
    with pytest.raises(ValueError, match="x: expected float32, bfloat16 or float16, came float64"):
        short_conv(x.double(), weight, *GDN)
