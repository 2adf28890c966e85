"""What the tests of the scan and of its kernels share: inputs, a run with all gradients, a comparison that
says what differs, the place that a kernel's test asks for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from prism.refinement import ACTIVATIONS, l2_norm
from prism.scan import prism_scan

FLOATING = ("q", "k", "v", "log_decay", "beta", "write_k", "write_v", "initial_state")


def make(
    B=2, T=37, H=2, HV=4, K=8, V=6, L=2, *, state=True, offsets=None, seed=0, decay=1.0, max_beta=1.0
) -> dict[str, Tensor | None]:
    """Random float64 arguments of prism_scan, unit keys; `offsets` packs T tokens into B = 1."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    unit = torch.nn.functional.normalize
    B, N = (B, B) if offsets is None else (1, len(offsets) - 1)
    return {
        "q": normal(B, T, H, K),
        "k": unit(normal(B, T, H, K), dim=-1),
        "v": normal(B, T, HV, V),
        "log_decay": -decay * normal(B, T, HV).abs(),
        "beta": max_beta * torch.rand(B, T, HV, generator=draw, dtype=torch.float64),
        "write_k": unit(normal(B, T, HV, L, K), dim=-1) if L else None,
        "write_v": normal(B, T, HV, L, V) if L else None,
        "initial_state": normal(N, HV, K, V) if state else None,
        "cu_seqlens": None if offsets is None else torch.tensor(offsets),
    }


def cast(inputs: dict, dtype: torch.dtype, **others: torch.dtype) -> dict:
    """The inputs in another dtype; `others` names exceptions."""
    state = torch.float64 if dtype == torch.float64 else torch.float32
    others = {"initial_state": state} | others
    return {
        name: x.to(others.get(name, dtype)) if name in FLOATING and x is not None else x
        for name, x in inputs.items()
    }


def results(inputs: dict, backend: str, scan=None, upstream_seed: int = 1, **options) -> dict[str, Tensor]:
    """Output, final state and the gradient of every floating input for random upstream gradients of both."""
    scan = scan or prism_scan
    leaves = {n: inputs[n].detach().clone().requires_grad_() for n in FLOATING if inputs.get(n) is not None}
    o, state = scan(**{**inputs, **leaves}, output_final_state=True, backend=backend, **options)
    draw = torch.Generator().manual_seed(upstream_seed)
    do, dstate = (torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x) for x in (o, state))
    grads = torch.autograd.grad([o, state], list(leaves.values()), [do, dstate])
    return {"o": o, "final state": state} | {
        f"gradient of {n}": g for n, g in zip(leaves, grads, strict=True)
    }


def error(x: Tensor, reference: Tensor) -> float:
    """||x - reference|| / ||reference||; infinite where x is not finite."""
    x, reference = x.detach().double(), reference.detach().double()
    if not x.isfinite().all():
        return float("inf")
    return float((x - reference).norm() / reference.norm().clamp_min(1e-300))


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    wrong = {name: e for name in want if not (e := error(got[name], want[name])) < tolerance}
    assert not wrong, f"relative error not below {tolerance}: {wrong}"


@pytest.fixture(scope="session")
def scan_cases() -> SimpleNamespace:
    return SimpleNamespace(make=make, cast=cast, results=results, error=error, assert_close=assert_close)


def reference(rows, u, v, L, K, activation, subtract, unit):
    """write_k and write_v as `prism.refinement` has them."""
    HV, V = v.shape[2:]
    keys, gains, gates, _ = rows.split(
        [HV * L * K, HV * L * V, HV * L, rows.shape[-1] - HV * L * (K + V + 1)], -1
    )
    keys, gains = (x.unflatten(-1, (HV, L, -1)) for x in (keys, gains))
    r, writes = v if u is None else v - u, []
    for l in range(L):
        delta = ACTIVATIONS[activation](gains[..., l, :] * r)
        writes.append(gates.sigmoid().unflatten(-1, (HV, L))[..., l, None] * delta)
        r = r - delta if subtract else r
    return l2_norm(keys) if unit else keys, torch.stack(writes, 3)


@pytest.fixture(scope="session")
def refine_reference():
    return reference


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skips a test that is marked for a place that is not here, and fills new memory with NaN."""
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    if request.node.get_closest_marker("interpreter") and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET=1 is not set")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
