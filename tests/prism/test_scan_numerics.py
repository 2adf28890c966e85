"""Inputs that broke other implementations: strong decay, equal keys, half precision, odd memory layouts."""

import threading

import pytest
import torch

from prism import prism_scan

f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
BACKENDS = ["recurrent", "chunked"]


def against_float64(cases, inputs, tolerance, dtype=f32):
    """Chunked in `dtype` against the definition in float64 on the same rounded values."""
    rounded = cases.cast(inputs, dtype)
    want = cases.results(cases.cast(rounded, f64), "recurrent")
    cases.assert_close(cases.results(rounded, "chunked"), want, tolerance)


def with_equal_keys(inputs, beta, noise=0.0):
    one = inputs["k"][:, :1]
    k = torch.nn.functional.normalize(one + noise * inputs["k"], dim=-1)
    return {**inputs, "k": k, "beta": torch.full_like(inputs["beta"], beta)}


@pytest.mark.parametrize("decay", [20.0, 70.0])
def test_strong_decay_at_every_token(scan_cases, decay):
    inputs = scan_cases.make(B=1, T=256 if decay == 20 else 70, H=1, HV=1, K=8, V=8)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], -decay)
    against_float64(scan_cases, inputs, 1e-12, f64)
    against_float64(scan_cases, inputs, 1e-5, f32)


def test_decays_that_alternate(scan_cases):
    """The gate's gradient as row sums minus column sums is wrong by 0.1 and more here."""
    inputs = scan_cases.make(B=1, T=70, H=1, HV=2)
    inputs["log_decay"][:, 1::2] = -20.0
    inputs["log_decay"][:, ::2] = 0.0
    against_float64(scan_cases, inputs, 1e-12, f64)
    against_float64(scan_cases, inputs, 1e-5, f32)


def test_a_weak_decay_among_strong_ones_keeps_its_digits(scan_cases):
    """Float32 sums of 32 decays near -70 leave four digits of a decay of 0.01 between two neighbours."""
    inputs = scan_cases.make(B=1, T=128, H=1, HV=1, K=64, V=64)  # wide enough for chunks of 32
    inputs["log_decay"][:, ::2] = -69.7
    inputs["log_decay"][:, 1::2] = -0.013
    against_float64(scan_cases, inputs, 2e-6, f32)


def test_no_decay(scan_cases):
    inputs = scan_cases.make(T=50)
    inputs["log_decay"] = torch.zeros_like(inputs["log_decay"])
    against_float64(scan_cases, inputs, 1e-12, f64)
    S, o = inputs["initial_state"][1, 3], []
    for t in range(50):
        key, x, w = inputs["k"][1, t, 1], inputs["write_k"][1, t, 3], inputs["write_v"][1, t, 3]
        S = S + inputs["beta"][1, t, 3] * torch.outer(key, inputs["v"][1, t, 3] - key @ S) + x.T @ w
        o.append(8**-0.5 * inputs["q"][1, t, 1] @ S)
    assert scan_cases.error(prism_scan(**inputs)[0][1, :, 3], torch.stack(o)) < 1e-13


@pytest.mark.parametrize("noise", [0.0, 1e-3])
@pytest.mark.parametrize("beta", [0.9, 1.0, 1.9, 2.0])
def test_equal_keys(scan_cases, beta, noise):
    """An inverse by repeated squaring is off by 1e9 at beta = 0.9 and by 1e20 at 1.9."""
    inputs = scan_cases.make(B=1, T=130, H=1, HV=1, K=16, V=16, L=1, decay=0.01)
    inputs = with_equal_keys(inputs, beta, noise)
    against_float64(scan_cases, inputs, 1e-11, f64)
    against_float64(scan_cases, inputs, 1e-4, f32)


def test_keys_longer_than_one_are_not_clamped(scan_cases):
    inputs = with_equal_keys(scan_cases.make(B=1, T=33, H=1, HV=1, decay=0.01), 0.9)
    inputs["k"] = 4 * inputs["k"]
    o = prism_scan(**inputs, backend="recurrent")[0]
    assert o.abs().max() > 1e10
    assert scan_cases.error(prism_scan(**inputs, backend="chunked")[0], o) < 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_half_precision_inputs_with_float32_state(scan_cases, dtype, backend):
    """Only the rounding of the results to the input's dtype is lost, with or without float32 gates."""
    for gates in (dtype, f32):
        inputs = scan_cases.cast(scan_cases.make(), dtype, log_decay=gates, beta=gates)
        want = scan_cases.results(scan_cases.cast(inputs, f64), "recurrent")
        got = scan_cases.results(inputs, backend)
        assert got["o"].dtype == dtype
        assert got["final state"].dtype == f32
        assert {n: g.dtype for n, g in got.items() if n.startswith("grad")} == {
            f"gradient of {n}": x.dtype for n, x in inputs.items() if x is not None and n != "cu_seqlens"
        }
        scan_cases.assert_close(got, want, torch.finfo(dtype).eps)


