"""Every bad input raises ValueError that names the argument, what was expected and what came."""

import sys
from types import SimpleNamespace

import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from prism import prism_scan

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16


def packed(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


# make(B=2, T=37, H=2, HV=4, K=8, V=6, L=2)
BAD = {
    "q rank": ({"q": torch.zeros(2, 37, 16)}, "q must have 4 dimensions [B, T, H, K], got [2, 37, 16]"),
    "q type": ({"q": [1.0]}, "q must be a tensor [B, T, H, K], got list"),
    "q integer": (
        {"q": torch.zeros(2, 37, 2, 8, dtype=torch.int64)},
        "q must have dtype float32, float64, bfloat16 or float16, got int64",
    ),
    "no tokens": (
        {"q": torch.zeros(2, 0, 2, 8, dtype=f64)},
        "q must have every size of [B, T, H, K] at least 1, got [2, 0, 2, 8]",
    ),
    "v rank": ({"v": torch.zeros(2, 37)}, "v must have 4 dimensions [B, T, HV, V], got [2, 37]"),
    "v heads": (
        {"v": torch.zeros(2, 37, 3, 6, dtype=f64)},
        "v must have V >= 1 and a number of value heads that is a multiple of H = 2, got [2, 37, 3, 6]",
    ),
    "v length": (
        {"v": torch.zeros(2, 36, 4, 6, dtype=f64)},
        "v must have shape [B, T, HV, V] = [2, 37, 4, 6], got [2, 36, 4, 6]",
    ),
    "v dtype": (
        {"v": torch.zeros(2, 37, 4, 6)},
        "v must have dtype float64 beside q of float64, got float32",
    ),
    "k heads": (
        {"k": torch.zeros(2, 37, 4, 8, dtype=f64)},
        "k must have shape [B, T, H, K] = [2, 37, 2, 8], got [2, 37, 4, 8]",
    ),
    "k device": (
        {"k": torch.zeros(2, 37, 2, 8, dtype=f64, device="meta")},
        "k must be on the device of q, cpu, got meta",
    ),
    "log_decay heads": (
        {"log_decay": torch.zeros(2, 37, 2, dtype=f64)},
        "log_decay must have shape [B, T, HV] = [2, 37, 4], got [2, 37, 2]",
    ),
    "log_decay dtype": (
        {"log_decay": torch.zeros(2, 37, 4, dtype=bf16)},
        "log_decay must have dtype float64 or float32 beside q of float64, got bfloat16",
    ),
    "beta rank": (
        {"beta": torch.zeros(2, 37, 4, 1, dtype=f64)},
        "beta must have 3 dimensions [B, T, HV], got [2, 37, 4, 1]",
    ),
    "write_v alone": ({"write_k": None}, "write_k must be given together with write_v, got None"),
    "write_k alone": ({"write_v": None}, "write_v must be given together with write_k, got None"),
    "write_k at key heads": (
        {"write_k": torch.zeros(2, 37, 2, 2, 8, dtype=f64)},
        "write_k must have shape [B, T, HV, L, K] = [2, 37, 4, 2, 8], got [2, 37, 2, 2, 8]",
    ),
    "write_v steps": (
        {"write_v": torch.zeros(2, 37, 4, 3, 6, dtype=f64)},
        "write_v must have shape [B, T, HV, L, V] = [2, 37, 4, 2, 6], got [2, 37, 4, 3, 6]",
    ),
    "write_v dtype": (
        {"write_v": torch.zeros(2, 37, 4, 2, 6)},
        "write_v must have dtype float64 beside q of float64, got float32",
    ),
    "scale": ({"scale": "big"}, "scale must be a finite number or None, got 'big'"),
    "scale tensor": ({"scale": torch.tensor(1.0)}, "scale must be a finite number or None, got tensor(1.)"),
    "scale nan": ({"scale": float("nan")}, "scale must be a finite number or None, got nan"),
    "state shape": (
        {"initial_state": torch.zeros(2, 4, 6, 8, dtype=f64)},
        "initial_state must have shape [N, HV, K, V] = [2, 4, 8, 6], got [2, 4, 6, 8]",
    ),
    "state dtype": (
        {"initial_state": torch.zeros(2, 4, 8, 6)},
        "initial_state must have dtype float64 beside float64 inputs, got float32",
    ),
    "offsets type": (
        {"cu_seqlens": [0, 37]},
        "cu_seqlens must be an int32 or int64 tensor of offsets, got list",
    ),
    "offsets dtype": (
        {"cu_seqlens": torch.tensor([0.0, 37.0])},
        "cu_seqlens must be an int32 or int64 tensor of offsets, got a tensor of float32",
    ),
    "offsets rank": (
        {"cu_seqlens": packed(37)},
        "cu_seqlens must have shape [N + 1] with N >= 1, got [1]",
    ),
    "offsets beside a batch": (
        {"cu_seqlens": packed(0, 37)},
        "q must have B = 1 where cu_seqlens packs the sequences, got [2, 37, 2, 8]",
    ),
    "backend": (
        {"backend": "cuda"},
        "backend must be one of auto, recurrent, chunked, triton, got 'cuda'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_argument(scan_cases, case):
    changes, message = BAD[case]
    with pytest.raises(ValueError) as raised:
        prism_scan(**{**scan_cases.make(), **changes})
    assert str(raised.value) == f"prism_scan: {message}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1, 128), "cu_seqlens must start at 0, got 1"),
        ((0, 100, 90, 128), "cu_seqlens must never decrease, got 100 before 90 at position 2"),
        ((0, 100), "cu_seqlens must end at T = 128, got 100"),
        ((0, 100, 129), "cu_seqlens must end at T = 128, got 129"),
    ],
)
@pytest.mark.parametrize("validate", [True, False])
def test_offsets_on_a_cpu_are_always_checked(scan_cases, values, message, validate):
    inputs = scan_cases.make(B=1, T=128, state=False)
    with pytest.raises(ValueError) as raised:
        prism_scan(**{**inputs, "cu_seqlens": packed(*values, dtype=torch.int32)}, validate=validate)
    assert str(raised.value) == f"prism_scan: {message}"


def test_number_of_states_is_the_number_of_packed_sequences(scan_cases):
    inputs = scan_cases.make(T=10, offsets=[0, 4, 10])
    inputs["initial_state"] = inputs["initial_state"][:1]
    with pytest.raises(ValueError, match=r"initial_state must have shape \[N, HV, K, V\] = \[2, 4, 8, 6\]"):
        prism_scan(**inputs)


def test_offsets_that_differ_between_members_of_an_ensemble(scan_cases):
    inputs = scan_cases.make(T=10, offsets=[0, 4, 10], state=False)
    cu_seqlens = torch.stack([inputs.pop("cu_seqlens")] * 2)
    with pytest.raises(ValueError, match="cu_seqlens must be the same for every member under vmap"):
        torch.vmap(lambda c: prism_scan(**inputs, cu_seqlens=c)[0])(cu_seqlens)


def test_triton_by_name_says_why_it_cannot_run(scan_cases, monkeypatch):
    monkeypatch.setitem(sys.modules, "prism.scan.triton", None)
    with pytest.raises(ValueError, match="backend 'triton' cannot run here: import of"):
        prism_scan(**scan_cases.make(), backend="triton")


def test_triton_by_name_says_what_it_does_not_take(scan_cases, monkeypatch):
    kernels = SimpleNamespace(why_not=lambda *inputs: f"{len(inputs)} inputs are too many", MAX_WIDTH=256)
    monkeypatch.setattr("prism.scan._triton", lambda: kernels)
    with pytest.raises(ValueError) as raised:
        prism_scan(**scan_cases.make(), backend="triton")
    assert str(raised.value) == "prism_scan: backend 'triton' cannot run here: 10 inputs are too many"


def test_no_writes_may_be_written_as_none_or_as_length_zero(scan_cases):
    inputs = scan_cases.make(L=2)
    none = {**inputs, "write_k": None, "write_v": None}
    zero = {**inputs, **{name: inputs[name][:, :, :, :0] for name in ("write_k", "write_v")}}
    for backend in ("recurrent", "chunked"):
        assert torch.equal(prism_scan(**none, backend=backend)[0], prism_scan(**zero, backend=backend)[0])


def test_the_final_state_comes_only_when_asked_for(scan_cases):
    inputs = scan_cases.make()
    for backend in ("recurrent", "chunked"):
        assert prism_scan(**inputs, backend=backend)[1] is None
        assert prism_scan(**inputs, backend=backend, output_final_state=True)[1].shape == (2, 4, 8, 6)


@pytest.mark.parametrize("offsets", [None, [0, 0, 3, 37]])
def test_annotated_shapes_hold(scan_cases, offsets):
    checked = jaxtyped(typechecker=beartype)(prism_scan)
    inputs = scan_cases.make(offsets=offsets)
    checked(**inputs, output_final_state=True)
    checked(**{**inputs, "write_k": None, "write_v": None, "initial_state": None})
    with pytest.raises(TypeCheckError):
        checked(**{**inputs, "k": inputs["v"]})
