"""Parts of the chunk-parallel implementation alone: the inverse inside a chunk, and how sequences are cut."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
from prism.scan.triton import _segments, chunkwise
from prism.scan.triton._chunkwise_forward import prepare_kernel

needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 before triton is imported"
)
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
# Triton 3.6's interpreter turns arrays into loop bounds in a way that numpy warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


@pytest.mark.interpreter
@needs_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("dot", ["ieee", "tf32x3"])
def test_interpreted_inverse(dot, C):
    """`prepare_kernel` with the products of float32, and with those that half precision takes."""
    T, HV, K = C + C // 2, 2, 16
    g = torch.Generator().manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(T, K, generator=g), dim=-1) for _ in range(2))
    log_decay, beta = -torch.rand(T, HV, generator=g), 2 * torch.rand(T, HV, generator=g)
    solve, scores = (torch.full((T, HV, C), float("nan")) for _ in range(2))
    grown, rest = (torch.full((T, HV), float("nan")) for _ in range(2))
    scratch = torch.full((2, HV, C, C), float("nan"))
    tensors = (q, k, log_decay, beta, solve, scores, grown, rest, scratch)
    prepare_kernel[(2 * HV,)](*tensors, None, 0.5, T, 2, 1, HV, K, C, K, False, False, True, dot)
    for start in (0, C):
        rows = slice(start, min(start + C, T))
        n = rows.stop - start
        for head in range(HV):
            total = log_decay[rows, head].double().cumsum(0)
            gamma = (total[:, None] - total).tril().exp().tril()
            Q, X = q[rows].double(), k[rows].double()
            system = torch.eye(n) + (X @ X.T * gamma * beta[rows, head]).tril(-1)
            for found, want in ((solve, torch.linalg.inv(system)), (scores, 0.5 * (Q @ X.T * gamma))):
                padded = torch.nn.functional.pad(want, (0, C - n)).float()
                torch.testing.assert_close(found[rows, head], padded, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(grown[rows, head], total.exp().float())
            torch.testing.assert_close(rest[rows, head], (total[-1] - total).exp().float())


@pytest.mark.parametrize(
    ("tokens", "sequences", "HV", "V", "length"),
    [
        (32768, 1, 16, 128, 128),  # 32 programs: four segments
        (131072, 2, 16, 128, 0),  # 64 programs: two segments would cost more than they gain
        (131072, 64, 16, 128, 0),
        (2048, 1, 1, 64, 0),  # too short to be cut
        (65536, 1, 1, 64, 16),
        (0, 0, 1, 64, 0),
    ],
)
def test_segments_fill_a_gpu_and_no_more(tokens, sequences, HV, V, length):
    assert chunkwise.segment_chunks(tokens, sequences, HV, V, 64) == length


@pytest.mark.parametrize(
    "offsets", [[0, 0, 5, 38, 38, 39, 200], [0, 200], [0, 64, 128, 192, 200], [0, 1, 200]]
)
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_segments_cover_every_sequence_once(offsets, chunks, device, kernels):
    C, T, N = 16, offsets[-1], len(offsets) - 1
    where = chunkwise.layout(1, T, C, torch.tensor(offsets, device=device))
    launched = _segments.number(T, N, chunks * C, packed=True)
    found = chunkwise._cut(where, T, C, chunks, launched, torch.device(device))
    assert found.first[0] == 0
    assert found.first[-1] <= launched
    assert torch.equal(found.last, found.first[1:] - 1)
    for n in range(N):
        mine = range(int(found.first[n]), int(found.first[n + 1]))
        assert len(mine) >= 1
        starts = [int(found.offsets[m]) for m in mine]
        assert starts == [offsets[n] + i * chunks * C for i in range(len(mine))]
        assert int(found.offsets[mine[-1] + 1]) == offsets[n + 1]
        assert offsets[n + 1] - starts[-1] <= chunks * C
        assert [int(found.chunk_start[m]) for m in mine] == [
            int(where.chunk_start[n]) + i * chunks for i in range(len(mine))
        ]
        assert all(int(found.owner[m]) == n for m in mine)
    assert (found.offsets[int(found.first[-1]) :] == T).all()


@pytest.mark.parametrize(("B", "T"), [(1, 200), (3, 37), (2, 96), (4, 16)])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_segments_of_rows_are_those_of_packed_sequences(B, T, chunks, device, kernels):
    C, where = 16, chunkwise.layout(B, T, 16, None)
    launched = _segments.number(T, B, chunks * C, packed=False)
    found = chunkwise._cut(where, T, C, chunks, launched, torch.device(device))
    packed = chunkwise.layout(1, B * T, C, T * torch.arange(B + 1, device=device))
    want = chunkwise._cut(packed, B * T, C, chunks, launched, torch.device(device))
    assert int(found.first[-1]) == launched
    for name in ("offsets", "owner", "first", "last"):
        assert torch.equal(getattr(found, name), getattr(want, name)), name
    assert torch.equal(found.chunk_start[:-1], want.chunk_start[:-1])
