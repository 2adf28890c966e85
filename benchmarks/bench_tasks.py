"""Task generation: tokens per second of every family, and the time of a small batch.

    python benchmarks/bench_tasks.py                    # one CPU thread -> benchmarks/results/tasks_cpu.json
    python benchmarks/bench_tasks.py --device cuda      #                -> benchmarks/results/tasks_cuda.json

Default parameters; a large batch (2**16 tokens on a CPU, 2**24 on a GPU) for the rate, 32 rows for the
time of a training step's batch. Medians. The rate on a CPU is per second of this thread's processor time,
so that other work on the machine does not count; the wall clock's rate stands beside it. Exit code 1 where
a rate is below what must be reached, or where a GPU's rows differ from the CPU's.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import tasks

# Million tokens per second: must, aim. Automata and brackets are walked symbol by symbol.
MUST = {"mqar": (10, 30), "xor": (20, 60), "parity": (20, 60)}
SLOW = {"in_context_automata": (2, 2), "bracket_arithmetic": (2, 2)}
CPU, GPU = (10, 10), (500, 500)


def median_seconds(run, device: str, repeats: int) -> tuple[float, float]:
    """Median (processor, wall-clock) time of run(i), warmed up, with the device idle before and after.

    On a GPU both are the wall clock's.
    """
    gpu = device.startswith("cuda")
    wait = torch.cuda.synchronize if gpu else lambda: None
    for i in range(3):
        run(i)
    times = []
    for i in range(repeats):
        wait()
        wall, cpu = time.perf_counter(), time.thread_time()
        run(i)
        wait()
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        times.append((wall if gpu else cpu, wall))
    cpu, wall = zip(*times, strict=True)
    return statistics.median(cpu), statistics.median(wall)


def equal_to_cpu(task, device: str) -> bool:
    """Whether the device makes the integers that a CPU makes, in every split, and solves them alike."""
    for split in ("train", "val", "test"):
        here, there = (task.batch(1000, seed=7, step=3, split=split, device=d) for d in ("cpu", device))
        pairs = [
            *zip(here, there, strict=True),
            (task.solve(here.inputs), task.solve(there.inputs)),
            (task.split_of(here.inputs), task.split_of(there.inputs)),
        ]
        if not all(torch.equal(a, b.cpu()) for a, b in pairs):
            return False
    return True


def measure(name: str, device: str, repeats: int) -> dict:
    """Rates of one family."""
    task = tasks.get(name)
    tokens = 2**24 if device.startswith("cuda") else 2**16
    rows = max(1, tokens // task.width())
    large, large_wall = median_seconds(lambda i: task.batch(rows, step=i, device=device), device, repeats)
    small, small_wall = median_seconds(lambda i: task.batch(32, step=i, device=device), device, repeats)
    must, aim = GPU if device.startswith("cuda") else {**MUST, **SLOW}.get(name, CPU)
    rate = rows * task.width() / large / 1e6
    return {
        "task": name,
        "rows": rows,
        "length": task.width(),
        "million_tokens_per_second": round(rate, 1),
        "million_tokens_per_second_wall": round(rows * task.width() / large_wall / 1e6, 1),
        "must": must,
        "aim": aim,
        "milliseconds_for_32_rows": round(small * 1e3, 3),
        "milliseconds_for_32_rows_wall": round(small_wall * 1e3, 3),
    } | ({"rows_equal_cpu": equal_to_cpu(task, device)} if device != "cpu" else {})


def machine(device: str) -> dict:
    """What the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        cpu = models[0] if models else cpu
    return {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--only", nargs="*", default=tasks.names(), help="families (default: all)")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/tasks_DEVICE.json)")
    args = parser.parse_args()
    torch.set_num_threads(1)

    report = {"machine": machine(args.device), "repeats": args.repeats, "tasks": []}
    print(f"{'task':28}{'M tokens/s':>12}{'wall':>8}{'must':>7}{'aim':>7}{'32 rows, ms':>14}")
    for name in args.only:
        row = measure(name, args.device, args.repeats)
        report["tasks"].append(row)
        rate, wall, must = (
            row[k] for k in ("million_tokens_per_second", "million_tokens_per_second_wall", "must")
        )
        mark = "" if rate >= must else "  below must"
        mark += "" if row.get("rows_equal_cpu", True) else "  ROWS DIFFER FROM THE CPU'S"
        print(
            f"{name:28}{rate:12.1f}{wall:8.1f}{must:7}{row['aim']:7}{row['milliseconds_for_32_rows']:14.3f}{mark}"
        )
    out = args.out or Path(__file__).parent / "results" / f"tasks_{args.device.split(':')[0]}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(out)
    rows = report["tasks"]
    return int(
        any(r["million_tokens_per_second"] < r["must"] or not r.get("rows_equal_cpu", True) for r in rows)
    )


if __name__ == "__main__":
    sys.exit(main())
