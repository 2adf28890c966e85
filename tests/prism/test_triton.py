"""The Triton kernels against the definition in float64: in the interpreter on a CPU, and compiled on a GPU.

Every test runs in both places unless it says otherwise; the interpreter takes small shapes.
"""

import os
import threading
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from prism.scan import prism_scan, resolve_backend

# Triton's interpreter turns run-time loop bounds into numbers in a way that numpy 2 warns about.
# Dynamo of torch 2.11 instantiates the autograd.Function that it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = ("q", "k", "v", "log_decay", "beta", "write_k", "write_v", "initial_state")


def interpreter(*values):
    return pytest.param(*values, marks=pytest.mark.interpreter)


def gpu(*values):
    return pytest.param(*values, marks=pytest.mark.gpu)


PLACES = [interpreter("cpu"), gpu("cuda")]


@pytest.fixture(autouse=True)
def _right_place(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    if request.node.get_closest_marker("interpreter") and not INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 is not set")


def problem(
    B, T, HV, K, V, L, H=None, *, device, N=None, seed=0, decay=1.0, beta=2.0, state=True, keys="random"
):
    """float64 inputs on the device, drawn on the CPU."""
    rng = torch.Generator().manual_seed(seed)
    H = HV if H is None else H

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def uniform(*shape):
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    x = {"q": normalize(normal(B, T, H, K), dim=-1), "k": normalize(normal(B, T, H, K), dim=-1)}
    if keys == "identical":
        x["k"] = normalize(x["k"][:, :1] + 1e-3 * x["k"], dim=-1)
    x["v"] = normal(B, T, HV, V)
    # decay is the largest rate, or the rates to choose from, token by token
    choices = torch.as_tensor(decay, dtype=torch.float64)
    if choices.dim():
        x["log_decay"] = -choices[torch.randint(len(choices), (B, T, HV), generator=rng)]
    else:
        x["log_decay"] = -choices * uniform(B, T, HV)
    x["beta"] = beta * (uniform(B, T, HV) if keys == "random" else torch.ones(B, T, HV, dtype=torch.float64))
    if L:
        x["write_k"] = normalize(normal(B, T, HV, L, K), dim=-1)
        x["write_v"] = normal(B, T, HV, L, V)
    if state:
        x["initial_state"] = normal(B if N is None else N, HV, K, V)
    return {name: value.to(device) for name, value in x.items()}


def cast(x, dtype):
    """Inputs in dtype; decays, beta and state in float32 at least."""
    small = dtype if dtype == torch.float64 else torch.float32
    return {
        name: value.to(small if name in ("log_decay", "beta", "initial_state") else dtype)
        for name, value in x.items()
    }


def outcome(x, backend, *, seed=1, **options):
    """o, the final state and every gradient of a random linear function of both, by name."""
    x = {name: value.detach().clone().requires_grad_() for name, value in x.items()}
    o, last = prism_scan(**x, backend=backend, output_final_state=True, **options)
    rng = torch.Generator().manual_seed(seed)
    loss = 0.0
    for y in (o, last):
        weight = torch.randn(y.shape, generator=rng, dtype=torch.float64).to(y.device)
        loss = loss + (y * weight.to(y.dtype)).sum()
    loss.backward()
    return {"o": o.detach(), "final_state": last.detach()} | {f"d{n}": v.grad for n, v in x.items()}


def distances(found, wanted):
    assert found.keys() == wanted.keys()
    result = {}
    for name, want in wanted.items():
        assert torch.isfinite(found[name]).all(), name
        scale = want.norm().clamp_min(1e-30)
        result[name] = float((found[name].double() - want.double()).norm() / scale)
    return result


def check(x, *, dtype=torch.float32, **options):
    """The kernels on x in dtype against the definition in float64 on the same numbers."""
    x = cast(x, dtype)
    want = outcome({n: v.double() for n, v in x.items()}, "recurrent", **options)
    far = distances(outcome(x, "triton", **options), want)
    if dtype == torch.float32:
        bound = {name: 1e-4 if name.startswith("d") else 1e-5 for name in far}
        if any(far[name] > bound[name] for name in far):
            # An ill-conditioned problem: no worse than twice the other float32 backend.
            other = distances(outcome(x, "chunked", **options), want)
            bound = {name: max(bound[name], 2 * other[name]) for name in far}
    else:
        size = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        bound = {name: (6 if name.startswith("d") else 2) * size for name in far}
    assert all(far[name] <= bound[name] for name in far), {
        n: (far[n], bound[n]) for n in far if far[n] > bound[n]
    }
    return far


WIDTHS = [16, 32, 64, 128]


@pytest.mark.parametrize(
    ("device", "T", "K", "V", "L"),
    [interpreter("cpu", 20, K, V, L) for K, V, L in [(16, 16, 0), (16, 32, 2), (64, 16, 1), (128, 16, 1)]]
    + [gpu("cuda", 83, K, V, L) for K in WIDTHS for V in WIDTHS for L in (0, 2)],
)
def test_equals_the_definition_at_every_width(device, T, K, V, L):
    check(problem(2, T, 2, K, V, L, H=1, device=device))


@pytest.mark.parametrize(
    ("device", "K", "V"),
    [interpreter("cpu", 1, 3), interpreter("cpu", 20, 7)]
    + [
        gpu("cuda", K, V)
        for K, V in [(1, 1), (3, 40), (24, 24), (33, 65), (100, 127), (256, 256), (200, 16), (16, 256)]
    ],
)
def test_any_width_by_masking(device, K, V):
    check(problem(1, 18, 1, K, V, 1, device=device))


@pytest.mark.parametrize(
    ("device", "L"), [interpreter("cpu", 3)] + [gpu("cuda", L) for L in (1, 3, 4, 5, 6, 7, 8, 11)]
)
def test_any_number_of_writes(device, L):
    check(problem(1, 18, 1, 16, 16, L, device=device))


@pytest.mark.parametrize(
    ("device", "lengths"), [interpreter("cpu", (1, 15, 16, 17)), gpu("cuda", range(1, 131))]
)
def test_any_length(device, lengths):
    for T in lengths:
        check(problem(1, T, 1, 16, 16, 1, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "K", "L"), [(1000, 16, 2), (4097, 32, 0), (2050, 64, 1), (515, 128, 2)])
def test_long_sequences(T, K, L):
    check(problem(1, T, 2, K, K, L, device="cuda", decay=0.1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("K", "V"), [(K, V) for K in WIDTHS for V in WIDTHS if V in (K, 32)])
@pytest.mark.parametrize("L", [0, 2])
def test_half_precision(dtype, K, V, L):
    check(problem(2, 83, 2, K, V, L, H=1, device="cuda"), dtype=dtype)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("keys", ["random", "identical"])
@pytest.mark.parametrize("beta", [0.9, 1.9])
def test_repeated_keys(device, keys, beta):
    check(
        problem(
            1, 33 if device == "cpu" else 130, 1, 16, 16, 1, device=device, decay=0.01, beta=beta, keys=keys
        )
    )


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("decay", [0.0, 20.0, 70.0, (0.0, 20.0), (0.0, 70.0), (1e-3, 70.0)], ids=str)
def test_decays_from_none_to_all(device, decay):
    far = check(problem(1, 33 if device == "cpu" else 130, 1, 16, 16, 1, device=device, decay=decay))
    if decay != 0.0:
        assert far["dlog_decay"] < 1e-4  # digits are lost where the gradient is a difference of sums


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("lengths", [(5, 0, 16, 1, 0, 18), (0, 0, 3), (40,)], ids=str)
def test_packed_sequences(device, lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device)
    x = problem(1, sum(lengths), 2, 16, 16, 1, H=1, device=device, N=len(lengths))
    check(x, cu_seqlens=offsets)
    packed = outcome(x := cast(x, torch.float32), "triton", cu_seqlens=offsets.int())
    start = 0
    for n, length in enumerate(lengths):
        if length:
            part = {
                name: value[:, start : start + length] for name, value in x.items() if name != "initial_state"
            }
            o, last = prism_scan(
                **part, initial_state=x["initial_state"][n : n + 1], backend="triton", output_final_state=True
            )
            torch.testing.assert_close(packed["o"][:, start : start + length], o)
            torch.testing.assert_close(packed["final_state"][n : n + 1], last)
        else:
            torch.testing.assert_close(packed["final_state"][n], x["initial_state"][n])
        start += length


@pytest.mark.gpu
def test_many_packed_sequences():
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 9, (300,), generator=rng)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    x = problem(1, int(offsets[-1]), 1, 16, 16, 2, device="cuda", N=len(lengths))
    check(x, cu_seqlens=offsets.cuda())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "offsets", [(0, 90, 20, 40), (-5, 3, 10**12, 40), (40, 40, 40, 0), (7, 9, 9, 11)], ids=str
)
def test_offsets_never_lead_out_of_memory(offsets):
    """Guard bands around every input stay out of the results, and the machine stays well."""
    x = cast(problem(1, 40, 1, 16, 16, 1, device="cuda", N=3), torch.float32)
    wrong = torch.tensor(offsets, device="cuda")
    guarded = {}
    for name, value in x.items():
        band = torch.full((3, *value.shape), float("nan"), device="cuda")
        band[1] = value
        guarded[name] = band[1].requires_grad_()
    o, last = prism_scan(
        **guarded, cu_seqlens=wrong, backend="triton", output_final_state=True, validate=False
    )
    (o.sum() + last.sum()).backward()
    torch.cuda.synchronize()
    check(problem(1, 40, 1, 16, 16, 1, device="cuda"))


