"""The scan on one CPU thread: `chunked` beside transformers' Gated DeltaNet and the recurrence itself.

    python benchmarks/bench_scan_cpu.py                 # -> benchmarks/results/scan_cpu.json

Float32, forward with gradients required, and forward + backward. Every round runs each candidate of a shape
once, so that whatever else the machine does meets all of them alike; medians of the wall clock, and of the
processor time beside them. Results are compared before they are timed. transformers runs with its default
chunk of 64 and with 32. Exit code 1 where the target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# With fla installed transformers would hand these CPU tensors to its GPU kernels.
sys.modules["fla"] = None  # type: ignore[assignment]

from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule  # noqa: E402

from prism import prism_scan  # noqa: E402

Scan = Callable[..., tuple[Tensor, Tensor | None]]
MUST, AIM = 1.3, 2.0
SHAPES = {  # B, T, H, K = V, L
    "long": (4, 1024, 4, 64, 0),
    "long, two writes": (4, 1024, 4, 64, 2),
    "ensemble": (160, 64, 1, 16, 0),
    "ensemble, two writes": (160, 64, 1, 16, 2),
    "one small model, two writes": (32, 64, 1, 16, 2),
    "one wide model, two writes": (32, 64, 1, 128, 2),
}


def inputs(B: int, T: int, H: int, D: int, L: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    unit = partial(torch.nn.functional.normalize, dim=-1)
    log_decay = torch.nn.functional.logsigmoid(normal(B, T, H) + 3)
    tensors = [normal(B, T, H, D), unit(normal(B, T, H, D)), normal(B, T, H, D), log_decay]
    tensors.append(normal(B, T, H).sigmoid())
    if L:
        tensors += [unit(normal(B, T, H, L, D)), normal(B, T, H, L, D)]
    return [x.requires_grad_() for x in tensors]


def candidates(T: int, L: int) -> dict[str, Scan]:
    scans: dict[str, Scan] = {"chunked": partial(prism_scan, backend="chunked")}
    if L == 0:
        scans["transformers"] = torch_chunk_gated_delta_rule
        scans["transformers, chunk 32"] = partial(torch_chunk_gated_delta_rule, chunk_size=32)
    if T <= 64:
        scans["recurrent"] = partial(prism_scan, backend="recurrent")
    return scans


def passes(scan: Scan, tensors: list[Tensor], upstream: Tensor) -> tuple[tuple[float, float], ...]:
    """Wall and processor seconds of forward, and of forward + backward."""
    clocks = time.perf_counter, time.process_time
    before = [clock() for clock in clocks]
    o, _ = scan(*tensors)
    middle = [clock() for clock in clocks]
    torch.autograd.grad(o, tensors, upstream)
    after = [clock() for clock in clocks]
    return tuple((t[0] - before[0], t[1] - before[1]) for t in (middle, after))


def check(scans: dict[str, Scan], tensors: list[Tensor], upstream: Tensor) -> None:
    """Outputs and gradients of all candidates agree to float32."""
    results = {}
    for name, scan in scans.items():
        o, _ = scan(*tensors)
        results[name] = [o.detach(), *torch.autograd.grad(o, tensors, upstream)]
    for name, result in results.items():
        for x, reference in zip(result, results["chunked"], strict=True):
            error = float((x - reference).norm() / reference.norm())
            if not error < 1e-4:
                raise SystemExit(f"{name} differs from chunked by {error:.1e}; its time means nothing")


def measure(shape: tuple[int, ...], rounds: int) -> dict[str, dict[str, float]]:
    """Medians in milliseconds per candidate."""
    tensors = inputs(*shape)
    upstream = torch.randn(tensors[2].shape, generator=torch.Generator().manual_seed(1))
    scans = candidates(shape[1], shape[4])
    check(scans, tensors, upstream)
    times: dict[str, list] = {name: [] for name in scans}
    for _ in range(rounds):
        for name, scan in scans.items():
            times[name].append(passes(scan, tensors, upstream))
    columns = ("forward", "forward + backward")
    return {
        name: {
            f"{column}, {clock}": 1e3 * statistics.median(t[i][j] for t in rows)
            for i, column in enumerate(columns)
            for j, clock in enumerate(("wall", "processor"))
        }
        for name, rows in times.items()
    }


def machine() -> dict[str, object]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor()
    packages = {name: version(name) for name in ("torch", "transformers")}
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **packages,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scan_cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    table = {}
    print(f"{'milliseconds, medians':44}{'forward':>10}{'both':>10}{'x chunked':>11}{'(processor)':>13}")
    for title, shape in SHAPES.items():
        rows = measure(shape, options.rounds)
        ours = rows["chunked"]
        print(f"{title}: B, T, H, K = V, L = {', '.join(map(str, shape))}")
        for name, row in rows.items():
            row["ratio, wall"], row["ratio, processor"] = (
                row[f"forward + backward, {clock}"] / ours[f"forward + backward, {clock}"]
                for clock in ("wall", "processor")
            )
            times = f"{row['forward, wall']:10.2f}{row['forward + backward, wall']:10.2f}"
            print(f"    {name:40}{times}{row['ratio, wall']:11.2f}{row['ratio, processor']:13.2f}")
        table[title] = {"B, T, H, K = V, L": list(shape), "milliseconds": rows}

    ratio = table["long"]["milliseconds"]["transformers"]["ratio, wall"]  # type: ignore[index]
    print(f"L = 0 forward + backward: {ratio:.2f} times as fast as transformers (must {MUST}, aim {AIM})")
    target = {"times as fast as transformers": ratio, "must": MUST, "aim": AIM}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(), "rounds": options.rounds, "target": target, "shapes": table}
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if ratio >= MUST else 1


if __name__ == "__main__":
    sys.exit(main())
