"""The backends against the definition, and the definition against mathematics it was not written from."""

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prism import prism_scan
from prism.scan import chunked, resolve_backend

few = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(params=[1, 2, 3, 5, 16, 64])
def chunk_length(request, monkeypatch):
    monkeypatch.setattr(chunked, "_chunk_length", lambda T, width: request.param)
    return request.param


# --- the definition ---


def dense(q, k, v, log_decay, beta, write_k, write_v, initial_state, scale, **_):
    """The paper's form: S [V, K], A_t and B_t as matrices, one value head of one sequence at a time."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    o, final = torch.zeros(B, T, HV, V, dtype=q.dtype), torch.zeros_like(initial_state)
    for b in range(B):
        for j in range(HV):
            h = j // (HV // H)
            S = initial_state[b, j].T
            for t in range(T):
                key = k[b, t, h]
                A = log_decay[b, t, j].exp() * (torch.eye(K) - beta[b, t, j] * torch.outer(key, key))
                S = S @ A.to(q.dtype) + beta[b, t, j] * torch.outer(v[b, t, j], key)
                S = S + write_v[b, t, j].T @ write_k[b, t, j]
                o[b, t, j] = scale * S @ q[b, t, h]
            final[b, j] = S.T
    return o, final


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
def test_equals_transition_and_write_matrices(scan_cases, backend):
    inputs = scan_cases.make(B=2, T=19, H=2, HV=4, K=5, V=3, L=3, max_beta=2.0)
    o, final = dense(**inputs, scale=0.7)
    got_o, got_final = prism_scan(**inputs, scale=0.7, output_final_state=True, backend=backend)
    assert scan_cases.error(got_o, o) < 1e-13
    assert scan_cases.error(got_final, final) < 1e-13


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
def test_equals_a_diagonal_plus_low_rank_rule_on_a_longer_sequence(scan_cases, backend):
    """Each token becomes L + 1 sub-tokens of S <- S (D I + a b^T) + v k^T; only the last one is read."""
    inputs = scan_cases.make(B=1, T=21, H=1, HV=1, K=6, V=4, L=3, max_beta=2.0)
    q, k, v, g, beta, x, w = (inputs[n][0] for n in list(inputs)[:7])
    S, o = inputs["initial_state"][0, 0].T, []
    for t in range(21):
        alpha, key = g[t, 0].exp(), k[t, 0]
        subtokens = [(alpha, -alpha * beta[t, 0] * key, key, beta[t, 0] * v[t, 0], key)]
        subtokens += [(1.0, torch.zeros(6), key, w[t, 0, l], x[t, 0, l]) for l in range(3)]
        for D, a, b, value, write_key in subtokens:
            S = D * S + (S @ a.double()[:, None]) @ b[None] + value[:, None] @ write_key[None]
        o.append(6**-0.5 * S @ q[t, 0])
    got, _ = prism_scan(**inputs, backend=backend)
    assert scan_cases.error(got[0, :, 0], torch.stack(o)) < 1e-13


def test_write_keys_equal_to_k_are_a_larger_value(scan_cases):
    inputs = scan_cases.make(H=4, HV=4)
    inputs["beta"] = inputs["beta"] + 0.1
    inputs["write_k"] = inputs["k"][:, :, :, None].expand_as(inputs["write_k"])
    v = inputs["v"] + inputs["write_v"].sum(3) / inputs["beta"][..., None]
    merged = {**inputs, "v": v, "write_k": None, "write_v": None}
    assert scan_cases.error(prism_scan(**inputs)[0], prism_scan(**merged)[0]) < 1e-13


def test_one_write_key_for_all_steps_is_one_step(scan_cases):
    inputs = scan_cases.make(L=3)
    inputs["write_k"] = inputs["write_k"][:, :, :, :1].expand_as(inputs["write_k"])
    one = {
        **inputs,
        "write_k": inputs["write_k"][:, :, :, :1],
        "write_v": inputs["write_v"].sum(3, keepdim=True),
    }
    assert scan_cases.error(prism_scan(**inputs)[0], prism_scan(**one)[0]) < 1e-13


def test_jointly_linear_in_values_writes_and_state(scan_cases):
    a, b = scan_cases.make(seed=0), scan_cases.make(seed=1)
    linear = ("v", "write_v", "initial_state")
    b = {**a, **{n: b[n] for n in linear}}
    both = {**a, **{n: 2 * a[n] - 3 * b[n] for n in linear}}
    (oa, sa), (ob, sb), (oc, sc) = (prism_scan(**x, output_final_state=True) for x in (a, b, both))
    assert scan_cases.error(oc, 2 * oa - 3 * ob) < 1e-13
    assert scan_cases.error(sc, 2 * sa - 3 * sb) < 1e-13


# --- chunked equals the definition ---


@few
@given(data=st.data())
def test_chunked_equals_recurrent(scan_cases, data):
    H, group = data.draw(st.integers(1, 2), label="H"), data.draw(st.integers(1, 3), label="HV / H")
    shape = {name: data.draw(st.integers(1, 9), label=name) for name in ("K", "V")}
    shape |= {"H": H, "HV": H * group, "L": data.draw(st.integers(0, 8), label="L")}
    shape |= {"T": data.draw(st.integers(1, 40), label="T"), "B": data.draw(st.integers(1, 3), label="B")}
    inputs = scan_cases.make(**shape, state=data.draw(st.booleans(), label="state"), max_beta=2.0)
    scale = data.draw(st.sampled_from([None, 1.0, -0.3]), label="scale")
    want = scan_cases.results(inputs, "recurrent", scale=scale)
    scan_cases.assert_close(scan_cases.results(inputs, "chunked", scale=scale), want, 1e-10)


@few
@given(
    lengths=st.lists(st.integers(0, 37), min_size=1, max_size=6).filter(any),
    L=st.integers(0, 3),
    group=st.integers(1, 2),
    state=st.booleans(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_chunked_equals_recurrent_on_packed_sequences(scan_cases, lengths, L, group, state, dtype):
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    inputs = scan_cases.make(T=offsets[-1], H=2, HV=2 * group, L=L, offsets=offsets, state=state)
    inputs["cu_seqlens"] = inputs["cu_seqlens"].to(dtype)
    want = scan_cases.results(inputs, "recurrent")
    scan_cases.assert_close(scan_cases.results(inputs, "chunked"), want, 1e-10)


@pytest.mark.parametrize("offsets", [None, [0, 0, 3, 3, 20, 33, 33]])
def test_any_chunk_length_gives_the_same(scan_cases, chunk_length, offsets):
    inputs = scan_cases.make(T=33, offsets=offsets)
    want = scan_cases.results(inputs, "recurrent")
    scan_cases.assert_close(scan_cases.results(inputs, "chunked"), want, 1e-10)


@pytest.mark.parametrize("L", [0, 2])
@pytest.mark.parametrize("T", range(1, 18))
def test_short_sequences(scan_cases, T, L):
    inputs = scan_cases.make(T=T, L=L)
    want = scan_cases.results(inputs, "recurrent")
    scan_cases.assert_close(scan_cases.results(inputs, "chunked"), want, 1e-10)


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
def test_packing_equals_one_call_per_sequence(scan_cases, backend):
    ends = [0, 5, 5, 26, 40]
    packed = scan_cases.make(T=40, offsets=ends)
    o, final = prism_scan(**packed, output_final_state=True, backend=backend)
    for n, (start, end) in enumerate(pairwise(ends)):
        S = packed["initial_state"][n : n + 1]
        if start == end:
            torch.testing.assert_close(final[n : n + 1], S, rtol=0, atol=0)
            continue
        alone = {name: packed[name][:, start:end] for name in list(packed)[:7]} | {"initial_state": S}
        want_o, want_S = prism_scan(**alone, output_final_state=True, backend="recurrent")
        assert scan_cases.error(o[:, start:end], want_o) < 1e-13
        assert scan_cases.error(final[n : n + 1], want_S) < 1e-13


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
def test_a_cut_anywhere_with_the_state_passed_on_equals_one_pass(scan_cases, backend):
    whole = scan_cases.make(T=35)
    want = scan_cases.results(whole, "recurrent")

    def cut(at, cu_seqlens=None, initial_state=None, **tokens):
        options = {name: tokens.pop(name) for name in ("output_final_state", "backend")}
        first, second = ({n: x[:, part] for n, x in tokens.items()} for part in (slice(at), slice(at, None)))
        o1, S = prism_scan(**first, initial_state=initial_state, **options)
        o2, S = prism_scan(**second, initial_state=S, **options)
        return torch.cat([o1, o2], 1), S

    for at in (1, 16, 34) if backend == "recurrent" else (1, 2, 7, 15, 16, 17, 31, 32, 33, 34):
        got = scan_cases.results(whole, backend, scan=lambda at=at, **x: cut(at, **x))
        scan_cases.assert_close(got, want, 1e-10)


@pytest.mark.parametrize("offsets", [None, [0, 1, 1, 5]])
def test_gradcheck(scan_cases, offsets, monkeypatch):
    monkeypatch.setattr(chunked, "_chunk_length", lambda T, width: 3)
    inputs = scan_cases.make(B=1, T=5, H=1, HV=2, K=2, V=1, L=1, offsets=offsets)
    cu_seqlens = inputs.pop("cu_seqlens")
    leaves = [x.requires_grad_() for x in inputs.values()]

    def scan(*x):
        named = dict(zip(inputs, x, strict=True))
        return prism_scan(**named, cu_seqlens=cu_seqlens, output_final_state=True, backend="chunked")

    assert torch.autograd.gradcheck(scan, leaves)


@pytest.mark.parametrize("used", ["o", "final state"])
def test_gradients_through_one_of_the_two_results(scan_cases, used):
    grads = []
    for backend in ("recurrent", "chunked"):
        inputs = scan_cases.make()
        leaves = [x.requires_grad_() for x in inputs.values() if x is not None]
        o, state = prism_scan(**inputs, output_final_state=True, backend=backend)
        loss = (o if used == "o" else state).sin().sum()
        grads.append(torch.autograd.grad(loss, leaves, materialize_grads=True))
    for want, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("offsets", [None, [0, 0, 5, 37]])
@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
def test_results_may_be_edited_in_place(scan_cases, backend, offsets):
    """As far as autograd lets: the last read of "recurrent" needs its state as it was."""

    def edited(**x):
        o, state = prism_scan(**x)
        return o.mul_(2.0), state.mul_(3.0) if backend == "chunked" else state * 3.0

    def plain(**x):
        o, state = prism_scan(**x)
        return o * 2.0, state * 3.0

    inputs = scan_cases.make(offsets=offsets)
    want = scan_cases.results(inputs, "recurrent", scan=plain)
    scan_cases.assert_close(scan_cases.results(inputs, backend, scan=edited), want, 1e-10)


# --- auto ---


def test_auto_is_chunked_on_a_cpu(scan_cases):
    inputs = scan_cases.make()
    assert resolve_backend(inputs["q"], inputs["v"], inputs["write_k"]) == "chunked"
    assert resolve_backend(inputs["q"], inputs["v"], backend="recurrent") == "recurrent"
    auto, named = (prism_scan(**inputs, backend=b)[0] for b in ("auto", "chunked"))
    assert torch.equal(auto, named)


@pytest.mark.parametrize(
    ("dtype", "width", "backend"),
    [
        (torch.float32, 64, "triton"),
        (torch.bfloat16, 256, "triton"),
        (torch.float64, 64, "chunked"),
        (torch.float32, 257, "chunked"),
    ],
)
def test_auto_on_cuda_follows_the_table(dtype, width, backend):
    pytest.importorskip("triton", reason="the table for CUDA reads a limit from the Triton kernels")

    class OnCuda:
        is_cuda = True

        def __init__(self, *shape):
            self.shape, self.dtype = shape, dtype

    assert resolve_backend(OnCuda(1, 1, 1, width), OnCuda(1, 1, 1, 16)) == backend
    assert resolve_backend(OnCuda(1, 1, 1, 16), OnCuda(1, 1, 1, width)) == backend
