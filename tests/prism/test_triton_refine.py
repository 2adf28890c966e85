"""The refinement behind its projection in one kernel, against `prism.refinement` in float64.

The interpreter runs small shapes in float32; a GPU takes half precision too. Inputs are rounded to the dtype
under test before the reference sees them, and new memory is filled with NaN.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from prism.scan.triton.refine import refine

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
BOUNDS = {torch.float32: (1e-6, 4e-6), torch.float16: (1e-3, 2e-3), torch.bfloat16: (6e-3, 1.2e-2)}
# B, T, HV, K, V, L, values behind a row, activation, subtract, unit, anchored
CASES = {
    "default": (2, 5, 2, 16, 16, 2, 4, "gelu", True, True, True),
    "one_step": (1, 3, 1, 8, 8, 1, 0, "gelu", True, True, True),
    "four_steps": (1, 7, 3, 8, 8, 4, 4, "silu", True, True, True),
    "odd_widths": (1, 4, 2, 5, 12, 2, 6, "tanh", True, True, True),
    "kept_residual": (1, 4, 2, 8, 8, 3, 2, "identity", False, True, True),
    "bare_keys_no_anchor": (2, 3, 2, 8, 8, 2, 4, "gelu", True, False, False),
    "much_behind": (1, 3, 2, 8, 8, 1, 52, "gelu", True, True, True),
    "wide": (1, 70, 2, 128, 64, 2, 4, "gelu", True, True, True),
}


def make(case, dtype, device="cpu", seed=0):
    """rows (a view into longer ones), u, v and the options of a call."""
    B, T, HV, K, V, L, behind, activation, subtract, unit, anchored = CASES[case]
    g = torch.Generator().manual_seed(seed)
    R = HV * L * (K + V + 1) + behind
    rows = torch.randn(B, T, R + 2, generator=g).to(device, dtype).requires_grad_()
    u, v = (torch.randn(B, T, HV, V, generator=g).to(device, dtype).requires_grad_() for _ in range(2))
    return (rows, u if anchored else None, v), R, (L, K, activation, subtract, unit)


def relative(found, exact):
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case, device, dtype, refine_reference):
    inputs, R, options = make(case, dtype, device)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    want = refine_reference(exact[0][..., :R], *exact[1:], *options)
    found = refine(inputs[0][..., :R], *inputs[1:], *options)
    g = torch.Generator().manual_seed(1)
    grads = [torch.randn(t.shape, generator=g).to(device, dtype) for t in found]
    leaves = [[x for x in given if x is not None] for given in (exact, inputs)]
    wanted = torch.autograd.grad(want, leaves[0], [t.double() for t in grads])
    got = torch.autograd.grad(found, leaves[1], grads)
    bound, grad_bound = BOUNDS[dtype]
    for f, w in zip(found, want, strict=True):
        assert f.is_contiguous()
        assert f.dtype == dtype
        assert relative(f, w) < bound
    for f, w in zip(got, wanted, strict=True):
        assert relative(f, w) < grad_bound


@pytest.mark.parametrize(("device", "dtype"), PLACES[:1] + PLACES[2:3])
def test_members_under_vmap_and_one_backward(device, dtype):
    members = [make("default", dtype, device, seed)[0] for seed in range(2)]
    _, R, options = make("default", dtype, device)
    stacked = [torch.stack([m[i].detach() for m in members]).requires_grad_() for i in range(3)]

    def both(rows, u, v):
        return torch.cat([t.flatten() for t in refine(rows[..., :R], u, v, *options)])

    together = torch.func.vmap(both)(*stacked)
    together.float().square().sum().backward()
    for e, inputs in enumerate(members):
        alone = both(*inputs)
        alone.float().square().sum().backward()
        torch.testing.assert_close(together[e], alone)
        for x, own in zip(stacked, inputs, strict=True):
            torch.testing.assert_close(x.grad[e], own.grad)


@pytest.mark.parametrize(("device", "dtype"), PLACES[:1] + PLACES[2:3])
def test_a_result_that_nobody_reads_has_no_gradient(device, dtype):
    (rows, u, v), R, options = make("default", dtype, device)
    write_k, _ = refine(rows[..., :R], u, v, *options)
    d_rows, d_v = torch.autograd.grad(write_k.float().sum(), [rows, v])
    assert not d_v.any()
    assert d_rows[..., :64].any()
    assert not d_rows[..., 64:].any()


@pytest.mark.parametrize(("device", "dtype"), PLACES[:1] + PLACES[2:3])
@pytest.mark.parametrize("anchored", [True, False])
def test_what_stands_for_the_anchor_and_the_value_takes_their_gradient(anchored, device, dtype):
    (rows, u, v), R, options = make("default", dtype, device)
    u = u if anchored else None
    minus_u, v_again = (v.detach().new_empty(1).expand(v.shape).requires_grad_() for _ in range(2))
    found = refine(rows[..., :R], u, v, *options, minus_u, v_again)
    want = refine(rows[..., :R], u, v, *options)
    leaves = (rows, v, u) if anchored else (rows, v)
    d_rows, d_v, *d_u = torch.autograd.grad([x.float().square().sum() for x in want], leaves)
    inputs = (rows, v_again, minus_u, v, *leaves[2:])
    got = torch.autograd.grad([x.float().square().sum() for x in found], inputs, allow_unused=True)
    assert torch.equal(got[0], d_rows)
    assert torch.equal(got[1], d_v)
    assert all(x is None for x in got[3:])
    assert torch.equal(-got[2], *d_u) if anchored else got[2] is None


@pytest.mark.parametrize(("device", "dtype"), PLACES[:1] + PLACES[2:3])
def test_members_of_a_vmap_add_the_gradients_of_both_readers(device, dtype):
    from prism.scan.triton.short_conv import short_conv

    (rows, _, _), R, options = make("default", dtype, device)
    g = torch.Generator().manual_seed(2)
    x = torch.randn(2, *rows.shape[:2], 32, generator=g).to(device, dtype).requires_grad_()
    weight = torch.randn(32, 4, generator=g).to(device)

    def loss(x, again):
        v, *v_again = short_conv(x, weight, (2,), (16,), (False,), again=again)
        made = refine(rows[..., :R], None, v, *options, v_again=v_again[0] if v_again else None)
        return sum(t.float().square().sum() for t in (*made, v))

    (got,) = torch.autograd.grad(torch.func.vmap(lambda x: loss(x, (1,)))(x).sum(), [x])
    (want,) = torch.autograd.grad(loss(x[0], ()) + loss(x[1], ()), [x])
    assert relative(got, want.double()) < BOUNDS[dtype][1]


def test_wrong_inputs_are_named():
    (rows, u, v), _, (L, K, *options) = make("default", torch.float32)
    with pytest.raises(
        ValueError, match="activation: expected one of gelu, silu, tanh, identity, came 'relu'"
    ):
        refine(rows, u, v, L, K, "relu")
    with pytest.raises(
        ValueError, match="rows: expected steps >= 1 and at least 198 values a token, came 3 and 138"
    ):
        refine(rows, u, v, 3, K, *options)
    with pytest.raises(ValueError, match="rows, u, v: expected float32, bfloat16 or float16, came float64"):
        refine(rows.double(), u, v, L, K, *options)
    with pytest.raises(ValueError, match="rows, u, v: expected float32, bfloat16 or float16, came float64"):
        refine(rows, u.double(), v, L, K, *options)
    with pytest.raises(
        ValueError, match=r"u: expected the shape of v, \[2, 5, 2, 16\], came \[2, 5, 1, 16\]"
    ):
        refine(rows, u[:, :, :1], v, L, K, *options)
    with pytest.raises(ValueError, match=r"rows: expected \[B, T, R\] = \[2, 5, R\], came \[2, 4, 138\]"):
        refine(rows[:, :4], u, v, L, K, *options)
