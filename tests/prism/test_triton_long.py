"""The chunk-parallel kernels against the recurrence in float64: in Triton's interpreter, and on a GPU.

Inputs are rounded to the dtype under test before the reference sees them. Uninitialised memory is filled with
NaN, so that an element that no kernel wrote shows.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from prism.scan.chunked import chunked
from prism.scan.recurrent import recurrent

pytest.importorskip("triton")
from prism.scan.triton import chunkwise
from prism.scan.triton.chunkwise import Tuning

# Triton 3.6's interpreter turns arrays into loop bounds in a way that numpy warns of, and numpy warns of
# exponentials that overflow above the diagonal, which the kernels discard.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 before triton is imported"
)

NAMES = ("q", "k", "v", "log_decay", "beta", "write_k", "write_v", "initial_state")
# Largest |x - reference| / |reference| of an output and of a gradient.
BOUNDS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1.5e-2, 2e-2)}


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make(
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    L: int,
    *,
    N: int | None = None,
    decay: float = 1.0,
    seed: int = 0,
) -> dict[str, Tensor | None]:
    """Float64 on the CPU: unit keys, log_decay uniform in (-decay, 0), beta uniform in (0, 2)."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=g)

    return {
        "q": normal(B, T, H, K),
        "k": torch.nn.functional.normalize(normal(B, T, H, K), dim=-1),
        "v": normal(B, T, HV, V),
        "log_decay": -decay * uniform(B, T, HV),
        "beta": 2 * uniform(B, T, HV),
        "write_k": torch.nn.functional.normalize(normal(B, T, HV, L, K), dim=-1) if L else None,
        "write_v": normal(B, T, HV, L, V) if L else None,
        "initial_state": normal(B if N is None else N, HV, K, V),
    }


def errors(
    inputs: dict[str, Tensor | None],
    dtype: torch.dtype,
    device: str,
    offsets: list[int] | None = None,
    tuned: Tuning | None = None,
) -> dict[str, float]:
    """Relative error of both outputs and of every gradient."""
    wide = ("log_decay", "beta", "initial_state")
    given = {n: None if x is None else x.to(torch.float32 if n in wide else dtype) for n, x in inputs.items()}
    exact = {n: None if x is None else x.double().requires_grad_() for n, x in given.items()}
    scale = given["q"].shape[-1] ** -0.5
    cu = None if offsets is None else torch.tensor(offsets)
    g = torch.Generator().manual_seed(99)
    do = torch.randn(given["v"].shape, generator=g).to(dtype)
    dstate = torch.randn(given["initial_state"].shape, generator=g)

    *tensors, initial = exact.values()
    o, state = recurrent(*tensors, scale, initial, cu)
    wrt = {n: x for n, x in exact.items() if x is not None}
    grads = torch.autograd.grad((o * do).sum() + (state * dstate).sum(), list(wrt.values()))
    reference = {"o": o, "state": state, **dict(zip(wrt, grads, strict=True))}

    *tensors, initial = (None if x is None else x.to(device) for x in given.values())
    cu = None if cu is None else cu.to(device)
    saved = chunkwise.allocate(tensors[0], tensors[2], tensors[5], cu, tuned=tuned)
    o, state = chunkwise.forward(*tensors, scale, initial, cu, saved, tuned=tuned)
    bare, _ = chunkwise.forward(*tensors, scale, initial, cu, [], tuned=tuned)
    assert torch.equal(o, bare)
    grads = chunkwise.backward(
        do.to(device), dstate.to(device), *tensors, scale, initial, cu, saved, tuned=tuned
    )
    found = {"o": o, "state": state, **dict(zip(NAMES, grads, strict=True))}
    assert all(found[n].dtype == given[n].dtype for n in wrt)
    return {
        n: float((found[n].cpu().double() - r.detach()).norm() / r.detach().norm().clamp_min(1e-30))
        for n, r in reference.items()
    }


def plain_errors(inputs: dict[str, Tensor | None]) -> dict[str, float]:
    """Errors of the outputs of `chunked` in float32: how ill-conditioned the problem itself is."""
    *tensors, initial = (None if x is None else x.float() for x in inputs.values())
    scale = tensors[0].shape[-1] ** -0.5
    exact = recurrent(*(None if x is None else x.double() for x in tensors), scale, initial.double(), None)
    found = chunked(*tensors, scale, initial, None)
    return {n: float((f - r).norm() / r.norm()) for n, f, r in zip(("o", "state"), found, exact, strict=True)}