@pytest.mark.parametrize("device", PLACES)
def test_non_contiguous_inputs_and_gradients(device):
    x = cast(problem(2, 17, 2, 16, 16, 2, device=device), torch.float32)
    want = outcome(x, "triton")
    turned = {name: value.transpose(0, 1).contiguous().transpose(0, 1) for name, value in x.items()}
    leaves = {name: value.requires_grad_() for name, value in turned.items()}
    o, last = prism_scan(**leaves, backend="triton", output_final_state=True)
    rng = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(y.shape, generator=rng, dtype=torch.float64).to(device, y.dtype) for y in (o, last)
    ]
    weights = [w.transpose(1, -1).contiguous().transpose(1, -1) for w in weights]
    assert not any(w.is_contiguous() for w in weights)
    grads = torch.autograd.grad((o, last), list(leaves.values()), weights)
    found = {"o": o, "final_state": last} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}
    for name in want:
        assert torch.equal(found[name], want[name]), name


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("through", ["o", "final_state"])
def test_gradient_through_one_output_alone(device, through):
    x = problem(1, 18, 1, 16, 16, 1, device=device)
    grads = {}
    for backend, dtype in (("triton", torch.float32), ("recurrent", torch.float64)):
        leaves = {name: value.requires_grad_() for name, value in cast(x, dtype).items()}
        y = prism_scan(**leaves, backend=backend, output_final_state=True)[through == "final_state"]
        y.square().sum().backward()
        # The last output does not read q of the state's path, and the state reads no q at all.
        grads[backend] = {n: torch.zeros_like(v) if v.grad is None else v.grad for n, v in leaves.items()}
    far = distances(grads["triton"], grads["recurrent"])
    assert max(far.values()) < 1e-5


