"""Run the benchmark scripts of a checkout; an installed package does not carry them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_benchmarks(name: str | None = None, arguments: Sequence[str] = (), folder: Path | None = None) -> int:
    """Run benchmarks/bench_*.py one after the other, or only bench_<name>.py with `arguments`.

    In a run of all, scripts with a line `NEEDS_GPU = True` are skipped where there is no CUDA GPU, and the
    output says so.

    Returns the number of scripts that failed. Raises FileNotFoundError outside a checkout and ValueError for
    an unknown name, or for arguments without a name (scripts take different ones).
    """
    home = Path(__file__).resolve().parent.parent
    folder = home / "benchmarks" if folder is None else folder
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(folder.glob("bench_*.py"))}
    if not scripts:
        raise FileNotFoundError(
            f"benchmarks: no bench_*.py under {folder}; the benchmarks are part of a checkout, not of the "
            "installed package"
        )
    if name is None and arguments:
        raise ValueError(f"arguments: expected the name of a benchmark before {' '.join(arguments)}")
    if name is not None and name not in scripts:
        raise ValueError(f"name: expected one of {', '.join(scripts)}, got {name!r}")
    search_path = os.pathsep.join(filter(None, (str(home), os.environ.get("PYTHONPATH"))))
    failed = 0
    for script in scripts.values() if name is None else [scripts[name]]:
        print(f"== {script.name}", flush=True)
        if name is None and _needs_a_gpu(script) and not _gpu():
            print("skipped: it needs a CUDA GPU")
            continue
        command = [sys.executable, str(script), *arguments]
        failed += (
            subprocess.run(command, env={**os.environ, "PYTHONPATH": search_path}, check=False).returncode
            != 0
        )
    return failed


def _needs_a_gpu(script: Path) -> bool:
    return "NEEDS_GPU = True" in script.read_text().splitlines()


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()
