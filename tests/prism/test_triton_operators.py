"""What every operator of prism.scan.triton owes its caller, whatever it computes: any strides, empty batches,
and an error where a gradient is differentiated again. In Triton's interpreter, and on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prism import prism_scan

pytest.importorskip("triton")
from prism.scan.triton.chain import chain
from prism.scan.triton.refine import refine
from prism.scan.triton.short_conv import short_conv

pytestmark = [
    pytest.mark.usefixtures("kernels"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]
EVERYWHERE = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.interpreter),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
H, D, L = 2, 8, 2


def of_scan(q, k, v, log_decay, beta):
    return prism_scan(q, k, v, -log_decay.abs(), beta.sigmoid(), backend="triton")[0]


def of_chain(r, gain, gate):
    return chain(r, gain, gate)


def of_refine(rows, u, v):
    return torch.cat(refine(rows, u, v, L, D), -1)


def of_short_conv(x):
    weight = torch.linspace(-1, 1, H * D * 4, device=x.device).view(H * D, 4)
    return short_conv(x, weight, (H,), (D,), (True,))[0]


# Operator, and the sizes of its inputs behind [B, T].
OPERATORS = {
    "scan": (of_scan, ((H, D), (H, D), (H, D), (H,), (H,))),
    "chain": (of_chain, ((H, D), (H, L, D), (H, L))),
    "refine": (of_refine, ((H * L * (2 * D + 1),), (H, D), (H, D))),
    "short_conv": (of_short_conv, ((H * D,),)),
}
EVERY = pytest.mark.parametrize("name", OPERATORS)


def inputs(name: str, B: int, T: int, device: str) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(B, T, *size, generator=g).to(device) for size in OPERATORS[name][1]]


@EVERYWHERE
@EVERY
def test_one_token_that_stood_in_front_of_the_batch(name, device):
    """[1, B, ...] transposed counts as contiguous whatever the stride of its single token says."""
    run, given = OPERATORS[name][0], inputs(name, 3, 1, device)
    odd = [torch.stack(list(x.unbind(0)), 1).transpose(0, 1) for x in given]
    assert all(x.is_contiguous() and x.stride(1) != x.stride(0) for x in odd)
    found = []
    for x in (given, odd):
        leaves = [a.requires_grad_() for a in x]
        o = run(*leaves)
        upstream = torch.arange(o.numel())
        found.append([o, *torch.autograd.grad(o, leaves, upstream.to(o).view_as(o))])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@EVERYWHERE
@pytest.mark.parametrize("name", [n for n in OPERATORS if n != "scan"])  # which names what is empty
@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 3), (0, 0)])
def test_nothing_in_nothing_out(name, B, T, device):
    leaves = [x.requires_grad_() for x in inputs(name, B, T, device)]
    o = OPERATORS[name][0](*leaves)
    assert o.shape[:2] == (B, T)
    grads = torch.autograd.grad(o.sum(), leaves)
    assert [g.shape for g in grads] == [x.shape for x in leaves]


@EVERYWHERE
@EVERY
def test_a_gradient_of_a_gradient_raises(name, device):
    """Also where the input reaches the second loss by another path, which alone would be a wrong answer."""
    leaves = [x.requires_grad_() for x in inputs(name, 1, 3, device)]
    for other in (0.0, 1.0):
        loss = OPERATORS[name][0](*leaves).square().sum() + other * sum(x.pow(3).sum() for x in leaves)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        with pytest.raises(RuntimeError, match=r"differentiated once|no autograd formula was registered"):
            torch.autograd.grad(sum(g.sum() for g in first), leaves, allow_unused=True)


@EVERYWHERE
@pytest.mark.parametrize("name", ["scan", "chain"])
def test_a_gradient_of_a_gradient_raises_in_torch_func(name, device):
    run, (x, *others) = OPERATORS[name][0], inputs(name, 1, 3, device)

    def inner(x):
        return torch.func.grad(lambda x: run(x, *others).square().sum())(x)

    assert inner(x).any()
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.func.grad(lambda x: inner(x).square().sum())(x)
    members = torch.stack([x, 2 * x])
    torch.testing.assert_close(torch.func.vmap(inner)(members), torch.stack([inner(m) for m in members]))


@pytest.mark.gpu
def test_a_state_beyond_the_range_of_float16():
    """640 equal writes of 300 add up to 192,000, of which a read is an eighth."""
    T, K = 640, 64
    k = torch.zeros(1, T, 1, K, device="cuda", dtype=torch.float16)
    k[..., 0] = 1
    v, none = torch.full_like(k, 300), k.new_zeros(1, T, 1)
    writes = k.unsqueeze(3), v.unsqueeze(3)
    o, state = prism_scan(k, k, v, none, none, *writes, output_final_state=True, backend="triton")
    want = torch.arange(1, T + 1, device="cuda", dtype=torch.float32) * 300
    torch.testing.assert_close(o[0, :, 0, 0].float(), want / 8, rtol=2e-3, atol=0)
    torch.testing.assert_close(state[0, 0, 0], want[-1:].expand(K), rtol=2e-3, atol=0)
