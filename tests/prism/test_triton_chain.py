"""The refinement chain as one operator, against `prism.refinement` in float64.

The interpreter runs small shapes in float32; a GPU takes half precision too. Inputs are rounded to the dtype
under test before the reference sees them, and new memory is filled with NaN.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prism import PrismConfig
from prism.refinement import Refinement

triton = pytest.importorskip("triton")
from prism.scan.triton import chain as module  # noqa: E402
from prism.scan.triton.chain import chain  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("kernels"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:gain='one' with activation='identity':UserWarning"),
]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLACES = [
    pytest.param("cpu", torch.float32, marks=pytest.mark.interpreter),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
]
ALONE = pytest.param("cpu", torch.float32, marks=pytest.mark.interpreter)
# Largest |x - reference| / |reference| of an output and of a gradient.
BOUNDS = {torch.float32: (1e-6, 2e-6), torch.float16: (5e-4, 1e-3), torch.bfloat16: (4e-3, 6e-3)}
Inputs = dict[str, Tensor | None]


def make(B: int, T: int, HV: int, V: int, L: int, gain: bool = True, seed: int = 0) -> Inputs:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return {
        "r": 2 * normal(B, T, HV, V),
        "gain": normal(B, T, HV, L, V) if gain else None,
        "gate": normal(B, T, HV, L).sigmoid(),
    }


def cast(x: dict[str, Tensor | None], dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor | None]:
    """Leaves in dtype that require gradients."""
    return {
        n: None if a is None else a.detach().to(device, dtype).clone().requires_grad_() for n, a in x.items()
    }


def definition(r: Tensor, gain: Tensor | None, gate: Tensor, activation: str, subtract: bool) -> Tensor:
    """write_v by `Refinement.forward`, whose projections are given."""
    HV, L = gate.shape[2:]
    V = r.shape[-1]
    config = PrismConfig(
        vocab_size=2, d_model=HV * V, n_heads=HV, head_dim=V, n_refine=L, activation=activation,
        gain="one" if gain is None else "learned", residual="subtract" if subtract else "keep",
        residual_start="value",
    )  # fmt: skip
    refinement = Refinement(config)
    refinement.project = lambda *_: (r.new_zeros(*gate.shape, V), gain, gate)  # type: ignore[method-assign]
    return refinement(torch.zeros_like(r), r, None).write_v


def relative(found: dict[Any, Tensor], reference: dict[Any, Tensor]) -> dict[Any, float]:
    """|x - reference| / |reference|; absolute where the reference is zero (a residual that is used up)."""
    wide = {n: (found[n].detach().cpu().double(), r.detach().cpu().double()) for n, r in reference.items()}
    return {n: float((f - r).norm() / (r.norm() if r.norm() > 1e-9 else 1.0)) for n, (f, r) in wide.items()}


def check(found: dict[Any, float], bounds: tuple[float, float], outputs: tuple[Any, ...]) -> None:
    wrong = {n: e for n, e in found.items() if not e <= bounds[n not in outputs]}
    assert not wrong, f"{wrong} beside {found}"


def chain_errors(
    x: Inputs, dtype: torch.dtype, device: str, activation: str, subtract: bool
) -> dict[str, float]:
    rounded = cast(x, dtype)
    exact, given = cast(rounded, torch.float64), cast(rounded, dtype, device)
    wrt = [n for n, a in x.items() if a is not None]
    w = definition(*exact.values(), activation, subtract)
    up = torch.randn(w.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)
    grads = torch.autograd.grad(w, [exact[n] for n in wrt], up.double(), allow_unused=True)
    reference = {
        "write_v": w,
        **{n: torch.zeros_like(x[n]) if g is None else g for n, g in zip(wrt, grads, strict=True)},
    }
    w = chain(*given.values(), activation, subtract)
    assert w.dtype == dtype
    grads = torch.autograd.grad(w, [given[n] for n in wrt], up.to(device))
    found = {"write_v": w, **dict(zip(wrt, grads, strict=True))}
    return relative(found, reference)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("subtract", [True, False])
@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh", "identity"])
def test_chain_of_every_kind(activation, gain, subtract, device, dtype):
    found = chain_errors(make(2, 5, 3, 20, 3, gain), dtype, device, activation, subtract)
    check(found, BOUNDS[dtype], ("write_v",))


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 3, 2, 16, 9), (1, 9, 3, 64, 2), (1, 3, 1, 200, 4)])
def test_chain_of_every_shape(shape, device, dtype):
    check(chain_errors(make(*shape), dtype, device, "gelu", True), BOUNDS[dtype], ("write_v",))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize(("device", "dtype"), [ALONE])
def test_chain_at_large_arguments(device, dtype):
    """Nothing overflows where an activation is flat: the exponentials inside meet |z| up to 1e4."""
    z = torch.cat([torch.linspace(-1e4, 1e4, 101), torch.linspace(-8, 8, 99)]).double()
    x = {"r": z.reshape(1, 1, 1, -1), "gain": None, "gate": torch.ones(1, 1, 1, 1).double()}
    for activation in ("gelu", "silu", "tanh"):
        check(chain_errors(x, dtype, device, activation, True), BOUNDS[dtype], ("write_v",))


@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
def test_chain_at_small_arguments(device, dtype):
    """Digits are relative: what is nearly nothing must not be rounded to the grid of its neighbours."""
    z = torch.logspace(-8, 0, 80).to(device, dtype)
    r = torch.cat([z, -z]).reshape(1, 1, 1, -1)
    for activation, exact in (("gelu", F.gelu), ("silu", F.silu), ("tanh", torch.tanh)):
        found = chain(r, None, torch.ones(1, 1, 1, 1, device=device), activation).flatten()
        torch.testing.assert_close(found, exact(r.double()).float().flatten(), rtol=4e-6, atol=0)


@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
def test_chain_reads_views(device, dtype):
    """r and the gains as they come out of the split projections, and out of the low-rank ones."""
    rows = torch.randn(2, 5, 3 * 2 * 8 + 7, device=device, dtype=dtype)
    gain = rows[..., 7:].unflatten(-1, (3, 2, 8))
    low = torch.randn(2, 5, 2, 3, 8, device=device, dtype=dtype).transpose(2, 3)
    r = torch.randn(2, 5, 3 * 8 + 5, device=device, dtype=dtype)[..., 5:].unflatten(-1, (3, 8))
    gate = torch.rand(2, 5, 3, 2, device=device, dtype=dtype)
    upstream = torch.randn_like(gain)
    for p in (gain, low):
        given = [a.detach().requires_grad_() for a in (r, p, gate)]
        dense = [a.detach().contiguous().requires_grad_() for a in (r, p, gate)]
        w, expected = chain(*given), chain(*dense)
        assert torch.equal(w, expected)
        grads = zip(
            torch.autograd.grad(w, given, upstream),
            torch.autograd.grad(expected, dense, upstream),
            strict=True,
        )
        assert all(torch.equal(a, b) for a, b in grads)


@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
@pytest.mark.parametrize("dims", [(0, 0, 0), (1, None, 2), (None, 0, None)])
def test_chain_under_vmap(dims, device, dtype):
    """Members fold into the batch: vmap and one backward pass equal a loop, and vmap of grad does too."""
    E, x = 3, make(2, 5, 3, 8, 2)
    members = [make(2, 5, 3, 8, 2, seed=e) for e in range(E)]
    given = {}
    for (n, a), dim in zip(x.items(), dims, strict=True):
        given[n] = a if dim is None else torch.stack([m[n] for m in members], dim)
    leaves = [a.detach().to(device, dtype).requires_grad_() for a in given.values()]

    def member(e: int) -> Tensor:
        return chain(*(a if d is None else a.select(d, e) for a, d in zip(leaves, dims, strict=True)))

    found = torch.func.vmap(chain, in_dims=dims)(*leaves)
    expected = torch.stack([member(e) for e in range(E)])
    assert torch.equal(found, expected)
    upstream = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(found, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    by_member = torch.func.vmap(
        torch.func.grad(lambda r, p, b, u: (chain(r, p, b) * u).sum()), in_dims=(*dims, 0)
    )
    first = by_member(*(a.detach() for a in leaves), upstream)
    rows = torch.autograd.grad(torch.func.vmap(chain, in_dims=dims)(*leaves), leaves[0], upstream)[0]
    torch.testing.assert_close(first.sum(0) if dims[0] is None else first.movedim(0, dims[0]), rows)


@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
def test_chain_under_compile(device, dtype):
    leaves = list(cast(make(2, 5, 3, 8, 2), dtype, device).values())
    compiled = torch.compile(lambda r, p, b: chain(r, p, b).square(), backend="aot_eager", fullgraph=True)
    found, expected = compiled(*leaves), chain(*leaves).square()
    assert torch.equal(found, expected)
    upstream = torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad(found, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("device", "dtype"), [ALONE])
def test_chain_of_mixed_dtypes(device, dtype):
    """As under autocast: each gradient has its tensor's dtype, the writes the one PyTorch promotes to."""
    x = cast(make(1, 4, 2, 8, 2), dtype)
    x["gain"] = x["gain"].detach().to(torch.float16).requires_grad_()
    w = chain(*x.values())
    assert w.dtype == torch.float32
    assert [g.dtype for g in torch.autograd.grad(w.sum(), list(x.values()))] == [dtype, torch.float16, dtype]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "relu"}, "activation: expected one of gelu, silu, tanh, identity, came 'relu'"),
        (
            {"gate": torch.rand(1, 4, 2, 0)},
            r"gate: expected \[B, T, HV, L\] = \[1, 4, 2, 1 or more\], came \[1, 4, 2, 0\]",
        ),
        (
            {"gain": torch.rand(1, 4, 2, 8)},
            r"gain: expected \[B, T, HV, L, V\] = \[1, 4, 2, 2, 8\], came \[1, 4, 2, 8\]",
        ),
        ({"r": torch.rand(1, 4, 2, 8).double()}, "r: expected float32, bfloat16 or float16, came float64"),
    ],
)
def test_chain_refuses(change, message):
    given = {"r": torch.rand(1, 4, 2, 8), "gain": torch.rand(1, 4, 2, 2, 8), "gate": torch.rand(1, 4, 2, 2)}
    with pytest.raises(ValueError, match=message):
        chain(**{**given, **change})