def test_float32_gates_beside_float64(scan_cases):
    inputs = scan_cases.cast(scan_cases.make(), f64, log_decay=f32, beta=f32)
    want = scan_cases.results(scan_cases.cast(inputs, f64), "recurrent")
    got = scan_cases.results(inputs, "chunked")
    assert got["gradient of log_decay"].dtype == f32
    scan_cases.assert_close(got, want, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_autocast_changes_nothing_inside(scan_cases, backend):
    inputs = scan_cases.cast(scan_cases.make(T=65), f32)
    want = scan_cases.results(inputs, backend)

    def autocast(**x):
        with torch.autocast("cpu", dtype=bf16):
            return prism_scan(**x)

    got = scan_cases.results(inputs, backend, scan=autocast)
    assert got["final state"].dtype == f32
    assert all(torch.equal(got[n], want[n]) for n in want)
    if backend == "chunked":  # whose backward pass is ours, so that it may run under autocast too
        with torch.autocast("cpu", dtype=bf16):
            got = scan_cases.results(inputs, backend)
        assert all(torch.equal(got[n], want[n]) for n in want)


def test_ten_backward_passes_are_bit_identical(scan_cases):
    inputs = scan_cases.cast(scan_cases.make(T=50), f32)
    first = scan_cases.results(inputs, "chunked")
    for _ in range(9):
        again = scan_cases.results(inputs, "chunked")
        assert all(torch.equal(again[n], first[n]) for n in first)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offsets", [None, [0, 9, 9, 37]])
def test_views_equal_contiguous_tensors(scan_cases, backend, offsets):
    """Transposed and sliced inputs, and an upstream gradient that is one value expanded."""
    inputs = scan_cases.make(offsets=offsets)

    def view(x):
        if x.dim() == 3:
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        return x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)[..., ::2].copy_(x)

    grads = []
    for transform in (lambda x: x, view):
        tensors = {n: transform(x) for n, x in inputs.items() if n != "cu_seqlens"}
        leaves = [x.requires_grad_() for x in tensors.values()]
        o, state = prism_scan(
            **tensors, cu_seqlens=inputs["cu_seqlens"], output_final_state=True, backend=backend
        )
        grads.append([o, state, *torch.autograd.grad(o.sum() + state.mT.sum(), leaves)])
    for plain, strided in zip(*grads, strict=True):
        assert scan_cases.error(strided, plain) < 1e-14


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_changed_in_place_count(scan_cases, backend):
    inputs = scan_cases.make(T=20, offsets=[0, 5, 20])
    prism_scan(**inputs, backend=backend)
    inputs["cu_seqlens"][1] = 12
    fresh = {**inputs, "cu_seqlens": torch.tensor([0, 12, 20])}
    got, want = (prism_scan(**x, backend=backend)[0] for x in (inputs, fresh))
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_left_alone_and_results_share_no_memory(scan_cases, backend):
    for offsets in (None, [0, 0, 37]):
        inputs = scan_cases.make(offsets=offsets)
        before = {n: x.clone() for n, x in inputs.items() if x is not None}
        o, state = prism_scan(**inputs, output_final_state=True, backend=backend)
        o.zero_()
        state.zero_()
        assert all(torch.equal(inputs[n], x) for n, x in before.items())


def test_two_threads(scan_cases):
    inputs = [scan_cases.make(T=40, seed=seed) for seed in range(2)]
    want = [scan_cases.results(x, "recurrent") for x in inputs]
    got = [[], []]

    def work(i):
        got[i] += [scan_cases.results(inputs[i], "chunked") for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert len(got[i]) == 5
        for result in got[i]:
            scan_cases.assert_close(result, want[i], 1e-10)


def test_wide_heads(scan_cases):
    """K = 256, V = 512: against the definition at T = 34, then T = 1024 against two halves."""
    small = scan_cases.make(B=1, T=34, H=1, HV=1, K=256, V=512, L=1)
    scan_cases.assert_close(
        scan_cases.results(small, "chunked"), scan_cases.results(small, "recurrent"), 1e-10
    )
    long = scan_cases.cast(scan_cases.make(B=1, T=1024, H=1, HV=1, K=256, V=512, L=1, decay=0.05), f32)

    def halves(initial_state, cu_seqlens, **tokens):
        options = {name: tokens.pop(name) for name in ("output_final_state", "backend")}
        first, second = ({n: x[:, p] for n, x in tokens.items()} for p in (slice(500), slice(500, None)))
        o1, S = prism_scan(**first, initial_state=initial_state, **options)
        o2, S = prism_scan(**second, initial_state=S, **options)
        return torch.cat([o1, o2], 1), S

    scan_cases.assert_close(
        scan_cases.results(long, "chunked"), scan_cases.results(long, "chunked", scan=halves), 1e-5
    )