def check(found: dict[str, float], dtype: torch.dtype, plain: dict[str, float] | None = None) -> None:
    """`plain`: the errors of plain PyTorch in the same dtype; twice those pass too."""
    output, gradient = BOUNDS[dtype]
    bound = {
        n: max(output if n in ("o", "state") else gradient, 2 * (plain or {}).get(n, 0.0)) for n in found
    }
    wrong = {n: e for n, e in found.items() if not e <= bound[n]}
    assert not wrong, f"{wrong} beside {found}"


def tuned(dtype: torch.dtype, K: int, V: int, chunk: int) -> Tuning:
    """The launch settings of these widths with another chunk length."""
    return chunkwise.tuning(dtype, K, V, 1000, True, False)._replace(chunk=chunk)


def repeated_keys(T: int, beta: float, L: int = 1) -> dict[str, Tensor | None]:
    """Keys that differ by 1e-3 of their length: the triangular system has all entries near beta."""
    x = make(1, T, 1, 1, 16, 16, L, decay=0.01)
    x["k"] = torch.nn.functional.normalize(x["k"][:, :1] + 1e-3 * x["k"], dim=-1)
    x["beta"] = torch.full_like(x["beta"], beta)
    return x


def alternating(T: int, L: int = 1) -> dict[str, Tensor | None]:
    x = make(1, T, 1, 1, 16, 16, L)
    x["log_decay"] = torch.where(torch.arange(T) % 2 == 0, -20.0, 0.0)[None, :, None].double()
    return x


@pytest.mark.interpreter
@needs_interpreter
@pytest.mark.parametrize(
    ("B", "T", "H", "HV", "K", "V", "L", "C"),
    [
        (1, 1, 1, 1, 16, 16, 0, 64),
        (2, 33, 1, 2, 5, 3, 1, 16),
        (1, 70, 1, 1, 24, 40, 2, 32),
        (1, 130, 2, 4, 20, 16, 0, 64),
        (1, 65, 1, 1, 64, 32, 3, 64),
        (1, 40, 1, 1, 128, 128, 1, 32),
        (1, 17, 1, 1, 16, 16, 8, 16),
        (2, 64, 1, 2, 20, 16, 2, 32),  # whole chunks
    ],
)
def test_interpreted_shapes(B, T, H, HV, K, V, L, C):
    found = errors(make(B, T, H, HV, K, V, L), torch.float32, "cpu", tuned=tuned(torch.float32, K, V, C))
    check(found, torch.float32)


@pytest.mark.interpreter
@needs_interpreter
def test_interpreted_programs_in_any_order(monkeypatch):
    """No program writes what is another's: last to first gives what first to last gives."""
    from triton.runtime.interpreter import interpreter_builder as builder

    forwards = builder.set_grid_idx
    inputs, at = make(1, 40, 1, 1, 16, 16, 1), tuned(torch.float32, 16, 16, 16)
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: forwards(builder.grid_dim[0] - 1 - x, y, z))
    check(errors(inputs, torch.float32, "cpu", tuned=at), torch.float32)


@pytest.mark.interpreter
@needs_interpreter
@pytest.mark.parametrize("C", [16, 32])
def test_interpreted_packed_sequences(C):
    offsets = [0, 0, 5, 38, 38, 39]
    inputs = make(1, 39, 1, 2, 16, 16, 1, N=len(offsets) - 1)
    check(errors(inputs, torch.float32, "cpu", offsets, tuned(torch.float32, 16, 16, C)), torch.float32)


@pytest.mark.interpreter
@needs_interpreter
@pytest.mark.parametrize(
    ("shape", "offsets", "chunks"),
    [
        ((2, 70, 1, 1, 16, 16, 1), None, 2),
        ((1, 60, 1, 2, 24, 20, 0), None, 1),
        ((2, 64, 1, 2, 16, 20, 1), None, 1),  # of whole chunks
        ((1, 64, 1, 1, 16, 16, 0), None, 3),
        ((1, 90, 1, 1, 16, 16, 1), [0, 0, 5, 38, 38, 39, 90], 1),
        ((1, 40, 1, 1, 16, 16, 0), None, 100),
    ],
)
def test_interpreted_levels(shape, offsets, chunks):
    """Sequences cut into segments: ragged, empty, of one segment; the same in one level."""
    at = tuned(torch.float32, shape[4], shape[5], 16)._replace(segment_chunks=chunks)
    inputs = make(*shape, N=None if offsets is None else len(offsets) - 1)
    check(errors(inputs, torch.float32, "cpu", offsets, at), torch.float32)