@pytest.mark.parametrize("device", PLACES)
def test_splitting_and_single_steps_equal_one_pass(device):
    x = cast(problem(2, 19, 2, 16, 16, 2, H=1, device=device), torch.float32)
    state = x.pop("initial_state")
    want, last = prism_scan(**x, initial_state=state, backend="triton", output_final_state=True)
    parts = []
    for at in (slice(0, 7), slice(7, 8), slice(8, 9), slice(9, 19)):
        part = {name: value[:, at] for name, value in x.items()}
        o, state = prism_scan(**part, initial_state=state, backend="triton", output_final_state=True)
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 1), want)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("device", PLACES)
def test_ten_backward_passes_are_the_same_bits(device):
    B, T, V = (2, 40, 48) if device == "cuda" else (1, 20, 40)
    x = cast(problem(B, T, 2, 16, V, 2, H=1, device=device), torch.float32)
    first = outcome(x, "triton")
    for _ in range(9 if device == "cuda" else 1):
        again = outcome(x, "triton")
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.interpreter
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    B=st.integers(1, 2),
    T=st.integers(1, 20),
    H=st.integers(1, 2),
    group=st.integers(1, 2),
    K=st.integers(1, 40),
    V=st.integers(1, 40),
    L=st.integers(0, 2),
    state=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_shape(B, T, H, group, K, V, L, state, seed):
    check(problem(B, T, H * group, K, V, L, H=H, device="cpu", seed=seed, state=state))


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((128 * 4096, 4096, 1, 16, 16, 2), "resident"),
        ((64, 64, 16, 128, 128, 0), "resident"),  # a decoding step
        ((511, 1, 1, 64, 64, 0), "resident"),
        ((512, 1, 1, 64, 64, 0), "chunkwise"),
        ((128 * 16, 16, 16, 64, 64, 0), "chunkwise"),
        ((127 * 16, 16, 16, 64, 64, 0), "resident"),
        ((128 * 15, 15, 16, 64, 64, 0), "resident"),
        ((2047, 1, 1, 32, 32, 0), "resident"),
        ((2048, 1, 1, 32, 32, 0), "chunkwise"),
        ((2048 * 129, 129, 1, 32, 32, 0), "resident"),
        ((4096 * 4, 4, 16, 128, 128, 2), "chunkwise"),
        ((4096, 1, 1, 129, 16, 0), "resident"),
    ],
)
def test_the_implementation_is_chosen_by_shape(shape, name):
    from prism.scan.triton import _operator, resident

    assert _operator.choose(*shape).__name__ == f"prism.scan.triton.{name}"
    if not INTERPRETED:
        assert _operator.choose(*shape, torch.float32) is resident
        assert _operator.choose(*shape, torch.float16) is resident


