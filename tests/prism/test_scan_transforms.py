"""The scan inside vmap, torch.func, torch.compile and checkpointing, and what it costs in operator calls."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from prism import prism_scan

# Both come from inside PyTorch: its compiler instantiates the Function, its forward mode scripts a formula.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

BACKENDS = ["recurrent", "chunked"]
OFFSETS = [None, [0, 0, 5, 21]]


def members(cases, E, **shape):
    """E sets of inputs stacked, offsets excepted: (stacked, offsets, [one by one])."""
    each = [cases.make(seed=seed, **shape) for seed in range(E)]
    cu_seqlens = each[0]["cu_seqlens"]
    names = [n for n, x in each[0].items() if x is not None and n != "cu_seqlens"]
    return {n: torch.stack([x[n] for x in each]) for n in names}, cu_seqlens, each


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("L", [0, 2])
def test_vmap_with_one_backward_equals_a_loop(scan_cases, backend, offsets, L):
    stacked, cu_seqlens, _ = members(scan_cases, 3, T=21, L=L, offsets=offsets)

    def vmapped(cu_seqlens, backend, output_final_state, **tensors):
        def one(tensors):
            return prism_scan(
                **tensors, cu_seqlens=cu_seqlens, backend=backend, output_final_state=output_final_state
            )

        return torch.vmap(one)(tensors)

    got = scan_cases.results({**stacked, "cu_seqlens": cu_seqlens}, backend, scan=vmapped)

    def looped(cu_seqlens, backend, output_final_state, **tensors):
        rows = [{n: x[e] for n, x in tensors.items()} for e in range(3)]
        pairs = [
            prism_scan(**x, cu_seqlens=cu_seqlens, backend="recurrent", output_final_state=True) for x in rows
        ]
        return tuple(torch.stack(x) for x in zip(*pairs, strict=True))

    want = scan_cases.results({**stacked, "cu_seqlens": cu_seqlens}, "recurrent", scan=looped)
    scan_cases.assert_close(got, want, 1e-10)


@pytest.mark.parametrize("offsets", OFFSETS)
def test_vmap_with_shared_inputs_and_other_dimensions(scan_cases, offsets):
    stacked, cu_seqlens, each = members(scan_cases, 3, T=21, offsets=offsets)
    shared = {"beta": each[0]["beta"], "initial_state": each[0]["initial_state"]}

    def scan(q, k, write_v):
        rest = {n: each[0][n] for n in ("v", "log_decay", "write_k")} | shared
        return prism_scan(q, k, write_v=write_v, **rest, cu_seqlens=cu_seqlens, output_final_state=True)

    o, state = torch.vmap(scan, in_dims=(0, 2, -1), out_dims=(1, 0))(
        stacked["q"], stacked["k"].movedim(0, 2), stacked["write_v"].movedim(0, -1)
    )
    for e in range(3):
        want_o, want_state = scan(stacked["q"][e], stacked["k"][e], stacked["write_v"][e])
        assert scan_cases.error(o[:, e], want_o) < 1e-13
        assert scan_cases.error(state[e], want_state) < 1e-13


def test_vmap_inside_vmap(scan_cases):
    stacked, _, each = members(scan_cases, 4, T=9)
    nested = {n: x.unflatten(0, (2, 2)) for n, x in stacked.items()}
    got = torch.vmap(torch.vmap(lambda x: prism_scan(**x)[0]))(nested)
    for e in range(4):
        assert scan_cases.error(got[e // 2, e % 2], prism_scan(**each[e])[0]) < 1e-13


def loss(tensors, **options):
    o, state = prism_scan(**tensors, output_final_state=True, **options)
    return o.square().sum() + state.sin().sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_func_grad(scan_cases, backend):
    tensors = scan_cases.make(T=21)
    tensors.pop("cu_seqlens")
    got = torch.func.grad(loss)(tensors, backend=backend)
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    loss(leaves, backend="recurrent").backward()
    scan_cases.assert_close(got, {n: x.grad for n, x in leaves.items()}, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offsets", OFFSETS)
def test_vmap_of_func_grad(scan_cases, backend, offsets):
    stacked, cu_seqlens, _ = members(scan_cases, 3, T=21, offsets=offsets)
    options = {"backend": backend, "cu_seqlens": cu_seqlens}
    got = torch.vmap(lambda x: torch.func.grad(loss)(x, **options))(stacked)
    for e in range(3):
        row = {n: x[e] for n, x in stacked.items()}
        want = torch.func.grad(loss)(row, backend="recurrent", cu_seqlens=cu_seqlens)
        scan_cases.assert_close({n: g[e] for n, g in got.items()}, want, 1e-10)


def test_what_chunked_cannot_do_raises_and_recurrent_does_it(scan_cases):
    q, k, v, g, beta = list(scan_cases.make(T=9, L=0, state=False).values())[:5]

    def scan(q, backend):
        return prism_scan(q, k, v, g, beta, backend=backend)[0]

    def second(backend):
        x = q.clone().requires_grad_()
        (first,) = torch.autograd.grad(scan(x, backend).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)

    def nested(backend):
        inner = torch.func.grad(lambda q: scan(q, backend).square().sum())
        return torch.func.grad(lambda q: inner(q).square().sum())(q)

    cases = {
        "differentiated once": (RuntimeError, second),
        "differentiated  once": (RuntimeError, nested),
        "vmap over the backward pass alone": (
            RuntimeError,
            lambda b: torch.func.jacrev(lambda q: scan(q, b).sum((0, 2, 3)))(q),
        ),
        "forward mode": (NotImplementedError, lambda b: torch.func.jvp(lambda q: scan(q, b), (q,), (q,))),
    }
    for message, (kind, attempt) in cases.items():
        attempt("recurrent")
        with pytest.raises(kind, match=message.replace("  ", " ")):
            attempt("chunked")


def test_checkpointing(scan_cases):
    inputs = scan_cases.make()

    def checkpointed(**x):
        return checkpoint(lambda: prism_scan(**x), use_reentrant=False)

    got = scan_cases.results(inputs, "chunked", scan=checkpointed)
    want = scan_cases.results(inputs, "chunked")
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("offsets", OFFSETS)
def test_chunked_on_a_gpu_also_captured_and_replayed_with_new_contents(scan_cases, offsets):
    inputs = scan_cases.make(T=21, offsets=offsets)
    on_gpu = {n: x if x is None else x.cuda() for n, x in inputs.items()}
    got = {n: x.cpu() for n, x in scan_cases.results(on_gpu, "chunked").items()}
    scan_cases.assert_close(got, scan_cases.results(inputs, "recurrent"), 1e-10)

    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        o, _ = prism_scan(**on_gpu, backend="chunked")
    other = scan_cases.make(T=21, offsets=[0, 11, 11, 21] if offsets else None, seed=7)
    for name, x in other.items():
        if x is not None:
            on_gpu[name].copy_(x)
    graph.replay()
    assert scan_cases.error(o.cpu(), prism_scan(**other, backend="recurrent")[0]) < 1e-10


# --- torch.compile ---


def compiled(**options):
    torch._dynamo.reset()
    return torch.compile(prism_scan, backend="aot_eager", dynamic=False, **options)


@pytest.mark.parametrize("offsets", [None, [0, 0, 3, 20, 20]])
def test_compiles_without_a_graph_break(scan_cases, offsets):
    inputs = scan_cases.make(T=20, L=1, offsets=offsets)
    want = scan_cases.results(inputs, "chunked")
    scan_cases.assert_close(scan_cases.results(inputs, "chunked", scan=compiled(fullgraph=True)), want, 1e-12)


def test_compiled_once_serves_other_offsets_and_keeps_its_first_result(scan_cases):
    scan = compiled(fullgraph=True)
    inputs = scan_cases.make(T=20, L=0, offsets=[0, 4, 20])
    first, _ = scan(**inputs, backend="chunked")
    kept = first.clone()
    inputs["cu_seqlens"] = torch.tensor([0, 17, 20])
    second, _ = scan(**inputs, backend="chunked")
    assert torch.equal(first, kept)
    assert (
        scan_cases.error(first, prism_scan(**{**inputs, "cu_seqlens": torch.tensor([0, 4, 20])})[0]) < 1e-13
    )
    assert scan_cases.error(second, prism_scan(**inputs)[0]) < 1e-13


def test_compiled_vmap_runs_eagerly_or_says_why_not(scan_cases):
    """Traced below vmap, torch.compile would differentiate the forward pass and drop the backward pass."""
    torch._dynamo.reset()
    stacked, _, _ = members(scan_cases, 2, T=5, L=0)

    def ensemble(x):
        return torch.vmap(lambda x: prism_scan(**x, backend="chunked")[0])(x)

    assert torch.equal(torch.compile(ensemble, backend="aot_eager")(stacked), ensemble(stacked))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="does not trace backend 'chunked' under vmap"):
        torch.compile(ensemble, backend="aot_eager", fullgraph=True)(stacked)


# --- cost ---


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def calls(cases, inputs):
    with Count() as count:
        cases.results(inputs, "chunked")
    return count.calls


def test_operator_calls_grow_with_chunks_not_tokens_or_sequences(scan_cases):
    """Forward and backward. One chunk more costs a fixed few calls; more sequences or steps cost none."""
    per_length = {T: calls(scan_cases, scan_cases.make(T=T)) for T in (32, 48, 160)}
    per_chunk = per_length[48] - per_length[32]
    assert 0 < per_chunk <= 20
    assert per_length[160] == per_length[32] + 8 * per_chunk
    few = calls(scan_cases, scan_cases.make(T=60, offsets=[0, 30, 60]))
    many = calls(scan_cases, scan_cases.make(T=90, offsets=[0, 30, 30, 37, 60, 75, 90]))
    assert many == few
    assert calls(scan_cases, scan_cases.make(T=32, L=6)) == per_length[32]
