"""What is compared: grids of (task, arm, seed), their trainer, store, statistics, report and command line.

    import ablations
    grid = ablations.Grid(
        tasks={"xor": {"length": 32}},
        arms={"gdn": {"preset": "gdn"}, "prism": {"preset": "prism"}},
        seeds=range(5),
        train={"steps": 300},
    )
    rows = ablations.run(grid, out="runs/first")        # a pandas.DataFrame, a row per (task, arm, seed)
    print(ablations.summarize(rows))

Names are imported when they are first used, so that ``prism --help`` does not pay for torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ablations.claims import contrasts, findings
    from ablations.ensemble import Ensemble
    from ablations.grid import Cell, Grid, TrainSettings, load_grid
    from ablations.report import summarize, write_report
    from ablations.runner import run
    from ablations.statistics import bootstrap_mean, paired_difference, wilson
    from ablations.store import RESULTS_VERSION, load

_HOME = {
    "Cell": "grid",
    "Ensemble": "ensemble",
    "Grid": "grid",
    "RESULTS_VERSION": "store",
    "TrainSettings": "grid",
    "bootstrap_mean": "statistics",
    "contrasts": "claims",
    "findings": "claims",
    "load": "store",
    "load_grid": "grid",
    "paired_difference": "statistics",
    "run": "runner",
    "summarize": "report",
    "wilson": "statistics",
    "write_report": "report",
}

__all__ = [
    "RESULTS_VERSION",
    "Cell",
    "Ensemble",
    "Grid",
    "TrainSettings",
    "bootstrap_mean",
    "contrasts",
    "findings",
    "load",
    "load_grid",
    "paired_difference",
    "run",
    "summarize",
    "wilson",
    "write_report",
]


def _require_own(*names: str) -> None:
    """Raise ImportError where a sibling package is missing, or another one or a mere folder hides it."""
    home = Path(__file__).resolve().parent.parent
    for name in names:
        spec = importlib.util.find_spec(name)
        origin = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if origin == home / name / "__init__.py":
            continue
        found = f"resolves to {origin or 'nothing'}"
        remedy = (
            "Other distributions carry that name too: uninstall them "
            f"(pip uninstall {name}) or install prism-lab in an environment of its own."
        )
        if spec is not None and origin is None:
            # A folder on sys.path (the working directory is) is a namespace package to Python, and comes
            # before an editable installation.
            folders = ", ".join(dict.fromkeys(spec.submodule_search_locations or ()))
            found = f"is hidden by a folder of that name without __init__.py: {folders}"
            remedy = "Rename it, or start Python elsewhere."
        raise ImportError(
            f"ablations needs prism-lab's own package {name!r} at {home / name}, "
            f"but {name!r} {found}. {remedy}"
        )


_require_own("prism", "tasks", "probes")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"ablations.{_HOME[name]}"), name)
    raise AttributeError(f"module 'ablations' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
