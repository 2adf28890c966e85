"""The quick ablation behind ``prism demo``: eight arms on three tasks from several seeds, a few minutes on a
CPU.

The skeleton is bare (one mixer layer, no MLP, no output gate, no convolution on q, k, v), because a full
block hides what a single ingredient does. Every arm but the widened one differs from PRISM or from GDN in one
field. Learning rates are each arm's own, chosen on validation with seeds that are not reported, by
``benchmarks/demo_learning_rates.py``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from ablations.grid import Grid

TASKS: dict[str, dict[str, Any]] = {
    "xor": {"length": 32},
    "parity": {"length": 32, "bits": 3},
    "mqar": {"length": 24, "pairs": 4, "queries": 8, "vocab_size": 32, "noise": 4},
}
ARMS: dict[str, dict[str, Any]] = {
    "GDN": {"base": "PRISM", "n_refine": 0},
    "GDN + short conv": {"base": "GDN", "short_conv": 4},
    "GDN widened": {"base": "GDN", "match_parameters": "PRISM"},
    "PRISM": {
        "preset": "prism",
        "d_model": 16,
        "n_layers": 1,
        "mlp_ratio": 0,
        "output_gate": False,
        "short_conv": 0,
    },
    "PRISM, no GELU": {"base": "PRISM", "activation": "identity"},
    "PRISM, token anchor": {"base": "PRISM", "anchor": "token"},
    "PRISM, no gain": {"base": "PRISM", "gain": "one"},
    "PRISM, no subtraction": {"base": "PRISM", "residual": "keep"},
}
TRAIN: dict[str, Any] = {
    "steps": 300,
    "batch_size": 32,
    "warmup_steps": 60,
    "eval_every": 25,
    "val_size": 128,
}
OVERRIDES: list[dict[str, Any]] = [{"task": "mqar", "steps": 600, "warmup_steps": 120}]
INSIDE = {
    "update_rank": ("GDN + short conv", "PRISM", "PRISM, no GELU"),
    "state_rank": ("GDN + short conv", "PRISM", "PRISM, no GELU"),
    "residual_decay": ("PRISM", "PRISM, no GELU", "PRISM, no subtraction"),
}
"""Probe -> arms that are looked into, on mqar."""
SEEDS = 6
"""Five pairs cannot reach p <= 0.05 in a sign-flip test, six can."""
CANDIDATE_RATES = (0.005, 0.01, 0.02, 0.04)
SELECTION_SEEDS = (1000, 1001)

LEARNING_RATES: dict[str, dict[str, float]] = {
    "xor": {
        "GDN": 0.02,
        "GDN + short conv": 0.04,
        "GDN widened": 0.01,
        "PRISM": 0.04,
        "PRISM, no GELU": 0.04,
        "PRISM, token anchor": 0.02,
        "PRISM, no gain": 0.04,
        "PRISM, no subtraction": 0.04,
    },
    "parity": {
        "GDN": 0.02,
        "GDN + short conv": 0.04,
        "GDN widened": 0.01,
        "PRISM": 0.04,
        "PRISM, no GELU": 0.02,
        "PRISM, token anchor": 0.02,
        "PRISM, no gain": 0.04,
        "PRISM, no subtraction": 0.04,
    },
    "mqar": {
        "GDN": 0.01,
        "GDN + short conv": 0.02,
        "GDN widened": 0.04,
        "PRISM": 0.04,
        "PRISM, no GELU": 0.04,
        "PRISM, token anchor": 0.02,
        "PRISM, no gain": 0.01,
        "PRISM, no subtraction": 0.02,
    },
}
"""Task -> arm -> learning rate: the choice recorded in benchmarks/results/demo_learning_rates.json."""


def demo_grid(seeds: int = SEEDS) -> Grid:
    """The demo's grid with seeds 0 .. seeds - 1."""
    from ablations.grid import Grid

    rates = [
        {"task": task, "arm": arm, "learning_rate": rate}
        for task, of_task in LEARNING_RATES.items()
        for arm, rate in of_task.items()
    ]
    return Grid(tasks=TASKS, arms=ARMS, seeds=range(seeds), train=TRAIN, overrides=[*OVERRIDES, *rates])


def selection_grid() -> Grid:
    """The sweep that chooses the demo's learning rates: nothing is reported."""
    from ablations.grid import Grid

    return Grid(
        tasks=TASKS,
        arms=ARMS,
        seeds=(),
        train=TRAIN,
        overrides=OVERRIDES,
        learning_rates=CANDIDATE_RATES,
        selection_seeds=SELECTION_SEEDS,
    )


def run_demo(
    out: Path | str = "runs/demo", seeds: int = SEEDS, device: str = "cpu", workers: int | None = None
) -> pd.DataFrame:
    """Run the demo's grid, print the table and what was found, write report and figures under `out`.

    workers: processes (default: one per CPU core, at most 4; 1 on a GPU, where an ensemble fills the device).
    """
    from ablations import probing, report, runner, store

    started = time.perf_counter()
    workers = runner.default_workers(device) if workers is None else workers
    rows = runner.run(demo_grid(seeds), out, device=device, workers=workers, save_models=True)
    for measure, arms in INSIDE.items():
        probing.draw(out, measure, "mqar", arms)
    paths = report.write_report(out)
    report.print_report(store.load(out), paths, time.perf_counter() - started)
    return rows


def choose_learning_rates(out: Path | str, workers: int = 1) -> dict[str, Any]:
    """Run the sweep; returns the choice per task and arm, and every candidate's validation scores."""
    from ablations import runner, store

    runner.run(selection_grid(), out, workers=workers)
    rows = store.load(out)
    chosen = runner.choose_learning_rates(rows)
    rates: dict[str, dict[str, float]] = {}
    for (task, arm), rate in chosen.items():
        rates.setdefault(task, {})[arm] = rate
    scores = (
        rows.groupby(["task", "arm", "learning_rate"], sort=False)
        .agg(val_accuracy=("val_accuracy", "mean"), val_loss=("val_loss", "mean"), seeds=("seed", "size"))
        .round(6)
        .reset_index()
    )
    return {
        "chosen": rates,
        "scores": scores.to_dict("records"),
        "selection_seeds": list(SELECTION_SEEDS),
        "results_version": store.RESULTS_VERSION,
        "environment": store.environment("cpu"),
    }
