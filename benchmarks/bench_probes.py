"""Rank probe against full singular value decompositions of the formed matrices: same values, time ratio.

python benchmarks/bench_probes.py                   # one CPU thread -> benchmarks/results/probes_cpu.json
python benchmarks/bench_probes.py --device cuda     # -> benchmarks/results/probes_cuda.json
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
    """Medians over rounds that run every function once: a disturbance meets all of them alike."""
    for function in functions.values():
        function()
    rounds = [
        {name: milliseconds(function, device) for name, function in functions.items()} for _ in range(repeats)
    ]
    return {name: statistics.median(one[name] for one in rounds) for name in functions}


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