def test_a_gpu_with_little_shared_memory_takes_resident(monkeypatch):
    from prism.scan.triton import _operator, chunkwise, resident

    q = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"), dtype=torch.bfloat16)
    q.shape = (4, 4096, 16, 128)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for size, expected in ((101_376, resident), (166_912, resident), (232_448, chunkwise)):
        monkeypatch.setattr(_operator, "_shared_memory", lambda device, size=size: size)
        assert _operator.choose_for(q, q, None, None) is expected


@pytest.mark.gpu
def test_shared_memory_is_what_the_driver_says():
    from prism.scan.triton import _operator

    properties = torch.cuda.get_device_properties(0)
    assert _operator._shared_memory(0) == properties.shared_memory_per_block_optin  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("K", [16, 64])
@pytest.mark.parametrize("T", [255, 256, 1023, 1024])
def test_both_sides_of_the_boundary(T, K):
    check(problem(1, T, 2, K, K, 1, device="cuda", decay=0.1))


# An operator like any other ---------------------------------------------------------------------------------


def step(q, k, v, log_decay, beta, write_k, write_v):
    o, last = prism_scan(
        q, k, v, log_decay, beta, write_k, write_v, backend="triton", output_final_state=True
    )
    return o.square().sum((-1, -2, -3)) + last.square().sum((-1, -2, -3))


def members(E, device, **options):
    x = [
        cast(problem(2, 9, 1, 16, 16, 1, device=device, seed=s, state=False, **options), torch.float32)
        for s in range(E)
    ]
    return {name: torch.stack([member[name] for member in x]) for name in x[0]}


@pytest.mark.parametrize("device", PLACES)
def test_vmap_of_the_forward_and_one_backward(device):
    x = members(3, device)
    leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
    losses = torch.func.vmap(step)(*leaves.values())
    losses.sum().backward()
    for e in range(3):
        alone = {name: value[e].clone().requires_grad_() for name, value in x.items()}
        loss = step(*alone.values())
        torch.testing.assert_close(losses[e], loss)
        loss.sum().backward()
        for name, leaf in leaves.items():
            torch.testing.assert_close(leaf.grad[e], alone[name].grad)


