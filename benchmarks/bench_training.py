"""Training steps.

CPU, one thread: a step of a full PRISM model (L = 2, 2 layers with MLP, T 64, B 32, vocabulary 32) against
the same skeleton whose mixer forms every D x D update and sums them up (the public release's arithmetic:
nothing is erased or decayed). Both take turns in one process, and all but the scan is the same code.

CUDA: a step of 16 members (2 layers with MLP, D 16, T 128, B 32, L = 2) captured in a CUDA graph, fresh
batches and the optimiser included. Ways to run it are rows, each in a process of its own: all compile at the
same time, then each is timed while the others wait.

    python benchmarks/bench_training.py                    # writes benchmarks/results/training_cpu.json
    python benchmarks/bench_training.py --device cuda      # writes benchmarks/results/training_cuda.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _turns import Part, report, take_turns, wait_for_turn
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import prism.mixer  # noqa: E402
import tasks  # noqa: E402
from ablations.grid import TrainSettings  # noqa: E402
from ablations.store import environment  # noqa: E402
from ablations.trainer import Trainer  # noqa: E402
from prism import PrismConfig, PrismModel  # noqa: E402

Rows = list[dict[str, Any]]
TARGETS = {"cpu": {16: (1.2, 2.0), 128: (15.0, 25.0)}, "cuda": (15e6, 40e6)}


def cumulative_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    write_k: Tensor,
    write_v: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """o_t = K^-1/2 q_t^T sum_{s <= t} (beta_s k_s v_s^T + sum_l kappa_s^l w_s^l^T), every D x D matrix
    formed.
    """
    keys = torch.cat([k[..., None, :], write_k], -2)
    values = torch.cat([(beta[..., None] * v)[..., None, :], write_v], -2)
    states = torch.einsum("bthlk,bthlv->bthkv", keys, values).cumsum(1)
    return torch.einsum("bthk,bthkv->bthv", q * q.shape[-1] ** -0.5, states), None


def step_of(model: PrismModel, task: tasks.Task, rows: int) -> Callable[[], None]:
    """One optimiser step of a model on a fixed batch."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = task.batch(rows)

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(
            model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return step


def on_cpu(repeats: int) -> list[dict[str, Any]]:
    """Rows for D = 16 and D = 128."""
    task = tasks.get("xor", length=64)
    rows = []
    for width, (must, aim) in TARGETS["cpu"].items():  # type: ignore[attr-defined]
        config = PrismConfig(vocab_size=task.vocab_size, d_model=width, n_layers=2, n_refine=2)
        ours, summed = (step_of(PrismModel(config, seed=0), task, 32) for _ in range(2))
        times: dict[str, list[float]] = {"prism_ms": [], "cumulative_sum_ms": []}
        count = repeats if width <= 32 else max(3, repeats // 6)
        for turn in range(count + 1):
            for name, step in (("prism_ms", ours), ("cumulative_sum_ms", summed)):
                scan = cumulative_sum if name == "cumulative_sum_ms" else prism.mixer.prism_scan
                with mock.patch.object(prism.mixer, "prism_scan", scan):
                    started = time.perf_counter()
                    step()
                    if turn:  # the first turn allocates
                        times[name].append(1e3 * (time.perf_counter() - started))
        medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
        ratio = medians["cumulative_sum_ms"] / medians["prism_ms"]
        row = {"D": width, **medians, "ratio": round(ratio, 2), "must": must, "aim": aim, "repeats": count}
        row |= {
            f"{name}_range": [round(min(values), 3), round(max(values), 3)] for name, values in times.items()
        }
        rows.append(row)
        print(
            f"D = {width}: PRISM {medians['prism_ms']:.1f} ms, "
            f"cumulative sum {medians['cumulative_sum_ms']:.1f} ms, "
            f"{ratio:.2f}x ({_verdict(ratio, must, aim)}; must {must}x, aim {aim}x)",
            flush=True,
        )
    return rows


# L, scan backend, torch.compile, CUDA graph; the first ones are what is aimed at.
CUDA_ROWS = (
    (2, "auto", True, True),
    (2, "auto", False, True),
    (2, "auto", False, False),
    (2, "chunked", False, True),
    (0, "auto", True, True),
    (0, "auto", False, True),
)


def cuda_row(number: int, repeats: int, profile: Path | None) -> None:
    """One of CUDA_ROWS, in a process of its own."""
    task = tasks.get("xor", length=128)
    members, batch, block = 16, 32, 160
    n_refine, backend, compiled, graph = CUDA_ROWS[number]
    config = PrismConfig(
        vocab_size=task.vocab_size, d_model=16, n_layers=2, n_refine=n_refine, scan_backend=backend
    )
    settings = TrainSettings(steps=block * (repeats + 2), batch_size=batch)
    row: dict[str, Any] = {"L": n_refine, "members": members, "compile": compiled, "cuda_graph": graph}

    def steps(trainer: Trainer) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(block):
            trainer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / block

    try:
        trainer = Trainer(
            config, task, settings, list(range(members)), "cuda", compile=compiled, cuda_graph=graph
        )
        row["scan_backend"] = trainer.ensemble.scan_backend
        steps(trainer)  # compiles and captures
        wait_for_turn()
        times = [steps(trainer) for _ in range(repeats)]
        median = statistics.median(times)
        speed = members * batch * task.length / median
        row |= {"ms": round(1e3 * median, 4), "tokens_per_second": round(speed)}
        row["ms_range"] = [round(1e3 * t, 4) for t in (min(times), max(times))]
        row["alive"] = int(trainer.optimiser.alive.sum())
        if profile is not None:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
                for _ in range(32):  # a block of batches, its generation included
                    trainer.step()
                torch.cuda.synchronize()
            averages = found.key_averages()
            averages = sorted(averages, key=lambda event: -event.self_device_time_total)
            lines = [
                f"{event.self_device_time_total / 32:9.1f} us {event.count / 32:7.1f} x  {event.key[:160]}"
                for event in averages
            ]
            profile.with_name(f"{profile.name}{number}.txt").write_text("\n".join(lines) + "\n")
    except Exception as error:  # one way that fails must not hide the others
        row["error"] = f"{type(error).__name__}: {error}"[:2000]
    report(row)


def on_cuda(
    repeats: int, only: list[int], gate: Path | None, profile: Path | None, write: Callable[[Rows], None]
) -> Rows:
    """Rows for L and for the ways to run the step."""
    must, aim = TARGETS["cuda"]  # type: ignore[misc]
    command = [sys.executable, __file__, "--repeats", str(repeats)]
    if profile is not None:
        command += ["--profile", str(profile)]
    parts = [Part(f"row {number}", [*command, "--row", str(number)]) for number in only]
    rows = take_turns(parts, 300, 60, gate, write)
    for row in rows:
        name = (
            f"L = {row['L']}, {row.get('scan_backend')}, compile {row['compile']}, graph {row['cuda_graph']}"
        )
        if "error" in row:
            print(f"{name}: {row['error']}")
            continue
        row |= {"must": must, "aim": aim}
        speed = row["tokens_per_second"]
        verdict = _verdict(speed, must, aim)
        print(f"{name}: {row['ms']:.3f} ms a step, {speed / 1e6:.1f} M tokens/s ({verdict})", flush=True)
    return rows


def _verdict(value: float, must: float, aim: float) -> str:
    return "aim reached" if value >= aim else "must reached" if value >= must else "BELOW the must"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--repeats", type=int, help="default: 30 steps on a CPU, 5 blocks of 160 steps on a GPU"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(len(CUDA_ROWS))))
    parser.add_argument("--profile", type=Path, help="on a GPU: where to write the kernels' times of a step")
    parser.add_argument("--wait-for", type=Path, help="on a GPU: time nothing before this file exists")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    repeats = given.repeats or (30 if given.device == "cpu" else 5)
    if given.row is not None:
        cuda_row(given.row, repeats, given.profile)
        return
    out = given.out or HERE / "results" / f"training_{given.device}.json"
    out.parent.mkdir(parents=True, exist_ok=True)

    def write(rows: Rows) -> None:
        out.write_text(json.dumps({"rows": rows, "environment": environment(given.device)}, indent=1) + "\n")

    if given.device == "cpu":
        rows = on_cpu(repeats)
    else:
        rows = on_cuda(repeats, given.rows, given.wait_for, given.profile, write)
    write(rows)
    print(out)


if __name__ == "__main__":
    main()