@pytest.mark.interpreter
@needs_interpreter
@pytest.mark.parametrize("inputs", [repeated_keys(64, 0.9), repeated_keys(64, 1.9), alternating(66)])
def test_interpreted_hard_numbers(inputs):
    check(errors(inputs, torch.float32, "cpu", tuned=tuned(torch.float32, 16, 16, 64)), torch.float32)


@pytest.mark.interpreter
@needs_interpreter
@pytest.mark.parametrize(
    ("inputs", "times"),
    [(make(1, 130, 1, 1, 64, 64, 1), 1), (alternating(80), 1), (repeated_keys(100, 1.9), 20)],
)
def test_interpreted_rounding_of_bfloat16(inputs, times, monkeypatch):
    """What half precision rounds, the operands of its products, rounded here: its errors without a GPU. The
    products of the inverse, over 32 rows at most, keep float32. Where keys repeat, the system amplifies."""
    from triton.runtime.interpreter import TensorHandle
    from triton.runtime.interpreter import interpreter_builder as builder

    product = builder.create_dot

    def rounded(x: TensorHandle) -> TensorHandle:
        return TensorHandle(torch.from_numpy(x.data.copy()).bfloat16().float().numpy(), x.dtype)

    def create_dot(a, b, *rest):
        return product(a, b, *rest) if a.data.shape[-1] < 64 else product(rounded(a), rounded(b), *rest)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    K = inputs["q"].shape[-1]
    for name in ("q", "k", "v", "write_k", "write_v", "initial_state"):  # to width 64, as the launch does
        widen = (0, 64 - K, 0, 64 - K) if name == "initial_state" else (0, 64 - K)
        inputs = inputs | {name: torch.nn.functional.pad(inputs[name], widen)}
    exact = {
        n: x.bfloat16().double() if x.ndim > 3 and n != "initial_state" else x for n, x in inputs.items()
    }
    found = errors(exact, torch.float32, "cpu", tuned=tuned(torch.float32, 64, 64, 64))
    check({n: e / times for n, e in found.items()}, torch.bfloat16)


@pytest.mark.interpreter
@needs_interpreter
@pytest.mark.parametrize("decay", [20.0, 70.0])
def test_interpreted_strong_decay(decay):
    inputs = make(1, 50, 1, 1, 16, 16, 1)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], -decay)
    found = errors(inputs, torch.float32, "cpu")
    # exp(-70) is gone beside 1: what is left of this gradient has no digits in float32, but must be a number.
    assert found.pop("log_decay") < (1e-4 if decay < 70 else float("inf"))
    check({n: e for n, e in found.items() if n != "initial_state" or decay < 70}, torch.float32)


@pytest.mark.interpreter
@needs_interpreter
@pytest.mark.parametrize("offsets", [[-7, 40, 3, 10**12], [9, 2, 2, 2], [0, 50, 50, 20]])
def test_interpreted_offsets_never_lead_outside(offsets):
    inputs = {n: None if x is None else x.float() for n, x in make(1, 50, 1, 1, 16, 16, 1, N=3).items()}
    *tensors, initial = inputs.values()
    cu = torch.tensor(offsets)
    saved = chunkwise.allocate(tensors[0], tensors[2], tensors[5], cu)
    table = chunkwise.layout(1, 50, chunkwise.tuning(torch.float32, 16, 16, 1, True, False).chunk, cu)
    assert table.chunks == len(saved[3]) >= table.chunk_start[-1]
    assert table.spans.min() >= 0
    assert table.spans.max() <= 50
    o, state = chunkwise.forward(*tensors, 1.0, initial, cu, saved)
    chunkwise.backward(o, state, *tensors, 1.0, initial, cu, saved)


@pytest.mark.interpreter
@needs_interpreter
def test_interpreted_gradient_of_one_output_only():
    inputs = {n: None if x is None else x.float() for n, x in make(1, 20, 1, 1, 16, 16, 1).items()}
    *tensors, initial = inputs.values()
    saved = chunkwise.allocate(tensors[0], tensors[2], tensors[5], None)
    o, state = chunkwise.forward(*tensors, 1.0, initial, None, saved)
    both = chunkwise.backward(o, state, *tensors, 1.0, initial, None, saved)
    first = chunkwise.backward(o, None, *tensors, 1.0, initial, None, saved)
    second = chunkwise.backward(None, state, *tensors, 1.0, initial, None, saved)
    for a, b, c in zip(both, first, second, strict=True):
        torch.testing.assert_close(a, b + c, rtol=1e-4, atol=1e-5)