@pytest.mark.parametrize(("device", "dtype"), PLACES[:2])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"refine_rank": 3, "gain": "sigmoid", "residual_start": "value", "step_gate_bias": 2.0},
        {"gain": "one", "residual": "keep", "activation": "tanh", "n_value_heads": 4},
    ],
)
def test_refinement_fused(change, device, dtype):
    """The layer with the operator in it equals the layer step by step, parameters' gradients included."""
    torch.use_deterministic_algorithms(False)  # cuBLAS asks for a setting of the environment otherwise
    config = PrismConfig(vocab_size=2, d_model=16, n_heads=2, n_refine=3, **change)
    refinement = Refinement(config).to(device, dtype)
    g = torch.Generator().manual_seed(0)
    for parameter in refinement.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g).to(device, dtype) / 2
    u, v = (torch.randn(2, 7, config.value_heads, 8, generator=g).to(device, dtype) for _ in range(2))
    leaves = [u.requires_grad_(), v.requires_grad_(), *refinement.parameters()]
    results = []
    for fused in (False, True):
        refined = refinement(u, v, None, fused=fused)
        assert len(refined.deltas) == (0 if fused else 3)
        wrt = torch.autograd.grad(refined.write_v.square().sum() + refined.write_k.sum(), leaves)
        results.append(dict(enumerate((refined.write_v, refined.write_k, *wrt))))
    check(relative(results[1], results[0]), (2e-6, 1e-5), (0, 1))


TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


@pytest.mark.skipif(not TOOL.exists(), reason="this Triton ships no nvdisasm")
@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under TRITON_INTERPRET=1")
@pytest.mark.parametrize("L", [2, 8, 16])
def test_machine_code_for_hopper(L, tmp_path, monkeypatch):
    """As launched for bfloat16: nothing spills, and no matrix instruction, which the faults of ptxas need."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launches = []
    monkeypatch.setattr(module, "launch", lambda *given: launches.append(given))
    x = {n: a.bfloat16() for n, a in make(1, 2, 2, 128, L).items()}
    module._run(*x.values(), "gelu", True)
    module._run_backward(x["gain"], *x.values(), "gelu", True)
    for kernel, _, _, arguments, constants, options in launches:
        names = kernel.arg_names[: len(arguments)]
        signature = dict.fromkeys(kernel.arg_names, "constexpr")
        signature |= {
            n: "*bf16" if isinstance(a, Tensor) else "i32" for n, a in zip(names, arguments, strict=True)
        }
        aligned = {(n,): [["tt.divisibility", 16]] for n, a in enumerate(arguments) if isinstance(a, Tensor)}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        binary = tmp_path / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        code = subprocess.run([TOOL, "-c", binary], capture_output=True, text=True, check=True).stdout
        assert "LDG.E" in code
        found = re.findall(r"\b(?:LDL|STL|H?GMMA|HMMA)\S*", code)
        assert not found, f"{kernel.__name__} at L = {L}: {found}"
    assert len(launches) == 2