@pytest.mark.parametrize("device", PLACES)
def test_vmap_of_packed_sequences_with_some_inputs_shared(device):
    x = members(3, device)
    x = {name: value[:, :1] for name, value in x.items()}
    offsets = torch.tensor([0, 4, 4, 9], device=device)
    shared = x["k"][0]

    def run(q, v, log_decay, beta, write_k, write_v):
        return prism_scan(
            q,
            shared,
            v,
            log_decay,
            beta,
            write_k,
            write_v,
            cu_seqlens=offsets,
            backend="triton",
            output_final_state=True,
        )

    args = [x[name] for name in ("q", "v", "log_decay", "beta", "write_k", "write_v")]
    found = torch.func.vmap(run, in_dims=(0, 0, 0, 0, 0, 0))(*args)
    for e in range(3):
        for many, one in zip(found, run(*(a[e] for a in args)), strict=True):
            torch.testing.assert_close(many[e], one)


@pytest.mark.parametrize("device", PLACES)
def test_torch_func_grad_and_its_vmap(device):
    x = members(2, device)

    def loss(*args):
        return step(*args).sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=tuple(range(7))))(*x.values())
    for e in range(2):
        alone = [value[e].clone().requires_grad_() for value in x.values()]
        loss(*alone).backward()
        for many, one in zip(found, alone, strict=True):
            torch.testing.assert_close(many[e], one.grad)


@pytest.mark.parametrize("device", PLACES)
def test_compiles_without_a_graph_break(device):
    x = cast(problem(2, 9, 1, 16, 16, 1, device=device, state=False), torch.float32)
    want = outcome(x, "triton")["dk"]
    backend = "inductor" if device == "cuda" else "aot_eager"
    for run in (torch.compile(step, fullgraph=True, backend=backend), step):
        leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
        run(*leaves.values()).sum().backward()
        grads = leaves["k"].grad if run is step else (compiled := leaves["k"].grad)
    torch.testing.assert_close(compiled, grads)
    assert want.shape == grads.shape