# On a GPU only bfloat16 comes here (`choose`), and each pair of padded widths is one set of programs.


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("K", "V"), list(itertools.product((64, 128), repeat=2)))
@pytest.mark.parametrize("L", [0, 2])
@pytest.mark.parametrize("programs", [chunkwise.FEW_PROGRAMS, chunkwise.FEW_PROGRAMS + 1])
@pytest.mark.parametrize("T", [130, 192])
def test_every_program(T, programs, L, K, V):
    """At the warps, stages and slices that these widths are launched with: there are no others."""
    at = chunkwise.tuning(torch.bfloat16, K, V, programs, L > 0, T % 64 == 0)
    check(errors(make(1, T, 1, 2, K, V, L), torch.bfloat16, "cuda", tuned=at), torch.bfloat16)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("K", "V"), list(itertools.product((1, 16, 32, 100), repeat=2)))
def test_padded_widths(K, V):
    check(errors(make(1, 130, 1, 2, K, V, 1), torch.bfloat16, "cuda"), torch.bfloat16)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("sequences", [3, 300])
@pytest.mark.parametrize("L", [0, 1])
def test_few_and_many_programs(L, sequences):
    """Launch settings differ between them."""
    assert (sequences <= chunkwise.FEW_PROGRAMS) == (sequences == 3)
    T = 330 if sequences == 3 else 70  # more chunks than stages
    check(errors(make(sequences, T, 1, 1, 128, 64, L), torch.bfloat16, "cuda"), torch.bfloat16)


@pytest.mark.gpu
@needs_gpu
def test_writes():
    for L in range(9):
        check(errors(make(2, 70, 2, 2, 64, 64, L), torch.bfloat16, "cuda"), torch.bfloat16)


@pytest.mark.gpu
@needs_gpu
def test_every_length():
    """Four sequences: the gradient of a single beta is one sum, which may cancel below its rounding."""
    for T in range(1, 131):
        inputs = make(4, T, 1, 1, 20, 48, 1, seed=T)
        check(errors(inputs, torch.bfloat16, "cuda"), torch.bfloat16)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("offsets", [[0, 0, 5, 200, 200, 201, 330], [0, 64, 128, 192], [0, 1, 2, 3]])
def test_packed_sequences(offsets):
    inputs = make(1, offsets[-1], 2, 4, 64, 32, 2, N=len(offsets) - 1)
    check(errors(inputs, torch.bfloat16, "cuda", offsets), torch.bfloat16)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("T", "offsets"), [(1000, None), (1024, None), (1000, [0, 0, 70, 600, 601, 1000])])
@pytest.mark.parametrize(
    ("K", "V", "L"), [(128, 128, 0), (128, 128, 1), (64, 128, 1), (128, 64, 0), (64, 64, 1)]
)
def test_levels(K, V, L, T, offsets):
    """Segments of two chunks, against the recurrence and against one level."""
    inputs = make(1, T, 1, 2, K, V, L, N=1 if offsets is None else len(offsets) - 1, decay=0.1)
    at = chunkwise.tuning(torch.bfloat16, K, V, 1000, L > 0, T % 64 == 0)
    one, two = (
        errors(inputs, torch.bfloat16, "cuda", offsets, at._replace(segment_chunks=n)) for n in (0, 2)
    )
    check(two, torch.bfloat16)
    assert all(two[n] <= 1.5 * one[n] for n in one), f"{two} beside {one}"


@pytest.mark.gpu
@needs_gpu
def test_levels_chosen_by_shape():
    """A long sequence with few heads takes two levels by itself, the same bits in every pass."""
    inputs = {
        n: None if x is None else x.bfloat16().cuda() for n, x in make(1, 8192, 2, 2, 64, 64, 0).items()
    }
    *tensors, initial = inputs.values()
    saved = chunkwise.allocate(tensors[0], tensors[2], tensors[5], None)
    assert len(saved) == 5
    initial = initial.float()
    found = []
    for _ in range(3):
        o, state = chunkwise.forward(*tensors, 0.125, initial, None, saved)
        found.append([o, state, *chunkwise.backward(o, state, *tensors, 0.125, initial, None, saved)])
    for other in found[1:]:
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("beta", [0.9, 1.0, 1.9, 2.0])
def test_repeated_keys(beta):
    """The system amplifies what rounding to half precision leaves, here up to twenty times."""
    found = errors(repeated_keys(200, beta), torch.bfloat16, "cuda")
    check({n: e / 20 for n, e in found.items()}, torch.bfloat16)


