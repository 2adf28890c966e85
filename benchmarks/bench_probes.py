"""Rank probe against full singular value decompositions of the formed matrices: same values, time ratio.

python benchmarks/bench_probes.py                   # one CPU thread -> benchmarks/results/probes_cpu.json
python benchmarks/bench_probes.py --device cuda     # also the alternatives for a GPU -> probes_cuda.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from probes import rank

WIDTH, TERMS = 128, 4


def milliseconds(function: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def medians(functions: dict[str, Callable[[], Any]], device: str, repeats: int) -> dict[str, float]:
    """Medians over rounds that run every function once: what else the machine does then meets all of them
    alike.
    """
    for function in functions.values():
        function()
    rounds = [
        {name: milliseconds(function, device) for name, function in functions.items()} for _ in range(repeats)
    ]
    return {name: statistics.median(one[name] for one in rounds) for name in functions}


def batched_qr(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    a, b = (torch.linalg.qr(x.double().mT, mode="r").R for x in (left, right))
    return torch.linalg.svdvals(a @ b.mT)


def gram_schmidt_svd(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    a, b = (rank._triangle_by_gram_schmidt(x) for x in (left, right))
    return torch.linalg.svdvals(a @ b.mT)


def cholesky_qr2(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """CholeskyQR twice, in float64: fails where the factors of a token are dependent (kappa = k), which the
    probe must take.
    """

    def triangle(rows: torch.Tensor) -> torch.Tensor:
        columns = rows.double().mT
        first = torch.linalg.cholesky_ex(columns.mT @ columns).L.mT
        q = torch.linalg.solve_triangular(first, columns, upper=True, left=False)
        return torch.linalg.cholesky_ex(q.mT @ q).L.mT @ first

    return rank._jacobi_singular_values(triangle(left) @ triangle(right).mT)


def ill_conditioned(device: str) -> float:
    """Largest relative error of the smallest singular value at condition number 2.5e5, against a float64
    SVD.
    """
    gen = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(64, WIDTH, TERMS, generator=gen, dtype=torch.float64)).Q
    mix = torch.linalg.qr(torch.randn(64, TERMS, TERMS, generator=gen, dtype=torch.float64)).Q
    left = (basis * torch.tensor([1, 1e-1, 1e-3, 4e-6], dtype=torch.float64) @ mix).mT.float()
    right = torch.linalg.qr(torch.randn(64, WIDTH, TERMS, generator=gen, dtype=torch.float64)).Q.mT.float()
    truth = torch.linalg.svdvals(left.double().mT @ right.double())[:, TERMS - 1]
    found = rank.factor_singular_values(left.to(device), right.to(device))[:, -1].cpu()
    return ((found - truth) / truth).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--updates", type=int, default=None, help="number of updates (default 4096)")
    parser.add_argument(
        "--full", type=int, default=None, help="how many of them the full SVD is timed on, then scaled"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    device, updates = args.device, args.updates or 4096
    timed = min(args.full or 256, updates)
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(0)
    left, right = (torch.randn(updates, TERMS, WIDTH, generator=gen).to(device) for _ in range(2))

    def full() -> torch.Tensor:
        return torch.linalg.svdvals(left[:timed].mT @ right[:timed])

    methods: dict[str, Callable[[], torch.Tensor]] = {
        "probe": lambda: rank.factor_singular_values(left, right),
        "probe and the four measures": lambda: rank.rank_measures(
            rank.factor_singular_values(left, right), rank.factor_threshold(left, right, torch.float32)
        )["effective"],
        "qr": lambda: rank.factor_singular_values(left, right, method="qr"),
        "gram_schmidt": lambda: rank.factor_singular_values(left, right, method="gram_schmidt"),
    }
    if device == "cuda":
        methods |= {
            "batched qr": lambda: batched_qr(left, right),
            "choleskyqr2": lambda: cholesky_qr2(left, right),
        }
    truth = torch.linalg.svdvals((left[:timed].double().mT @ right[:timed].double()).cpu())[:, :TERMS]
    error = ((methods["probe"]()[:timed].cpu() - truth) / truth).abs().max().item()
    times = medians({"full": full} | methods, device, args.repeats)
    scaled = times.pop("full") * updates / timed
    result = {
        "what": f"{updates} updates, d = {WIDTH}, R = {TERMS}, float32 factors; medians in ms",
        "machine": torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine(),
        "threads": 1,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "full_svdvals_ms": scaled,
        "full_svdvals_timed_on": timed,
        "ms": times,
        "speedup": {name: scaled / ms for name, ms in times.items()},
        "largest_relative_error_to_float64_svd": error,
        "smallest_singular_value_error_at_condition_2.5e5": ill_conditioned(device),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"probes_{device}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