@pytest.mark.parametrize("device", PLACES)
def test_compiles_under_vmap(device):
    x = members(2, device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    grads = []
    for run in (torch.compile(torch.func.vmap(step), fullgraph=True, backend=backend), torch.func.vmap(step)):
        leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
        run(*leaves.values()).sum().backward()
        grads.append([leaf.grad for leaf in leaves.values()])
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("device", PLACES)
def test_a_trace_sees_the_copies_that_make_inputs_contiguous(device):
    """Inside the operators a compiler could not fuse them, and backward would copy once more."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x = members(2, device)
    wide = {name: torch.cat([value, value], -1) for name, value in x.items()}

    def run(*wide):
        leaves = [value[..., : value.shape[-1] // 2].requires_grad_() for value in wide]
        assert not any(value.is_contiguous() for value in leaves)
        return torch.autograd.grad(torch.func.vmap(step)(*leaves).sum(), leaves)

    traced = make_fx(run, tracing_mode="fake")(*wide.values())
    calls = [node for node in traced.graph.nodes if str(node.target).startswith("prism.triton_scan")]
    assert len(calls) == 2
    for call in calls:
        tensors = [arg.meta["val"] for arg in call.args if isinstance(arg, torch.fx.Node)]
        assert len(tensors) >= 7
        assert all(value.is_contiguous() for value in tensors)


@pytest.mark.parametrize("device", PLACES)
def test_operator_passes_the_checks_of_torch(device):
    from prism.scan.triton import _operator

    x = cast(problem(2, 5, 1, 16, 16, 1, device=device), torch.float32)
    state = x.pop("initial_state")
    for save in (False, True):
        torch.library.opcheck(
            _operator._scan,
            (*x.values(), 0.25, state, None, save),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("device", PLACES)
def test_activation_checkpointing(device):
    x = cast(problem(2, 9, 1, 16, 16, 1, device=device, state=False), torch.float32)
    grads = []
    for run in (step, lambda *a: torch.utils.checkpoint.checkpoint(step, *a, use_reentrant=False)):
        leaves = [value.clone().requires_grad_() for value in x.values()]
        run(*leaves).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.gpu
def test_autocast_leaves_the_sums_alone():
    x = cast(problem(2, 33, 1, 16, 16, 1, device="cuda"), torch.float32)
    want = outcome(x, "triton")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = outcome(x, "triton")
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("device", PLACES)
def test_a_second_derivative_is_refused(device):
    x = cast(problem(1, 5, 1, 16, 16, 0, device=device), torch.float32)
    v = x["v"].requires_grad_()
    o, _ = prism_scan(**x, backend="triton")
    (grad,) = torch.autograd.grad(o.square().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        grad.sum().backward()


@pytest.mark.gpu
def test_cuda_graph_capture():
    x = cast(problem(4, 40, 1, 16, 16, 2, device="cuda", state=False), torch.float32)
    leaves = {name: value.requires_grad_() for name, value in x.items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(*leaves.values()).sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for leaf in leaves.values():
        leaf.grad = None
    with torch.cuda.graph(graph):
        loss = step(*leaves.values()).sum()
        loss.backward()
    fresh = cast(problem(4, 40, 1, 16, 16, 2, device="cuda", state=False, seed=5), torch.float32)
    with torch.no_grad():
        for name, leaf in leaves.items():
            leaf.copy_(fresh[name])
    graph.replay()
    eager = {name: value.clone().requires_grad_() for name, value in fresh.items()}
    want = step(*eager.values()).sum()
    want.backward()
    assert torch.equal(loss, want)
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, eager[name].grad), name


@pytest.mark.gpu
def test_two_threads_with_nothing_compiled_yet():
    x = problem(1, 21, 1, 48, 80, 3, device="cuda")  # widths and L no other test uses
    results, errors = [], []

    def work():
        try:
            results.append(outcome(cast(x, torch.float32), "triton"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    check(x)


@pytest.mark.gpu
def test_a_decoding_step_is_one_launch():
    x = cast(problem(8, 1, 2, 16, 16, 2, device="cuda"), torch.float32)
    prism_scan(**x, backend="triton", output_final_state=True)
    with (
        torch.no_grad(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile,
    ):
        prism_scan(**x, backend="triton", output_final_state=True)
        torch.cuda.synchronize()
    launched = [
        event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert len(launched) == 1, launched


@pytest.mark.gpu
def test_sizes_past_two_to_the_31():
    B, T, K = 2**11 + 1, 2**16, 16  # 2.1e9 numbers in q
    shape = (B, T, 1)
    with torch.no_grad():
        q = torch.zeros(*shape, K, device="cuda", dtype=torch.bfloat16)
        v = torch.zeros(*shape, K, device="cuda", dtype=torch.bfloat16)
        g = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
        q[-1, -5:], v[-1, -5:], g[-1, -5:] = 0.5, 1.0, 0.25
        o, _ = prism_scan(q, q, v, -g, g, backend="triton")
        tail = [x[-1:, -5:] for x in (q, q, v, -g, g)]
        want, _ = prism_scan(*tail, backend="recurrent")
        assert o[-1, :-5].abs().max() == 0
        torch.testing.assert_close(o[-1:, -5:], want)


def test_what_it_cannot_run_is_said_by_name():
    x = cast(problem(1, 2, 1, 16, 16, 0, device="cpu"), torch.float32)
    if INTERPRETED:
        with pytest.raises(ValueError, match="float32 only"):
            prism_scan(**cast(x, torch.bfloat16), backend="triton")
    else:
        with pytest.raises(ValueError, match="CUDA tensors"):
            prism_scan(**x, backend="triton")
    with pytest.raises(ValueError, match="float64"):
        prism_scan(**cast(x, torch.float64), backend="triton")
    wide = cast(problem(1, 2, 1, 257, 16, 0, device="cpu"), torch.float32)
    with pytest.raises(ValueError, match="at most 256"):
        prism_scan(**wide, backend="triton")


@pytest.mark.gpu
def test_auto_is_triton_on_a_gpu():
    x = problem(1, 2, 1, 16, 16, 0, device="cuda")
    assert resolve_backend(x["q"].float(), x["v"].float()) == "triton"
    assert resolve_backend(x["q"], x["v"]) == "chunked"