@pytest.mark.gpu
@needs_gpu
def test_alternating_decay():
    check(errors(alternating(200), torch.bfloat16, "cuda"), torch.bfloat16)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("L", [0, 1])
def test_through_the_operator(L):
    """`prism_scan` hands long half-precision inputs to these kernels: in eager mode, under vmap, and replayed
    from a CUDA graph with other contents."""
    from prism import prism_scan
    from prism.scan.triton import choose

    assert choose(2 * 600, 2, 2, 64, 64, L) is chunkwise
    inputs = {n: None if x is None else x.cuda() for n, x in make(4, 600, 1, 2, 64, 64, L).items()}
    names = [n for n in NAMES[:7] if inputs[n] is not None]
    leaves = [inputs[n].to(torch.float32 if n in ("log_decay", "beta") else torch.bfloat16) for n in names]
    leaves = [x.requires_grad_() for x in leaves]
    do = torch.randn(4, 600, 2, 64, device="cuda", dtype=torch.bfloat16)

    def run(*x: Tensor) -> Tensor:
        return prism_scan(**dict(zip(names, x, strict=True)), backend="triton", validate=False)[0]

    o = run(*leaves)
    grads = torch.autograd.grad(o, leaves, do)
    exact = [x.detach().double().cpu().requires_grad_() for x in leaves]  # no cuBLAS: it refuses the fixture
    r, _ = recurrent(*(dict(zip(names, exact, strict=True)).get(n) for n in NAMES[:7]), 0.125, None, None)
    reference = torch.autograd.grad(r, exact, do.double().cpu())
    found = {n: x.detach().cpu() for n, x in zip(("o", *names), (o, *grads), strict=True)}
    wanted = dict(zip(("o", *names), (r, *reference), strict=True))
    check(
        {n: float(((found[n] - wanted[n]).norm() / wanted[n].norm()).detach()) for n in found}, torch.bfloat16
    )

    members = torch.vmap(run)(*(x.unflatten(0, (2, 2)) for x in leaves)).flatten(0, 1)
    assert torch.equal(members, o)
    again = torch.autograd.grad(members, leaves, do)
    assert all(torch.equal(a, b) for a, b in zip(again, grads, strict=True))

    static = [x.detach().clone().requires_grad_() for x in leaves]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o_static = run(*static)
        grads_static = torch.autograd.grad(o_static, static, do)
    with torch.no_grad():
        for name, x in zip(names, static, strict=True):
            if name in ("v", "write_v"):  # in which both results are linear
                x.mul_(2)
    graph.replay()
    torch.testing.assert_close(o_static, 2 * o, rtol=0.02, atol=0.02)
    torch.testing.assert_close(grads_static[0], 2 * grads[0], rtol=0.05, atol=0.05)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("L", [0, 2])
def test_ten_backward_passes_agree_bit_for_bit(L):
    inputs = {
        n: None if x is None else x.bfloat16().cuda() for n, x in make(2, 1000, 4, 8, 128, 128, L).items()
    }
    *tensors, initial = inputs.values()
    initial = initial.float()
    saved = chunkwise.allocate(tensors[0], tensors[2], tensors[5], None)
    o, state = chunkwise.forward(*tensors, 1.0, initial, None, saved)
    first, *others = (chunkwise.backward(o, state, *tensors, 1.0, initial, None, saved) for _ in range(10))
    for other in others:
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_more_elements_than_int32_counts():
    """The last sequence of a batch whose write_k has 2.4e9 elements equals the same sequence alone."""
    T, last, H, L, K = 150_000, 500, 16, 8, 128
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=g)

    q, k, v = (normal(1, T, H, K) for _ in range(3))
    k /= k.norm(dim=-1, keepdim=True)
    log_decay, beta = normal(1, T, H).sigmoid().neg(), normal(1, T, H).sigmoid()
    write_k, write_v = (normal(1, T, H, L, K) / 10 for _ in range(2))
    assert write_k.numel() > 2**31
    tensors = (q, k, v, log_decay, beta, write_k, write_v)
    results = []
    for start, bounds in ((0, [0, T - last, T]), (T - last, [0, last])):
        part = [x[:, start:].contiguous() for x in tensors]
        cu = torch.tensor(bounds, device="cuda")
        saved = chunkwise.allocate(part[0], part[2], part[5], cu)
        o, state = chunkwise.forward(*part, 1.0, None, cu, saved)
        grads = chunkwise.backward(o, state, *part, 1.0, None, cu, saved)
        results.append([x[:, -last:].clone() for x in (o, *grads[:7])] + [state[-1:].clone()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
